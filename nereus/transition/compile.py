"""In which order do all model-stages get from plan to plan without waiting for each other for ever?

The compiler plays the transition through in predicted time: it starts every primitive as early as slots, memory and
copies allow, and notes what each one waited for. So every edge points forward in time and the graph is acyclic. The
rules: *release before acquire* (an acquisition follows the primitives that release its slots and memory, none of which
waits for it); *stage order* (generation before inference before training where several could go first); the last copy
of a model-stage is dropped only after it has been copied. A cycle of last copies is broken by parking one in host
memory. Invariants (tests/transition/test_compile.py): run in any order that the graph allows, the books balance
and the target is reached.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from nereus.core.plan import ModelStage, Plan, SlotId
from nereus.transition.diff import Merging, StageDiff, diff
from nereus.transition.ledger import groups_of, growth_bytes, release_bytes
from nereus.transition.primitive import (
    Destroy,
    Extend,
    Memory,
    Merge,
    Park,
    Primitive,
    Replica,
    Split,
    Stuck,
    TransitionDag,
    Unpark,
    slots_of,
)

MAX_STRIPES = 4
"""So many replicas at most send to one new replica: more do not fill its links any better."""

SMALL = 24
"""So many primitives at most has a transition that is played through in several ways: the shortest wins."""

MAX_VARIANTS = 40
"""So many other ways are tried: with 24, one small transition in thirty was over 5 % longer than it could be."""

_CHOICES = 256
"""So many ways to choose the copies that are dropped last are tried before one is parked."""


class Order(enum.Enum):
    """Which of the copies that could be made goes first."""

    ARRIVAL = "as their slots become free, sources shared out evenly"
    SPREAD = "that on most slots, with all sources that help"
    PARTS = "those that a merge waits for"
    PARTS_ONLY = "those that a merge waits for, and nothing else until they have started"


class Timing(enum.Enum):
    """When parts are merged that are all there."""

    IDLE = "when nothing waits that they could send"
    EARLY = "at once"
    LATE = "when everything of their model-stage is under way; until then others send rather than parts"


class Way(NamedTuple):
    """How to play a transition through."""

    order: Order = Order.ARRIVAL
    merge: Timing = Timing.IDLE
    lend: ModelStage | None = None
    """The model-stage whose copies go only when all its new ones are under way, though somebody waits for slots."""
    lender: Replica | None = None
    """The only copy of it that does so; by default all."""


def nominal_seconds(primitive: Primitive) -> float:
    """Return a duration without units for planning without a price: copies dominate, stripes share the work."""
    kind = type(primitive)
    if kind is Destroy:
        return 0.01
    if isinstance(primitive, Extend):
        return 1.0 / len(primitive.sources)
    return 0.1 if isinstance(primitive, Merge) and primitive.aligned else 0.5


def compile_transition(
    current: Plan,
    target: Plan,
    *,
    groups: Iterable[Sequence[ModelStage]],
    memory: Memory | None = None,
    seconds: Callable[[Primitive], float] = nominal_seconds,
    variants: int = MAX_VARIANTS,
) -> TransitionDag | Stuck:
    """Return the graph of primitives from ``current`` to ``target``, or why there is none.

    ``groups`` are the sets of model-stages that run at the same time (``Workflow.concurrency_groups``). Both plans must
    be valid for them. Without ``memory`` only slots count and nothing is parked. ``seconds`` orders what could go in
    several orders; the graph is right whatever it says. A small transition is played through in up to ``variants``
    other ways, and the shortest wins: each costs as much time as the first; 0 where only feasibility matters.
    """
    changes = diff(current, target)
    in_groups = tuple(tuple(group) for group in groups)
    best = _Compiler(current, target, in_groups, memory, seconds, changes)
    dag = best.compile()
    if isinstance(dag, Stuck) or len(dag.primitives) > SMALL:
        return dag
    end = _length(dag, seconds)
    ways = [Way(order, merge) for merge in Timing for order in Order]
    for change in changes:
        if change.extended or change.mergings:
            going = [*change.dropped, *(part for split in change.splittings for part in split.dropped)]
            ways += [Way(order, lend=change.model_stage) for order in (Order.ARRIVAL, Order.PARTS) if going]
            ways += [Way(lend=change.model_stage, lender=replica) for replica in going if len(going) > 1]
    tries = [(best.kept, way) for way in ways[1:]]
    tries += [(kept, Way(order)) for kept in best.variants for order in (Order.ARRIVAL, Order.SPREAD)]
    for kept, way in tries[:variants]:
        other = _Compiler(current, target, in_groups, memory, seconds, changes, kept, way)
        found = other.compile()
        if isinstance(found, TransitionDag) and (length := _length(found, seconds)) < end:
            dag, end = found, length
    return dag


_MORE_CHOICES = 16
"""So many are tried for the sake of variants."""


def _length(dag: TransitionDag, seconds: Callable[[Primitive], float]) -> float:
    """Return the longest path through the graph: what is played through may also wait for what no edge says."""
    ends: list[float] = []
    for primitive, local, resource in zip(dag.primitives, dag.local, dag.resource, strict=True):
        start = max([ends[before] for before in (*local, *resource)], default=0.0)
        ends.append(start + seconds(primitive))
    return max(ends, default=0.0)


class _Copy:
    """A replica while the transition is played through. Identity matters: never compared by value."""

    doomed = False
    made_by = -1
    last_use = -1
    dropped_by = -1
    merging: _Merging | None = None
    blocked: Sequence[_Acquisition] = ()
    """The acquisitions that wait for this copy's slots."""

    def __init__(self, replica: Replica, stage: _Stage) -> None:
        self.replica = replica
        self.stage = stage


