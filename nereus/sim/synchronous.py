"""How does a synchronous job go on a cluster that is not here: PPO, ReMax or GRPO, phase after phase, on virtual time?

``run_synchronous(job, trace, policy, seed=...)`` returns a ``SynchronousRun``: seconds of every step with its phases,
the bands of plans, every transition with its seconds, bytes and reason. Nothing is written unless a run folder is
given. Policies are those of ``policies/``; ``Nereus()`` is the live runtime's controller itself, told of steps, slots
and failures through the same ``Planning`` as by the live supervisor, and it learns from measured seconds only.

A step: at the boundary slots come and go, searches are waited for, and the plan changes if one is wished for; then the
phases of the workflow, each as long as its slowest member, and the new weights travel. Owner of one run's progress.
Invariants (tests/sim/test_synchronous.py): phases run in the workflow's order; no slot computes for two model-stages at
once; equal seeds give byte-identical journals; what is sampled depends on seed and step, never on a plan.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from nereus.bus.messages import GroupRef, GroupSpec
from nereus.control.memory import MemoryCalibration
from nereus.control.move import Move, move
from nereus.core.plan import ModelStage, Plan, SlotId, Stage
from nereus.errors import NereusError, OutOfMemory
from nereus.runtime import journal as record
from nereus.runtime.journal import Journal
from nereus.runtime.regroup import Restores, StateLost
from nereus.runtime.schedule import Planning, Standing, Wish
from nereus.runtime.searching import Answered, Asked, Searcher
from nereus.runtime.surroundings import Outcome, RunFailed
from nereus.runtime.timeline import summarized
from nereus.runtime.transform import execute
from nereus.sim.course import NOTICE_S, Course, Failures
from nereus.sim.engine import Drawn
from nereus.sim.job import SynchronousJob, config_of, estimate_of, pool_of, pricing_of
from nereus.sim.links import ENGINE_START_S
from nereus.sim.loop import run_virtual
from nereus.sim.noise import Noise
from nereus.sim.policy import Circumstances, Known, Opening, SynchronousPolicy
from nereus.sim.simulation import BOOT_S, RESTORE_S, SEARCH_S, TICK_S
from nereus.sim.stages import Sampled, Stages, Took, sample_of
from nereus.sim.trace import Trace
from nereus.sim.world import SearchHere, ended
from nereus.transition.primitive import Primitive, Replica
from nereus.transition.run import TransitionRun

PAUSE_S = 1.0
"""Ours: around a plan change: every worker lets go of the old plan and follows the new one."""

MOST_CHANGES = 4
"""Plan changes at one boundary."""

MOST_TRIES = 4
"""How often one step is tried that finds too little memory."""


class StepTaken(Struct, frozen=True):
    """One finished step."""

    step: int
    seconds: float
    """Since the step before: waiting for slots and searches, changing the plan, and what was lost included."""
    phases_s: dict[str, float]
    """``boundary``, ``generation``, ``inference``, ``training``, ``weight_sync``; what was done again is in none."""
    epoch: int
    slots: int
    """That the job had."""
    mean_tokens: float


class Change(Struct, frozen=True):
    """One plan change, also one that was given up."""

    step: int
    """Steps that were done."""
    epoch: int
    ok: bool
    seconds: float
    moved_bytes: int
    why: str


class Band(Struct, frozen=True):
    """A plan and the steps that were made under it."""

    epoch: int
    first_step: int
    steps: int
    plan: str


class SynchronousRun(Struct, frozen=True):
    """What came of a run."""

    policy: str
    trace: str
    seed: int
    steps: tuple[StepTaken, ...]
    bands: tuple[Band, ...]
    changes: tuple[Change, ...]
    virtual_s: float
    restores: int
    """How often it went back to a checkpoint."""
    cpu_s: float
    """What simulating it took."""
    outcome: str

    @property
    def mean_step_s(self) -> float:
        """Return the mean seconds of a step, changes of the plan and all that was lost included."""
        return self.virtual_s / len(self.steps) if self.steps else math.nan


def _no_halt(seconds: float) -> None:
    raise RunFailed("a synchronous run is not halted from outside: its policy changes the plan or loses state")


class _Lost(Exception):
    """Slots of the plan are gone."""


class _Searches:
    """Passes questions on and knows whether an answer is still to come."""

    def __init__(self, inner: Searcher) -> None:
        self._inner = inner
        self._flying = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def prepare(self) -> None:
        await self._inner.prepare()

    async def search(self, asked: Asked) -> Answered:
        self._flying += 1
        self._idle.clear()
        try:
            return await self._inner.search(asked)
        finally:
            self._flying -= 1
            if not self._flying:
                self._idle.set()

    async def close(self) -> None:
        await self._inner.close()

    async def settled(self) -> None:
        """Wait until nothing is asked any more; each search takes bounded time."""
        while True:
            for _ in range(3):  # a search begins, and its answer is taken, a turn of the loop later
                await asyncio.sleep(0)
            if not self._flying:
                return
            await self._idle.wait()


class Synchronous:
    """One run on virtual time; also the yard of its course of events."""

    def __init__(
        self,
        job: SynchronousJob,
        trace: Trace,
        journal: Path,
        *,
        policy: SynchronousPolicy,
        seed: int = 0,
        failures: Failures = Failures(),  # noqa: B008 (frozen)
        noise: float = 1.0,
        run_id: str = "simulated",
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.job = job
        self._trace = trace
        self._policy = policy
        self._seed = seed
        self._run_id = run_id
        self._noise = Noise(seed, scale=noise)
        self._stages = Stages(job, self._noise, trace, sharded=policy.sharded)
        self._course = Course(trace, job.cluster.size, self._noise, failures, self)
        self._config = config_of(job, seed)
        self._journal = Journal(journal, clock=self._loop.time)
        self._alive: set[SlotId] = set(self._course.present)
        self._leaving: set[SlotId] = set()
        self._planning: Planning | None = None
        self._searches = _Searches(SearchHere(SEARCH_S))
        self._plan = Plan(-1, ())
        self._target: Plan | None = None
        self._epoch = -1
        self._step = 0
        self._told = 0
        """Steps that the course of events was told of."""
        self._saved = 0
        """The step of the newest checkpoint."""
        self._attempts = 0
        self._ooms = 0
        self._activity: asyncio.Task[None] | None = None
        self._lost: set[SlotId] = set()
        self._busy: dict[SlotId, ModelStage] = {}
        self._since = 0.0
        self._at_boundary = False
        self.steps: list[StepTaken] = []
        self.changes: list[Change] = []
        self.plans: list[tuple[int, Plan]] = []
        """(steps that were done, plan) of every plan that came into force."""
        self.restores = 0

    async def run(self) -> Outcome:
        """Run to the end; a run that has lost its state goes on from its newest checkpoint."""
        outcome: Outcome | None = None
        reason = "failed"
        self._course.begin()
        allowance = Restores()
        try:
            while outcome is None:
                try:
                    outcome = await self._attempt()
                    reason = outcome.reason
                except StateLost:
                    self.restores += 1
                    if not allowance.allowed(self._step):
                        raise
                    await asyncio.sleep(RESTORE_S)
                    self._step = self._saved
                    self.steps = [taken for taken in self.steps if taken.step < self._saved]
            return outcome
        except NereusError as error:
            reason = str(error)
            raise
        finally:
            self._course.end()
            ended(self._journal, outcome, reason)

    # One attempt

    async def _attempt(self) -> Outcome:
        self._attempts += 1
        self._lost.clear()
        cluster = self.job.cluster
        estimate = estimate_of(self.job, self._trace)
        pool = pool_of(cluster, self._alive - self._leaving)
        asked = estimate.question(pool, Plan(-1, ()), {})
        start = Opening(asked, self._stages, self._sample(self._step), self._trace, self._seed, self._step)
        self._epoch += 1
        plan = replace(self._policy.opening(start), epoch=self._epoch)
        self._journal.append(
            record.RunStarted(
                run=self._run_id,
                attempt=self._attempts,
                config=self._policy.name,
                data="simulated",
                seed=self._seed,
                wall=0.0,
                step=self._step,
                version=self._step,
                cursor=self._step * self.job.prompts,
            )
        )
        self._in_force(plan, "start" if self._attempts == 1 else "restore")
        truth = self._stages.truth("policy")
        self._planning = planning = self._policy.planning(
            Circumstances(
                self._config,
                plan,
                self._step,
                cluster,
                estimate,
                self._searches,
                self._journal,
                lambda answered: planning.answered(answered),
                Known(self.job.model, cluster, truth, self._trace, self._drawn),
                _no_halt,
                Standing(plan),
            )
        )
        self._since = self._loop.time() if self._attempts == 1 else self._since
        try:
            while self._step < self.job.steps:
                await self._boundary(planning)
                await self._try_step(planning)
        finally:
            self._planning = None
            await planning.close()
        return Outcome(f"all {self.job.steps} steps are done", True)

    # Between steps

    async def _boundary(self, planning: Planning) -> None:
        """Let slots come and go, and change the plan if another one is wished for."""
        if self._told < self._step:
            self._told = self._step
            self._at_boundary = True
            self._course.stepped(self._step)
            await asyncio.sleep(0)  # notice is given by a task
            self._at_boundary = False
        self._look()
        changed, waited_until = 0, self._loop.time() + self.job.patience_s + RESTORE_S
        while True:
            await self._searches.settled()
            if planning.restart:
                raise StateLost(planning.restart)
            usable = sorted(self._alive - self._leaving)
            wish = planning.wish(self._step, self._plan, usable) if changed < MOST_CHANGES else None
            if wish is not None:
                changed += 1
                await self._change(planning, wish)
            elif self._lacking():
                if self._loop.time() > waited_until:
                    raise StateLost(f"no unit of {', '.join(map(str, self._lacking()))} is left")
                await asyncio.sleep(TICK_S)
                self._look()
            elif planning.stuck:
                raise StateLost(f"no other plan was found: {planning.stuck}")
            else:
                return

    def _lacking(self) -> list[ModelStage]:
        """Return the model-stages that have no unit."""
        there = self._plan.model_stages()
        return [stage for stage in self.job.workflow.model_stages if stage not in there]

    async def _change(self, planning: Planning, wish: Wish) -> None:
        """Move state and put the plan in force, or stay with the old one."""
        self._epoch += 1
        target = replace(wish.plan, epoch=self._epoch)
        planning.began(wish.plan)
        way = self._way(target)
        names = tuple(primitive.id for primitive in way.dag.primitives) if way.dag else ()
        self._journal.append(record.TransitionBegun(plan=target, primitives=names, why=wish.why))
        began, failure = self._loop.time(), way.stuck
        if not failure:
            self._target = target
            try:
                await self._guarded(self._transform(way, target))
            except _Lost:
                failure = f"slots {sorted(self._lost)} were lost"
            self._target = None
        seconds = self._loop.time() - began
        if not failure:
            self._in_force(target, "transition")
        self.changes.append(Change(self._step, target.epoch, not failure, seconds, way.moved_bytes, wish.why))
        self._journal.append(
            record.TransitionEnded(
                epoch=target.epoch,
                ok=not failure,
                reason=failure,
                seconds=seconds,
                moved_bytes=0 if failure else way.moved_bytes,
            )
        )
        planning.ended(self._plan, failure, seconds)
        if self._lost:
            self._recover()
        self._let_go()

    def _way(self, target: Plan) -> Move:
        """Return the graph of moves, as the live runtime compiles it."""
        pricing = pricing_of(self.job, self.job.lengths(self._trace, 0).lengths(self.job.longest_response))
        pool = pool_of(self.job.cluster, self._alive)
        roomy = MemoryCalibration(workspace_bytes=0.0)
        return move(replace(pricing, cluster=pool, calibration=roomy), self._plan, target)

    async def _transform(self, way: Move, target: Plan) -> None:
        """Perform the primitives, each as soon as it may; load what no unit has; build engines."""
        assert way.dag is not None, "a way that is not stuck has a graph"

        async def perform(primitive: Primitive) -> None:
            await asyncio.sleep(self._stages.primitive_s(primitive, self._loop.time()))

        await execute(TransitionRun(way.dag), perform)
        loads = [self._stages.restored_s(emu) for emu in target.emus if emu.model_stage in way.restored]
        before = {Replica.of(emu) for emu in self._plan.emus}
        engines = any(
            emu.model_stage.stage is Stage.GENERATION and Replica.of(emu) not in before for emu in target.emus
        )
        await asyncio.sleep(max(loads, default=0.0) + ENGINE_START_S * engines + PAUSE_S)

    def _in_force(self, plan: Plan, why: str) -> None:
        self._plan = plan
        self.plans.append((self._step, plan))
        self._journal.append(record.PlanCommitted(plan=plan, why=why))

    # A step

    async def _try_step(self, planning: Planning) -> None:
        """Make a step, unless slots are lost or too small."""
        sampled, step = self._sample(self._step), self._step
        first = step * self.job.prompts
        groups = tuple(GroupRef(group, self._ooms) for group in range(first, first + self.job.prompts))
        self._journal.append(record.StepBegun(step=step, version=step, groups=groups))
        took: dict[ModelStage, Took] = {}
        phases_s = {"boundary": self._loop.time() - self._since}
        began = self._loop.time()
        try:
            await self._guarded(self._phases(sampled, took, phases_s))
        except _Lost:
            self._recover()
            return
        except OutOfMemory as error:
            self._ooms += 1
            if self._ooms >= MOST_TRIES:
                raise RunFailed(f"{error}; no plan was found that fits") from error
            facts = sampled.facts(took)
            planning.out_of_memory(replace(facts, peak_bytes=sum(error.needed_bytes.values())), str(error))
            return
        self._ooms = 0
        now = self._loop.time()
        facts = sampled.facts(took)
        tokens = sum(facts.prompts) + sum(facts.responses)
        self._journal.append(record.Trained(step=step, version=step, groups=groups, samples=len(sampled.trained)))
        self.steps.append(
            StepTaken(
                step,
                now - self._since,
                phases_s,
                self._plan.epoch,
                len(self._course.present),
                tokens / len(sampled.trained),
            )
        )
        self._since = now
        self._step = step + 1
        if self._step % self.job.checkpoint_every == 0:
            self._save()
        planning.stepped(self._step, facts, now - began)

    def _save(self) -> None:
        """Save beside the next step; what was saved last is what a run without state goes back to."""
        folder = f"step_{self._step:08d}"
        cursor = self._step * self.job.prompts
        self._journal.append(
            record.CheckpointBegun(step=self._step, folder=folder),
            record.CheckpointCommitted(step=self._step, version=self._step, cursor=cursor, folder=folder),
        )
        self._saved = self._step

    async def _phases(self, sampled: Sampled, took: dict[ModelStage, Took], phases_s: dict[str, float]) -> None:
        """Run the phases one after the other, then let the new weights travel."""
        for side in self.job.workflow.sides:
            for phase in side:
                began = self._loop.time()
                for stage in phase:
                    took[stage] = self._stages.took(self._plan, stage, sampled, self._step)
                await self._phase(phase, took)
                phases_s[phase[0].stage.name.lower()] = self._loop.time() - began
        began = self._loop.time()
        await asyncio.sleep(self._stages.weight_sync_s(self._plan))
        phases_s["weight_sync"] = self._loop.time() - began

    async def _phase(self, phase: Sequence[ModelStage], took: dict[ModelStage, Took]) -> None:
        """Run members side by side; those that a policy has put on the same slots take turns."""
        running: list[tuple[frozenset[SlotId], asyncio.Task[None]]] = []
        async with asyncio.TaskGroup() as group:
            for stage in phase:
                slots = frozenset(slot for unit in self._plan.of(stage) for slot in unit.slots)
                before = [task for others, task in running if not slots.isdisjoint(others)]
                task = group.create_task(self._member(stage, slots, before, took[stage].seconds))
                running.append((slots, task))

    async def _member(
        self, stage: ModelStage, slots: frozenset[SlotId], before: Sequence[asyncio.Task[None]], seconds: float
    ) -> None:
        if before:
            await asyncio.wait(before)
        taken = sorted(slot for slot in slots if slot in self._busy)
        assert not taken, f"slots {taken} compute for {stage} and {self._busy[taken[0]]} at once"
        self._busy.update(dict.fromkeys(slots, stage))
        try:
            await asyncio.sleep(seconds)
        finally:
            for slot in slots:
                del self._busy[slot]

    def _sample(self, step: int) -> Sampled:
        """Draw prompts and responses of a step."""
        return sample_of(self.job, self._trace, self._seed, step)

    def _drawn(self, group: int) -> Drawn:
        """Return what will come of a group, by its number."""
        step, place = divmod(group, self.job.prompts)
        prompt, lengths = self._sample(step).groups[place]
        return Drawn(GroupSpec(group, 0, group, b"null", b"{}"), prompt, lengths)

    # Losses

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Await ``work``; a loss of slots that it needs ends it with ``_Lost``."""
        self._activity = task = asyncio.create_task(work)
        try:
            await task
        except asyncio.CancelledError:
            if not self._lost:
                raise
            raise _Lost from None
        finally:
            self._activity = None

    def _recover(self) -> None:
        """Put the units in force that are whole."""
        assert self._planning is not None
        self._lost.clear()
        self._epoch += 1
        whole = tuple(emu for emu in self._plan.emus if self._alive.issuperset(emu.slots))
        plan = Plan(self._epoch, whole, self._plan.recomputed)
        self._in_force(plan, "recovery")
        self._planning.recovered(plan)

    def _ended(self, slot: SlotId) -> None:
        """Let ``slot`` be gone from now on."""
        if slot not in self._alive:
            return
        self._alive.discard(slot)
        self._leaving.discard(slot)
        used = self._plan.slots() | (self._target.slots() if self._target else frozenset())
        if slot in used:
            self._lost.add(slot)
            if self._activity is not None:
                self._activity.cancel()
        self._look()

    def _look(self) -> None:
        """Tell the policy which slots are alive, now and when patience with those that are lost has run out."""
        if self._planning is None:
            return
        self._look_again()
        if self._plan.slots() - self._alive or self._course.present - self._alive:
            self._loop.call_later(self.job.patience_s + 1.0, self._look_again)

    def _look_again(self) -> None:
        if self._planning is not None:
            self._planning.watch(frozenset(self._alive), self._loop.time())

    def _let_go(self) -> None:
        """Let slots that were taken back go where the plan has left them."""
        for slot in sorted(self._leaving - self._plan.slots()):
            self._ended(slot)

    # What the course of events does

    def add(self, slots: Sequence[SlotId]) -> None:
        """Start slots; those that come at a step's boundary were started before it."""
        for slot in slots:
            self._loop.call_later(0.0 if self._at_boundary else BOOT_S, self._came, slot)
        if self._at_boundary:
            self._alive.update(slots)

    def _came(self, slot: SlotId) -> None:
        if slot in self._course.present:
            self._alive.add(slot)
            self._look()

    async def take_back(self, slots: Sequence[SlotId], notice_s: float) -> None:
        """Give notice, then end what is left."""
        there = [slot for slot in slots if slot in self._alive]
        self._leaving.update(there)
        planning = self._planning
        refused = planning.drain(there, self._alive - self._leaving) if planning is not None else ""
        if refused:
            notice_s = min(notice_s, NOTICE_S)
        self._let_go()
        if notice_s == math.inf:
            return
        await asyncio.sleep(notice_s)
        for slot in there:
            if slot in self._leaving:
                self._ended(slot)

    def running(self) -> Sequence[SlotId]:
        return sorted(self._alive & self._course.present)

    def fail(self, kind: str, slot: SlotId) -> None:
        """Let a slot end; one that falls silent is noticed later, one that dies is started anew."""
        delay = self._config.bus.liveness_s if kind == "hang" else 0.0
        self._loop.call_later(delay, self._ended, slot)
        if kind != "reclaim":
            self._loop.call_later(delay + BOOT_S, self._came, slot)


