"""What must change to get from one plan to another, model-stage by model-stage?

Pure set arithmetic over units and slots, blind to memory and to other model-stages. Invariants
(tests/transition/test_diff.py): replicas of both plans with the same layout on the same slots stay untouched; a slot
whose state can be reused through the common layout is never emptied; what is kept, extended and merged is exactly the
target.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from nereus.core.plan import Emu, Layout, ModelStage, Plan, SlotId
from nereus.transition.primitive import Replica

Slots = tuple[SlotId, ...]


class Splitting(Struct, frozen=True):
    """One replica becomes ``kept`` parts, which the target uses, and ``dropped`` ones."""

    source: Replica
    kept: tuple[Replica, ...]
    dropped: tuple[Replica, ...]


class Merging(Struct, frozen=True):
    """``resident`` replicas and ``extended`` ones, still to be made, become ``target``.

    The resident ones are either all unsplit (``StageDiff.kept``) or all parts of split ones.
    """

    resident: tuple[Replica, ...]
    extended: tuple[Replica, ...]
    target: Replica
    aligned: bool


class StageDiff(Struct, frozen=True):
    """The local moves of one model-stage.

    ``stays`` are replicas of both plans; ``kept`` unsplit ones that a merge consumes; ``dropped`` whole units that go;
    ``extended`` whole units to be made.
    """

    model_stage: ModelStage
    stays: tuple[Replica, ...] = ()
    kept: tuple[Replica, ...] = ()
    splittings: tuple[Splitting, ...] = ()
    dropped: tuple[Replica, ...] = ()
    extended: tuple[Replica, ...] = ()
    mergings: tuple[Merging, ...] = ()


def common_layout(one: Layout, other: Layout) -> Layout:
    """Return the largest layout that replicas of both layouts split into: the gcd of every degree."""
    return Layout(math.gcd(one.tp, other.tp), math.gcd(one.pp, other.pp))


def diff(current: Plan, target: Plan) -> tuple[StageDiff, ...]:
    """Return the local moves of every model-stage of either plan, in stage order."""
    before, after = _by_model_stage(current), _by_model_stage(target)
    return tuple(
        _stage_diff(model_stage, before.get(model_stage, []), after.get(model_stage, []))
        for model_stage in sorted({**before, **after})
    )


def canonical_parts(slots: Slots, layout: Layout, part: Layout) -> tuple[Slots, ...]:
    """Cut the slots of a replica into those of ``part`` replicas so that no slot loses what it keeps needing.

    Position (p, t) of a part takes one slot out of the block of adjacent ranks that the part's shard (p, t) covers: a
    split then gathers inside the smallest enclosing tensor and pipeline groups, and a merge copies nothing.
    """
    return tuple([pick(slots) for pick in _pickers(layout, part)])


def _by_model_stage(plan: Plan) -> dict[ModelStage, list[Emu]]:
    found: dict[ModelStage, list[Emu]] = {}
    last: ModelStage | None = None
    for emu in plan.emus:
        if emu.model_stage is not last:
            last = emu.model_stage
            units = found.setdefault(last, [])
        units.append(emu)
    return found


def _stage_diff(model_stage: ModelStage, before: Sequence[Emu], after: Sequence[Emu]) -> StageDiff:
    if not before or not after:
        return StageDiff(model_stage, dropped=_replicas(before), extended=_replicas(after))
    layout, wanted = before[0].layout, after[0].layout
    if layout == wanted:
        return _moved(model_stage, before, after)
    common = common_layout(layout, wanted)
    if common == layout:
        return _without_splits(model_stage, before, after)
    return _with_splits(model_stage, before, after, common)


def _moved(model_stage: ModelStage, before: Sequence[Emu], after: Sequence[Emu]) -> StageDiff:
    """Keep units on the same slots; reshuffle one in place where only the order of its slots differs."""
    layout = before[0].layout
    old, new = {emu.slots for emu in before}, {emu.slots for emu in after}
    both = old & new

    def replicas(units: Iterable[Slots]) -> tuple[Replica, ...]:
        return tuple([Replica(model_stage, layout, slots) for slots in units])

    if len(both) == len(old):
        return StageDiff(model_stage, stays=_replicas(before), extended=replicas(sorted(new - both)))
    gone, wanted = sorted(old - both), sorted(new - both)
    sources: dict[Slots, Slots] = {}
    """Which unit becomes which."""
    if not {slot for slots in gone for slot in slots}.isdisjoint(itertools.chain(*wanted)):
        on_slots = {frozenset(slots): slots for slots in gone}
        for slots in wanted:
            if source := on_slots.get(frozenset(slots)):
                sources[slots] = source
    kept = set(sources.values())
    return StageDiff(
        model_stage,
        stays=replicas(sorted(both)),
        kept=replicas([slots for slots in gone if slots in kept]) if kept else (),
        dropped=replicas([slots for slots in gone if slots not in kept] if kept else gone),
        extended=replicas([slots for slots in wanted if slots not in sources] if kept else wanted),
        mergings=tuple(
            [
                Merging(replicas((source,)), (), Replica(model_stage, layout, slots), False)
                for slots, source in sources.items()
            ]
        ),
    )


def _without_splits(model_stage: ModelStage, before: Sequence[Emu], after: Sequence[Emu]) -> StageDiff:
    """Merge whole units that lie inside a wanted unit; make the rest of it, or all of it, anew."""
    owner = _owners(before)
    old = _replicas(before)
    used: set[int] = set()
    extended: list[Replica] = []
    mergings: list[Merging] = []
    for emu in after:
        target = Replica(model_stage, emu.layout, emu.slots)
        touched = set(map(owner.get, emu.slots))
        touched.discard(None)
        inside = _inside(touched, old, set(emu.slots)) if touched else ()
        if not inside:
            extended.append(target)
            continue
        used.update(inside)
        resident = tuple([old[i] for i in inside])
        layout = resident[0].layout
        taken = {slot for replica in resident for slot in replica.slots}
        parts = _group([slot for slot in emu.slots if slot not in taken], emu, layout)
        new = tuple([Replica(model_stage, layout, part) for part in parts])
        tiles = {replica.slots for replica in resident + new}
        aligned = tiles.issuperset(canonical_parts(emu.slots, emu.layout, layout))
        mergings.append(Merging(resident, new, target, aligned))
    return StageDiff(
        model_stage,
        kept=tuple([old[i] for i in sorted(used)]),
        dropped=tuple([replica for i, replica in enumerate(old) if i not in used]),
        extended=tuple(extended),
        mergings=tuple(mergings),
    )


def _inside(touched: Iterable[int | None], old: Sequence[Replica], slots: set[SlotId]) -> list[int]:
    """Return which of the ``touched`` replicas have all their slots in ``slots``."""
    return sorted(i for i in touched if i is not None and slots.issuperset(old[i].slots))


def _with_splits(model_stage: ModelStage, before: Sequence[Emu], after: Sequence[Emu], common: Layout) -> StageDiff:
    """Split the units of which a part lies where a part of a wanted unit is to be; the others are not worth it."""
    owner = _owners(before)
    kept: dict[int, list[Replica]] = {}
    extended: list[Replica] = []
    mergings: list[Merging] = []
    for emu in after:
        resident: list[Replica] = []
        new: list[Replica] = []
        for slots in canonical_parts(emu.slots, emu.layout, common):
            owners = set(map(owner.get, slots))
            holder = owners.pop()
            part = Replica(model_stage, common, slots)
            if owners or holder is None:
                new.append(part)
            else:
                resident.append(part)
                kept.setdefault(holder, []).append(part)
        if not resident:
            extended.append(Replica.of(emu))
        elif emu.layout != common:
            mergings.append(Merging(tuple(resident), tuple(new), Replica.of(emu), True))
    return StageDiff(
        model_stage,
        splittings=tuple(_splitting(before[i], parts, common) for i, parts in sorted(kept.items())),
        dropped=_replicas(emu for i, emu in enumerate(before) if i not in kept),
        extended=tuple(extended),
        mergings=tuple(mergings),
    )


def _splitting(emu: Emu, kept: Sequence[Replica], common: Layout) -> Splitting:
    taken = {slot for part in kept for slot in part.slots}
    if len(taken) == len(emu.slots):
        return Splitting(Replica.of(emu), tuple(kept), ())
    rest = _group([slot for slot in emu.slots if slot not in taken], emu, common)
    return Splitting(Replica.of(emu), tuple(kept), tuple(Replica(emu.model_stage, common, part) for part in rest))


def _group(rest: Sequence[SlotId], emu: Emu, part: Layout) -> list[Slots]:
    """Cut leftover slots of a unit into ``part`` replicas, as near to its canonical parts as they allow."""
    if not rest:
        return []
    position = dict(zip(emu.slots, _positions(emu.layout, part), strict=True))
    ordered = sorted(rest, key=position.__getitem__)
    count = len(ordered) // part.slots
    return [tuple(ordered[i::count]) for i in range(count)]


def _owners(emus: Sequence[Emu]) -> dict[SlotId, int]:
    owner: dict[SlotId, int] = {}
    for index, emu in enumerate(emus):
        owner.update(dict.fromkeys(emu.slots, index))
    return owner


def _replicas(emus: Iterable[Emu]) -> tuple[Replica, ...]:
    return tuple([Replica(emu.model_stage, emu.layout, emu.slots) for emu in emus])


@functools.cache
def _positions(layout: Layout, part: Layout) -> tuple[int, ...]:
    """Return for each slot of a unit at which position of ``part`` its shard lies."""
    ranks = map(layout.coordinates, range(layout.slots))
    return tuple(pp * part.pp // layout.pp * part.tp + tp * part.tp // layout.tp for pp, tp in ranks)


@functools.cache
def _pickers(layout: Layout, part: Layout) -> tuple[Callable[[Slots], Slots], ...]:
    positions = _positions(layout, part)
    ordered = sorted(range(layout.slots), key=lambda index: (positions[index], index))
    count = layout.slots // part.slots
    return tuple(_picker(ordered[i::count]) for i in range(count))


def _picker(indices: Sequence[int]) -> Callable[[Slots], Slots]:
    if len(indices) == 1:
        only = indices[0]
        return lambda slots: (slots[only],)
    return operator.itemgetter(*indices)