class _Doomed(_Copy):
    """A copy that goes."""

    doomed = True


class _Acquisition(_Copy):
    """A copy to be made."""

    started = False
    missing = 0
    """So many blockers are still there."""
    blockers: Sequence[_Copy] = ()
    """The copies that hold its slots."""

    @property
    def releases(self) -> list[int]:
        """Return the primitives that released its slots."""
        return sorted([blocker.dropped_by for blocker in self.blockers])


class _Merging:
    """Parts that become one replica once none of them is ``missing``."""

    __slots__ = ("change", "missing", "parts")

    def __init__(self, parts: list[_Copy], change: Merging, missing: int) -> None:
        self.parts = parts
        self.change = change
        self.missing = missing
        for part in parts:
            part.merging = self


class _Stage:
    """One model-stage while the transition is played through."""

    __slots__ = (
        "acquisitions",
        "change",
        "dropped",
        "groups",
        "idle",
        "lost",
        "merges",
        "name",
        "order",
        "parked",
        "ready",
        "rescued",
        "splits",
        "unstarted",
    )

    def __init__(self, order: int, change: StageDiff, groups: tuple[int, ...]) -> None:
        self.order = order
        self.change = change
        self.name = str(change.model_stage)
        self.groups = groups
        self.idle: dict[_Copy, None] = {}
        """Complete copies that could send now."""
        self.splits: list[tuple[_Copy, list[_Copy]]] = []
        self.dropped: list[_Copy] = []
        """Whole units that go."""
        self.lost: list[_Copy] = []
        """Parts of split units that go."""
        self.acquisitions: list[_Acquisition] = []
        self.ready: deque[_Acquisition] = deque()
        self.merges: list[_Merging] = []
        self.unstarted = 0
        self.rescued = False
        """Whether a copy exists, or will without waiting for anybody, that the target keeps."""
        self.parked: tuple[Replica, int] | None = None
        """The copy in host memory and the index of the primitive that put it there."""
        self._fill(change)

    def _fill(self, change: StageDiff) -> None:
        if change.stays and (change.extended or change.mergings):
            self.idle = dict.fromkeys([_Copy(replica, self) for replica in change.stays])
        parts: dict[tuple[SlotId, ...], _Copy] = {}
        for replica in change.kept:
            parts[replica.slots] = copy = _Copy(replica, self)
            self.idle[copy] = None
        for splitting in change.splittings:
            made = [_Copy(replica, self) for replica in splitting.kept]
            for part in made:
                parts[part.replica.slots] = part
            if splitting.dropped:
                lost = [_Doomed(replica, self) for replica in splitting.dropped]
                self.lost += lost
                made += lost
            self.splits.append((_Copy(splitting.source, self), made))
        self.dropped = [_Doomed(replica, self) for replica in change.dropped]
        self.rescued = bool(change.stays or change.kept or change.splittings)
        for merging in change.mergings:
            new = [_Acquisition(replica, self) for replica in merging.extended]
            self.acquisitions += new
            resident = [parts[replica.slots] for replica in merging.resident]
            missing = len(new) + (len(resident) if self.splits else 0)
            self.merges.append(_Merging([*resident, *new], merging, missing))
        self.acquisitions += [_Acquisition(replica, self) for replica in change.extended]
        self.unstarted = len(self.acquisitions)


