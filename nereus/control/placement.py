"""Which slots does each unit get? Turns the planner's choice into a plan that moves little.

Owner of the rule "keep resident state". Invariants (tests/control/test_plan_placement.py): units that run at the same
time share no slot; memory fits on every slot; a unit that needs no change keeps its slots and its ordinal; no ordinal
is used twice in a run; tensor groups lie inside a node wherever free slots allow it, and those that do not are named.

Greedy and deterministic: the widest tensor groups first, whole units before parts of units, then the pairs of group and
pipeline rank with the most resident bytes. What is placed anew goes where the weight sync has least to bring into a
node, then where slots hold least.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from nereus.control.problem import Candidate, Infeasible, Problem, Solution, gib
from nereus.core.plan import Emu, Layout, ModelStage, Plan, SlotId, Stage

Group = tuple[SlotId, ...]
"""The slots of one tensor-parallel group, tp rank by tp rank."""


class Placement(Struct, frozen=True):
    """A plan and what it costs to get there from the current one."""

    plan: Plan
    next_ordinals: dict[ModelStage, int]
    """The first ordinal of each model-stage that no unit has had."""
    kept_bytes: int
    """Resident state that is where the plan wants it already."""
    moved_bytes: int
    """Resident state that must come from somewhere else."""
    memory_bytes: int
    """The fullest slot's prediction."""
    cross_node: tuple[str, ...]
    """Units with a tensor group that spans nodes: slower than they were priced."""


class _Shard(NamedTuple):
    """What part of a model a slot holds: fractions of its layers and of each layer's width."""

    layers: tuple[float, float]
    width: tuple[float, float]

    @classmethod
    def of(cls, layout: Layout, pp_rank: int, tp_rank: int) -> _Shard:
        return cls((pp_rank / layout.pp, (pp_rank + 1) / layout.pp), (tp_rank / layout.tp, (tp_rank + 1) / layout.tp))

    def share_of(self, other: _Shard) -> float:
        """Return which share of ``other`` is in this shard."""
        return _overlap(self.layers, other.layers) * _overlap(self.width, other.width)


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0])) / (other[1] - other[0])


class _Room:
    """Which slots are taken: by a side for good, by a member within its phase."""

    def __init__(self, nodes: Sequence[Group], shares: Sequence[int]) -> None:
        self.nodes = nodes
        self.node_of = {slot: index for index, node in enumerate(nodes) for slot in node}
        self.spare = list(shares)
        self.side_of: dict[SlotId, int] = {}
        self.busy: dict[tuple[int, int], set[SlotId]] = {}
        self.resident: dict[SlotId, int] = dict.fromkeys(self.node_of, 0)
        self.transient: dict[SlotId, int] = dict.fromkeys(self.node_of, 0)
        self.synced: dict[int, float] = dict.fromkeys(range(len(nodes)), 0.0)
        """Bytes of trained weights that each weight sync brings into a node."""
        self.trained: dict[str, dict[int, float]] = {}
        """Of each trained model, which share of its weights the trainers of a node hold."""

    def open(self, phase: tuple[int, int], slot: SlotId) -> bool:
        """May a member of ``phase`` (side, phase within it) have this slot, its side's budget aside?"""
        return (
            slot in self.node_of
            and slot not in self.busy.get(phase, ())
            and self.side_of.get(slot, phase[0]) == phase[0]
        )

    def fits(self, phase: tuple[int, int], slots: Group) -> bool:
        """May it have all of them?"""
        fresh = sum(slot not in self.side_of for slot in slots)
        return fresh <= self.spare[phase[0]] and all(self.open(phase, slot) for slot in slots)

    def take(self, phase: tuple[int, int], slots: Group, candidate: Candidate) -> None:
        fresh = [slot for slot in slots if slot not in self.side_of]
        self.spare[phase[0]] -= len(fresh)
        self.side_of.update(dict.fromkeys(fresh, phase[0]))
        self.busy.setdefault(phase, set()).update(slots)
        for slot in slots:
            self.resident[slot] += candidate.resident_bytes
            self.transient[slot] = max(self.transient[slot], candidate.transient_bytes)

    def lacking(self, candidate: Candidate, node: int) -> float:
        """Return the bytes that the weight sync would have to bring into a node where ``candidate`` had its units."""
        if (held := self.trained.get(candidate.model_stage.model)) is None:
            return 0.0
        needed = min(1.0, len(self.nodes[node]) / candidate.layout.slots)
        return max(0.0, needed - held.get(node, 0.0)) * candidate.resident_bytes * candidate.layout.slots

    def settle(self, candidate: Candidate, units: Sequence[Group]) -> None:
        """Note what the units of a member, now complete, hold of trained weights or have to be sent of them."""
        if candidate.model_stage.stage is Stage.TRAINING:
            held = self.trained.setdefault(candidate.model_stage.model, {})
            for node, places in _places(self, units).items():
                held[node] = len(places) / candidate.layout.slots
        elif candidate.model_stage.model in self.trained:
            for node in _places(self, units):
                self.synced[node] += self.lacking(candidate, node)

    def groups(self, phase: tuple[int, int], width: int) -> Iterator[Group]:
        """Yield the open groups of ``width`` neighbours in a node, aligned so that groups of other widths nest."""
        for node in self.nodes:
            for first in range(0, len(node) - width + 1, width):
                group = node[first : first + width]
                if all(self.open(phase, slot) for slot in group):
                    yield group

    def any_group(self, phase: tuple[int, int], width: int) -> Group | None:
        """Return ``width`` open slots, inside one node if there is one with so many, else wherever they are."""
        left = [[slot for slot in node if self.open(phase, slot)] for node in self.nodes]
        for pool in (*left, [slot for node in left for slot in node]):
            owned = [slot for slot in pool if slot in self.side_of]
            fresh = [slot for slot in pool if slot not in self.side_of][: self.spare[phase[0]]]
            if len(owned) + len(fresh) >= width:
                return tuple((owned + fresh)[:width])
        return None


