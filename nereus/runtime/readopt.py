"""A supervisor was killed and its workers live: from where does the next one go on, and with whom?

Owner: the supervisor of the next attempt, before its run begins. The journal says what the one before had decided
(``estate_of``); the workers come by themselves (``gather``); the trainers say how far they have come, as after a loss
(``take_over``). Of a plan change that was under way nothing counts but what the journal has committed.

Groups that were under way are forgotten everywhere and granted again: what a group draws depends on its seed and place
in the sample order, not on who draws it.

Invariants (tests/runtime/test_readopt.py, tests/virtual/test_readoption.py): a step that the trainers have applied is
in the journal once, whether or not its supervisor lived to write it; a worker that the journal does not count among the
living, or that has come further than the journal, is sent away.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping

import structlog
from msgspec import Struct

from nereus.actors.names import RELAY, slot_of, slot_worker
from nereus.algo.sampler import Cursor
from nereus.bus.endpoint import Delivery, Endpoint, PeerGone
from nereus.bus.messages import (
    Hello,
    Message,
    Pull,
    PullDone,
    PullFrom,
    Refused,
    Shutdown,
    Stand,
    Standing,
    VersionReady,
    Welcome,
)
from nereus.core.plan import POLICY_TRAINING, Plan, PlanEpoch
from nereus.errors import NereusError, PeerLost
from nereus.runtime import journal as record
from nereus.runtime.fleet import Fleet, State
from nereus.runtime.journal import Entry, Record
from nereus.runtime.regroup import Regrouped, StateLost, regroup
from nereus.transition.reshard import TensorSpec

log = structlog.get_logger()


class Estate(Struct, frozen=True):
    """What a supervisor that did not come to its end has left behind, by its journal."""

    started: record.RunStarted
    plan: Plan
    tried: PlanEpoch
    """The newest plan epoch that anybody may have heard of."""
    step: int
    version: int
    cursor: Cursor
    begun: record.StepBegun | None
    """The step in flight, if there was one."""
    samples: int
    """How many samples it consists of."""
    unfinished: tuple[int, ...]
    """Groups that somebody may be working on, or holds."""
    living: Mapping[str, record.WorkerJoined]
    saved_step: int
    """The newest step with a checkpoint; -1: none."""


class Takeover(Struct, frozen=True):
    """From where and with whom the next attempt goes on."""

    estate: Estate
    found: Mapping[str, Hello]
    regrouped: Regrouped
    tensors: tuple[TensorSpec, ...]
    tied: Mapping[str, str]
    visible: VersionReady | None
    """What the relay can lend."""

    @property
    def completed(self) -> record.Trained | None:
        """The step that the trainers have made and the journal does not know of."""
        begun = self.estate.begun
        if begun is None or self.regrouped.step == self.estate.step:
            return None
        return record.Trained(step=begun.step, version=begun.version, groups=begun.groups, samples=self.estate.samples)

    @property
    def step(self) -> int:
        return self.regrouped.step

    @property
    def version(self) -> int:
        return self.estate.version + (self.completed is not None)

    @property
    def cursor(self) -> Cursor:
        done = self.completed
        return self.estate.cursor if done is None else self.estate.cursor.advance(ref.group for ref in done.groups)

    @property
    def lost(self) -> tuple[str, ...]:
        return tuple(sorted(self.estate.living.keys() - self.found.keys()))

    def records(self, started: record.RunStarted) -> list[Record]:
        """Return what the journal has to say of it, ``started`` included, as one batch."""
        completed = self.completed
        readopted = record.Readopted(
            attempt=started.attempt,
            epoch=self.estate.plan.epoch,
            step=self.step,
            workers=tuple(sorted(self.found)),
            lost=self.lost,
            completed=completed is not None,
        )
        joined = [
            record.WorkerJoined(worker=hello.worker, incarnation=hello.incarnation, host=hello.host, pid=hello.pid)
            for _, hello in sorted(self.found.items())
        ]
        return [*([completed] if completed else []), started, readopted, *joined]


def estate_of(entries: Iterable[Entry]) -> Estate | None:
    """Return what the journal leaves to a successor; None if its last attempt has ended, or had not begun to train."""
    ledger = _Ledger()
    for entry in entries:
        ledger.take(entry.record)
    return ledger.estate()


class _Ledger:
    """What is known after the records so far."""

    def __init__(self) -> None:
        self._started: record.RunStarted | None = None
        self._training = False
        self._plan: Plan | None = None
        self._tried = 0
        self._step = self._version = 0
        self._trained: dict[int, int] = {}
        self._dropped: set[int] = set()
        self._granted: set[int] = set()
        self._samples: dict[int, int] = {}
        self._begun: record.StepBegun | None = None
        self._living: dict[str, record.WorkerJoined] = {}
        self._saved_step = -1

    def take(self, one: Record) -> None:
        match one:
            case record.RunStarted(step=step, version=version):
                self._started, self._training, self._begun = one, False, None
                self._step, self._version = step, version
                self._trained = {group: at for group, at in self._trained.items() if at < step}
                self._saved_step = step or -1
                self._living, self._granted = {}, set()
            case record.Readopted():
                self._training = True
            case record.WorkerJoined(worker=worker):
                self._living[worker] = one
            case record.WorkerGone(worker=worker):
                self._living.pop(worker, None)
            case record.PlanCommitted(plan=plan, why=why):
                self._plan = plan
                self._tried = plan.epoch if why == "start" else max(self._tried, plan.epoch)
            case record.TransitionBegun(plan=plan):
                self._tried = max(self._tried, plan.epoch)
            case record.VersionReady():
                self._training = True
            case record.Granted(groups=groups):
                self._granted.update(ref.group for ref in groups)
            case record.Accepted(group=group, rewards=rewards):
                self._samples[group] = len(rewards)
            case record.Dropped(group=group):
                self._dropped.add(group)
            case record.StepBegun():
                self._begun = one
            case record.Trained(step=step, version=version, groups=groups):
                self._step, self._version, self._begun = step + 1, version + 1, None
                self._trained.update((ref.group, step) for ref in groups)
            case record.CheckpointCommitted(step=step):
                self._saved_step = step
            case record.RunEnded():
                self._started = None
            case _:
                pass

    def estate(self) -> Estate | None:
        if self._started is None or self._plan is None or not self._training:
            return None
        finished = self._trained.keys() | self._dropped
        return Estate(
            self._started,
            self._plan,
            self._tried,
            self._step,
            self._version,
            Cursor().advance(finished),
            self._begun,
            sum(self._samples.get(ref.group, 0) for ref in self._begun.groups) if self._begun else 0,
            tuple(sorted(self._granted - finished)),
            self._living,
            self._saved_step,
        )


def refusal(estate: Estate, hello: Hello) -> str:
    """Return why a worker cannot be taken over; empty if it can."""
    known = estate.living.get(hello.worker)
    if not hello.orphan:
        return "the run is being taken over; come again"
    if known is None or (known.host, known.pid) != (hello.host, hello.pid):
        return f"{hello.worker} (pid {hello.pid} on {hello.host}) is not among the living workers of the run"
    if hello.epoch > estate.plan.epoch:
        return f"{hello.worker} lives in plan epoch {hello.epoch}, the journal ends in {estate.plan.epoch}"
    return ""


async def gather(
    endpoint: Endpoint, estate: Estate, run_id: str, expected: Callable[[], Collection[str]], *, timeout_s: float
) -> dict[str, Hello]:
    """Welcome the workers of the estate; return when all that are ``expected`` have come, or time is up."""
    found: dict[str, Hello] = {}

    async def answer(delivery: Delivery, message: Message) -> None:
        with contextlib.suppress(PeerLost):
            await endpoint.reply(delivery, message)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while (estate.living.keys() & set(expected())) - found.keys():
                event = await endpoint.receive()
                match event:
                    case Delivery(peer=peer, message=Hello() as hello) if peer == hello.worker:
                        why = refusal(estate, hello)
                        if why:
                            log.warning("a worker is sent away", worker=peer, why=why)
                            await answer(event, Refused(why))
                            continue
                        found[peer] = hello
                        await answer(event, Welcome(run_id, estate.plan.epoch))
                    case Delivery(peer=peer) if event.token:
                        await answer(event, Refused("the run is being taken over; ask again"))
                    case PeerGone(peer=peer, incarnation=incarnation):
                        if peer in found and found[peer].incarnation == incarnation:
                            del found[peer]
                    case _:
                        pass  # what was meant for the supervisor before is asked for anew
    return found


async def take_over(endpoint: Endpoint, estate: Estate, found: Mapping[str, Hello], *, timeout_s: float) -> Takeover:
    """Find out from where the run goes on; ``StateLost`` if that is a checkpoint."""
    slots = {slot for name, hello in found.items() if (slot := slot_of(name)) is not None and hello.stage}
    training = {slot for slot in slots if found[slot_worker(slot)].stage == str(POLICY_TRAINING)}
    regrouped = await regroup(endpoint, estate.plan, training, timeout_s=timeout_s)
    if regrouped.step not in (estate.step, estate.step + (estate.begun is not None)):
        raise StateLost(f"the trainers stand before step {regrouped.step}, the journal ends before step {estate.step}")
    tensors, tied = await _describe(endpoint, regrouped, timeout_s)
    visible = await _visible(endpoint, timeout_s) if RELAY in found else None
    takeover = Takeover(estate, found, regrouped, tensors, tied, visible)
    if visible is not None and visible.version > takeover.version:
        raise StateLost(f"the relay has version {visible.version}, the trainers stand before {takeover.version}")
    return takeover


def enlist(fleet: Fleet, takeover: Takeover) -> None:
    """Note the workers that were taken over: those that are what the plan says are ready, others have to become it."""
    for name, hello in sorted(takeover.found.items()):
        slot = slot_of(name)
        if name not in fleet and slot is not None:
            fleet.admit(slot)
        worker = fleet.joined(hello)
        stage = str(worker.emu.model_stage) if worker.emu is not None and slot is not None else ""
        if hello.stage == stage:
            worker.state = State.READY


async def send_away(endpoint: Endpoint, found: Iterable[str], reason: str) -> None:
    """Tell workers to leave."""
    for name in found:
        with contextlib.suppress(PeerLost):
            await endpoint.send(name, Shutdown(reason))


async def _describe(
    endpoint: Endpoint, regrouped: Regrouped, timeout_s: float
) -> tuple[tuple[TensorSpec, ...], Mapping[str, str]]:
    """Ask one trainer slot after the other which tensors the model consists of."""
    for slot in (slot for unit in regrouped.units for slot in unit.slots):
        with contextlib.suppress(NereusError, TimeoutError):
            standing = await endpoint.request(slot_worker(slot), Stand(describe=True), timeout_s=timeout_s)
            if isinstance(standing, Standing) and standing.tensors:
                return standing.tensors, standing.tied
    raise StateLost("no trainer says any more what the model consists of")


async def _visible(endpoint: Endpoint, timeout_s: float) -> VersionReady | None:
    """Ask the relay for its newest version, as a reader would."""
    with contextlib.suppress(NereusError, TimeoutError):
        lent = await endpoint.request(RELAY, Pull(0, endpoint.name), timeout_s=timeout_s)
        if isinstance(lent, PullFrom):
            await endpoint.request(RELAY, PullDone(lent.version, endpoint.name), timeout_s=timeout_s)
            return VersionReady(lent.version, lent.checksum, len(lent.tensors), 0, 0.0)
    return None
