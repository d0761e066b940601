"""Which unit was on which slot, from when to when, and what did each plan change do to the time of a step?

Owner: the report and ``nereus explain``, which read a journal. Pure: entries in, values out. All times are those of the
journal: seconds of a run at work, over all attempts; hours between two attempts do not count.

Invariants (tests/runtime/test_timeline.py): the spans of one slot never overlap and lie within the run; eras follow
each other without overlap; every change that was begun is listed once, with its end; a step's seconds are without
those of plan changes, so that steps before and after a change can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Literal

import msgspec
from msgspec import Struct

from nereus.actors.names import slot_of, slot_worker
from nereus.core.plan import Emu, ModelStage, Plan, PlanEpoch, Replication, SlotId, Stage
from nereus.runtime import journal as record
from nereus.runtime.journal import Entry

NEIGHBOURS = 10
"""So many steps on either side of a change say what a step takes; fewer where another change is nearer."""

_VERBS = {Stage.TRAINING: "train", Stage.GENERATION: "generate", Stage.INFERENCE: "infer"}
_ORDER = (Stage.TRAINING, Stage.GENERATION, Stage.INFERENCE)


State = Literal["starting", "working", "moving"]
"""``starting``: the unit is being built, or waits for its first weights; ``moving``: a plan change takes its place."""


class Span(Struct, frozen=True):
    """One unit on one slot."""

    slot: SlotId
    emu: Emu
    state: State
    begin_s: float
    end_s: float


class Era(Struct, frozen=True):
    """One plan in force."""

    attempt: int
    plan: Plan
    begin_s: float
    end_s: float


class Loss(Struct, frozen=True):
    """A worker that left without being asked to."""

    worker: str
    slot: SlotId | None
    at_s: float
    why: str


class Step(Struct, frozen=True):
    """One optimizer step."""

    attempt: int
    epoch: PlanEpoch
    step: int
    end_s: float
    seconds: float
    """From the step before to this one, less what plan changes took meanwhile."""


class Change(Struct, frozen=True, kw_only=True):
    """One plan change, in force or given up. NaN: not known."""

    attempt: int
    step: int
    """So many steps were done when it began."""
    before: Plan
    after: Plan
    why: str
    begin_s: float
    end_s: float
    ok: bool = True
    reason: str = ""
    """Why it was given up."""
    primitives: tuple[str, ...] = ()
    moved_bytes: int = 0
    seconds: float = 0.0
    predicted_s: float = math.nan
    step_predicted_s: float = math.nan
    step_before_s: float = math.nan
    step_after_s: float = math.nan

    @property
    def touched(self) -> frozenset[SlotId]:
        """The slots whose unit is another one afterwards."""
        return _touched(self.before, self.after)


class Timeline(Struct, frozen=True):
    """What a run did with its slots."""

    slots: tuple[SlotId, ...] = ()
    """Device slots that joined or were in a plan."""
    spans: tuple[Span, ...] = ()
    eras: tuple[Era, ...] = ()
    changes: tuple[Change, ...] = ()
    losses: tuple[Loss, ...] = ()
    steps: tuple[Step, ...] = ()
    attempts: tuple[float, ...] = ()
    """When each attempt began."""
    end_s: float = 0.0


def layouts(plan: Plan) -> dict[ModelStage, Replication]:
    """Return how often each model-stage that uses devices is there and in which layout, training first."""
    found = [model_stage for model_stage in plan.model_stages() if model_stage.stage in _ORDER]
    found.sort(key=lambda one: (one.model != "policy", _ORDER.index(one.stage), one))
    return {model_stage: Replication(len(units := plan.of(model_stage)), units[0].layout) for model_stage in found}


def stage_name(model_stage: ModelStage) -> str:
    """Return what the model-stage does, in a word or two: ``train``, ``critic infer``."""
    verb = _VERBS[model_stage.stage]
    return verb if model_stage.model == "policy" else f"{model_stage.model} {verb}"


def summarized(plan: Plan) -> str:
    """Return the layouts of ``plan`` on one line: ``train d1t2p1 recomputed · generate d2t1p1``."""
    return " · ".join(
        f"{stage_name(model_stage)} {layout}{' recomputed' if model_stage in plan.recomputed else ''}"
        for model_stage, layout in layouts(plan).items()
    )


def timeline(entries: Iterable[Entry]) -> Timeline:
    """Return the timeline of a run from the entries of its journal."""
    builder = _Builder()
    for entry in entries:
        builder.add(entry.t, entry.record)
    return builder.finished()


class _Builder:
    """Follows a journal; what is open is closed by what follows, or by the end."""

    def __init__(self) -> None:
        self._t = 0.0
        self._plan: Plan | None = None
        self._plan_since_s = 0.0
        self._open: dict[SlotId, tuple[Emu, State, float]] = {}
        """Slot -> its unit, what that does, since when."""
        self._gone: set[str] = set()
        self._done = 0
        self._mark_s = math.nan
        """When the last step ended, or the first could begin."""
        self._paused_s = 0.0
        self._begun: tuple[float, Plan | None, record.TransitionBegun] | None = None
        """The change in flight: since when, and under which plan."""
        self._slots: set[SlotId] = set()
        self._spans: list[Span] = []
        self._eras: list[Era] = []
        self._changes: list[Change] = []
        self._losses: list[Loss] = []
        self._steps: list[Step] = []
        self._attempts: list[float] = []
        self._compared: dict[tuple[int, PlanEpoch, str], float] = {}

    def add(self, t: float, one: record.Record) -> None:
        """Take in one record."""
        self._t = t
        match one:
            case record.RunStarted(step=step):
                self._stop("the attempt ended in the middle of it")
                self._attempts.append(t)
                self._done, self._mark_s, self._paused_s = step, math.nan, 0.0
                self._gone.clear()
            case record.PlanCommitted(plan=plan, why=why):
                self._commit(plan, why)
            case record.TransitionBegun():
                self._begin(one)
            case record.TransitionEnded():
                self._conclude(one)
            case record.WorkerJoined(worker=worker):
                self._join(worker)
            case record.WorkerGone():
                self._leave(one)
            case record.VersionReady():
                self._mark_s = t if math.isnan(self._mark_s) else self._mark_s
                self._works(emu for emu, _, _ in self._open.values() if emu.model_stage.stage is not Stage.GENERATION)
            case record.WeightsLive(worker=worker):
                slot = slot_of(worker)
                if slot in self._open:
                    self._works([self._open[slot][0]])
            case record.Trained(step=step):
                self._trained(step)
            case record.Compared(epoch=epoch, what=what, predicted_s=predicted_s):
                self._compared[len(self._attempts), epoch, what] = predicted_s
            case record.RunEnded():
                self._stop("the run ended in the middle of it")

    def finished(self) -> Timeline:
        """Close what is open and return all."""
        self._stop("the journal ends in the middle of it")
        return Timeline(
            tuple(sorted(self._slots)),
            tuple(sorted(self._spans, key=lambda span: (span.begin_s, span.slot))),
            tuple(self._eras),
            tuple(map(self._measured, self._changes)),
            tuple(self._losses),
            tuple(self._steps),
            tuple(self._attempts),
            self._t,
        )

    # Slots

    def _occupy(self, slot: SlotId, emu: Emu, state: State) -> None:
        self._open[slot] = (emu, state, self._t)
        self._slots.add(slot)

    def _turn(self, slots: Iterable[SlotId], before: State, after: State) -> None:
        """Units on ``slots`` that do one thing do another from now on."""
        for slot in slots:
            if slot in self._open and self._open[slot][1] == before:
                emu = self._open[slot][0]
                self._vacate(slot)
                self._occupy(slot, emu, after)

    def _vacate(self, slot: SlotId) -> None:
        if slot in self._open:
            emu, state, since = self._open.pop(slot)
            if self._t > since:
                self._spans.append(Span(slot, emu, state, since, self._t))

    def _works(self, units: Iterable[Emu]) -> None:
        """Units that were starting are at work from now on."""
        self._turn({slot for emu in units for slot in emu.slots}, "starting", "working")

    def _join(self, worker: str) -> None:
        slot = slot_of(worker)
        self._gone.discard(worker)
        if slot is None:
            return
        self._slots.add(slot)
        emu = next(iter(_on(self._plan, slot)), None)
        if emu is not None and slot not in self._open:
            self._occupy(slot, emu, "starting")

    def _leave(self, one: record.WorkerGone) -> None:
        slot = slot_of(one.worker)
        if slot is not None:
            self._vacate(slot)
        if not one.expected and one.worker not in self._gone:
            self._gone.add(one.worker)
            self._losses.append(Loss(one.worker, slot, self._t, one.why))

    # Plans

    def _commit(self, plan: Plan, why: str) -> None:
        before, self._plan = self._plan, plan
        first = before is None
        if before is not None:
            self._eras.append(Era(len(self._attempts), before, self._plan_since_s, self._t))
            if self._begun is None:  # put in force without a move of state, as when slots are merely given up
                change = self._change(before, plan, why, self._t)
                self._changes.append(change)
        self._plan_since_s = self._t
        for slot in {*self._open, *plan.slots()}:
            emu = next(iter(_on(plan, slot)), None)
            if slot in self._open and self._open[slot][0] == emu:
                continue
            self._vacate(slot)
            if emu is not None and slot_worker(slot) not in self._gone:
                builds = first or emu.model_stage.stage is Stage.GENERATION
                self._occupy(slot, emu, "starting" if builds else "working")

    def _begin(self, begun: record.TransitionBegun) -> None:
        self._give_up("another change took its place")
        self._begun = (self._t, self._plan, begun)
        if self._plan is not None:
            self._turn(_touched(self._plan, begun.plan), "working", "moving")

    def _conclude(self, one: record.TransitionEnded) -> None:
        if self._begun is None:
            return
        began, before, begun = self._begun
        if before is not None:
            change = self._change(before, begun.plan, begun.why, began)
            self._changes.append(
                msgspec.structs.replace(
                    change,
                    primitives=begun.primitives,
                    ok=one.ok,
                    reason=one.reason,
                    moved_bytes=one.moved_bytes,
                    seconds=one.seconds,
                )
            )
        self._turn(tuple(self._open), "moving", "working")
        self._paused_s += self._t - began
        self._begun = None

    def _give_up(self, why: str) -> None:
        """End the change in flight, whose own end is not in the journal."""
        if self._begun is not None:
            began, _, begun = self._begun
            ended = record.TransitionEnded(epoch=begun.plan.epoch, ok=False, reason=why, seconds=self._t - began)
            self._conclude(ended)

    def _change(self, before: Plan, after: Plan, why: str, began: float) -> Change:
        return Change(
            attempt=len(self._attempts),
            step=self._done,
            before=before,
            after=after,
            why=why,
            begin_s=began,
            end_s=self._t,
        )

    def _stop(self, why: str) -> None:
        """Close what an attempt leaves open."""
        self._give_up(why)
        for slot in tuple(self._open):
            self._vacate(slot)
        if self._plan is not None:
            self._eras.append(Era(len(self._attempts), self._plan, self._plan_since_s, self._t))
        self._plan = None

    # Steps

    def _trained(self, step: int) -> None:
        self._works(emu for emu, _, _ in self._open.values() if emu.model_stage.stage is not Stage.GENERATION)
        if not math.isnan(self._mark_s):
            epoch = self._plan.epoch if self._plan else 0
            seconds = max(0.0, self._t - self._mark_s - self._paused_s)
            self._steps.append(Step(len(self._attempts), epoch, step + 1, self._t, seconds))
        self._done, self._mark_s, self._paused_s = step + 1, self._t, 0.0

    def _measured(self, change: Change) -> Change:
        """Add what was predicted, and what steps took on either side."""
        step_s = {
            plan.epoch: [one.seconds for one in self._steps if (one.attempt, one.epoch) == (change.attempt, plan.epoch)]
            for plan in (change.before, change.after)
        }
        key = (change.attempt, change.after.epoch)
        after = step_s[change.after.epoch][:NEIGHBOURS] if change.ok else []
        return msgspec.structs.replace(
            change,
            predicted_s=self._compared.get((*key, "transition"), math.nan),
            step_predicted_s=self._compared.get((*key, "step"), math.nan),
            step_before_s=_median(step_s[change.before.epoch][-NEIGHBOURS:]),
            step_after_s=_median(after),
        )


def _touched(before: Plan, after: Plan) -> frozenset[SlotId]:
    return frozenset({slot for emu in {*before.emus} ^ {*after.emus} for slot in emu.slots})


def _on(plan: Plan | None, slot: SlotId) -> Iterable[Emu]:
    """Return the units on ``slot`` that use a device, what trains before what generates."""
    if plan is None:
        return ()
    units = [emu for emu in plan.on(slot) if emu.model_stage.stage in _ORDER]
    return sorted(units, key=lambda emu: _ORDER.index(emu.model_stage.stage))


def _median(values: Sequence[float]) -> float:
    return median(values) if values else math.nan