class _Wanted(NamedTuple):
    """One member's candidate, where its phase stands, and the units found for it so far."""

    phase: tuple[int, int]
    candidate: Candidate
    units: list[Group]


def place(
    problem: Problem,
    solution: Solution,
    nodes: Sequence[Group],
    current: Plan,
    next_ordinals: Mapping[ModelStage, int] | None = None,
) -> Placement | Infeasible:
    """Return the next plan epoch for the planner's ``solution`` on ``nodes`` (the slots of each, intact ones only).

    ``next_ordinals`` tells ordinals that units of earlier plans have had; those of ``current`` are never reused either.
    """
    count = sum(map(len, nodes))
    if sum(solution.shares) > count:
        missing = sum(solution.shares) - count
        return Infeasible("slots", missing, f"the plan needs {sum(solution.shares)} slots and {count} are there")
    room = _Room([tuple(node) for node in nodes], solution.shares)
    wanted = list(_wanted(problem, solution))
    trained = {one.candidate.model_stage.model for one in wanted if one.candidate.model_stage.stage is Stage.TRAINING}

    def turn(one: _Wanted) -> tuple[int, bool, bool, int]:
        """Trainers come before what reads their weights, and that before what reads none, among equally wide groups."""
        stage = one.candidate.model_stage
        training, reads = stage.stage is Stage.TRAINING, stage.model in trained
        return -one.candidate.layout.tp, not training, not reads, -one.candidate.resident_bytes

    order = sorted(wanted, key=turn)
    kept = {one.candidate.model_stage: _keep_units(room, one, current) for one in order}
    for one in order:
        _place_rest(room, one, current)
        room.settle(one.candidate, one.units)
    fullest = max(room.resident, key=lambda slot: room.resident[slot] + room.transient[slot])
    memory = room.resident[fullest] + room.transient[fullest]
    if memory > problem.usable_bytes:
        because = f"slot {fullest} would need {gib(memory)}, {gib(problem.usable_bytes)} may be used"
        return Infeasible("memory", memory - problem.usable_bytes, because)
    return _placement(room, wanted, kept, current, dict(next_ordinals or {}), memory)


def _wanted(problem: Problem, solution: Solution) -> Iterator[_Wanted]:
    rest = iter(solution.candidates)
    for side_index, side in enumerate(problem.sides):
        for phase_index, phase in enumerate(side):
            for _ in phase.members:
                yield _Wanted((side_index, phase_index), next(rest), [])


def _keep_units(room: _Room, wanted: _Wanted, current: Plan) -> list[int]:
    """Take the current units that can stay as they are; return their ordinals in the order of ``wanted.units``."""
    ordinals = list[int]()
    for emu in current.of(wanted.candidate.model_stage):
        fitting = emu.layout == wanted.candidate.layout and len(wanted.units) < wanted.candidate.dp
        if fitting and room.fits(wanted.phase, emu.slots):
            room.take(wanted.phase, emu.slots, wanted.candidate)
            wanted.units.append(emu.slots)
            ordinals.append(emu.ordinal)
    return ordinals


def _places(room: _Room, units: Sequence[Group]) -> dict[int, set[int]]:
    """Return which parts of a unit are on each node."""
    found: dict[int, set[int]] = {}
    for unit in units:
        for place, slot in enumerate(unit):
            found.setdefault(room.node_of[slot], set()).add(place)
    return found


