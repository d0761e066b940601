"""Which plan would Nereus choose, and why? The command ``nereus plan``.

Asks the planner and gathers the figures (``planfile.PlanReport``); ``render`` writes them for people. No torch, no
sockets. Invariants (tests/commands/test_plan_command.py): phases add up to the step; the fullest slot is within what
may be used; equal words give equal reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from nereus.commands.planfile import PhaseFigures, PlanReport, SlotMemory, StageFigures, read_plan, to_json
from nereus.commands.question import Options, question_of
from nereus.commands.render import render_plan
from nereus.control.breakdown import Breakdown, breakdown, fits_by_layout
from nereus.control.choose import Found, Question, start_plan
from nereus.control.problem import Infeasible, Problem, RunnerUp, Solution, gib, usable_bytes
from nereus.core.plan import ModelStage
from nereus.errors import ConfigError

RUNNERS_UP = 2
"""So many are told for each model-stage."""
_ALL = 1000


def show_plan(options: Options, *, as_json: bool, out: Path | None, framework: str | None) -> str:
    """Return what ``nereus plan`` prints: the plan for people, the JSON object, or another framework's flags."""
    if framework is not None:
        return _show_flags(options, framework, as_json=as_json, out=out)
    report = make_report(options)
    encoded = to_json(report)
    if out is not None:
        write_plan(encoded, out)
    return encoded.decode() + "\n" if as_json else render_plan(report)


def show_transition(source: Path | None, target: Path | None, *, form: str, as_json: bool) -> str:
    """Return the way from one PLAN file to another: a table with its price, a diagram, or a JSON object."""
    from nereus.commands.transition import FORMS, render_transition, transition, transition_object

    if source is None or target is None:
        missing = "--from" if source is None else "--to"
        raise ConfigError(f"{missing} is missing", where="command line", remedy="give both PLAN files")
    if form not in FORMS:
        raise ConfigError(
            f"there is no diagram {form!r}", where="--diagram", remedy=f"choose one of {', '.join(FORMS)}"
        )
    before, after = read_plan(source, where="--from"), read_plan(target, where="--to")
    pricing, found = transition(before, after)
    if as_json:
        return msgspec.json.encode(transition_object(before, after, pricing, found)).decode() + "\n"
    return render_transition(before, after, pricing, found, form=form)


def _show_flags(options: Options, framework: str, *, as_json: bool, out: Path | None) -> str:
    from nereus.commands.emit import check_framework, emit

    check_framework(framework)
    report = make_report(options)
    if out is not None:
        write_plan(to_json(report), out)
    emission = emit(report, framework)
    return msgspec.json.encode(emission).decode() + "\n" if as_json else emission.render()


def make_report(options: Options) -> PlanReport:
    """Return the chosen plan with its figures; ``ConfigError`` where nothing fits."""
    question = question_of(options)
    found = start_plan(question, runners_up=_ALL)
    if isinstance(found, Infeasible):
        raise _refusal(options, question, found)
    return _report(options, question, found)


def write_plan(report: bytes, path: Path) -> None:
    """Write a PLAN file."""
    try:
        path.write_bytes(report + b"\n")
    except OSError as error:
        what = f"{path} cannot be written ({error.strerror})"
        raise ConfigError(what, where="--out", remedy="name a file in a folder that exists") from None


def _refusal(options: Options, question: Question, lost: Infeasible) -> ConfigError:
    cluster = question.pricing.cluster
    pool = f"{cluster.size} slot{'s' if cluster.size > 1 else ''} of {cluster.name}"
    what = f"no plan fits {options.model} on {pool}: {lost.because}"
    match lost.constraint:
        case "memory":
            what += f": {gib(lost.shortfall)} short"
            remedy = "use more or larger slots, shorter --lengths, a smaller model, or fewer models (--no-reference)"
        case "slots":
            remedy = f"add at least {lost.shortfall} slot(s) (--slots)"
        case _:
            remedy = "change --batch, --slots or the layout asked for"
    return ConfigError(what, where=f"constraint {lost.constraint}", remedy=remedy)