def run_synchronous(
    job: SynchronousJob,
    trace: Trace,
    policy: SynchronousPolicy,
    *,
    seed: int = 0,
    journal: Path | None = None,
    failures: Failures = Failures(),  # noqa: B008 (frozen)
    noise: float = 1.0,
) -> SynchronousRun:
    """Simulate ``job`` to its end under ``policy``; raises what ended it if that was a failure.

    ``journal`` is a file to keep, of the same kind as a live run's; None: it is not kept.
    """
    began = time.process_time()
    made: list[Synchronous] = []

    async def main(path: Path) -> tuple[Outcome, float]:
        made.append(Synchronous(job, trace, path, policy=policy, seed=seed, failures=failures, noise=noise))
        outcome = await made[0].run()
        return outcome, asyncio.get_running_loop().time()

    with tempfile.TemporaryDirectory() as folder:
        outcome, virtual_s = run_virtual(main(journal or Path(folder) / "journal.jsonl"))
    run = made[0]
    return SynchronousRun(
        policy.name,
        trace.name,
        seed,
        tuple(run.steps),
        _bands(run),
        tuple(run.changes),
        virtual_s,
        run.restores,
        time.process_time() - began,
        outcome.reason,
    )


def _bands(run: Synchronous) -> tuple[Band, ...]:
    made = dict[int, list[int]]()
    for taken in run.steps:
        made.setdefault(taken.epoch, []).append(taken.step)
    return tuple(
        Band(plan.epoch, min(made[plan.epoch]), len(made[plan.epoch]), summarized(plan))
        for _, plan in run.plans
        if plan.epoch in made
    )
