"""How does a running job get from one plan to the next?

Owner: the supervisor, which says when the boundary is reached and what follows. One change at a time: ``begin`` starts
the state moves in the background (``transform.py``), ``conclude`` puts the new plan in force on every worker, or stays
with the old one. What was lost on the way is the supervisor's to issue again.

Invariants (tests/virtual/test_transitions.py): a change that fails leaves the old plan in force; after a commit no
worker acts under the old epoch; a worker that others can replace never ends the run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import structlog
from msgspec import Struct

from nereus.actors.names import RELAY, REWARD, slot_worker
from nereus.bus.endpoint import Endpoint
from nereus.bus.messages import Commit
from nereus.config import JobConfig
from nereus.core.change import parse_changes
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, Plan
from nereus.errors import NereusError, TransitionError
from nereus.runtime import journal as record
from nereus.runtime.fleet import Fleet, State, Worker
from nereus.runtime.journal import Journal
from nereus.runtime.placement import next_plan, ordinals_after
from nereus.runtime.surroundings import Launcher, Observer, Origin, RunFailed
from nereus.runtime.transform import StateMoves, execute
from nereus.transition.compile import compile_transition
from nereus.transition.primitive import Stuck
from nereus.transition.reshard import TensorSpec
from nereus.transition.run import TransitionRun

log = structlog.get_logger()


class Transformed(Struct, frozen=True):
    """The state moves of a transition are over: all done, or given up because of ``failure``."""

    failure: str = ""


class _Running(Struct):
    """The change in flight."""

    target: Plan
    moves: StateMoves
    began: float
    task: asyncio.Task[None]


class PlanChanges:
    """The plan in force and the changes that the job asks for."""

    def __init__(
        self,
        config: JobConfig,
        plan: Plan,
        origin: Origin,
        *,
        store: str,
        fleet: Fleet,
        endpoint: Endpoint,
        launcher: Launcher,
        journal: Journal,
        observer: Observer,
    ) -> None:
        self.plan = plan
        self._timeout_s = config.adapt.timeout_s
        self._model = origin.model
        self._store = store
        self._fleet = fleet
        self._endpoint = endpoint
        self._launcher = launcher
        self._journal = journal
        self._observer = observer
        asked = parse_changes(config.adapt.at)
        past = [change for change in asked if change.step <= origin.step]  # a resumed run goes back to the newest
        self._asked = deque((*past[-1:], *asked[len(past) :]))
        self._ordinals = ordinals_after(plan, {})
        self._running: _Running | None = None

    @property
    def running(self) -> bool:
        """Whether state is being moved."""
        return self._running is not None

    def due(self, step: int) -> bool:
        """Say whether a change must come before the next step, ``step`` steps being done."""
        return bool(self._asked) and self._asked[0].step <= step

    def begin(
        self, tensors: Sequence[TensorSpec], tied: Mapping[str, str], report: Callable[[Transformed], None]
    ) -> None:
        """Start the change that is due; ``report`` is called once, when its state moves are over."""
        change = self._asked.popleft()
        target = next_plan(self.plan, change.train, change.rollout, self._fleet.slots(), self._ordinals)
        self._ordinals = ordinals_after(target, self._ordinals)
        dag = compile_transition(self.plan, target, groups=[(POLICY_GENERATION, POLICY_TRAINING)])
        primitives = () if isinstance(dag, Stuck) else dag.primitives
        moves = StateMoves(self._endpoint, tensors, tied, self._model, primitives, timeout_s=self._timeout_s)
        names = tuple(primitive.id for primitive in primitives)
        why = f"adapt.at asks for {change.train} and {change.rollout} after step {change.step}"
        self._journal.append(record.TransitionBegun(plan=target, primitives=names, why=why))
        self._observer.note(f"changing the plan: train {change.train}, generate {change.rollout}")

        async def transform() -> None:
            failure = ""
            try:
                if isinstance(dag, Stuck):
                    raise TransitionError(f"there is no way: {dag}")
                await execute(TransitionRun(dag), moves.perform)
            except Exception as error:  # noqa: BLE001 - whatever breaks here must not leave training waiting
                failure = str(error) or type(error).__name__
                log.warning("state moves failed", why=failure, kind=type(error).__name__)
            report(Transformed(failure))

        began = asyncio.get_running_loop().time()
        self._running = _Running(target, moves, began, asyncio.create_task(transform(), name="transition"))

    async def conclude(self, failure: str) -> list[Worker]:
        """Put the new plan in force, or stay with the old one; return the rollouts that have given up their units.

        After a failure the trainers are still to be told to forget what they took.
        """
        running, self._running = self._running, None
        assert running is not None
        vacated = [self._fleet[slot_worker(slot)] for slot in running.moves.vacated]
        given_up = [worker for worker in vacated if worker.state in (State.READY, State.LIVE)]  # others have died
        for worker in given_up:
            worker.state, worker.version, worker.switching = State.JOINED, None, None
            worker.running.clear()
        if not failure:
            await self._commit(running.target)
        seconds = asyncio.get_running_loop().time() - running.began
        moved = running.moves.moved_bytes
        self._journal.append(
            record.TransitionEnded(
                epoch=running.target.epoch, ok=not failure, reason=failure, seconds=seconds, moved_bytes=moved
            )
        )
        outcome = f"was given up: {failure}" if failure else f"is done, {moved / 1e6:.1f} MB moved"
        self._observer.note(f"the plan change {outcome} ({seconds:.2f} s)")
        return given_up

    async def close(self) -> None:
        """Stop what is in flight."""
        if self._running is not None:
            self._running.task.cancel()
            await asyncio.gather(self._running.task, return_exceptions=True)

    async def _commit(self, target: Plan) -> None:
        """Put ``target`` in force everywhere, first where nobody listens to others; then here.

        A worker that answers has sent all that it had to say under the old plan, so nothing of it is refused.
        """
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
        for names in (untouched, trainers, [*left, RELAY, REWARD]):
            await self._ask_all(names, message)
        self._endpoint.advance(target.epoch)
        self.plan = target
        self._journal.append(record.PlanCommitted(plan=target, why="transition"))
        for worker in changed:
            worker.state = State.READY if worker.name in trainers else State.JOINED

    async def _ask_all(self, workers: Sequence[str], message: Commit) -> None:
        """Have several workers follow at once; one that others can replace is killed if it does not."""
        names = [name for name in workers if self._fleet[name].state is not State.GONE]
        results = await asyncio.gather(
            *(self._endpoint.request(name, message, timeout_s=self._timeout_s) for name in names),
            return_exceptions=True,
        )
        for name, result in zip(names, results, strict=True):
            if not isinstance(result, BaseException):
                continue
            if not isinstance(result, NereusError | TimeoutError):
                raise result
            if name != REWARD and self._fleet[name] not in self._fleet.of(POLICY_GENERATION):
                raise RunFailed(f"{name} did not follow the new plan: {result}; resume with --resume")
            log.warning("did not follow the new plan", worker=name, why=str(result))
            self._launcher.kill(name)  # its exit brings the replacement
