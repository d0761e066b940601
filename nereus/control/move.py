"""What does it take to get from one plan to another: which graph, how long, how many bytes, how full a slot?

Joins what the memory model knows of state with what the transition package knows of order. State means what a replica
holds between steps: no gradients, for at a safe boundary there are none (that a plan has room for them is the
planner's to see). Copies that no intact unit has left are *restored*: frozen and published weights come from the host
(the model's files, the relay); trained state that is gone is in a checkpoint only, and the move is stuck. Invariants
(tests/control/test_move.py): no change costs nothing; the peak is that of the states on the way; equal input gives
equal output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nereus.control.breakdown import Pricing
from nereus.control.cost import Recompute, Setups
from nereus.control.efficiency import OperationClass
from nereus.control.memory import Memory as Terms
from nereus.control.memory import generation_memory, scoring_memory, training_memory
from nereus.control.problem import usable_bytes
from nereus.core.cluster import Link
from nereus.core.plan import Layout, ModelStage, Plan, Stage
from nereus.transition.compile import compile_transition
from nereus.transition.cost import PrimitiveSeconds, TransferRates, makespan
from nereus.transition.diff import common_layout
from nereus.transition.primitive import (
    Destroy,
    Extend,
    Memory,
    Merge,
    Park,
    Primitive,
    Split,
    Stuck,
    TransitionDag,
    Unpark,
    slots_of,
)
from nereus.transition.run import TransitionRun


class Move(Struct, frozen=True):
    """The way from one plan to another, with its price."""

    dag: TransitionDag | None
    """None where no order exists."""
    seconds: float
    moved_bytes: int
    """Over links and to and from hosts, all slots together."""
    peak_bytes: int
    """State on the fullest slot at the worst moment, workspace included."""
    restored: tuple[ModelStage, ...] = ()
    """Model-stages without an intact copy, loaded from the host once their slots are free."""
    stuck: str = ""


def move(pricing: Pricing, current: Plan, target: Plan) -> Move:
    """Return the way from ``current`` (intact units only) to ``target`` on the pool of ``pricing``."""
    gone = tuple(sorted(set(target.model_stages()) - set(current.model_stages())))
    lost = [str(stage) for stage in gone if stage.stage is Stage.TRAINING]
    if lost:
        return Move(None, 0.0, 0, 0, gone, f"no intact unit holds {', '.join(lost)}: only a checkpoint has it")
    memory = _memory(pricing, current, target)
    kept = replace(target, emus=tuple(emu for emu in target.emus if emu.model_stage not in gone))
    rates = _rates(pricing)
    seconds = PrimitiveSeconds(rates, memory)
    groups = tuple(pricing.workflow.concurrency_groups())
    dag = compile_transition(current, kept, groups=groups, memory=memory, seconds=seconds)
    if isinstance(dag, Stuck):
        return Move(None, 0.0, 0, 0, gone, str(dag))
    peak, took = _play(dag, seconds)
    restored = [emu for emu in target.emus if emu.model_stage in gone]
    loads = [memory.footprint(emu.model_stage, emu.layout) for emu in restored]
    took += max(loads, default=0) / rates.host_bytes_per_s
    moved = sum(wire_bytes(primitive, memory) for primitive in dag.primitives)
    moved += sum(load * len(emu.slots) for load, emu in zip(loads, restored, strict=True))
    peak = max(peak, _fullest(target, memory)) + round(pricing.calibration.workspace_bytes)
    pause = rates.pause_s if dag.primitives or restored else 0.0
    return Move(dag, took + pause, moved, peak, gone)


def seconds_of(pricing: Pricing, dag: TransitionDag) -> Callable[[Primitive], float]:
    """Return the prices of single primitives, for tables."""
    return PrimitiveSeconds(_rates(pricing), _memory(pricing, dag.current, dag.target))


def wire_bytes(primitive: Primitive, moving: Memory) -> int:
    """Return how many bytes ``primitive`` copies between slots, or between slots and their hosts."""
    match primitive:
        case Extend(target=target) | Unpark(target=target):
            return moving.footprint(target.model_stage, target.layout) * len(target.slots)
        case Park(replica=replica):
            return moving.footprint(replica.model_stage, replica.layout) * len(replica.slots)
        case Split(source=source, parts=parts):
            lacking = moving.footprint(source.model_stage, parts[0].layout)
            return max(0, lacking - moving.footprint(source.model_stage, source.layout)) * len(source.slots)
        case Merge(target=target, aligned=aligned):
            return 0 if aligned else moving.footprint(target.model_stage, target.layout) * len(target.slots)
        case Destroy():
            return 0


def state_terms(pricing: Pricing, stage: ModelStage, layout: Layout) -> dict[str, int]:
    """Return the bytes that the fullest slot of a unit holds between steps, by purpose."""
    shape, setups = pricing.shape_of(stage), Setups.grid([(layout, 1, 1, Recompute.NONE)])
    space = pricing.space
    terms: Terms
    match stage.stage:
        case Stage.TRAINING:
            terms = training_memory(
                shape,
                setups,
                0.0,
                1.0,
                compute_bytes=space.compute_bytes,
                state_bytes=space.state_bytes,
                gradient_bytes=space.state_bytes,
            )
        case Stage.INFERENCE:
            terms = scoring_memory(shape, setups, 0.0, compute_bytes=space.compute_bytes)
        case Stage.GENERATION:
            terms = generation_memory(shape, setups, 0.0, 0.0, 0.0, compute_bytes=space.compute_bytes)
        case Stage.WEIGHTS:
            return {}
    return {name: int(np.ceil(np.max(size))) for name, size in terms.resident.items()}


def _memory(pricing: Pricing, current: Plan, target: Plan) -> Memory:
    """Return what state takes on slots while a plan changes: at a safe boundary there are no gradients."""
    held: dict[tuple[ModelStage, Layout], int] = {}
    for stage in {*current.model_stages(), *target.model_stages()}:
        layouts = {emu.layout for plan in (current, target) for emu in plan.of(stage)[:1]}
        for layout in layouts | {common_layout(one, other) for one in layouts for other in layouts}:
            terms = state_terms(pricing, stage, layout)
            held[stage, layout] = sum(terms.values()) - terms.get("gradients", 0)
    cluster = pricing.cluster
    capacity = usable_bytes(int(cluster.device.memory_bytes)) - round(pricing.calibration.workspace_bytes)
    wholes = dict.fromkeys((stage for stage, _ in held), 0)
    """Never asked for: every layout on the way is known."""
    memory = Memory(
        capacity,
        wholes,
        held,
        host_bytes=int(cluster.host_memory_bytes),
        host_of=cluster.node_of(),
    )
    # What is on a slot now is there, whatever the model says of its capacity.
    return replace(memory, capacity_bytes=max(capacity, _fullest(current, memory)))


def _fullest(plan: Plan, memory: Memory) -> int:
    taken: dict[int, int] = {}
    for emu in plan.emus:
        share = memory.footprint(emu.model_stage, emu.layout)
        for slot in emu.slots:
            taken[slot] = taken.get(slot, 0) + share
    return max(taken.values(), default=0)


def _play(dag: TransitionDag, seconds: Callable[[Primitive], float]) -> tuple[int, float]:
    """Return the fullest slot's bytes at the worst moment, and how long the primitives take."""
    run = TransitionRun(dag)
    taken = run.ledger.slot_bytes()
    peak = max(taken.values(), default=0)

    def observed(primitive: Primitive) -> float:
        nonlocal peak
        peak = max(peak, _most(taken[slot] for slot in slots_of(primitive)))
        return seconds(primitive)

    took = makespan(run, observed)
    return peak, took


def _most(sizes: Iterable[int]) -> int:
    return max(sizes, default=0)


def _rates(pricing: Pricing) -> TransferRates:
    """Return the rates that links reach, by the efficiencies of sending between neighbours."""
    cluster, efficiencies, overheads = pricing.cluster, pricing.efficiencies, pricing.overheads
    return TransferRates(
        _reached(cluster.in_node, efficiencies[OperationClass.P2P_IN_NODE]),
        _reached(cluster.cross_node, efficiencies[OperationClass.P2P_CROSS_NODE]),
        cluster.host_bytes_per_s,
        communicator_s=overheads.communicator_s,
        communicator_rank_s=overheads.communicator_rank_s,
        release_s=overheads.release_s,
        pause_s=overheads.pause_s,
        node_of=cluster.node_of(),
    )


def _reached(link: Link, efficiency: float) -> Link:
    return Link(link.latency_s, link.bytes_per_s * efficiency)
