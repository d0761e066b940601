"""How would one plan become another, and at what price? ``nereus plan --from PLAN --to PLAN``.

Invariants (tests/commands/test_transition_command.py): a plan becomes itself for nothing; the table, the diagrams and
the JSON object show the same graph.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from nereus.commands.planfile import PlanReport
from nereus.commands.render import columns, ranges
from nereus.control.breakdown import Pricing
from nereus.control.move import Move, move, seconds_of
from nereus.control.problem import gib
from nereus.core.cluster import Cluster, Node
from nereus.core.units import format_seconds
from nereus.errors import ConfigError
from nereus.transition.primitive import TransitionDag, model_stage_of
from nereus.transition.render import dot, mermaid, sentence

FORMS = ("table", "mermaid", "dot")
_SLOTS = re.compile(r"\d+(?:,\d+)+")


def transition(source: PlanReport, target: PlanReport) -> tuple[Pricing, Move]:
    """Return the way between two plans, priced on the slots of both; ``ConfigError`` if they cannot be compared."""
    pricing = _common(source, target)
    after = msgspec.structs.replace(target.plan, epoch=source.plan.epoch + 1)
    return pricing, move(pricing, source.plan, after)


def render_transition(source: PlanReport, target: PlanReport, pricing: Pricing, found: Move, *, form: str) -> str:
    """Write the graph as a table with its price, or as a Mermaid or DOT diagram."""
    if found.dag is None:
        what = f"no order leads from one plan to the other: {found.stuck}"
        raise ConfigError(what, where="transition", remedy="go by a checkpoint, or plan with more free memory")
    match form:
        case "mermaid":
            return mermaid(found.dag) + "\n"
        case "dot":
            return dot(found.dag) + "\n"
    usable = found.dag.memory.capacity_bytes if found.dag.memory else 0
    workspace = round(pricing.calibration.workspace_bytes)
    return "\n".join(
        (
            f"from {_summary(source)}",
            f"to   {_summary(target)}",
            "",
            *_rows(pricing, found.dag),
            "",
            f"price: {format_seconds(found.seconds)}, {gib(found.moved_bytes)} copied; "
            f"state on the fullest slot peaks at {gib(found.peak_bytes)} of {gib(usable + workspace)}",
            _worth(source, target, found),
            "",
        )
    )


def transition_object(source: PlanReport, target: PlanReport, pricing: Pricing, found: Move) -> dict[str, Any]:
    """Return the graph and its price as plain values."""
    return {
        "from": _summary(source),
        "to": _summary(target),
        "seconds": found.seconds,
        "bytes": found.moved_bytes,
        "peak_bytes": found.peak_bytes,
        "stuck": found.stuck,
        "step_from_s": source.step_s,
        "step_to_s": target.step_s,
        "primitives": _primitives(pricing, found.dag) if found.dag else [],
    }


def _rows(pricing: Pricing, dag: TransitionDag) -> list[str]:
    """Return one line a primitive, in an order in which they may run; slots in a row are written as a range."""
    if not dag.primitives:
        return ["nothing to do: both plans have the same replicas"]
    seconds = seconds_of(pricing, dag)
    ids = [primitive.id for primitive in dag.primitives]
    rows = [
        (
            ids[index],
            _SLOTS.sub(lambda found: ranges(list(map(int, found[0].split(",")))), sentence(primitive)),
            format_seconds(seconds(primitive)),
            ", ".join(ids[before] for before in dag.local[index]),
            ", ".join(ids[before] for before in dag.resource[index]),
        )
        for index, primitive in enumerate(dag.primitives)
    ]
    return columns(("primitive", "what", "time", "after", "waits for room from"), rows)


def _primitives(pricing: Pricing, dag: TransitionDag) -> list[dict[str, Any]]:
    seconds = seconds_of(pricing, dag)
    ids = [primitive.id for primitive in dag.primitives]
    return [
        {
            "id": primitive.id,
            "kind": type(primitive).__name__,
            "model_stage": str(model_stage_of(primitive)),
            "what": sentence(primitive),
            "after": [ids[before] for before in dag.local[index]],
            "waits_for_room_from": [ids[before] for before in dag.resource[index]],
            "seconds": seconds(primitive),
        }
        for index, primitive in enumerate(dag.primitives)
    ]


def _summary(report: PlanReport) -> str:
    layouts = ", ".join(f"{stage.model_stage} {stage.layout}" for stage in report.stages)
    return f"{layouts} on {report.slots} slots"


def _worth(source: PlanReport, target: PlanReport, found: Move) -> str:
    if source.basis.workload != target.basis.workload:
        return "the plans are for different workloads, so their step times cannot be compared"
    gain = source.step_s - target.step_s
    steps = f"step time {format_seconds(source.step_s)} before, {format_seconds(target.step_s)} after"
    if gain <= 0:
        return f"{steps}: it never pays back"
    return f"{steps}: pays back in {found.seconds / gain:.3g} steps"


def _common(source: PlanReport, target: PlanReport) -> Pricing:
    """Return the pricing of the target on the union of both pools; refuse plans of different jobs."""
    before, after = source.basis, target.basis
    if before.shapes != after.shapes:
        raise ConfigError("the plans are of different models", where="--from, --to", remedy="plan the same model twice")
    if before.workflow.sides != after.workflow.sides:
        what = f"the plans are of different workflows ({_flow(source)} and {_flow(target)})"
        raise ConfigError(what, where="--from, --to", remedy="plan the same algorithm twice")
    old, new = before.cluster, after.cluster
    if (old.device, old.in_node, old.cross_node) != (new.device, new.in_node, new.cross_node):
        what = f"the plans are of different clusters ({source.cluster} and {target.cluster})"
        raise ConfigError(what, where="--from, --to", remedy="plan on the same cluster twice")
    return msgspec.structs.replace(after, cluster=_union(old, new))


def _flow(report: PlanReport) -> str:
    return f"{'async' if report.asynchronous else 'sync'} {report.algorithm}"


def _union(old: Cluster, new: Cluster) -> Cluster:
    hosts: dict[str, dict[int, None]] = {}
    for node in (*old.nodes, *new.nodes):
        hosts.setdefault(node.host, {}).update(dict.fromkeys(node.slots))
    nodes = tuple(Node(host, tuple(sorted(slots))) for host, slots in hosts.items())
    try:
        return msgspec.structs.replace(new, nodes=nodes)
    except ValueError as error:
        raise ConfigError(str(error), where="--from, --to", remedy="plan on the same cluster twice") from None