_Kept = dict[_Stage, tuple[_Copy, ...]]
"""By model-stage, copies in somebody's way that are dropped only after they have been copied."""


_Numbers = dict[int, tuple[int, ...]]
"""The same by the order of model-stages and the places of copies among those that go."""


class _MemoryBook:
    """Memory per slot in predicted time, and the edges that keep it true in any order.

    ``gross`` counts what was ever taken: an acquisition that fits on top of it needs nobody's release. One that does
    not follows every release of that slot that it saw.
    """

    def __init__(self, memory: Memory, current: Plan) -> None:
        self._memory = memory
        self._taken = dict(memory.reserved_bytes)
        for emu in current.emus:
            share = memory.footprint(emu.model_stage, emu.layout)
            for slot in emu.slots:
                self._taken[slot] = self._taken.get(slot, 0) + share
        self._gross = dict(self._taken)
        self._releases: dict[SlotId, list[int]] = {}

    def take(self, primitive: Primitive) -> set[int] | None:
        """Return whom ``primitive`` must follow, having taken its memory; None if a slot has not enough now."""
        size, capacity = growth_bytes(primitive, self._memory), self._memory.capacity_bytes
        if size <= 0:
            return set()
        slots, taken, gross = slots_of(primitive), self._taken, self._gross
        if any(taken.get(slot, 0) + size > capacity for slot in slots):
            return None
        follows: set[int] = set()
        for slot in slots:
            taken[slot] = taken.get(slot, 0) + size
            gross[slot] = gross.get(slot, 0) + size
            if gross[slot] > capacity:
                follows.update(self._releases.get(slot, ()))
        return follows

    def release(self, index: int, primitive: Primitive) -> bool:
        """Count what ``primitive`` releases; return whether it releases anything."""
        size = release_bytes(primitive, self._memory)
        if size <= 0:
            return False
        for slot in slots_of(primitive):
            self._taken[slot] -= size
            self._releases.setdefault(slot, []).append(index)
        return True


