"""What do the slots of a simulated run compute, hold and send to each other?

Owner of everything that the workers of a run share besides the bus: the process groups of the trainers, the state that
each slot holds, the pieces on their way to the relay, the links. What takes time takes it by the world's truth
(``truth.py``, ``links.py``). Workers of one unit talk here and not over the bus, as devices do; what the supervisor is
told, and tells, are messages.

Invariants (tests/sim/test_simulation.py): a step needs every slot of every unit; nobody applies an update before all
have it ready; a death breaks the step for the others; a version is visible when every slot has pushed its share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from nereus.bus.messages import GroupAccepted
from nereus.core.plan import POLICY_TRAINING, Emu, Plan, PlanEpoch, SlotId
from nereus.errors import OutOfMemory, TransitionError
from nereus.sim.links import Links
from nereus.sim.truth import Step, Truth
from nereus.transition.primitive import Replica

AGREE_S = 0.02
"""Ours: from the last slot's readiness until the update is applied."""

NOTICE_S = 0.2
"""Ours: until the peers of a slot that has died find their collective broken."""

PUBLISHED_BYTES = 2.0
"""Of a parameter: rollouts get 16-bit weights."""


class Held(Struct):
    """The trained state of one slot."""

    replicas: set[Replica] = msgspec.field(default_factory=set)
    committed: Replica | None = None
    step: int = 0
    """The step that comes next."""
    ready: bool = False
    """The update of that step is complete and neither applied nor forgotten."""
    received_bytes: float = 0.0
    """Of replicas that are not committed."""


class Batch(Struct, frozen=True):
    """What the lead slot knows of a step and the others need not."""

    lengths: tuple[tuple[int, int], ...]


class _Round(Struct):
    """One step of the process groups of one plan."""

    units: tuple[Emu, ...]
    recompute: bool
    step: int
    members: frozenset[SlotId]
    waiting: dict[SlotId, asyncio.Future[Step]] = msgspec.field(default_factory=dict)
    batch: Batch | None = None
    timer: asyncio.TimerHandle | None = None
    lacks: bool = False
    """Whether a member is lost."""
    over: bool = False


class Collectives:
    """The process groups of the trainers."""

    def __init__(self, held: dict[SlotId, Held], time_step: Callable[[_Round], Step], timeout_s: float) -> None:
        """``time_step`` says what a complete round takes; it raises ``OutOfMemory``."""
        self._held = held
        self._time_step = time_step
        self._timeout_s = timeout_s
        self._rounds: dict[tuple[PlanEpoch, int], _Round] = {}
        self._hung: set[SlotId] = set()

    def enter(self, slot: SlotId, plan: Plan, step: int, batch: Batch | None) -> asyncio.Future[Step]:
        """Enter a step; the future ends when the update is applied, or with ``TransitionError`` or ``OutOfMemory``."""
        now = self._rounds.get((plan.epoch, step))
        if now is None or now.over:
            self._rounds = {key: one for key, one in self._rounds.items() if not one.over}
            units, recompute = plan.of(POLICY_TRAINING), POLICY_TRAINING in plan.recomputed
            members = frozenset(slot for unit in units for slot in unit.slots)
            now = self._rounds[plan.epoch, step] = _Round(units, recompute, step, members)
            now.lacks = not members <= self._held.keys()
        future: asyncio.Future[Step] = asyncio.get_running_loop().create_future()
        now.waiting[slot] = future
        now.batch = batch or now.batch
        if now.lacks:
            self._later(now, NOTICE_S, lambda: self._fail(now, "a peer is lost"))
        elif len(now.waiting) == len(now.members):
            self._begin(now)
        return future

    def hung(self, slot: SlotId) -> None:
        """Let ``slot`` do nothing more in a step; the others give up when their time is over."""
        self._hung.add(slot)
        for one in self._rounds.values():
            if slot in one.members and not one.over:
                self._wait_in_vain(one)

    def gone(self, slot: SlotId) -> None:
        """Break the steps that ``slot`` is in, or is expected in."""
        self._hung.discard(slot)
        for one in self._rounds.values():
            if slot in one.members and not one.over:
                one.lacks = True
                one.waiting.pop(slot, None)
                self._later(one, NOTICE_S, lambda one=one: self._fail(one, f"slot {slot} is lost"))  # type: ignore[misc]

    def _begin(self, one: _Round) -> None:
        if self._hung & one.members:
            return self._wait_in_vain(one)
        try:
            took = self._time_step(one)
        except OutOfMemory as error:
            return self._fail(one, error)
        self._later(one, took.seconds, lambda: self._agree(one, took))

    def _agree(self, one: _Round, took: Step) -> None:
        for slot in one.waiting:
            self._held[slot].ready = True
        self._later(one, AGREE_S, lambda: self._apply(one, took))

    def _apply(self, one: _Round, took: Step) -> None:
        one.over = True
        for slot, future in one.waiting.items():
            held = self._held[slot]
            held.step, held.ready = one.step + 1, False
            if not future.done():
                future.set_result(took)

    def _wait_in_vain(self, one: _Round) -> None:
        self._later(one, self._timeout_s, lambda: self._fail(one, f"a peer has not come in {self._timeout_s:g} s"))

    def _fail(self, one: _Round, why: str | OutOfMemory) -> None:
        one.over = True
        for slot, future in one.waiting.items():
            if not future.done() and slot not in self._hung:
                text = f"step {one.step}: {why}"
                future.set_exception(why if isinstance(why, OutOfMemory) else TransitionError(text))

    def _later(self, one: _Round, seconds: float, act: Callable[[], None]) -> None:
        """Let this come next for a round, in place of what was to come."""
        if one.timer is not None:
            one.timer.cancel()
        one.timer = asyncio.get_running_loop().call_later(seconds, act)


