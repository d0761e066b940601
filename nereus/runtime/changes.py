"""How does a running job get from one plan to the next?

Owner: the supervisor, which says when the boundary is reached, what the next plan is and what follows. One change at a
time: ``begin`` starts the state moves in the background (``transform.py``), ``conclude`` puts the new plan in force on
every worker, or stays with the old one. ``recover`` puts a plan of intact units in force after a loss, without moves.
What was lost on the way is the supervisor's to issue again.

Once the state is where it belongs the new plan is decided: a worker that does not follow is lost under the new plan.

Invariants (tests/virtual/test_transitions.py): a change that fails leaves the old plan in force; after a commit no
worker acts under the old epoch; an epoch is tried once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

import structlog
from msgspec import Struct
from msgspec.structs import replace

from nereus.actors.names import RELAY, REWARD, slot_worker
from nereus.bus.endpoint import Endpoint
from nereus.bus.messages import Abandon, Commit
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, POLICY_WEIGHTS, Emu, Plan, PlanEpoch
from nereus.errors import NereusError, PeerLost, TransitionError
from nereus.runtime import journal as record
from nereus.runtime.fleet import Fleet, State, Worker
from nereus.runtime.journal import Journal
from nereus.runtime.surroundings import Launcher, Observer, Origin, TransitionProgress
from nereus.runtime.timeline import summarized
from nereus.runtime.transform import StateMoves, execute
from nereus.transition.compile import compile_transition
from nereus.transition.primitive import Stuck
from nereus.transition.reshard import TensorSpec
from nereus.transition.run import TransitionRun

log = structlog.get_logger()


class Transformed(Struct, frozen=True):
    """The state moves of a transition are over: all done, or given up because of ``failure``."""

    failure: str = ""


class Concluded(Struct, frozen=True):
    """What a change has left behind."""

    failure: str
    lost: tuple[str, ...] = ()
    """Trainer slots that did not follow the new plan, and why is in the log."""
    seconds: float = 0.0


class _Running(Struct):
    """The change in flight."""

    target: Plan
    moves: StateMoves
    began: float
    task: asyncio.Task[None]
    aborted: str = ""


class PlanChanges:
    """The plan in force and the change in flight."""

    def __init__(
        self,
        plan: Plan,
        origin: Origin,
        *,
        store: str,
        fleet: Fleet,
        endpoint: Endpoint,
        launcher: Launcher,
        journal: Journal,
        observer: Observer,
        timeout_s: float,
        tried: PlanEpoch,
    ) -> None:
        self.plan = plan
        self._timeout_s = timeout_s
        self._model = origin.model
        self._store = store
        self._fleet = fleet
        self._endpoint = endpoint
        self._launcher = launcher
        self._journal = journal
        self._observer = observer
        self._epoch = max(plan.epoch, tried)
        """The newest that was tried."""
        self._running: _Running | None = None

    @property
    def running(self) -> Plan | None:
        """The plan towards which state is being moved."""
        return self._running.target if self._running else None

    @property
    def aborted(self) -> bool:
        """Whether the change in flight was given up."""
        return bool(self._running and self._running.aborted)

    @property
    def vacated(self) -> list[Worker]:
        """Return the rollouts that have given up their units for the change in flight, and live."""
        moved = self._running.moves.vacated if self._running else []
        workers = (self._fleet[slot_worker(slot)] for slot in moved)
        return [worker for worker in workers if worker.state in (State.READY, State.LIVE)]

    def begin(
        self,
        target: Plan,
        why: str,
        tensors: Sequence[TensorSpec],
        tied: Mapping[str, str],
        report: Callable[[Transformed], None],
    ) -> None:
        """Start to move state towards ``target``; ``report`` is called once, when the moves are over."""
        assert self._running is None, "one change at a time"
        target = self._numbered(target)
        dag = compile_transition(self.plan, target, groups=[(POLICY_GENERATION, POLICY_TRAINING)], variants=0)
        primitives = () if isinstance(dag, Stuck) else dag.primitives
        moves = StateMoves(
            self._endpoint,
            tensors,
            tied,
            self._model,
            primitives,
            hosts=self._fleet.hosts(),
            timeout_s=self._timeout_s,
        )
        names = tuple(primitive.id for primitive in primitives)
        self._journal.append(record.TransitionBegun(plan=target, primitives=names, why=why))
        self._observer.note(f"changing the plan: {summarized(target)} ({why})")

        def watch(done: int, running: tuple[str, ...]) -> None:
            self._observer.transition(TransitionProgress(summarized(target), len(primitives), done, running))

        async def transform() -> None:
            failure = ""
            try:
                if isinstance(dag, Stuck):
                    raise TransitionError(f"there is no way: {dag}")
                await execute(TransitionRun(dag), moves.perform, watch)
            except asyncio.CancelledError:
                failure = self._running.aborted if self._running else ""
                if not failure:
                    raise
            except Exception as error:  # noqa: BLE001 - whatever breaks here must not leave training waiting
                failure = str(error) or type(error).__name__
                log.warning("state moves failed", why=failure, kind=type(error).__name__)
            report(Transformed(failure))

        began = asyncio.get_running_loop().time()
        self._running = _Running(target, moves, began, asyncio.create_task(transform(), name="transition"))

    def abort(self, why: str) -> None:
        """Give up the change in flight, if there is one: its report follows."""
        if self._running is not None and not self._running.aborted:
            self._running.aborted = why
            self._running.task.cancel()

    async def conclude(self, failure: str) -> Concluded:
        """Put the new plan in force, or stay with the old one and let the trainers forget what they took."""
        vacated = self.vacated
        running, self._running = self._running, None
        assert running is not None
        failure = running.aborted or failure
        for worker in vacated:
            worker.state, worker.version, worker.switching = State.JOINED, None, None
            worker.running.clear()
        lost: list[str] = []
        if failure:
            await self._abandon(running.target, failure)
        else:
            lost = await self._commit(running.target, "transition")
        seconds = asyncio.get_running_loop().time() - running.began
        moved = running.moves.moved_bytes
        self._journal.append(
            record.TransitionEnded(
                epoch=running.target.epoch, ok=not failure, reason=failure, seconds=seconds, moved_bytes=moved
            )
        )
        outcome = f"was given up: {failure}" if failure else f"is done, {moved / 1e6:.1f} MB moved"
        self._observer.note(f"the plan change {outcome} ({seconds:.2f} s)")
        self._observer.plan(self.plan)
        return Concluded(failure, tuple(lost), seconds)

    async def recover(self, units: Sequence[Emu]) -> list[str]:
        """Train on with intact units alone; everything else stays. Return the slots that did not follow."""
        others = (emu for stage in (POLICY_GENERATION, POLICY_WEIGHTS) for emu in self.plan.of(stage))
        lost = await self._commit(self._numbered(replace(self.plan, emus=(*units, *others))), "recovery")
        self._observer.plan(self.plan)
        return lost

    async def close(self) -> None:
        """Stop what is in flight."""
        if self._running is not None:
            self._running.task.cancel()
            await asyncio.gather(self._running.task, return_exceptions=True)

    def _numbered(self, plan: Plan) -> Plan:
        """Return ``plan`` with an epoch that nobody has heard of."""
        self._epoch += 1
        return replace(plan, epoch=self._epoch)

    async def _abandon(self, target: Plan, reason: str) -> None:
        """Let every slot that has or was to get trained state forget what it took."""
        units = (*self.plan.of(POLICY_TRAINING), *target.of(POLICY_TRAINING))
        for name in sorted({slot_worker(slot) for unit in units for slot in unit.slots}):
            if self._fleet[name].alive:
                with contextlib.suppress(PeerLost):  # its PeerGone follows
                    await self._endpoint.send(name, Abandon(reason))

    async def _commit(self, target: Plan, why: str) -> list[str]:
        """Put ``target`` in force everywhere, first where nobody listens to others; then here.

        A worker that answers has sent all that it had to say under the old plan, so nothing of it is refused. Returns
        the trainer slots that did not follow: what they hold is in question.
        """
        self.plan = target
        self._journal.append(record.PlanCommitted(plan=target, why=why))
        before = {trainer.name for trainer in self._fleet.of(POLICY_TRAINING)}
        changed = self._fleet.commit(target)
        trainers = [trainer.name for trainer in self._fleet.of(POLICY_TRAINING)]
        untouched = [
            rollout.name
            for rollout in self._fleet.of(POLICY_GENERATION)
            if rollout not in changed and rollout.state in (State.BUILDING, State.READY, State.LIVE)
        ]
        left = sorted(before - {*trainers})
        message = Commit(target, self._store, self._fleet.peers())
        await self._ask_all(untouched, message)
        failed = await self._ask_all(trainers, message)
        await self._ask_all([*left, RELAY, REWARD], message)
        self._endpoint.advance(target.epoch)
        for worker in changed:
            if worker.alive:
                worker.state = State.READY if worker.name in trainers else State.JOINED
        return failed

    async def _ask_all(self, workers: Sequence[str], message: Commit) -> list[str]:
        """Have several workers follow at once; return those that did not. One that hangs is killed."""
        names = [name for name in workers if self._fleet[name].alive]
        results = await asyncio.gather(
            *(self._endpoint.request(name, message, timeout_s=self._timeout_s) for name in names),
            return_exceptions=True,
        )
        failed = [name for name in workers if name not in names]
        for name, result in zip(names, results, strict=True):
            if not isinstance(result, BaseException):
                continue
            if not isinstance(result, NereusError | TimeoutError):
                raise result
            log.warning("did not follow the new plan", worker=name, why=str(result))
            failed.append(name)
            # A trainer that refuses lacks a peer: it is well and keeps what it holds.
            if isinstance(result, TimeoutError) or self._fleet[name] not in self._fleet.of(POLICY_TRAINING):
                self._launcher.kill(name)  # its exit brings the replacement
        return failed