class _Compiler:
    def __init__(
        self,
        current: Plan,
        target: Plan,
        groups: tuple[tuple[ModelStage, ...], ...],
        memory: Memory | None,
        seconds: Callable[[Primitive], float],
        changes: Sequence[StageDiff],
        kept: _Numbers | None = None,
        way: Way | None = None,
    ) -> None:
        self._current, self._target, self._groups = current, target, groups
        self._memory, self._seconds = memory, seconds
        self._way = way or Way()
        self._order = self._way.order
        self._plain = way is None
        self.kept = kept
        self.variants: list[_Numbers] = []
        """What else could be kept: other ways to play it through."""
        in_groups = groups_of([change.model_stage for change in changes], groups)
        self._stages = [_Stage(i, change, in_groups[change.model_stage]) for i, change in enumerate(changes)]
        self._book = None if memory is None or self._roomy(memory) else _MemoryBook(memory, current)
        self._host_bytes: dict[str, int] = {}
        self._primitives: list[Primitive] = []
        self._local: list[tuple[int, ...]] = []
        self._resource: list[tuple[int, ...]] = []
        self._now = 0.0
        self._running: list[tuple[float, int, Callable[[Any, int], None], Any]] = []
        self._waiting_splits: list[tuple[_Copy, list[_Copy]]] = []
        self._hungry: dict[_Stage, None] = {}
        """Model-stages that wait for memory."""
        self._touched: dict[_Stage, None] = {}

    def compile(self) -> TransitionDag | Stuck:
        missing = [stage for stage in self._stages if stage.acquisitions and not (stage.rescued or stage.dropped)]
        if missing:
            return Stuck(tuple(map(_no_copy, missing)))
        self._block()
        for stage in self._stages:
            self._waiting_splits += stage.splits
        self._start_splits()
        self._doom(self._last_copies())
        self._touched.update(dict.fromkeys(self._stages))
        while True:
            self._dispatch()
            if self._running:
                self._advance()
            elif self._unfinished():
                if not (self._give_way() or self._park()):
                    return self._stuck()
            else:
                break
        return TransitionDag(
            self._current,
            self._target,
            self._groups,
            self._memory,
            tuple(self._primitives),
            tuple(self._local),
            tuple(self._resource),
        )

    # What stands in whose way

    def _roomy(self, memory: Memory) -> bool:
        """Return whether memory can be left out: even the largest layouts of all that may share a slot fit."""
        largest: dict[int, int] = {}
        for stage in self._stages:
            change = stage.change
            held = [*change.stays[:1], *change.kept[:1], *change.dropped[:1], *change.extended[:1]]
            for splitting in change.splittings[:1]:
                held += [splitting.source, splitting.kept[0]]
            for merging in change.mergings[:1]:
                held += [merging.target, *merging.extended[:1]]
            sizes = [memory.footprint(change.model_stage, replica.layout) for replica in held]
            size = max(sizes, default=0)
            if any(not merging.aligned for merging in change.mergings):
                size *= 2
            group = stage.groups[0]
            largest[group] = max(largest.get(group, 0), size)
        reserved = max(memory.reserved_bytes.values(), default=0)
        return sum(largest.values()) + reserved <= memory.capacity_bytes

    def _block(self) -> None:
        """Link every acquisition with the copies whose slots it needs."""
        holders: dict[int, dict[SlotId, _Copy]] = {}
        for stage in self._stages:
            for copy in stage.dropped + stage.lost:
                held = dict.fromkeys(copy.replica.slots, copy)
                for group in stage.groups:
                    holders.setdefault(group, {}).update(held)
        waiting: dict[_Copy, list[_Acquisition]] = {}
        for stage in self._stages:
            if not stage.acquisitions:
                continue
            maps = [holders[group].get for group in stage.groups if group in holders]
            for acquisition in stage.acquisitions:
                slots = acquisition.replica.slots
                blockers: set[_Copy | None] = set(map(maps[0], slots)) if maps else set()
                for find in maps[1:]:
                    blockers.update(map(find, slots))
                found = [blocker for blocker in blockers if blocker is not None]
                if not found:
                    stage.ready.append(acquisition)
                    continue
                acquisition.blockers = found
                acquisition.missing = len(found)
                for blocker in found:
                    if blocker in waiting:
                        waiting[blocker].append(acquisition)
                    else:
                        waiting[blocker] = [acquisition]
        for blocker, acquisitions in waiting.items():
            blocker.blocked = acquisitions

    def _last_copies(self) -> _Kept:
        """Choose, for each model-stage all of whose copies stand in somebody's way, what is not dropped at once.

        Each choice must let some model-stage make a copy without waiting for a chosen one, then another, and so on. The
        least wanted copies are tried first; if no choice works, the one that opens the way for most is taken. One copy
        each is enough; variants of a small transition keep others, or all that they can, to send from.
        """
        if self.kept is not None:
            return {
                self._stages[order]: tuple([self._stages[order].dropped[number] for number in numbers])
                for order, numbers in self.kept.items()
            }
        closed = [
            stage
            for stage in self._stages
            if stage.acquisitions and not stage.rescued and (self._book or all(copy.blocked for copy in stage.dropped))
        ]
        if not closed:
            return {}
        options = [_distinct(stage.dropped) for stage in closed]
        small = sum([len(stage.acquisitions) for stage in self._stages]) <= SMALL
        good = list[_Kept]()
        best, opened = _Kept(), -1
        for tried, choice in enumerate(itertools.islice(itertools.product(*options), _CHOICES)):
            if good and (not small or tried >= _MORE_CHOICES or len(good) > MAX_VARIANTS):
                break
            chosen: _Kept = {stage: (copy,) for stage, copy in zip(closed, choice, strict=True)}
            count = _opened(chosen)
            if count > opened:
                best, opened = chosen, count
            if count == len(closed):
                good += [chosen, *_wider(chosen)] if small else [chosen]
        self.kept, *self.variants = map(_numbers, good or [best])
        return best

    def _doom(self, last: _Kept) -> None:
        """Destroy what is in the way; what is not stays as a source while there is something to send."""
        for stage in self._stages:
            kept = last.get(stage, ())
            for copy in stage.dropped:
                self._settle(copy, kept)

    def _settle(self, copy: _Copy, kept: Sequence[_Copy] = ()) -> None:
        """Let a complete copy send, or destroy it if somebody waits for its room."""
        stage = copy.stage
        if copy.doomed and copy not in kept and (not stage.unstarted or self._must_go(copy)):
            self._destroy(copy)
        else:
            stage.idle[copy] = None
            self._touched[stage] = None

    def _must_go(self, copy: _Copy) -> bool:
        """Return whether somebody waits for the room of a copy that does not stay to send."""
        if not copy.blocked and not self._book:
            return False
        way = self._way
        return self._plain or way.lend != copy.stage.change.model_stage or way.lender not in (None, copy.replica)

    # Playing it through

    def _advance(self) -> None:
        """Go to the next moment at which something ends, and let everything end that ends then."""
        running = self._running
        now = self._now = running[0][0]
        while running and running[0][0] <= now:
            _, index, then, subject = heapq.heappop(running)
            if self._book and self._book.release(index, self._primitives[index]):
                self._touched.update(self._hungry)
                self._start_splits()
            then(subject, index)

    def _dispatch(self) -> None:
        """Start what can start, model-stage by model-stage in stage order."""
        touched, self._touched = self._touched, {}
        for stage in sorted(touched, key=_stage_order):
            if stage.merges and self._way.merge is Timing.EARLY:
                self._merge(stage)
            if stage.ready:
                self._extend(stage)
            waits = stage.unstarted if self._way.merge is Timing.LATE else stage.ready
            if stage.merges and (not waits or stage in self._hungry):
                self._merge(stage)
            if not stage.unstarted:
                for copy in [copy for copy in stage.idle if copy.doomed]:
                    del stage.idle[copy]
                    self._destroy(copy)

    def _start(
        self,
        primitive: Primitive,
        local: tuple[int, ...],
        resource: Sequence[int],
        then: Callable[[Any, int], None],
        subject: Any,
    ) -> bool:
        """Note ``primitive`` and run it, then call ``then(subject, index)``; False: there is no memory for it now."""
        if self._book:
            follows = self._book.take(primitive)
            if follows is None:
                return False
            resource = sorted(follows.union(resource))
        index = len(self._primitives)
        self._primitives.append(primitive)
        self._local.append(local)
        self._resource.append(tuple(resource))
        heapq.heappush(self._running, (self._now + self._seconds(primitive), index, then, subject))
        return True

    def _next_id(self, stage: _Stage, kind: str) -> str:
        return f"{stage.name}/{kind}-{len(self._primitives)}"

    def _start_splits(self) -> None:
        waiting, self._waiting_splits = self._waiting_splits, []
        for source, parts in waiting:
            replicas = tuple([part.replica for part in parts])
            primitive = Split(self._next_id(source.stage, "split"), source.replica, replicas)
            if not self._start(primitive, (), (), self._splitted, parts):
                self._waiting_splits.append((source, parts))

    def _splitted(self, parts: list[_Copy], index: int) -> None:
        for part in parts:
            self._complete(part, index)

    def _destroy(self, copy: _Copy) -> None:
        primitive = Destroy(self._next_id(copy.stage, "destroy"), copy.replica)
        self._start(primitive, _after((copy,)), (), self._free, copy)

    def _free(self, copy: _Copy, index: int) -> None:
        copy.dropped_by = index
        for acquisition in copy.blocked:
            acquisition.missing -= 1
            if not acquisition.missing:
                stage = acquisition.stage
                stage.ready.append(acquisition)
                self._touched[stage] = None

    def _extend(self, stage: _Stage) -> None:
        """Give every acquisition that has its slots idle copies of its own to copy from, as many as there are."""
        postponed: list[_Acquisition] = []
        held: list[_Acquisition] = []
        if self._order is Order.SPREAD:
            stage.ready = deque(sorted(stage.ready, key=_spread))
        elif self._order is not Order.ARRIVAL:
            parts = [acquisition for acquisition in stage.ready if acquisition.merging]
            held = [acquisition for acquisition in stage.ready if not acquisition.merging]
            if self._order is Order.PARTS or all(part.started or not part.merging for part in stage.acquisitions):
                parts, held = parts + held, []
            stage.ready = deque(parts)
        while stage.ready and (stage.idle or stage.parked):
            acquisition = stage.ready.popleft()
            if not (self._unpark(stage, acquisition) if stage.parked else self._copy(stage, acquisition)):
                postponed.append(acquisition)
        stage.ready.extend(postponed + held)
        if postponed:
            self._hungry[stage] = None
        else:
            self._hungry.pop(stage, None)

    def _copy(self, stage: _Stage, acquisition: _Acquisition) -> bool:
        idle: Iterable[_Copy] = stage.idle
        share = len(stage.idle) // (len(stage.ready) + 1)
        if not self._plain:
            if self._order is Order.SPREAD:
                share = MAX_STRIPES
            if self._way.merge is Timing.LATE:
                idle = sorted(idle, key=_is_part)
        name, target = self._next_id(stage, "extend"), acquisition.replica
        sources = list(itertools.islice(idle, min(MAX_STRIPES, max(1, share))))
        primitive = Extend(name, tuple([source.replica for source in sources]), target)
        while len(sources) > 1:
            fewer = Extend(name, primitive.sources[:-1], target)
            if self._seconds(fewer) > self._seconds(primitive):
                break
            primitive = fewer
            sources.pop()
        index = len(self._primitives)
        if not self._start(primitive, _after(sources), acquisition.releases, self._copied, (sources, acquisition)):
            return False
        stage.unstarted -= 1
        acquisition.started = True
        for source in sources:
            source.last_use = index
            del stage.idle[source]
        return True

    def _copied(self, copies: tuple[list[_Copy], _Copy], index: int) -> None:
        sources, target = copies
        for source in sources:
            self._settle(source)
        self._complete(target, index)

    def _unpark(self, stage: _Stage, acquisition: _Acquisition) -> bool:
        assert stage.parked
        replica, parked_by = stage.parked
        primitive = Unpark(self._next_id(stage, "unpark"), replica, acquisition.replica)
        if not self._start(primitive, (parked_by,), acquisition.releases, self._complete, acquisition):
            return False
        stage.unstarted -= 1
        acquisition.started = True
        stage.parked = None
        return True

    def _complete(self, copy: _Copy, index: int) -> None:
        """A copy has come into being."""
        copy.made_by = index
        if copy.merging:
            copy.merging.missing -= 1
        self._settle(copy)

    def _merge(self, stage: _Stage) -> None:
        """Merge what is complete and not needed as a source right now."""
        waiting: list[_Merging] = []
        idle = stage.idle
        for merging in stage.merges:
            if merging.missing or not idle.keys() >= set(merging.parts):
                waiting.append(merging)
                continue
            change = merging.change
            parts = tuple([part.replica for part in merging.parts])
            primitive = Merge(self._next_id(stage, "merge"), parts, change.target, change.aligned)
            copy = _Copy(change.target, stage)
            if not self._start(primitive, _after(merging.parts), (), self._complete, copy):
                self._hungry[stage] = None
                waiting.append(merging)
                continue
            for part in merging.parts:
                del idle[part]
        stage.merges = waiting

    # When nothing moves

    def _unfinished(self) -> bool:
        return bool(self._waiting_splits) or any(stage.unstarted or stage.merges for stage in self._stages)

    def _in_the_way(self) -> list[_Copy]:
        """Return the copies that could go if they need not be kept for their model-stage."""
        return [
            copy
            for stage in self._stages
            if stage.unstarted
            for copy in stage.idle
            if copy.doomed and (copy.blocked or self._book)
        ]

    def _give_way(self) -> bool:
        """Destroy a copy in somebody's way that is not the last one; return whether there was one."""
        for copy in self._in_the_way():
            stage = copy.stage
            if len(stage.idle) > 1 or stage.parked:
                del stage.idle[copy]
                self._destroy(copy)
                return True
        return False

    def _park(self) -> bool:
        """Park the last copy, in somebody's way, that is cheapest to park; return whether one could be parked."""
        memory = self._memory
        if memory is None or not memory.host_bytes:
            return False
        found = [
            (memory.state_bytes[copy.stage.change.model_stage], copy.stage.order, copy) for copy in self._in_the_way()
        ]
        for _, _, copy in sorted(found, key=lambda item: item[:2]):
            taken = memory.parked(copy.replica)
            if all(self._host_bytes.get(host, 0) + size <= memory.host_bytes for host, size in taken.items()):
                for host, size in taken.items():
                    self._host_bytes[host] = self._host_bytes.get(host, 0) + size
                self._start_parking(copy)
                return True
        return False

    def _start_parking(self, copy: _Copy) -> None:
        del copy.stage.idle[copy]
        primitive = Park(self._next_id(copy.stage, "park"), copy.replica)
        self._start(primitive, _after((copy,)), (), self._parked, copy)

    def _parked(self, copy: _Copy, index: int) -> None:
        copy.stage.parked = (copy.replica, index)
        self._touched[copy.stage] = None
        self._free(copy, index)

    def _stuck(self) -> Stuck:
        """Explain who waits for whom: a cycle of last copies, or memory that nobody frees."""
        waits: dict[_Stage, tuple[_Stage, str]] = {}
        for stage in self._stages:
            for acquisition in stage.acquisitions:
                held = [copy for copy in acquisition.blockers if copy in copy.stage.idle]
                blocker = min(held, key=_replica, default=None)
                if blocker and acquisition.missing:
                    why = (
                        f"{stage.name} waits for slots of {acquisition.replica}, "
                        f"held by {blocker.replica}, the last copy of {blocker.stage.name}"
                    )
                    waits.setdefault(stage, (blocker.stage, why))
        for first in waits:
            path: list[_Stage] = []
            stage = first
            while stage in waits and stage not in path:
                path.append(stage)
                stage = waits[stage][0]
            if stage in path:
                return Stuck(tuple(waits[member][1] for member in path[path.index(stage) :]))
        hungry = [stage.name for stage in self._stages if stage in self._hungry]
        hungry += [source.stage.name for source, _ in self._waiting_splits]
        return Stuck(tuple(f"{name} waits for memory that nothing frees" for name in dict.fromkeys(hungry)))


