"""What happens next? Events in, effects out: the one place that decides when to search, to move and to stay.

Pure: no clock, no search, no device. The live supervisor and the simulator drive the same object and carry the effects
out; what takes time comes back as an event. Invariants (tests/control/test_controller.py):

- at most one search and one transition are under way; an answer to a search that was overtaken changes nothing;
- lost slots hold the job at once and start an urgent search, whatever is under way; other triggers wait for the running
  transition to end;
- every plan found gets a recorded verdict; the first that is admitted is begun, ordered by latency, next-best ones only
  within 10 % of the best unless urgent;
- an urgent search that finds nothing is widened: smaller micro-batches, then recomputation; then the plan is kept if it
  still works; else most of the memory's margin is given up, and a restart from the newest checkpoint comes last;
- references are reset after every replan, so that noise and refusals do not start the next one.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from nereus.control.admission import GAMMA, WITHIN, Admission, Offer, admit
from nereus.control.horizon import Horizon
from nereus.control.monitor import Monitoring, Signals, Trigger
from nereus.core.plan import Plan, PlanEpoch, SlotId
from nereus.core.units import listed

SLOTS = "slots"
CALIBRATION = "calibration"


class Widening(enum.IntEnum):
    """What a search may use, each with all before it."""

    PLANS = 0
    MICRO_BATCH = 1
    RECOMPUTE = 2
    MARGIN = 3
    RESTART = 4


# Events


class StepReport(Struct, frozen=True, tag=True):
    """A step ended."""

    step: int
    signals: Signals
    fits: bool = True
    """False: it needed more memory than there is, and is still to be done."""


class SlotsLost(Struct, frozen=True, tag=True):
    """Slots died or were taken away; units on them are gone."""

    step: int
    slots: tuple[SlotId, ...]


class PoolChanged(Struct, frozen=True, tag=True):
    """Slots were added, or will be taken away (``revoked``) while they still work."""

    step: int
    added: tuple[SlotId, ...] = ()
    revoked: tuple[SlotId, ...] = ()


class Proposal(Struct, frozen=True):
    """A plan and its prices; trigger, horizon and urgency are the controller's to add."""

    plan: Plan
    latency_now_s: float
    latency_new_s: float
    transition_s: float
    peak_bytes: int
    usable_bytes: int
    stuck: str = ""


class Calibrated(Struct, frozen=True, tag=True):
    """Measurements of the first plan, or of one that was chosen, stand in the place of guesses; nothing will make this
    happen again in ``remaining`` steps, so that is the horizon."""

    step: int
    remaining: int


class PlanFound(Struct, frozen=True, tag=True):
    """A search ended; no proposals means that nothing fits, and ``because`` says why."""

    search: int
    proposals: tuple[Proposal, ...] = ()
    because: str = ""


class TransitionEnded(Struct, frozen=True, tag=True):
    """The transition to ``epoch`` is complete, or failed and what is intact is intact."""

    epoch: PlanEpoch
    completed: bool
    because: str = ""


Event = StepReport | SlotsLost | PoolChanged | Calibrated | PlanFound | TransitionEnded


# Effects


class Search(Struct, frozen=True, tag=True):
    """Look for a plan on the intact slots."""

    search: int
    because: str
    urgent: bool
    widening: Widening = Widening.PLANS


class Hold(Struct, frozen=True, tag=True):
    """Start nothing new: from the next safe boundary on, or ``at_once`` where units are gone."""

    because: str
    at_once: bool = False


class BeginTransition(Struct, frozen=True, tag=True):
    """Move to this plan as soon as the job is held."""

    plan: Plan
    because: str


class AbortTransition(Struct, frozen=True, tag=True):
    """Cancel the running transition: a unit it counts on is gone. Its ``TransitionEnded`` need not follow."""

    epoch: PlanEpoch
    because: str


class Restart(Struct, frozen=True, tag=True):
    """Go back to the newest checkpoint on whatever slots there are: nothing else is left."""

    because: str


class Resume(Struct, frozen=True, tag=True):
    """Go on under this plan epoch."""

    epoch: PlanEpoch


class Record(Struct, frozen=True, tag=True):
    """Write this to the journal."""

    kind: str
    because: str
    numbers: dict[str, float] = {}


Effect = Search | Hold | BeginTransition | AbortTransition | Restart | Resume | Record