def _report(options: Options, question: Question, found: Found) -> PlanReport:
    pricing, solution, plan = question.pricing, found.solution, found.placement.plan
    problem = found.problem
    details = {stage: breakdown(pricing, solution.of(stage)) for stage in pricing.workflow.model_stages}
    phases = list(_phases(problem, solution, details))
    return PlanReport(
        "nereus-plan-1",
        options.model,
        pricing.cluster.name,
        pricing.cluster.size,
        str(pricing.workflow.algorithm),
        pricing.workflow.asynchronous,
        solution.latency_s,
        problem.exposed_s + sum(sync_s for _, sync_s in phases),
        tuple(phase for phase, _ in phases),
        tuple(_stage(question, found, stage, detail) for stage, detail in details.items()),
        _memory(question, found),
        tuple(_runners_up(solution)),
        options.max_staleness if options.asynchronous else 0,
        tuple(_notes(question, found)),
        pricing,
        plan,
        solution.candidates,
    )


def _phases(
    problem: Problem, solution: Solution, details: Mapping[ModelStage, Breakdown]
) -> Iterator[tuple[PhaseFigures, float]]:
    """Yield each phase, and the seconds that it adds to the weight sync."""
    for index, side in enumerate(problem.sides):
        for phase in side:
            chosen = [solution.of(member.model_stage) for member in phase.members]
            slowest = max(chosen, key=lambda one: one.seconds)
            sync_s = details[slowest.model_stage].weight_sync_s
            yield PhaseFigures(phase.name, index, slowest.seconds - sync_s, str(slowest.model_stage)), sync_s


def _stage(question: Question, found: Found, stage: ModelStage, detail: Breakdown) -> StageFigures:
    chosen = found.solution.of(stage)
    units = tuple(emu.slots for emu in found.placement.plan.of(stage))
    host = question.pricing.cluster.node_of()
    return StageFigures(
        str(stage),
        f"d{chosen.dp}{chosen.layout}",
        chosen.slots,
        len({host[slot] for unit in units for slot in unit}),
        units,
        chosen.micro_batch,
        chosen.recompute,
        chosen.seconds - detail.weight_sync_s,
        detail.seconds,
        {name: round(size) for name, size in detail.memory_bytes.items()},
    )


def _memory(question: Question, found: Found) -> SlotMemory:
    """Return the fullest slot: what stays there, and the largest of what comes and goes."""
    plan, solution = found.placement.plan, found.solution
    on: dict[int, dict[ModelStage, None]] = {}
    for emu in plan.emus:
        for slot in emu.slots:
            on.setdefault(slot, {})[emu.model_stage] = None

    def predicted(slot: int) -> int:
        there = [solution.of(stage) for stage in on[slot]]
        return sum(one.resident_bytes for one in there) + max(one.transient_bytes for one in there)

    fullest = max(sorted(on), key=predicted)
    capacity = int(question.pricing.cluster.device.memory_bytes)
    return SlotMemory(
        fullest,
        predicted(fullest),
        usable_bytes(capacity),
        capacity,
        {str(stage): solution.of(stage).resident_bytes for stage in on[fullest]},
        {str(stage): solution.of(stage).transient_bytes for stage in on[fullest]},
    )


def _runners_up(solution: Solution) -> Iterator[RunnerUp]:
    """Yield the nearest losers of each model-stage; one that only uses up slack is said to."""
    for stage in sorted(one.model_stage for one in solution.candidates):
        lost = [one for one in solution.runners_up if one.choice.startswith(f"{stage} ")]
        for one in lost[:RUNNERS_UP]:
            equal = one.latency_s is not None and one.latency_s <= solution.latency_s * (1 + 1e-9)
            slower = one.because.partition(": ")[2]
            yield (
                replace(one, because=f"slower itself, though the step does not wait for it: {slower}") if equal else one
            )


def _notes(question: Question, found: Found) -> Iterator[str]:
    yield "priced with prior efficiencies: not calibrated on this cluster, so trust ratios more than seconds"
    if found.placement.cross_node:
        yield f"tensor groups span nodes, slower than priced: {', '.join(found.placement.cross_node)}"
    idle = question.pricing.cluster.size - len(found.placement.plan.slots())
    if idle:
        yield f"{idle} of {question.pricing.cluster.size} slots stay idle: the batch or the layouts leave them no use"
    for stage in question.pricing.workflow.model_stages:
        yield from _excluded(question, stage)


def _excluded(question: Question, stage: ModelStage) -> Iterator[str]:
    """Say which layouts of a model-stage no slot can hold, and what the leanest of them lacks."""
    tight = sorted(layout for layout, fits in fits_by_layout(question.pricing, stage).items() if not fits)
    if tight:
        names = ", ".join(map(str, tight))
        yield f"{stage}: {names} fit{'s' if len(tight) == 1 else ''} on no slot"