def _is_part(copy: _Copy) -> bool:
    return copy.merging is not None


def _spread(acquisition: _Acquisition) -> int:
    return -len(acquisition.replica.slots)


def _replica(copy: _Copy) -> Replica:
    return copy.replica


def _after(copies: Iterable[_Copy]) -> tuple[int, ...]:
    """Return the primitives that must be done before ``copies`` can be read or dropped."""
    found: set[int] = set()
    for copy in copies:
        if copy.made_by >= 0:
            found.add(copy.made_by)
        if copy.last_use >= 0:
            found.add(copy.last_use)
    return tuple(sorted(found)) if found else ()


def _no_copy(stage: _Stage) -> str:
    wanted = stage.acquisitions[0].replica
    return (
        f"{stage.name} has no copy in the current plan, so nothing can send the {len(stage.acquisitions)} that the "
        f"target plan wants (the first is {wanted}): load it from a checkpoint, or leave it out of the target plan"
    )


def _stage_order(stage: _Stage) -> int:
    return stage.order


def _distinct(copies: Sequence[_Copy]) -> list[_Copy]:
    """Return the copies that stand in the way of different acquisitions, the least wanted first."""
    found: dict[tuple[int, ...], _Copy] = {}
    for copy in copies:
        found.setdefault(tuple(map(id, copy.blocked)), copy)
    return sorted(found.values(), key=lambda copy: len(copy.blocked))


def _numbers(kept: _Kept) -> _Numbers:
    return {stage.order: tuple([stage.dropped.index(copy) for copy in copies]) for stage, copies in kept.items()}


def _wider(chosen: _Kept) -> list[_Kept]:
    """Return the choices that keep all copies of one more model-stage and still open the way for everybody."""
    wider = [{**chosen, stage: tuple(stage.dropped)} for stage in chosen if len(stage.dropped) > 1]
    return [kept for kept in wider if _opened(kept) == len(kept)]


def _opened(chosen: _Kept) -> int:
    """Count the model-stages that get a copy, one after the other, if each drops its ``chosen`` copies last."""
    closed = dict(chosen)
    progress = True
    while progress:
        held = set(itertools.chain(*closed.values()))
        free = [stage for stage in closed if any(held.isdisjoint(item.blockers) for item in stage.acquisitions)]
        progress = bool(free)
        for stage in free:
            del closed[stage]
    return len(chosen) - len(closed)
