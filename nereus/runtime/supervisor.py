"""Who decides what happens next in a run? The supervisor: one event loop, one inbox, no torch.

Owner: the ``nereus-supervisor`` process. It brings the workers up, grants groups to rollout units within the staleness
bound, starts an optimizer step when a batch is complete, announces new weights, keeps checkpoints and the journal, and
takes the run to a clean, explained end. Every event is handled to its end before the next one: no two decisions race.

Invariants (tests/virtual/test_supervisor.py, tests/live): a group is trained exactly once; staleness never exceeds the
bound; a lost rollout costs only its running groups; every wait is bounded and names what it waits for.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
import structlog
from msgspec import Struct

from nereus.actors.names import RELAY, REWARD
from nereus.algo.sampler import SampleOrder
from nereus.algo.staleness import GroupAttempt, Pacer, Waiting
from nereus.bus.endpoint import Delivery, Endpoint, Event, PeerGone, Undelivered
from nereus.bus.messages import (
    Abandon,
    Assign,
    Fault,
    Grant,
    GroupAccepted,
    GroupFailed,
    GroupRef,
    GroupSpec,
    Hello,
    Manifest,
    Message,
    Peers,
    Publish,
    Ready,
    Refused,
    Release,
    Save,
    Saved,
    SaveFailed,
    Shutdown,
    StepDone,
    StepReport,
    Switch,
    Train,
    VersionReady,
    WeightsLive,
    Welcome,
)
from nereus.config import JobConfig
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, Plan
from nereus.errors import CheckpointError, PeerLost
from nereus.runtime import journal as record
from nereus.runtime.changes import PlanChanges, Transformed
from nereus.runtime.checkpoints import CheckpointStore
from nereus.runtime.dataset import Dataset
from nereus.runtime.figures import group_figures
from nereus.runtime.fleet import Fleet, State, Worker
from nereus.runtime.journal import Journal
from nereus.runtime.processes import Exited
from nereus.runtime.saving import Saver
from nereus.runtime.surroundings import Launcher, LeftAtOnce, Observer, Origin, Outcome, RunFailed
from nereus.transition.reshard import TensorSpec

MAX_ATTEMPTS = 4
"""How often one group is tried before its failure ends the run."""

MAX_RESTARTS = 5
"""How often one worker is replaced before its deaths end the run."""

SHUTDOWN_GRACE_S = 15.0
MANIFEST_TIMEOUT_S = 30.0
TICK_S = 1.0
STALL_S = 60.0
"""After this long without progress the log says what the run waits for."""

log = structlog.get_logger()


class Interrupt(Struct, frozen=True):
    """The operator or the system asks the run to end (first: drain, second: leave now)."""

    name: str


class Tick(Struct, frozen=True):
    """Time to look at deadlines."""


Occurrence = Event | Exited | Interrupt | Tick | Transformed


def _ref(attempt: GroupAttempt) -> GroupRef:
    return GroupRef(attempt.group, attempt.attempt)


class _Training(Struct):
    """The optimizer step in flight."""

    refs: tuple[GroupRef, ...]
    began: float
    waited_s: float
    report: StepReport | None = None
    done: set[str] = msgspec.field(default_factory=set)


class Supervisor:
    """One run, from the start of its workers to its end."""

    def __init__(
        self,
        config: JobConfig,
        plan: Plan,
        *,
        run_id: str,
        store: str,
        origin: Origin,
        endpoint: Endpoint,
        launcher: Launcher,
        journal: Journal,
        dataset: Dataset,
        checkpoints: CheckpointStore,
        observer: Observer,
    ) -> None:
        self._config = config
        self._fleet = Fleet.of_plan(plan)
        self._run_id = run_id
        self._store = store
        self._origin = origin
        self._endpoint = endpoint
        self._launcher = launcher
        self._journal = journal
        self._dataset = dataset
        self._observer = observer
        self._order = SampleOrder(len(dataset), seed=config.run.seed, shuffle=config.data.shuffle)
        self._pacer = Pacer(
            groups_per_step=config.train.groups_per_step,
            staleness=config.async_.staleness,
            version=origin.version,
            cursor=origin.cursor,
            final_version=origin.version + config.run.steps - origin.step,
        )
        self._inbox: asyncio.Queue[Occurrence] = asyncio.Queue()
        self._step = origin.step
        self._version = origin.version
        self._visible: VersionReady | None = None
        self._tensors: tuple[TensorSpec, ...] = ()
        self._tied: dict[str, str] = {}
        self._accepted: dict[int, GroupAccepted] = {}
        self._training: _Training | None = None
        self._changes = PlanChanges(
            config,
            plan,
            origin,
            store=store,
            fleet=self._fleet,
            endpoint=endpoint,
            launcher=launcher,
            journal=journal,
            observer=observer,
        )
        about: dict[str, Any] = {
            "seed": config.run.seed,
            "rng": "sample streams are keyed by (run.seed, group, index, position); nothing else draws random numbers",
            "data": dataset.fingerprint,
            "plan": msgspec.to_builtins(plan),
        }
        self._saver = Saver(checkpoints, origin.model, about, saved_step=origin.step or -1)
        self._draining = ""
        self._outcome: Outcome | None = None
        self._began = self._idle_since = self._progress_at = 0.0
        self._restarts = 0

    # The life of the run

    async def run(self) -> Outcome:
        """Bring the workers up, train, and return how it ended; raises ``RunFailed`` with the explanation."""
        self._began = self._idle_since = self._progress_at = self._now()
        pumps = [
            asyncio.create_task(self._pump(self._endpoint.receive), name="bus"),
            asyncio.create_task(self._pump(self._launcher.exits.get), name="exits"),
            asyncio.create_task(self._ticks(), name="ticks"),
        ]
        try:
            self._journal.append(record.PlanCommitted(plan=self._changes.plan, why="start"))
            for worker in self._fleet:
                await self._launch(worker)
            while self._outcome is None:
                await self._on(await self._next(pumps))
            return self._outcome
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            await self._changes.close()

    async def leave(self, reason: str) -> None:
        """Ask every worker to leave, then make sure that none is left."""
        for worker in self._fleet:
            if worker.state not in (State.STARTING, State.GONE):
                await self._send(worker.name, Shutdown(reason))
        left = await self._launcher.wait(timeout_s=SHUTDOWN_GRACE_S)
        if left:
            log.warning("workers had to be stopped", workers=",".join(left))
        await self._launcher.stop(grace_s=2.0)

    def interrupt(self, name: str) -> None:
        """Begin to drain: finish the step, save, end. Safe to call from a signal handler of the loop."""
        self._inbox.put_nowait(Interrupt(name))

    async def _pump(self, receive: Any) -> None:
        while True:
            self._inbox.put_nowait(await receive())

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._inbox.put_nowait(Tick())

    async def _next(self, pumps: list[asyncio.Task[None]]) -> Occurrence:
        """Return the next occurrence; a pump that dies ends the run instead of leaving it waiting for ever."""
        waiting = asyncio.ensure_future(self._inbox.get())
        await asyncio.wait([waiting, *pumps], return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        dead = next(pump for pump in pumps if pump.done())
        raise RunFailed(f"the supervisor's {dead.get_name()} task died: {dead.exception()!r}")

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # Occurrences

    async def _on(self, occurrence: Occurrence) -> None:
        match occurrence:
            case Delivery():
                await self._on_delivery(occurrence)
            case PeerGone(peer, incarnation, why):
                if peer in self._fleet and self._fleet[peer].incarnation == incarnation:
                    self._launcher.kill(peer)  # it may only hang; its exit brings the replacement
                    await self._lost(self._fleet[peer], why)
            case Exited(name, pid, _):
                if name not in self._fleet:
                    raise RunFailed(f"the rendezvous store ({name}) {occurrence.why}; resume with --resume")
                if self._fleet[name].pid in (0, pid):
                    await self._exited(self._fleet[name], occurrence.why)
            case Interrupt(name):
                await self._drain(name)
            case Tick():
                self._check_deadlines()
            case Transformed(failure):
                await self._on_transformed(failure)
            case Undelivered(peer, message, epoch):
                log.warning("message refused: older plan epoch", peer=peer, type=type(message).__name__, epoch=epoch)

    async def _on_delivery(self, delivery: Delivery) -> None:
        if delivery.peer not in self._fleet:
            return await self._reply(delivery, Refused(f"{delivery.peer} is not a worker of this run"))
        worker = self._fleet[delivery.peer]
        match delivery.message:
            case Hello() as hello:
                await self._on_hello(delivery, hello)
            case Ready() as ready:
                await self._on_ready(worker, ready)
            case GroupAccepted() as accepted:
                await self._on_accepted(accepted)
            case GroupFailed() as failed:
                await self._on_failed(worker, failed)
            case StepDone(report, _):
                await self._on_step_done(worker, report)
            case VersionReady() as visible:
                await self._on_version_ready(visible)
            case WeightsLive() as live:
                await self._on_weights_live(worker, live)
            case Saved(step, _, manifest):
                await self._on_saved(worker, step, manifest)
            case SaveFailed(step, reason):
                if self._saver.abandon(step):
                    self._save_failed(f"{worker.name}: {reason}")
            case Fault(where, reason, fatal):
                worker.fault = reason
                log.error("fault", worker=where, reason=reason, fatal=fatal)
            case other:
                log.warning("message not understood", worker=worker.name, type=type(other).__name__)
        return None

    # Workers come and go

    async def _launch(self, worker: Worker) -> None:
        worker.state = State.STARTING
        worker.incarnation = ""  # what is still heard of the dead one concerns nobody
        worker.pid = await self._launcher.start(worker.name)

    async def _on_hello(self, delivery: Delivery, hello: Hello) -> None:
        if hello.worker != delivery.peer:
            return await self._reply(delivery, Refused(f"{delivery.peer} cannot speak for {hello.worker}"))
        worker = self._fleet.joined(hello)
        self._journal.append(
            record.WorkerJoined(worker=hello.worker, incarnation=hello.incarnation, host=hello.host, pid=hello.pid)
        )
        await self._reply(delivery, Welcome(self._run_id, self._changes.plan.epoch))
        self._observer.fleet(self._fleet)
        if not self._fleet.missing(at_least=State.JOINED):
            await self._assign_joined()
        if worker.name == REWARD:
            for rollout in self._fleet.of(POLICY_GENERATION):
                if rollout.state in (State.BUILDING, State.READY, State.LIVE):
                    await self._send(rollout.name, Peers(self._fleet.peers()))

    async def _assign_joined(self) -> None:
        """Give every worker that has joined its unit, now that all addresses are known."""
        for worker in self._fleet:
            if worker.state is not State.JOINED:
                continue
            worker.state = State.BUILDING
            if worker.emu is None:  # the reward service has nothing to build
                worker.state = State.READY
                continue
            trains = worker.emu.model_stage == POLICY_TRAINING
            source = str(self._origin.source if trains else self._origin.model)
            peers, version = self._fleet.peers(), self._origin.version
            await self._send(worker.name, Assign(worker.emu, self._changes.plan, self._store, peers, source, version))

    async def _on_ready(self, worker: Worker, ready: Ready) -> None:
        worker.state = State.READY
        log.info("unit is ready", worker=worker.name, emu=ready.emu, seconds=ready.seconds)
        if ready.tensors:
            self._tensors, self._tied = ready.tensors, ready.tied
            # A request: the relay must know the tensors before the first trainer begins to push.
            await self._endpoint.request(RELAY, Manifest(ready.tensors, ready.tied), timeout_s=MANIFEST_TIMEOUT_S)
        trainers = self._fleet.of(POLICY_TRAINING)
        if worker in trainers and all(trainer.state is State.READY for trainer in trainers):
            for trainer in trainers:
                await self._send(trainer.name, Publish(self._version))
        if worker in self._fleet.of(POLICY_GENERATION):
            await self._switch(worker)
        self._observer.fleet(self._fleet)

    async def _lost(self, worker: Worker, why: str) -> None:
        """A worker is gone: re-issue what a rollout was doing; anything else ends the run, to be resumed."""
        if worker.state is State.GONE:
            return
        why = worker.fault or why
        joined = worker.incarnation
        running = self._fleet.lost(worker.name)
        if joined:
            self._journal.append(record.WorkerGone(worker=worker.name, incarnation=joined, why=why))
        self._observer.note(f"{worker.name} ({worker.role}) is lost: {why}")
        log.warning("worker lost", worker=worker.name, role=worker.role, why=why, groups=len(running))
        if worker.name == REWARD and worker.fault and self._config.reward.on_failure == "stop":
            raise RunFailed(f"reward.on_failure is stop: {worker.fault}")
        if worker not in self._fleet.of(POLICY_GENERATION) and worker.name != REWARD:
            raise RunFailed(f"{worker.name} ({worker.role}) is lost: {why}; resume with --resume")
        self._reissue(worker, "lost")
        await self._grant()
        self._observer.fleet(self._fleet)

    def _reissue(self, rollout: Worker, why: str) -> None:
        """Let others do what a rollout was doing."""
        for ref in map(_ref, self._pacer.lost(rollout.name)):
            self._journal.append(record.Reissued(group=ref.group, attempt=ref.attempt, reason=f"{rollout.name} {why}"))

    async def _exited(self, worker: Worker, why: str) -> None:
        """A process has ended: see to its loss, then start its replacement."""
        await self._lost(worker, why)
        worker.restarts += 1
        self._restarts += 1
        if worker.restarts > MAX_RESTARTS:
            raise RunFailed(f"{worker.name} died {worker.restarts} times, last: {worker.fault or why}; see its log")
        await self._launch(worker)

    # Weights

    async def _on_version_ready(self, visible: VersionReady) -> None:
        if self._visible is None:
            self._idle_since = self._progress_at = self._now()  # starting up is no part of the first step
        self._visible = visible
        self._journal.append(record.VersionReady(version=visible.version, checksum=visible.checksum))
        for rollout in self._fleet.of(POLICY_GENERATION):
            if rollout.state in (State.READY, State.LIVE):
                await self._switch(rollout)
        await self._go_on()

    async def _switch(self, rollout: Worker) -> None:
        if self._visible is not None and rollout.switching != self._visible.version:
            rollout.switching = self._visible.version
            await self._send(rollout.name, Switch(self._visible.version))

    async def _on_weights_live(self, worker: Worker, live: WeightsLive) -> None:
        if self._visible is not None and live.version == self._visible.version:
            expected = self._visible.checksum
            if live.checksum != expected:
                raise RunFailed(
                    f"{worker.name} serves version {live.version} with checksum {live.checksum}, published: {expected}"
                )
        worker.version = live.version
        worker.state = State.LIVE
        self._journal.append(record.WeightsLive(worker=worker.name, version=live.version, checksum=live.checksum))
        self._observer.fleet(self._fleet)
        await self._grant()

    # Groups

    async def _grant(self) -> None:
        """Give the least busy live rollout units what the staleness bound allows, lost groups first."""
        if self._draining:
            return
        capacity = math.ceil(self._config.rollout.max_live / self._config.rollout.group_size) + 1
        granted: dict[str, list[GroupRef]] = {}
        while True:
            able = [
                rollout
                for rollout in self._fleet.of(POLICY_GENERATION)
                if rollout.state is State.LIVE and len(rollout.running) < capacity
            ]
            rollout = min(able, key=lambda rollout: (len(rollout.running), rollout.name), default=None)
            if rollout is None or rollout.version is None:
                break
            issued = self._pacer.issue(rollout.name, rollout.version, 1)
            if not issued:
                break
            ref = _ref(issued[0])
            rollout.running.add(ref.group)
            granted.setdefault(rollout.name, []).append(ref)
        for name, refs in granted.items():
            version = self._fleet[name].version or 0
            self._journal.append(record.Granted(groups=tuple(refs), owner=name, version=version))
            await self._send(name, Grant(tuple(map(self._spec, refs))))

    def _spec(self, ref: GroupRef) -> GroupSpec:
        index = self._order.row(ref.group)
        row = self._dataset.row(index)
        return GroupSpec(
            ref.group,
            ref.attempt,
            index,
            msgspec.json.encode(row.prompt),
            msgspec.json.encode(row.columns),
        )

    async def _on_accepted(self, accepted: GroupAccepted) -> None:
        for rollout in self._fleet.of(POLICY_GENERATION):
            rollout.running.discard(accepted.group)
        verdict = self._pacer.accept(accepted.group, accepted.attempt, accepted.version_first)
        if verdict == "stale":
            log.warning("group is older than its rollout said", group=accepted.group, version=accepted.version_first)
        if verdict == "accepted":
            self._accepted[accepted.group] = accepted
            self._progress_at = self._now()
            self._journal.append(
                record.Accepted(
                    group=accepted.group,
                    attempt=accepted.attempt,
                    row=accepted.row,
                    rollout=accepted.rollout,
                    version_first=accepted.version_first,
                    version_last=accepted.version_last,
                    rewards=tuple(sample.reward for sample in accepted.samples),
                )
            )
        await self._train()
        await self._grant()

    async def _on_failed(self, worker: Worker, failed: GroupFailed) -> None:
        worker.running.discard(failed.group)
        log.warning("group failed", worker=worker.name, group=failed.group, reason=failed.reason)
        if failed.attempt + 1 >= MAX_ATTEMPTS:
            raise RunFailed(f"group {failed.group} failed {MAX_ATTEMPTS} times, last: {failed.reason}")
        again = self._pacer.fail(failed.group, failed.attempt, retry=True)
        if again is not None:
            self._journal.append(record.Reissued(group=again.group, attempt=again.attempt, reason=failed.reason))
        await self._grant()

    # Training

    async def _train(self) -> None:
        """Start the next optimizer step if its batch is complete and nothing is in flight."""
        if self._training is not None or self._draining or self._step >= self._config.run.steps:
            return
        if self._changes.running or self._changes.due(self._step):
            return
        batch = self._pacer.choose_batch(self._version)
        if isinstance(batch, Waiting):
            return
        refs = tuple(map(_ref, batch))
        now = self._now()
        self._training = _Training(refs, now, now - self._idle_since)
        for trainer in self._fleet.of(POLICY_TRAINING):
            await self._send(trainer.name, Train(self._step, self._version, refs))

    async def _on_step_done(self, worker: Worker, report: StepReport) -> None:
        training = self._training
        if training is None or report.step != self._step:
            log.warning("report of another step", worker=worker.name, step=report.step, expected=self._step)
            return
        trainers = self._fleet.of(POLICY_TRAINING)
        training.done.add(worker.name)
        if worker is trainers[0]:
            training.report = report
        if training.report is None or len(training.done) < len(trainers):
            return
        await self._finish_step(training, training.report)

    async def _finish_step(self, training: _Training, report: StepReport) -> None:
        groups = [ref.group for ref in training.refs]
        held = [self._accepted.pop(group) for group in groups]
        self._pacer.trained(self._version)
        self._journal.append(
            record.Trained(
                step=self._step,
                version=self._version,
                groups=training.refs,
                samples=sum(len(group.samples) for group in held),
                skipped=report.skipped,
            )
        )
        now = self._now()
        metrics = {
            **report.metrics,
            **group_figures(held, self._version),
            "perf/tokens": report.tokens,
            "timing_s/step": now - self._idle_since,
            "timing_s/wait_for_batch": training.waited_s,
            "timing_s/train": now - training.began,
            "fleet/restarts": self._restarts,
        }
        self._training, self._idle_since, self._progress_at = None, now, now
        self._step += 1
        self._version += 1
        self._observer.step(report, metrics)
        for worker in (*self._fleet.of(POLICY_GENERATION), self._fleet.of(POLICY_TRAINING)[0]):
            if worker.state is not State.GONE:
                await self._send(worker.name, Release(tuple(groups)))
        await self._after_step()

    async def _after_step(self) -> None:
        """Save if it is time, end if it is time, else go on."""
        every = self._config.checkpoint.every
        last = self._step >= self._config.run.steps
        if last or self._draining or (every and self._step % every == 0):
            await self._save()
        if not last:
            await self._go_on()

    async def _go_on(self) -> None:
        """Begin the plan change that is due, as soon as its boundary is reached; otherwise train."""
        if self._changes.running or self._training is not None or self._draining:
            return
        if not self._changes.due(self._step):
            await self._train()
        elif self._visible is not None and self._visible.version == self._version and not self._saver.busy:
            self._changes.begin(self._tensors, self._tied, self._inbox.put_nowait)

    async def _on_transformed(self, failure: str) -> None:
        """Conclude the plan change; what rollouts that moved were doing is done elsewhere."""
        moved = await self._changes.conclude(failure)
        if failure:
            for trainer in self._fleet.of(POLICY_TRAINING):
                await self._send(trainer.name, Abandon(failure))
        for rollout in moved:
            self._reissue(rollout, "moved")
        self._progress_at = self._now()
        await self._assign_joined()
        self._observer.fleet(self._fleet)
        await (self._save() if self._draining else self._go_on())

    # Checkpoints and the end

    async def _save(self) -> None:
        """Begin a checkpoint of the present step; one that is already saved or being saved is left alone."""
        if self._saver.saved_step == self._step:
            return self._end_if_due()
        if self._saver.busy:
            return  # its end brings us here again if the run is to end
        folder = self._saver.begin(self._step, self._version, self._pacer.cursor)
        self._journal.append(record.CheckpointBegun(step=self._step, folder=folder.name))
        for trainer in self._fleet.of(POLICY_TRAINING):
            await self._send(trainer.name, Save(self._step, str(folder)))

    async def _on_saved(self, worker: Worker, step: int, manifest: bytes) -> None:
        shares = self._saver.add(worker.name, step, manifest)
        if shares < len(self._fleet.of(POLICY_TRAINING)):
            return
        try:
            committed = await self._saver.commit(self._tensors)
        except CheckpointError as error:
            return self._save_failed(str(error))
        self._journal.append(committed)
        self._observer.note(f"checkpoint of step {step} is on disk")
        self._end_if_due()
        leaving = bool(self._draining) or self._step >= self._config.run.steps
        if self._outcome is not None or self._training is not None:
            return
        await (self._save() if leaving else self._go_on())

    def _save_failed(self, reason: str) -> None:
        """Go on without this checkpoint; the next one is due as before. Only the last one cannot be done without."""
        log.error("checkpoint failed", reason=reason)
        if self._draining or self._step >= self._config.run.steps:
            raise RunFailed(f"the last checkpoint failed: {reason}")
        self._observer.note(f"a checkpoint failed, training goes on: {reason}")

    def _end_if_due(self) -> None:
        if self._saver.saved_step != self._step or self._training is not None:
            return
        if self._step >= self._config.run.steps:
            self._outcome = Outcome(f"all {self._step} steps are done", finished=True)
        elif self._draining:
            self._outcome = Outcome(f"drained after step {self._step} ({self._draining})", finished=False)

    async def _drain(self, name: str) -> None:
        if self._draining:
            raise LeftAtOnce(f"left at once on a second {name}; resume with --resume")
        self._draining = name
        self._journal.append(record.Drain(reason=name))
        self._observer.note(f"{name}: finishing the step, saving, leaving (once more: leave now)")
        ready = all(trainer.state is State.READY for trainer in self._fleet.of(POLICY_TRAINING))
        if not ready or (self._step == 0 and self._training is None):
            self._outcome = Outcome(f"drained before the first step ({name})", finished=False)
        elif self._training is None and not self._changes.running:
            await self._save()

    def _check_deadlines(self) -> None:
        now = self._now()
        if self._visible is None and now - self._began > self._config.bus.start_timeout_s:
            missing = self._fleet.missing(at_least=State.READY) or ["the first weight publication"]
            raise RunFailed(
                f"not ready after {self._config.bus.start_timeout_s:g} s: {', '.join(missing)}; "
                "see their logs, or raise bus.start_timeout_s"
            )
        idle = self._training is None and not self._changes.running
        if self._visible is not None and idle and now - self._progress_at > STALL_S:
            self._progress_at = now
            busy = {rollout.name: len(rollout.running) for rollout in self._fleet.of(POLICY_GENERATION)}
            waiting = self._pacer.choose_batch(self._version)
            assert isinstance(waiting, Waiting), "a batch that could be chosen was not"
            log.warning("no progress", why=waiting.why, groups=waiting.groups[:8], running=busy)

    # The bus

    async def _send(self, worker: str, message: Message) -> None:
        """Send; a peer that is lost is dealt with when its ``PeerGone`` arrives."""
        try:
            await self._endpoint.send(worker, message)
        except PeerLost as error:
            log.info("not sent", worker=worker, type=type(message).__name__, why=error.why)

    async def _reply(self, delivery: Delivery, message: Message) -> None:
        try:
            await self._endpoint.reply(delivery, message)
        except PeerLost as error:
            log.info("not answered", worker=delivery.peer, why=error.why)
