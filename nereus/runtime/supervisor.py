"""Who decides what happens next in a run? The supervisor: one event loop, one inbox, no torch.

Owner: the ``nereus-supervisor`` process. It brings the workers up, grants groups to rollout units within the staleness
bound, starts an optimizer step when a batch is complete, announces new weights, keeps checkpoints and the journal,
changes the plan at weight-sync points, and takes the run to a clean, explained end. Every event is handled to its end
before the next one: no two decisions race.

When trainer slots are lost, training is *held*: what is intact agrees on a step (``regroup.py``), goes on under a plan
of its own, and grows again when there are slots. Rollouts generate on all the while.

Invariants (tests/virtual/test_supervisor.py, test_losses.py, tests/live): a group is trained exactly once; staleness
never exceeds the bound; a lost rollout costs only its running groups, a lost trainer at most the step in flight; every
wait is bounded and names what it waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import structlog
from msgspec import Struct

from nereus.actors.names import OPERATOR, RELAY, REWARD, slot_of, slot_worker
from nereus.algo.staleness import Waiting
from nereus.bus.endpoint import Delivery, Endpoint, Event, PeerGone, Undelivered
from nereus.bus.messages import (
    Abandon,
    Admit,
    Admitted,
    Assign,
    DrainSlots,
    Fault,
    GroupAccepted,
    GroupFailed,
    GroupRef,
    Hello,
    Message,
    Ok,
    Peers,
    PublishFailed,
    Ready,
    Refused,
    Release,
    Save,
    Saved,
    SaveFailed,
    Shutdown,
    StepDone,
    StepFailed,
    StepReport,
    Switch,
    Train,
    Vacate,
    VersionReady,
    WeightsLive,
    Welcome,
)
from nereus.config import JobConfig
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, Emu, Plan, SlotId
from nereus.core.units import listed
from nereus.errors import CheckpointError, PeerLost
from nereus.runtime import journal as record
from nereus.runtime.changes import PlanChanges, Transformed
from nereus.runtime.checkpoints import CheckpointStore
from nereus.runtime.dataset import Dataset
from nereus.runtime.figures import group_figures, step_facts
from nereus.runtime.fleet import Fleet, State, Worker
from nereus.runtime.groups import Groups
from nereus.runtime.journal import Journal
from nereus.runtime.loopwatch import LoopWatch
from nereus.runtime.placement import slots_to_start
from nereus.runtime.processes import Exited
from nereus.runtime.publishing import Published, Publishing
from nereus.runtime.readopt import Takeover, enlist
from nereus.runtime.regroup import Regrouped, StateLost, regroup
from nereus.runtime.saving import Saver
from nereus.runtime.schedule import GivenPlans, Planning, Schedule, Wish
from nereus.runtime.searching import Answered
from nereus.runtime.surroundings import (
    Launcher,
    LeftAtOnce,
    Observer,
    Origin,
    Outcome,
    RunFailed,
    TransitionProgress,
)
from nereus.runtime.timeline import summarized

MAX_RESTARTS = 5
"""How often one worker is replaced before its deaths end the run."""

MAX_HOLDS = 8
"""How often training may be held without a step between."""

SLOW_STEP = 10
"""So many times the longest step before may a step take until its trainers count as hanging."""

SHUTDOWN_GRACE_S = 15.0
PUSH_TIMEOUT_S = 120.0
TICK_S = 1.0
STALL_S = 60.0
"""After this long without progress the log says what the run waits for."""

log = structlog.get_logger()


class Interrupt(Struct, frozen=True):
    """The operator or the system asks the run to end (first: drain, second: leave now)."""

    name: str


class Tick(Struct, frozen=True):
    """Time to look at deadlines."""


class Settled(Struct, frozen=True):
    """The trainer slots that are left have agreed, or nothing is left, because of ``failure``."""

    regrouped: Regrouped | None
    failure: str = ""


Occurrence = Event | Exited | Interrupt | Tick | Transformed | Published | Settled | Answered


class _Training(Struct):
    """The optimizer step in flight."""

    refs: tuple[GroupRef, ...]
    began: float
    waited_s: float
    report: StepReport | None = None
    done: set[str] = msgspec.field(default_factory=set)


class _Hold(Struct):
    """Training is held: why, since when, and who is asked for what is left."""

    why: str
    began: float
    task: asyncio.Task[None] | None = None
    lost: bool = False
    """More was lost since they were asked."""


class Supervisor:
    """One run, from the start of its workers to its end."""

    def __init__(
        self,
        config: JobConfig,
        plan: Plan,
        *,
        run_id: str,
        attempt: int = 1,
        store: str,
        origin: Origin,
        endpoint: Endpoint,
        launcher: Launcher,
        journal: Journal,
        dataset: Dataset,
        checkpoints: CheckpointStore,
        observer: Observer,
        adapt: Callable[[Callable[[Answered], None]], Planning] | None = None,
        tick_s: float = TICK_S,
        watched: bool = True,
        takeover: Takeover | None = None,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        """``adapt`` makes what decides about plans, given whom to tell of answers; None: the job file says them all.

        Deadlines are looked at every ``tick_s``. ``watched``: whether blocks of the loop are noticed (there are none
        on virtual time).

        ``takeover``: go on with the live workers of a supervisor that is gone, under their ``plan``. ``fence`` raises
        when another supervisor has taken over.
        """
        self._config = config
        self._fleet = Fleet.of_plan(plan, slots_to_start(config))
        self._run_id = run_id
        self._attempt = attempt
        self._store = store
        self._origin = origin
        self._endpoint = endpoint
        self._launcher = launcher
        self._journal = journal
        self._observer = observer
        self._takeover = takeover
        self._fence = fence
        self._inbox: asyncio.Queue[Occurrence] = asyncio.Queue()
        self._step = origin.step
        self._version = origin.version
        self._groups = Groups(config, dataset, origin, self._fleet, journal, self._now)
        self._training: _Training | None = None
        self._weights = Publishing(endpoint, timeout_s=PUSH_TIMEOUT_S)
        self._changes = PlanChanges(
            plan,
            origin,
            store=store,
            fleet=self._fleet,
            endpoint=endpoint,
            launcher=launcher,
            journal=journal,
            observer=observer,
            timeout_s=config.adapt.timeout_s,
            tried=takeover.estate.tried if takeover else plan.epoch,
        )
        self._planning: Planning = (
            adapt(self._inbox.put_nowait) if adapt else GivenPlans(Schedule(config, plan, origin.step))
        )
        self._hold: _Hold | None = None
        self._holds = 0
        self._retiring: set[SlotId] = set()
        """Slots that the next plan does without, while their processes are there."""
        about: dict[str, Any] = {
            "seed": config.run.seed,
            "rng": "sample streams are keyed by (run.seed, group, index, position); nothing else draws random numbers",
            "data": dataset.fingerprint,
            "plan": msgspec.to_builtins(plan),
        }
        self._saver = Saver(
            checkpoints, origin.model, about, saved_step=takeover.estate.saved_step if takeover else origin.step or -1
        )
        self._tick_s = tick_s
        self._watch = LoopWatch() if watched else None
        self._started = False
        self._draining = ""
        self._outcome: Outcome | None = None
        self._began = self._idle_since = self._progress_at = 0.0
        self._longest_step_s = 0.0
        self._restarts = 0

    # The life of the run

    async def run(self) -> Outcome:
        """Bring the workers up, train, and return how it ended; raises ``RunFailed`` with the explanation."""
        self._began = self._idle_since = self._progress_at = self._now()
        if self._takeover is not None:
            await self._take_over(self._takeover)
        pumps = [
            asyncio.create_task(self._pump(self._endpoint.receive), name="bus"),
            asyncio.create_task(self._pump(self._launcher.exits.get), name="exits"),
            asyncio.create_task(self._ticks(), name="ticks"),
        ]
        if self._watch is not None:
            pumps.append(asyncio.create_task(self._watch.run(), name="loop watch"))
        try:
            if self._takeover is None:
                self._journal.append(record.PlanCommitted(plan=self._changes.plan, why="start"))
            for worker in self._fleet:
                if not worker.alive:
                    await self._launch(worker)
            while self._outcome is None:
                await self._on(await self._next(pumps))
            return self._outcome
        finally:
            for pump in pumps:
                pump.cancel()
            if self._hold is not None and self._hold.task is not None:
                pumps.append(self._hold.task)
                self._hold.task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            await self._changes.close()
            await self._weights.close()
            await self._planning.close()

    async def _take_over(self, takeover: Takeover) -> None:
        """Go on with the workers of a supervisor that is gone as after a loss; what was under way is done anew.

        What workers still say under the plan before is refused from here on: nobody is listened to before that.
        """
        enlist(self._fleet, takeover)
        lost = f", lost: {', '.join(takeover.lost)}" if takeover.lost else ""
        self._observer.note(f"taken over before step {self._step}: {', '.join(sorted(takeover.found))}{lost}")
        self._started = True
        self._weights.know(takeover.tensors, takeover.tied)
        visible = takeover.visible
        if visible is not None and visible.version == self._version:
            self._weights.became_visible(visible)
            self._journal.append(record.VersionReady(version=visible.version, checksum=visible.checksum))
        workers = [worker for worker in self._fleet if worker.alive and slot_of(worker.name) is not None]
        for worker in workers:
            if worker.state is State.READY and worker.emu is not None:
                await self._send(worker.name, Release(takeover.estate.unfinished))
            elif worker.emu is None and worker.state is State.JOINED:
                await self._send(worker.name, Vacate())
        self._hold = _Hold("the supervisor was replaced", self._now())
        await self._on_settled(Settled(takeover.regrouped))
        for trainer in self._fleet.of(POLICY_TRAINING):
            # Once more: a group that was on its way to the collector has arrived by now.
            await self._send(trainer.name, Release(takeover.estate.unfinished))
            await self._send(trainer.name, Abandon("the supervisor was replaced"))

    async def leave(self, reason: str) -> None:
        """Ask every worker to leave, then make sure that none is left."""
        for worker in self._fleet:
            if worker.state not in (State.STARTING, State.GONE):
                await self._send(worker.name, Shutdown(reason))
            elif worker.name in self._launcher.running:  # it cannot be told yet and has nothing to lose
                self._launcher.kill(worker.name)
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
            await asyncio.sleep(self._tick_s)
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
        self._fence()
        match occurrence:
            case Delivery():
                await self._on_delivery(occurrence)
            case PeerGone(peer, incarnation, why):
                if peer in self._fleet and self._fleet[peer].incarnation == incarnation:
                    self._launcher.kill(peer)  # it may only hang; its exit brings the replacement
                    await self._lost(self._fleet[peer], why)
            case Exited(name, pid, _):
                if name not in self._fleet:
                    raise StateLost(f"the rendezvous store ({name}) {occurrence.why}")
                if self._fleet[name].pid in (0, pid):
                    await self._exited(self._fleet[name], occurrence.why)
            case Interrupt(name):
                await self._drain(name)
            case Tick():
                await self._on_tick()
            case Transformed(failure):
                await self._on_transformed(failure)
            case Published():
                await self._on_published(occurrence)
            case Settled():
                await self._on_settled(occurrence)
            case Answered():
                self._planning.answered(occurrence)
                await self._go_on()
            case Undelivered(peer, message, epoch):
                log.warning("message refused: older plan epoch", peer=peer, type=type(message).__name__, epoch=epoch)

    async def _on_delivery(self, delivery: Delivery) -> None:
        if delivery.peer == OPERATOR:
            return await self._reply(delivery, await self._on_operator(delivery.message))
        if delivery.peer not in self._fleet:
            return await self._reply(delivery, Refused(f"{delivery.peer} is not a worker of this run"))
        worker = self._fleet[delivery.peer]
        match delivery.message:
            case Hello() as hello:
                await self._on_hello(delivery, hello)
            case Ready() as ready:
                await self._on_ready(worker, ready)
            case GroupAccepted() as accepted:
                await self._on_accepted(worker, accepted)
            case GroupFailed() as failed:
                await self._on_failed(worker, failed)
            case StepDone(report, _):
                await self._on_step_done(worker, report)
            case StepFailed() as failed:
                self._on_step_failed(worker, failed)
            case PublishFailed(version, reason):
                log.warning("weights did not get through", worker=worker.name, version=version, reason=reason)
                self._weights.failed(version)
                await self._go_on()
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
                worker.fault = reason if fatal else worker.fault
                worker.switching = None  # a switch that has failed is asked for again
                log.error("fault", worker=where, reason=reason, fatal=fatal)
            case other:
                log.warning("message not understood", worker=worker.name, type=type(other).__name__)
        return None

    # The operator

    async def _on_operator(self, message: Message) -> Message:
        match message:
            case Admit(host):
                return self._admit(host)
            case DrainSlots(slots):
                return await self._drain_slots(slots)
            case other:
                return Refused(f"an operator cannot ask for {type(other).__name__}")

    def _admit(self, host: str) -> Message:
        """Let one more slot come; it is idle until a plan uses it."""
        cluster = self._config.cluster
        for slot in range(cluster.slots, cluster.slots + cluster.joinable):
            name = slot_worker(slot)
            if name not in self._fleet or (self._fleet[name].guest and self._fleet[name].state is State.GONE):
                self._fleet.admit(slot)
                self._observer.note(f"{name} is expected from {host}")
                return Admitted(name, self._attempt)
        return Refused(f"{cluster.joinable} slots have joined already (cluster.joinable)")

    async def _drain_slots(self, slots: Sequence[SlotId]) -> Message:
        """Have the next plan do without some slots, then let their processes leave."""
        there = self._fleet.slots()
        if missing := sorted(set(slots) - set(there)):
            return Refused(f"slots {', '.join(map(str, missing))} are not there; slots: {', '.join(map(str, there))}")
        left = [slot for slot in there if slot not in slots]
        if refused := self._planning.drain(slots, left):
            return Refused(refused)
        for slot in slots:
            self._fleet[slot_worker(slot)].retired = True
        self._retiring.update(slots)
        self._observer.note(f"slots {', '.join(map(str, sorted(slots)))} are drained: the next plan does without them")
        await self._go_on()
        return Ok()

    async def _let_go(self) -> None:
        """Let the processes leave whose slots no plan uses any more."""
        if not self._retiring:
            return
        used = self._changes.plan.slots() | (self._changes.running.slots() if self._changes.running else frozenset())
        for slot in sorted(self._retiring - used):
            worker = self._fleet[slot_worker(slot)]
            self._retiring.discard(slot)
            if worker.retired and worker.alive:
                await self._send(worker.name, Shutdown("its slot is drained"))
                self._fleet.lost(worker.name)
                gone = record.WorkerGone(
                    worker=worker.name, incarnation=worker.incarnation, why="its slot is drained", expected=True
                )
                self._journal.append(gone)
                self._observer.fleet(self._fleet)

    # Workers come and go

    async def _launch(self, worker: Worker) -> None:
        worker.state = State.STARTING
        worker.incarnation = ""  # what is still heard of the dead one concerns nobody
        left = self._launcher.running.get(worker.name)
        if left is not None:  # it was not fit to be taken over
            worker.pid = left
            return self._launcher.kill(worker.name)  # its exit brings the replacement
        worker.pid = await self._launcher.start(worker.name)

    async def _on_hello(self, delivery: Delivery, hello: Hello) -> None:
        if hello.worker != delivery.peer:
            return await self._reply(delivery, Refused(f"{delivery.peer} cannot speak for {hello.worker}"))
        if hello.orphan:
            return await self._reply(delivery, Refused("too late to be taken over"))
        worker = self._fleet.joined(hello)
        self._journal.append(
            record.WorkerJoined(worker=hello.worker, incarnation=hello.incarnation, host=hello.host, pid=hello.pid)
        )
        await self._reply(delivery, Welcome(self._run_id, self._changes.plan.epoch))
        self._observer.fleet(self._fleet)
        if self._started or not self._fleet.missing(at_least=State.JOINED):
            await self._assign_joined()
        if worker.name in (REWARD, RELAY):
            for slot in (*self._fleet.of(POLICY_GENERATION), *self._fleet.of(POLICY_TRAINING)):
                if slot.state in (State.BUILDING, State.READY, State.LIVE):
                    await self._send(slot.name, Peers(self._fleet.peers()))
        if worker.emu is None or self._hold is not None:
            await self._go_on()  # a slot more may be what a plan change has waited for

    async def _assign_joined(self) -> None:
        """Give every worker that has joined its unit, now that all addresses are known.

        Trainers load what the run starts from; later on they get their state from others, by a plan change.
        """
        for worker in self._fleet:
            if worker.state is not State.JOINED:
                continue
            if worker.emu is None:  # the reward service has nothing to build, nor has an idle slot
                worker.state = State.READY
                continue
            trains = worker.emu.model_stage == POLICY_TRAINING
            if trains and self._started:
                continue
            if len(worker.emu.slots) > 1 and not trains and not all(one.alive for one in self._fleet.unit_of(worker)):
                continue
            worker.state = State.BUILDING
            source = str(self._origin.source if trains else self._origin.model)
            peers, version = self._fleet.peers(), self._origin.version
            await self._send(worker.name, Assign(worker.emu, self._changes.plan, self._store, peers, source, version))

    async def _on_ready(self, worker: Worker, ready: Ready) -> None:
        worker.state = State.READY
        log.info("unit is ready", worker=worker.name, emu=ready.emu, seconds=ready.seconds)
        if ready.tensors:
            self._weights.know(ready.tensors, ready.tied)
        if worker in self._fleet.rollouts():
            await self._switch(worker)
        self._observer.fleet(self._fleet)
        await self._go_on()

    async def _lost(self, worker: Worker, why: str) -> None:
        """A worker is gone: others do what it was doing."""
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
        target = self._changes.running
        if target is not None and (slot := slot_of(worker.name)) is not None and slot in target.slots():
            self._changes.abort(f"{worker.name} is lost: {why}")
        if worker in self._fleet.of(POLICY_TRAINING):
            self._hold_training(f"{worker.name} is lost: {why}")
        elif worker.name == RELAY:
            self._weights.relay_lost()
            for rollout in self._fleet.rollouts():
                rollout.switching = None
        else:
            self._unit_lost(worker)
            await self._grant()
        self._observer.fleet(self._fleet)

    def _unit_lost(self, worker: Worker) -> None:
        """A generation unit is as good as its slots: those that are left get it anew when all are there."""
        unit = self._fleet.unit_of(worker)
        for member in unit or [worker]:  # also one that led a unit before and was still finishing that one's groups
            self._groups.lost(member, "lost")
        for other in unit:
            if other.alive:
                other.state, other.version, other.switching = State.JOINED, None, None
                other.running.clear()

    async def _exited(self, worker: Worker, why: str) -> None:
        """A process has ended: see to its loss, then start its replacement."""
        await self._lost(worker, why)
        if worker.retired or worker.guest:
            return
        worker.restarts += 1
        self._restarts += 1
        if worker.restarts > MAX_RESTARTS:
            raise RunFailed(f"{worker.name} died {worker.restarts} times, last: {worker.fault or why}; see its log")
        await self._launch(worker)

    # Weights

    async def _on_version_ready(self, visible: VersionReady) -> None:
        if not self._started:
            self._started = True
            self._idle_since = self._progress_at = self._now()  # starting up is no part of the first step
        self._weights.became_visible(visible)
        self._journal.append(record.VersionReady(version=visible.version, checksum=visible.checksum))
        for rollout in self._fleet.rollouts():
            if rollout.state in (State.READY, State.LIVE):
                await self._switch(rollout)
        await self._go_on()

    async def _switch(self, rollout: Worker) -> None:
        visible = self._weights.visible
        if visible is not None and visible.version not in (rollout.switching, rollout.version):
            rollout.switching = visible.version
            await self._send(rollout.name, Switch(visible.version))

    async def _on_weights_live(self, worker: Worker, live: WeightsLive) -> None:
        visible = self._weights.visible
        if visible is not None and live.version == visible.version and live.checksum != visible.checksum:
            raise RunFailed(
                f"{worker.name} serves version {live.version} with checksum {live.checksum}, "
                f"published: {visible.checksum}"
            )
        worker.version = live.version
        worker.state = State.LIVE
        self._groups.generated(live.generated)
        self._journal.append(record.WeightsLive(worker=worker.name, version=live.version, checksum=live.checksum))
        self._observer.fleet(self._fleet)
        await self._grant()

    async def _on_published(self, published: Published) -> None:
        if published.failure:
            log.warning("weights did not get through", version=published.version, reason=published.failure)
            if self._weights.exhausted():
                raise RunFailed(f"version {published.version} cannot be published: {published.failure}")
            self._weights.failed(published.version)
            return  # it is tried again with the next tick
        await self._go_on()

    # Groups

    async def _grant(self) -> None:
        if self._draining:
            return
        for name, grant in self._groups.grants().items():
            await self._send(name, grant)

    async def _on_accepted(self, worker: Worker, accepted: GroupAccepted) -> None:
        if worker is not self._fleet.of(POLICY_TRAINING)[0]:
            return  # it held the groups of the plan before; the rollout hands them over to its successor
        if self._groups.accept(accepted):
            self._progress_at = self._now()
        else:
            await self._send(worker.name, Release((accepted.group,)))
        await self._train()
        await self._grant()

    async def _on_failed(self, worker: Worker, failed: GroupFailed) -> None:
        self._groups.fail(worker, failed)
        await self._grant()

    # Training

    async def _train(self) -> None:
        """Start the next optimizer step if its batch is complete and nothing else comes first."""
        if self._training is not None or self._draining or self._step >= self._config.run.steps:
            return
        if self._hold is not None or self._changes.running or self._weights.due or self._weights.busy:
            return
        if self._planning.restart:
            raise StateLost(self._planning.restart)
        if self._planning.stuck or not self._groups.complete or self._wish() is not None:
            return
        refs = self._groups.choose(self._version)
        if isinstance(refs, Waiting):
            return
        now = self._now()
        self._training = _Training(refs, now, now - self._idle_since)
        self._journal.append(record.StepBegun(step=self._step, version=self._version, groups=refs))
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
        await self._after_step()

    def _on_step_failed(self, worker: Worker, failed: StepFailed) -> None:
        log.warning("step failed", worker=worker.name, step=failed.step, reason=failed.reason)
        training = self._training
        if failed.peak_bytes and training is not None and not self._planning.stuck:
            report = StepReport(self._step, self._version, 0.0, 0, peak_bytes=failed.peak_bytes)
            self._planning.out_of_memory(step_facts(self._groups.held(training.refs), report, 0.0), failed.reason)
        self._hold_training(f"step {failed.step} failed on {worker.name}: {failed.reason}")

    async def _finish_step(self, training: _Training, report: StepReport) -> None:
        groups = [ref.group for ref in training.refs]
        held = self._groups.trained(self._version, training.refs)
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
        if self._watch is not None:
            metrics["supervisor/blocked_s"] = self._watch.longest_s()
        self._longest_step_s = max(self._longest_step_s, now - training.began)
        self._training, self._idle_since, self._progress_at = None, now, now
        self._holds = 0
        self._step += 1
        self._version += 1
        self._observer.step(report, metrics)
        if report.seconds:
            facts = step_facts(held, report, self._groups.generation_s(), self._groups.decoded())
            self._planning.stepped(self._step, facts, metrics["timing_s/step"])
        for worker in (*self._fleet.rollouts(), *self._fleet.of(POLICY_TRAINING)[:1]):
            if worker.alive:
                await self._send(worker.name, Release(tuple(groups)))

    async def _after_step(self) -> None:
        """Save if it is time, end if it is time, else go on."""
        every = self._config.checkpoint.every
        last = self._step >= self._config.run.steps
        if last or self._draining or (every and self._step and self._step % every == 0):
            await self._save()
        if not last:
            await self._go_on()

    async def _go_on(self) -> None:
        """Do what comes first: publish what is not visible, begin the plan change that is due, or train."""
        if self._training is not None or self._hold is not None or self._changes.running or self._weights.busy:
            return
        await self._let_go()
        if self._draining or (self._started and self._step >= self._config.run.steps):
            return
        if self._weights.due:
            return self._publish()
        wish = self._wish()
        if wish is None:
            await self._train()
        elif self._weights.version == self._version and not self._saver.busy:
            self._planning.began(wish.plan)
            self._changes.begin(wish.plan, wish.why, self._weights.tensors, self._weights.tied, self._inbox.put_nowait)
        else:
            self._observer.transition(TransitionProgress(summarized(wish.plan)))

    def _publish(self) -> None:
        """Have the present weights pushed, if there is somebody to push them and a relay to take them."""
        trainers = self._fleet.of(POLICY_TRAINING)
        if self._weights.tensors and all(worker.state is State.READY for worker in (self._fleet[RELAY], *trainers)):
            self._weights.begin(self._version, [trainer.name for trainer in trainers], self._inbox.put_nowait)

    def _wish(self) -> Wish | None:
        """Return the plan change that is due at the next boundary."""
        if not self._started:
            return None
        return self._planning.wish(self._step, self._changes.plan, self._fleet.slots())

    # Plan changes

    async def _on_transformed(self, failure: str) -> None:
        """Conclude the plan change; what rollouts that moved were doing is done elsewhere."""
        target = self._changes.running
        for rollout in self._changes.vacated:
            self._groups.lost(rollout, "moved")
        if target is not None and not (failure or self._changes.aborted):
            self._settle_collector(target.of(POLICY_TRAINING))
        self._groups.forget_decoded()
        concluded = await self._changes.conclude(failure)
        self._planning.ended(self._changes.plan, concluded.failure, concluded.seconds)
        self._progress_at = self._now()
        await self._assign_joined()
        self._observer.fleet(self._fleet)
        if concluded.lost:
            self._hold_training(f"{listed(concluded.lost)} did not follow the new plan")
        if self._hold is not None:
            return self._regroup()
        await self._grant()
        await (self._save() if self._draining else self._go_on())

    # Losses

    def _hold_training(self, why: str) -> None:
        """Let no step begin before what is left of the trainers has agreed on one."""
        if not self._started:
            # A worker that says what is wrong with it would say so again; one that was struck need not be.
            faults = any(worker.fault for worker in self._fleet.of(POLICY_TRAINING))
            raise (RunFailed if faults else StateLost)(f"{why}, before the first step")
        if self._hold is None:
            self._holds += 1
            if self._holds > MAX_HOLDS:
                raise RunFailed(f"training was held {MAX_HOLDS} times without a step between, last: {why}")
            self._hold = _Hold(why, self._now())
            self._observer.note(f"training is held: {why}")
        self._hold.lost = True
        self._changes.abort(why)
        step = self._saver.under_way
        if step is not None and self._saver.abandon(step):
            self._observer.note(f"the checkpoint of step {step} is given up")
        self._regroup()

    def _regroup(self) -> None:
        """Ask the trainer slots that are left how far they have come."""
        hold = self._hold
        if hold is None or hold.task is not None or self._changes.running:
            return
        hold.lost = False
        plan, alive = self._changes.plan, frozenset(self._fleet.slots())
        timeout_s = self._config.cluster.group_timeout_s + self._config.bus.liveness_s

        async def ask() -> None:
            try:
                settled = Settled(await regroup(self._endpoint, plan, alive, timeout_s=timeout_s))
            except StateLost as error:
                settled = Settled(None, str(error))
            self._inbox.put_nowait(settled)

        hold.task = asyncio.create_task(ask(), name="regroup")

    async def _on_settled(self, settled: Settled) -> None:
        """Go on with what is left: finish or undo the step in flight, and put a plan of the intact units in force."""
        hold = self._hold
        assert hold is not None
        hold.task = None
        regrouped = settled.regrouped
        if hold.lost:
            return self._regroup()
        if regrouped is None:
            raise StateLost(f"{hold.why}; {settled.failure}")
        for slot in regrouped.silent:
            self._launcher.kill(f"slot-{slot}")
        await self._settle_step(regrouped)
        self._settle_collector(regrouped.units)
        self._journal.append(
            record.Decided(
                decision="urgent",
                because=f"{hold.why}; {len(regrouped.units)} trainer units are whole, at step {regrouped.step}",
            )
        )
        lost = await self._changes.recover(regrouped.units)
        self._planning.recovered(self._changes.plan)
        if lost:
            hold.why = f"{listed(lost)} did not follow"
            self._holds += 1
            if self._holds > MAX_HOLDS:
                raise RunFailed(f"training was held {MAX_HOLDS} times without a step between, last: {hold.why}")
            return self._regroup()
        self._hold = None
        if self._weights.version != self._version:
            self._weights.due = True
        seconds = self._now() - hold.began
        self._observer.note(f"training goes on with {len(regrouped.units)} units after {seconds:.2f} s")
        self._progress_at = self._now()
        await self._assign_joined()
        self._observer.fleet(self._fleet)
        await self._grant()
        await self._after_step()

    async def _settle_step(self, regrouped: Regrouped) -> None:
        """Count the step in flight as made, or take it back."""
        training = self._training
        if regrouped.step not in (self._step, self._step + (training is not None)):
            raise StateLost(f"the trainers stand before step {regrouped.step}, the run before step {self._step}")
        if training is None:
            return
        if regrouped.step == self._step:
            self._groups.undo(self._version)
            self._training = None
            return
        report = training.report or StepReport(self._step, self._version, 0.0, 0)
        await self._finish_step(training, report)

    def _settle_collector(self, units: Sequence[Emu]) -> None:
        """If the lead slot becomes another one, have the groups that it holds sent there."""
        if units[0].slots[0] != self._changes.plan.of(POLICY_TRAINING)[0].slots[0]:
            self._groups.collector_lost()

    # Checkpoints and the end

    async def _save(self) -> None:
        """Begin a checkpoint of the present step; one that is already saved or being saved is left alone."""
        if self._saver.saved_step == self._step:
            return self._end_if_due()
        if self._saver.busy or self._hold is not None:
            return  # its end brings us here again if the run is to end
        folder = self._saver.begin(self._step, self._version, self._groups.cursor)
        self._journal.append(record.CheckpointBegun(step=self._step, folder=folder.name))
        for trainer in self._fleet.of(POLICY_TRAINING):
            await self._send(trainer.name, Save(self._step, str(folder)))

    async def _on_saved(self, worker: Worker, step: int, manifest: bytes) -> None:
        shares = self._saver.add(worker.name, step, manifest)
        if shares < len(self._fleet.of(POLICY_TRAINING)):
            return
        try:
            committed = await self._saver.commit(self._weights.tensors)
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
        if not self._started or (self._step == 0 and self._training is None):
            self._outcome = Outcome(f"drained before the first step ({name})", finished=False)
        elif self._training is None and not self._changes.running and self._hold is None:
            await self._save()

    async def _on_tick(self) -> None:
        self._check_deadlines()
        if self._started:
            self._planning.watch(self._fleet.present(), self._now())
            for rollout in self._fleet.rollouts():
                if rollout.state in (State.READY, State.LIVE):
                    await self._switch(rollout)
        await self._go_on()

    def _check_deadlines(self) -> None:
        now = self._now()
        if not self._started and now - self._began > self._config.bus.start_timeout_s:
            missing = self._fleet.missing(at_least=State.READY) or ["the first weight publication"]
            raise RunFailed(
                f"not ready after {self._config.bus.start_timeout_s:g} s: {', '.join(missing)}; "
                "see their logs, or raise bus.start_timeout_s"
            )
        training = self._training
        if training is not None and self._hold is None and now - training.began > self._step_limit_s():
            late = listed([w.name for w in self._fleet.of(POLICY_TRAINING) if w.name not in training.done])
            self._hold_training(f"step {self._step} takes more than {self._step_limit_s():.0f} s on {late}")
        idle = self._training is None and not self._changes.running and self._hold is None
        if self._started and idle and now - self._progress_at > STALL_S:
            self._progress_at = now
            busy = {rollout.name: len(rollout.running) for rollout in self._fleet.rollouts()}
            waiting = self._groups.waits_for(self._version)
            why = waiting.why if waiting else "the newest weights are not published"
            log.warning("no progress", why=why, groups=waiting.groups[:8] if waiting else (), running=busy)

    def _step_limit_s(self) -> float:
        """Return how long a step may take: peers notice who hangs in a collective, nobody does who hangs alone."""
        longest_s = max(self._config.bus.start_timeout_s, SLOW_STEP * self._longest_step_s)
        return self._config.cluster.group_timeout_s + longest_s

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