class Publications:
    """The versions on their way from trainers to the relays of the nodes that generate."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        """``seconds``: from the last push until the relays have it."""
        self._seconds = seconds
        self._pushed: dict[int, set[SlotId]] = {}
        self._verified: dict[int, asyncio.Future[bool]] = {}
        """By version: whether it has become visible."""
        self._busy_until = 0.0
        self.visible = -1
        self.tell: Callable[[int, float], None] | None = None
        """The relay's: called with a version that is complete, and the seconds it took; None: there is no relay."""

    def reset(self) -> None:
        """Drop what is half-pushed."""
        self._pushed.clear()
        for verified in self._verified.values():
            if not verified.done():
                verified.set_result(False)
        self._verified.clear()

    def relay_lost(self) -> None:
        self.reset()
        self.visible, self.tell = -1, None

    def push(self, version: int, slot: SlotId, writers: frozenset[SlotId]) -> asyncio.Future[bool]:
        """Note one slot's share of ``version``; the last one makes it visible after a while.

        The future tells whether it has become visible; false: there is no relay, or it was dropped.
        """
        if self.tell is None or version <= self.visible:
            done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            done.set_result(self.tell is not None)
            return done
        verified = self._verified.setdefault(version, asyncio.get_running_loop().create_future())
        pushed = self._pushed.setdefault(version, set())
        pushed.add(slot)
        if pushed >= writers:
            del self._pushed[version]
            loop, took = asyncio.get_running_loop(), self._seconds()
            self._busy_until = max(loop.time(), self._busy_until) + took
            loop.call_at(self._busy_until, self._complete, version, took, verified)
        return verified

    def _complete(self, version: int, took: float, verified: asyncio.Future[bool]) -> None:
        if self._verified.get(version) is verified and self.tell is not None:
            del self._verified[version]
            self.visible = version
            self.tell(version, took)
            if not verified.done():  # nobody may wait for it any more
                verified.set_result(True)


class Devices:
    """All slots of one attempt of one run."""

    def __init__(self, truth: Truth, *, budget: int, minibatches: int, group_timeout_s: float) -> None:
        self.truth = truth
        self.links = Links(truth.cluster)
        self.held: dict[SlotId, Held] = {}
        """By slot, of those whose process is there."""
        self.generating: frozenset[SlotId] = frozenset()
        self.collectives = Collectives(self.held, self._time_step, group_timeout_s)
        self.publications = Publications(self._publish_s)
        self.collect: Callable[[GroupAccepted], None] | None = None
        """Takes a finished group to the lead trainer; None: there is none."""
        self.broken: dict[SlotId, Callable[[], None]] = {}
        """Of each slot of a generation unit: what its loss does to the unit."""
        self.halted_until = 0.0
        """Until then the job is being restarted: nothing is computed, and state comes with the restart."""
        self.halts: list[Callable[[float], None]] = []
        """What a halt does to each generation unit; called with its end."""
        self._budget = budget
        self._minibatches = minibatches

    @property
    def weights_bytes(self) -> float:
        return self.truth.shape.parameters * PUBLISHED_BYTES

    def came(self, slot: SlotId) -> None:
        self.held[slot] = Held()

    def gone(self, slot: SlotId) -> None:
        self.held.pop(slot, None)
        self.collectives.gone(slot)
        if (broken := self.broken.pop(slot, None)) is not None:
            broken()

    def halt(self, seconds: float) -> None:
        """Restart the job: every device stops for a while."""
        self.halted_until = asyncio.get_running_loop().time() + seconds
        for stop in tuple(self.halts):
            stop(self.halted_until)

    @property
    def halted_s(self) -> float:
        """For how long the job is still being restarted."""
        return max(0.0, self.halted_until - asyncio.get_running_loop().time())

    def _publish_s(self) -> float:
        return self.links.broadcast_s(self.weights_bytes, self.links.nodes_of(self.generating))

    def _time_step(self, one: _Round) -> Step:
        assert one.batch is not None, "the lead slot knows the batch"
        took = step_of(self.truth, one.units, one.batch, one.step, self._budget, one.recompute, self._minibatches)
        limit = self.truth.cluster.device.memory_bytes
        if took.peak_bytes > limit:
            raise OutOfMemory(f"step {one.step}", {"state and activations": took.peak_bytes}, round(limit))
        return took


def step_of(
    truth: Truth, units: Sequence[Emu], batch: Batch, step: int, budget: int, recompute: bool, minibatches: int
) -> Step:
    """Return what all updates of one step take together."""
    parts = [
        truth.step(units, batch.lengths[part::minibatches], step, budget, recompute=recompute)
        for part in range(minibatches)
    ]
    names = {name for part in parts for name in part.operations}
    operations = {name: sum(part.operations.get(name, 0.0) for part in parts) for name in sorted(names)}
    return Step(sum(part.seconds for part in parts), operations, max(part.peak_bytes for part in parts))
