"""When is another plan worth the way, and which one is due now?

Owner: the supervisor of a job with ``adapt.mode``. Joins the pure decision core (``control``) with the run: what steps
report becomes events of the controller, its effects become searches in another process, plan changes at the next
boundary, and journal records. Slots that come back are put to use again as before, without a search.

Invariants (tests/virtual/test_adaptation.py): every decision and every plan found is in the journal with its numbers;
nothing here waits; what was predicted is compared with what was measured.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from itertools import pairwise
from statistics import median

import structlog
from msgspec import Struct
from msgspec.structs import replace

from nereus.config import JobConfig
from nereus.control.admission import Admission, admit
from nereus.control.controller import (
    AbortTransition,
    BeginTransition,
    Calibrated,
    Controller,
    Effect,
    Event,
    PoolChanged,
    Proposal,
    Record,
    Restart,
    Search,
    SlotsLost,
    StepReport,
    TransitionEnded,
)
from nereus.control.estimate import Estimate, StepFacts
from nereus.control.monitor import Monitor, Monitoring
from nereus.core.change import parse_supply
from nereus.core.cluster import Cluster
from nereus.core.plan import Plan, PlanEpoch, SlotId
from nereus.runtime import journal as record
from nereus.runtime.journal import Journal
from nereus.runtime.replaying import to_plain
from nereus.runtime.schedule import Asking, Schedule, Wish
from nereus.runtime.searching import Answered, Asked, Searcher

SETTLING_STEPS = 2
"""So many steps after the start and after a change find cold caches and old queues: their speeds are no drift."""

COMPARED_STEPS = 4
"""So many steps after a change are measured before they are compared with the prediction; even, because a tight bound
of staleness makes a short step follow each long one."""

log = structlog.get_logger()


class _Expected(Struct):
    """What was predicted of a plan, until it has been measured."""

    epoch: PlanEpoch
    step_s: float
    measured_s: list[float]


class Adaptation:
    """The controller of a live run and what it has asked for."""

    def __init__(
        self,
        config: JobConfig,
        plan: Plan,
        *,
        step: int,
        estimate: Estimate,
        cluster: Cluster,
        searcher: Searcher,
        journal: Journal,
        report: Callable[[Answered], None],
        asking: Asking | None = None,
        monitor: Monitoring | None = None,
        admission: Admission = admit,
    ) -> None:
        """``report`` is called with the answer to each search; the supervisor passes it on to ``answered``.

        ``asking`` holds what is asked for when nothing was decided: by default what the job file says. ``monitor`` says
        when to think again, ``admission`` what is worth its way; by default as Nereus does.
        """
        self._config = config
        self._schedule: Asking = asking or Schedule(config, plan, step)
        self._estimate = estimate
        self._cluster = cluster
        self._searcher = searcher
        self._journal = journal
        self._report = report
        watched = monitor or Monitor(int(cluster.device.memory_bytes))
        self._controller = Controller(plan, watched, gamma=config.adapt.gamma, admission=admission)
        self._plan = plan
        self._step = self._first_step = step
        self._since = 0
        """Steps under the present plan."""
        self._pool = frozenset(slot.id for slot in cluster.slots())
        self._supply = deque(parse_supply(config.emulate.slots))
        self._drained: set[SlotId] = set()
        self._present: frozenset[SlotId] = frozenset()
        """Slots that answered when ``watch`` looked last."""
        self._missing = True
        """Whether any slot of the pool may be away."""
        self._away: dict[SlotId, float] = {}
        """Slots that do not answer, and since when."""
        self._pending: BeginTransition | None = None
        self._proposals: tuple[Proposal, ...] = ()
        self._expected: _Expected | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._prepared = False
        self.restart = ""
        """Why nothing but a checkpoint is left, if so."""
        self.stuck = ""
        """Why no step can be made under the present plan, if so."""

    # What is due

    def wish(self, step: int, plan: Plan, slots: Sequence[SlotId]) -> Wish | None:
        """Return the plan to change to before the next step; None: stay."""
        if self._pending is None:
            usable = [slot for slot in slots if slot in self._pool]
            return self._schedule.wish(step, plan, usable)
        if not set(slots) >= {slot for emu in self._pending.plan.emus for slot in emu.slots if slot in self._pool}:
            return None  # a slot of it is being started anew
        return Wish(self._pending.plan, self._pending.because)

    def began(self, plan: Plan) -> None:
        """Note that a change to ``plan`` is tried."""
        self._schedule.began(plan)

    def ended(self, plan: Plan, failure: str, seconds: float) -> None:
        """Note that ``plan`` is in force after a change, or that a change has failed and the plan is as before."""
        pending, self._pending = self._pending, None
        self._schedule.ended(plan, failure, seconds)
        if not failure:
            self._in_force(plan)
            self.stuck = ""
        if pending is None:
            return
        proposal = next((one for one in self._proposals if one.plan == pending.plan), None)
        if not failure:
            self._schedule.ask(plan, pending.because)
            if proposal is not None:
                self._compare(plan.epoch, "transition", proposal.transition_s, seconds)
                self._estimate = self._estimate.moved(proposal.transition_s, seconds)
                self._expected = _Expected(plan.epoch, proposal.latency_new_s, [])
        self._tell(TransitionEnded(pending.plan.epoch, not failure, failure))
        self._controller.plan = self._plan

    def recovered(self, plan: Plan) -> None:
        """Note that ``plan``, of the units that were whole after a loss, is in force."""
        self._in_force(plan)
        if self._controller.moving is None:
            self._controller.plan = plan

    def _in_force(self, plan: Plan) -> None:
        self._plan = plan
        self._since = 0
        self._expected = None

    # What happens

    def stepped(self, step: int, facts: StepFacts, step_s: float) -> None:
        """Learn from a step; ``step`` steps are done."""
        self._step = step
        self._since += 1
        self._estimate = self._estimate.observed(self._plan, facts)
        measured = self._expect(step_s)
        signals = self._estimate.signals(self._plan)
        calibrated = step - self._first_step >= self._config.adapt.calibrate_steps
        if not calibrated or self._since <= SETTLING_STEPS:
            signals = replace(signals, efficiency={})
        self._tell(StepReport(step, signals))
        while self._supply and self._supply[0].step <= step:
            slots = self._supply.popleft().slots
            self.pool([slot.id for slot in self._cluster.slots() if slot.id < slots])
        if measured or step - self._first_step == self._config.adapt.calibrate_steps:
            self._tell(Calibrated(step, self._config.run.steps - step))

    def out_of_memory(self, facts: StepFacts, why: str) -> None:
        """Learn from a step that did not fit: no other is tried before the plan has changed."""
        self.stuck = why
        self._estimate = self._estimate.observed(self._plan, facts)
        self._tell(StepReport(self._step, self._estimate.signals(self._plan), fits=False))

    def pool(self, slots: Collection[SlotId]) -> None:
        """Note which slots the job may use from now on."""
        now = frozenset(slots)
        added, revoked = tuple(sorted(now - self._pool)), tuple(sorted(self._pool - now))
        self._pool = now
        self._missing = True
        if added or revoked:
            self._tell(PoolChanged(self._step, added, revoked))

    def drain(self, gone: Collection[SlotId], slots: Collection[SlotId]) -> str:
        """Do without the slots ``gone``: the next plan has to."""
        self._drained.update(gone)
        self.pool(self._pool - frozenset(gone))
        return ""

    def watch(self, alive: Collection[SlotId], now: float) -> None:
        """Look after slots that are lost: one that does not come back in time is not counted on any more."""
        present = frozenset(alive)
        if not self._prepared:
            self._prepared = True
            absent = self._pool - present - self._plan.slots()
            self._pool -= absent  # what is not there at the start is not waited for, but welcome
            self._away |= dict.fromkeys(absent, now)
            self._spawn(self._searcher.prepare(), "prepare-search")
        if present == self._present and not self._missing:
            return  # nobody has come or gone, and nobody is waited for
        self._present, self._missing = present, True
        left = self._drained - present
        self._drained -= left
        for slot in sorted((left | (self._pool - present)) - self._away.keys()):
            self._away[slot] = now
        back = tuple(slot for slot in self._away if slot in present)
        for slot in back:
            del self._away[slot]
        known = frozenset(slot.id for slot in self._cluster.slots())
        guests = tuple(sorted(present - known - self._drained))
        if guests:
            self._cluster = self._cluster.joined_by(guests)
        returned = tuple(slot for slot in back if slot not in self._pool and slot not in self._drained)
        if new := (*returned, *guests):
            self._pool |= frozenset(new)
            self._tell(PoolChanged(self._step, added=new))
        patience_s = self._config.adapt.patience_s
        given_up = tuple(slot for slot, since in self._away.items() if slot in self._pool and now - since > patience_s)
        if given_up:
            self._pool -= frozenset(given_up)
            self._tell(SlotsLost(self._step, given_up))
        self._missing = any(slot in self._pool for slot in self._away)

    def answered(self, answered: Answered) -> None:
        """Take the answer to a search."""
        self._proposals = answered.found.proposals
        self._tell(answered.found)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._searcher.close()

    # The controller

    def _tell(self, event: Event) -> None:
        self._journal.append(record.Happened(event=to_plain(event)))
        for effect in self._controller.on(event):
            self._act(effect)

    def _act(self, effect: Effect) -> None:
        match effect:
            case Record(kind, because, numbers):
                self._journal.append(record.Decided(decision=kind, because=because, numbers=numbers))
                log.info("decided", decision=kind, because=because)
            case Search():
                self._search(effect)
            case BeginTransition(plan) if plan.equals(self._plan):
                log.info("the plan that runs is the one that was found", epoch=self._plan.epoch)
                if self.stuck:
                    self.restart = f"no other plan was found for what did not fit: {self.stuck}"
                self._tell(TransitionEnded(plan.epoch, True))
                self._controller.plan = self._plan
            case BeginTransition():
                self._pending = effect
            case AbortTransition():
                self._pending = None
            case Restart(because):
                self.restart = because
            case _:
                """Holding is the supervisor's: a plan changes at boundaries only, and lost units hold at once."""

    def _search(self, search: Search) -> None:
        question = self._estimate.question(
            self._usable(), self._plan, self._schedule.ordinals, self._drained & self._present
        )
        asked = Asked(search.search, search.widening, question)

        async def ask() -> None:
            self._report(await self._searcher.search(asked))

        self._spawn(ask(), f"search-{search.search}")

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _usable(self) -> Cluster:
        gone = [slot.id for slot in self._cluster.slots() if slot.id not in self._pool]
        return self._cluster.without(gone) if gone else self._cluster

    # Predictions

    def _expect(self, step_s: float) -> bool:
        """Say whether a plan that was chosen for what it promised has now been measured.

        That is a reason to think again: what its layouts had not shown before the change was a guess.
        """
        expected = self._expected
        if expected is None:
            return False
        expected.measured_s.append(step_s)
        if len(expected.measured_s) <= COMPARED_STEPS:
            return False
        settled = expected.measured_s[1:]  # the first one finds queues of the old plan
        pairs = [(one + other) / 2 for one, other in pairwise(settled)]
        self._compare(expected.epoch, "step", expected.step_s, median(pairs))
        self._expected = None
        return True

    def _compare(self, epoch: PlanEpoch, what: str, predicted_s: float, measured_s: float) -> None:
        if math.isfinite(predicted_s) and math.isfinite(measured_s):
            self._journal.append(
                record.Compared(epoch=epoch, what=what, predicted_s=predicted_s, measured_s=measured_s)  # type: ignore[arg-type]
            )