class _Searching(Struct, frozen=True):
    """The search under way and what made it start."""

    number: int
    triggers: tuple[Trigger, ...]
    widening: Widening

    @property
    def urgent(self) -> bool:
        return any(trigger.urgent for trigger in self.triggers)

    @property
    def bearable(self) -> bool:
        """Return whether the job can go on as it is if nothing is found."""
        return all(trigger.bearable for trigger in self.triggers if trigger.urgent)


class Controller:
    """The state machine; ``on`` takes one event and returns the effects in the order they are to be carried out."""

    def __init__(self, plan: Plan, monitor: Monitoring, *, gamma: float = GAMMA, admission: Admission = admit) -> None:
        self.plan = plan
        self.monitor = monitor
        self.gamma = gamma
        self._admission = admission
        self.horizon = Horizon()
        self.held = False
        self.moving: Plan | None = None
        self._searching: _Searching | None = None
        self._searches = 0
        self._waiting: tuple[Trigger, ...] = ()

    @property
    def searching(self) -> bool:
        return self._searching is not None

    def on(self, event: Event) -> list[Effect]:
        """Return what is to be done now."""
        match event:
            case StepReport():
                return self._step(event)
            case SlotsLost():
                return self._lost(event)
            case PoolChanged():
                return self._pool(event)
            case Calibrated():
                return self._calibrated(event)
            case PlanFound():
                return self._found(event)
            case TransitionEnded():
                return self._ended(event)

    def _step(self, report: StepReport) -> list[Effect]:
        self.monitor, triggers = self.monitor.observe(report.signals)
        if not report.fits:
            triggers = tuple(replace(trigger, bearable=False) for trigger in triggers)
        return self._trigger(report.step, triggers)

    def _pool(self, change: PoolChanged) -> list[Effect]:
        used = sorted(self._used() & set(change.revoked))
        because = f"{len(change.added)} slots added, {len(change.revoked)} to be taken away"
        if used:
            because += f", {len(used)} of them in use: {listed(used)}"
        return self._trigger(change.step, [Trigger(SLOTS, because, urgent=bool(used))])

    def _calibrated(self, calibrated: Calibrated) -> list[Effect]:
        expected = {**self.horizon.expected, CALIBRATION: float(max(1, calibrated.remaining))}
        self.horizon = replace(self.horizon, expected=expected)
        because = f"speeds and memory are measured now; {calibrated.remaining} steps remain"
        return self._trigger(calibrated.step, [Trigger(CALIBRATION, because)])

    def _lost(self, lost: SlotsLost) -> list[Effect]:
        """Hold and search at once where the plan, or the one being moved to, used a lost slot."""
        used = sorted(self._used() & set(lost.slots))
        if not used:
            return self._trigger(lost.step, [Trigger(SLOTS, f"{len(lost.slots)} idle slots were lost")])
        trigger = Trigger(SLOTS, f"slots {listed(used)} were lost", urgent=True)
        self.horizon = self.horizon.crossed(SLOTS, lost.step)
        effects: list[Effect] = [Record("trigger", trigger.because)]
        if self.moving:
            effects.append(AbortTransition(self.moving.epoch, trigger.because))
            self.moving = None
        self.held = True
        effects.append(Hold(trigger.because, at_once=True))
        return [*effects, self._search((*self._open_triggers(), trigger), Widening.PLANS)]

    def _used(self) -> frozenset[SlotId]:
        return self.plan.slots() | (self.moving.slots() if self.moving else frozenset())

    def _open_triggers(self) -> tuple[Trigger, ...]:
        """Return the triggers that no replan has answered yet, and forget that they wait."""
        found = (*self._waiting, *(self._searching.triggers if self._searching else ()))
        self._waiting = ()
        return found

    def _trigger(self, step: int, triggers: Iterable[Trigger]) -> list[Effect]:
        """Count the crossings and search, unless a search or a transition is under way: then they wait.

        An urgent trigger overtakes a search that is not.
        """
        effects, fresh = list[Effect](), tuple(triggers)
        for trigger in fresh:
            self.horizon = self.horizon.crossed(trigger.signal, step)
            effects.append(Record("trigger", trigger.because, {"horizon_steps": self.horizon.steps([trigger.signal])}))
        if not fresh:
            return effects
        overtakes = any(trigger.urgent for trigger in fresh) and not (self._searching and self._searching.urgent)
        if self.moving or (self._searching and not overtakes):
            self._waiting = (*self._waiting, *fresh)
            return effects
        return [*effects, self._search((*self._open_triggers(), *fresh), Widening.PLANS)]

    def _search(self, triggers: tuple[Trigger, ...], widening: Widening) -> Search:
        self._searches += 1
        self._searching = _Searching(self._searches, triggers, widening)
        return Search(self._searches, _because(triggers), self._searching.urgent, widening)

    def _found(self, found: PlanFound) -> list[Effect]:
        searching = self._searching
        if searching is None or searching.number != found.search:
            return [Record("stale", f"search {found.search} was overtaken")]
        effects = list[Effect]()
        for proposal in _eligible(found.proposals, urgent=searching.urgent):
            verdict = self._admission(self._offer(proposal, searching), gamma=self.gamma)
            numbers = {
                "latency_now_s": proposal.latency_now_s,
                "latency_new_s": proposal.latency_new_s,
                "transition_s": proposal.transition_s,
                "peak_bytes": float(proposal.peak_bytes),
                "gain_s": verdict.gain_s,
                "payback_steps": verdict.payback_steps,
                "allowed_steps": verdict.allowed_steps,
            }
            effects.append(Record(verdict.path, verdict.because, numbers))
            if verdict.admitted:
                self._searching = None
                return [*effects, *self._begin(proposal.plan, verdict.because)]
        return [*effects, *self._stay(searching, found.because or "no plan on offer was admitted")]

    def _offer(self, proposal: Proposal, searching: _Searching) -> Offer:
        return Offer(
            trigger=_because(searching.triggers),
            latency_now_s=proposal.latency_now_s,
            latency_new_s=proposal.latency_new_s,
            transition_s=proposal.transition_s,
            horizon_steps=self.horizon.steps(trigger.signal for trigger in searching.triggers),
            peak_bytes=proposal.peak_bytes,
            usable_bytes=proposal.usable_bytes,
            urgent=searching.urgent,
            stuck=proposal.stuck,
        )

    def _begin(self, plan: Plan, because: str) -> list[Effect]:
        self.moving = plan
        effects = list[Effect]()
        if not self.held:
            effects.append(Hold(because))
            self.held = True
        return [*effects, BeginTransition(plan, because)]

    def _stay(self, searching: _Searching, because: str) -> list[Effect]:
        """Keep the plan; where it cannot be kept, widen the search, and restart when nothing is left to try."""
        if not searching.urgent:
            self._searching = None
            self.monitor = self.monitor.rebased()
            return [Record("stay", because), *self._next()]
        wider, last = Widening(searching.widening + 1), Widening.MARGIN if searching.bearable else Widening.RESTART
        if wider < last:
            return [Record("widen", because), self._search(searching.triggers, wider)]
        self._searching = None
        if searching.bearable:
            self.held = False
            self.monitor = self.monitor.rebased(bearing=True)
            stays = Record("stay", f"{because}; the job goes on under its plan, which still works")
            return [stays, Resume(self.plan.epoch), *self._next()]
        self.held = True
        self._waiting = ()
        self.monitor = self.monitor.rebased()
        return [Record("restart", because), Restart(f"{_because(searching.triggers)}; {because}")]

    def _next(self) -> list[Effect]:
        """Search for what came up meanwhile."""
        waiting, self._waiting = self._waiting, ()
        return [self._search(waiting, Widening.PLANS)] if waiting else []

    def _ended(self, ended: TransitionEnded) -> list[Effect]:
        if self.moving is None or self.moving.epoch != ended.epoch:
            return [Record("stale", f"the transition to epoch {ended.epoch} was given up before")]
        if not ended.completed:
            self.moving = None
            why = f"the transition to epoch {ended.epoch} failed: {ended.because}"
            failed = Trigger(SLOTS, why, urgent=True, bearable=True)
            return [Record("failed", failed.because), self._search((*self._open_triggers(), failed), Widening.PLANS)]
        self.plan, self.moving, self.held = self.moving, None, False
        self.monitor = self.monitor.rebased()
        return [Resume(ended.epoch), *self._next()]


def _eligible(proposals: tuple[Proposal, ...], *, urgent: bool) -> list[Proposal]:
    """Return the proposals to try, fastest first, of equals the one with the cheapest way."""
    ordered = sorted(proposals, key=lambda one: (one.latency_new_s, one.transition_s))
    limit = math.inf if urgent or not ordered else ordered[0].latency_new_s * (1 + WITHIN)
    return [proposal for proposal in ordered if proposal.latency_new_s <= limit]


def _because(triggers: tuple[Trigger, ...]) -> str:
    return "; ".join(dict.fromkeys(trigger.because for trigger in triggers))