def _place_rest(room: _Room, wanted: _Wanted, current: Plan) -> None:
    """Find tensor groups for each pipeline rank of the units still missing, and join them to units."""
    candidate, layout = wanted.candidate, wanted.candidate.layout
    missing = candidate.dp - len(wanted.units)
    ranks: list[list[Group]] = [[] for _ in range(layout.pp)]
    held = _held(current, candidate.model_stage)
    groups = list(room.groups(wanted.phase, layout.tp)) if missing else []
    scored = [
        (-_resident_share(held, ordered, layout, rank), rank, ordered)
        for group in groups
        if any(slot in held for slot in group)
        for rank in range(layout.pp)
        for ordered in (_ordered(held, group, layout, rank),)
    ]
    for score, rank, group in sorted(scored):
        if score < 0 and len(ranks[rank]) < missing and room.fits(wanted.phase, group):
            room.take(wanted.phase, group, candidate)
            ranks[rank].append(group)
    burdens = [room.synced[node] + room.lacking(candidate, node) for node in range(len(room.nodes))]
    roomy = sorted(
        groups, key=lambda group: (burdens[room.node_of[group[0]]], sum(room.resident[slot] for slot in group))
    )
    free = [group for group in roomy if room.fits(wanted.phase, group)]
    short = sum(missing - len(rank) for rank in ranks)
    # Neighbours go to the same unit: what is taken is sorted by place again before it is dealt out.
    dealt = list[Group]()
    for group in free:
        if len(dealt) < short and room.fits(wanted.phase, group):
            room.take(wanted.phase, group, candidate)
            dealt.append(group)
    while len(dealt) < short:
        group_or_none = room.any_group(wanted.phase, layout.tp)
        if group_or_none is None:
            raise AssertionError(f"no slots left for {candidate}: the shares do not cover the phase")
        room.take(wanted.phase, group_or_none, candidate)
        dealt.append(group_or_none)
    dealt.sort(key=lambda group: (room.node_of[group[0]], group))
    rest = iter(dealt)
    for unit in range(missing):
        for column in ranks:
            if len(column) <= unit:
                column.append(next(rest))
    wanted.units.extend(tuple(slot for group in unit for slot in group) for unit in zip(*ranks, strict=True))


def _held(current: Plan, model_stage: ModelStage) -> dict[SlotId, _Shard]:
    """Return which part of the model-stage each slot holds now."""
    return {
        slot: _Shard.of(emu.layout, *emu.layout.coordinates(index))
        for emu in current.of(model_stage)
        for index, slot in enumerate(emu.slots)
    }


def _ordered(held: Mapping[SlotId, _Shard], group: Group, layout: Layout, pp_rank: int) -> Group:
    """Give each slot of a group the tensor rank whose shard it holds most of; links in a node do not care.

    So two units that merge into a wider one move nothing: slots 0 1 and 2 3 become 0 2 1 3.
    """
    pairs = sorted(
        (-(held[slot].share_of(_Shard.of(layout, pp_rank, tp_rank)) if slot in held else 0.0), tp_rank, slot)
        for slot in group
        for tp_rank in range(layout.tp)
    )
    chosen: dict[int, SlotId] = {}
    for _, tp_rank, slot in pairs:
        if tp_rank not in chosen and slot not in chosen.values():
            chosen[tp_rank] = slot
    return tuple(chosen[tp_rank] for tp_rank in range(layout.tp))


def _resident_share(held: Mapping[SlotId, _Shard], group: Group, layout: Layout, pp_rank: int) -> float:
    """Return how many slots' worth of state the group holds already for this pipeline rank."""
    return sum(
        held[slot].share_of(_Shard.of(layout, pp_rank, tp_rank)) for tp_rank, slot in enumerate(group) if slot in held
    )


def _placement(
    room: _Room,
    wanted: list[_Wanted],
    kept: Mapping[ModelStage, list[int]],
    current: Plan,
    next_ordinals: dict[ModelStage, int],
    memory: int,
) -> Placement:
    for emu in current.emus:
        next_ordinals[emu.model_stage] = max(next_ordinals.get(emu.model_stage, 0), emu.ordinal + 1)
    emus, cross_node = list[Emu](), list[str]()
    kept_bytes = moved_bytes = 0
    for one in wanted:
        stage, layout = one.candidate.model_stage, one.candidate.layout
        first = next_ordinals.get(stage, 0)
        ordinals = [*kept[stage], *range(first, first + len(one.units) - len(kept[stage]))]
        next_ordinals[stage] = first + len(one.units) - len(kept[stage])
        held = _held(current, stage)
        for ordinal, slots in zip(ordinals, one.units, strict=True):
            emu = Emu(stage, ordinal, layout, slots)
            emus.append(emu)
            groups = [slots[start : start + layout.tp] for start in range(0, len(slots), layout.tp)]
            if any(len({room.node_of[slot] for slot in group}) > 1 for group in groups):
                cross_node.append(emu.id)
            share = sum(_resident_share(held, group, layout, rank) for rank, group in enumerate(groups))
            kept_bytes += round(share * one.candidate.resident_bytes)
            moved_bytes += round((len(slots) - share) * one.candidate.resident_bytes)
    recomputed = sorted({one.candidate.model_stage for one in wanted if one.candidate.recompute})
    plan = Plan(current.epoch + 1, tuple(sorted(emus)), tuple(recomputed))
    return Placement(plan, next_ordinals, kept_bytes, moved_bytes, memory, tuple(cross_node))
