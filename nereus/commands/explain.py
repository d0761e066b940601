"""What was decided in a run, and why? The command ``nereus explain RUN``.

Reads the journal alone, needs no lock, and works beside a running job. Each decision and each event that made one
necessary is a sentence, with what was predicted and what was measured; what merely goes on (steps, grants) is counted.
Invariants (tests/commands/test_explain.py): every decision, comparison, loss, re-issue, checkpoint, drain and end is
told once, in order; the steps that are counted add up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from nereus.actors.names import REWARD, slot_worker
from nereus.core.plan import POLICY_GENERATION, Emu, ModelStage, Plan, Replication
from nereus.core.units import format_bytes, format_seconds, listed
from nereus.errors import ConfigError
from nereus.runtime import journal as record
from nereus.runtime.journal import Contents, Entry, JournalError, read_journal
from nereus.runtime.timeline import Change, layouts, timeline

_REASONS = {"start": "the job's train.layout and rollout.layout ask for it (nothing is searched at the start yet)"}
NO_CHANGE = "No other plan was considered: neither the job (adapt.at) nor anything that happened asked for one."

_DECISIONS = {
    "trigger": "Another plan may be called for",
    "opportunistic": "A better plan was found and is taken",
    "urgent": "Another plan is needed and was found",
    "stay": "The plan stays",
    "widen": "No plan fits yet, and the search is widened",
    "restart": "Only a restart from the newest checkpoint is left",
    "failed": "The change did not succeed, and another plan is looked for at once",
    "stale": "An answer came too late and changes nothing",
}


class Told(Struct, frozen=True):
    """One sentence, and when what it tells happened (seconds since the first attempt began)."""

    t: float
    kind: str
    says: str


def explain(folder: Path) -> tuple[Told, ...]:
    """Return the story of the run in ``folder`` (or of a journal file); ``ConfigError`` if it cannot be read."""
    path = folder / "journal.jsonl" if folder.is_dir() else folder
    contents = _read(path, folder)
    told = tuple(_tell(contents.entries, timeline(contents.entries).changes))
    if contents.torn_bytes:
        last = contents.entries[-1].t if contents.entries else 0.0
        told += (Told(last, "torn", f"The last {contents.torn_bytes} bytes of the journal are an unfinished record."),)
    return told


def show(folder: Path, *, as_json: bool) -> str:
    """Return the story as text, or as one JSON array of objects with ``t``, ``kind`` and ``says``."""
    told = explain(folder)
    return msgspec.json.encode(told).decode() + "\n" if as_json else render_story(told)


def render_story(told: Iterable[Told]) -> str:
    """Write the story one sentence a line."""
    lines = [f"{_clock(one.t)}  {one.says}" for one in told]
    return "".join(line + "\n" for line in lines)


def _read(path: Path, folder: Path) -> Contents:
    try:
        return read_journal(path)
    except OSError as error:
        what = f"holds no journal ({error.strerror})" if folder.is_dir() else f"cannot be read ({error.strerror})"
        raise ConfigError(what, where=str(folder), remedy="name a run folder") from None
    except JournalError as error:
        raise ConfigError(f"the journal is damaged: {error}", where=str(folder), remedy="restore the file") from None


class _Steps:
    """Steps that went by without anything to tell, until something is to be told."""

    def __init__(self) -> None:
        self.first = self.last = -1
        self.groups = 0
        self.t = 0.0

    def add(self, t: float, step: int, groups: int) -> None:
        if self.first < 0:
            self.first = step
        self.last, self.t = step, t
        self.groups += groups

    def take(self) -> Iterator[Told]:
        """Tell what was counted, and forget it."""
        if self.first >= 0:
            which = f"Step {self.first}" if self.first == self.last else f"Steps {self.first} to {self.last}"
            verb = "was" if self.first == self.last else "were"
            yield Told(self.t, "trained", f"{which} {verb} trained on {self.groups} groups, as planned.")
        self.first, self.groups = -1, 0


def _tell(entries: Sequence[Entry], changes: Iterable[Change]) -> Iterator[Told]:
    steps = _Steps()
    reissued = dict[str, list[int]]()
    readopted = {entry.record.attempt for entry in entries if isinstance(entry.record, record.Readopted)}
    story = _Story(changes, readopted)
    last = 0.0
    for entry in entries:
        one, t = entry.record, entry.t
        if reissued and not isinstance(one, record.Reissued):
            yield from _reissues(last, reissued)
        last = t
        match one:
            case record.Trained(step=step, groups=groups, skipped=False):
                steps.add(t, step, len(groups))
            case record.Reissued(group=group, reason=reason):
                yield from steps.take()
                reissued.setdefault(reason, []).append(group)
            case _:
                says = story.of(one)
                if says:
                    yield from steps.take()
                    yield Told(t, _kind(one), says)
    yield from _reissues(last, reissued)
    yield from steps.take()
    yield from story.end(last)


class _Story:
    """The words for one record after another; remembers what they refer to."""

    def __init__(self, changes: Iterable[Change], readopted: Collection[int]) -> None:
        self.changes = {(change.attempt, change.after.epoch): change for change in changes if change.ok}
        self.readopted = readopted
        """Attempts that went on from live workers."""
        self.attempt = 0
        self.plan: Plan | None = None
        self.decided = False
        self.roles: dict[str, ModelStage] = {}
        self.lost: dict[str, str] = {}
        self.joined: set[str] = set()
        self.saving: set[int] = set()
        self.plans = 0
        self.newest = -1
        self.ended = False

    def of(self, one: record.Record) -> str:
        """Return the sentence for a record; empty for one that merely says that all goes on."""
        match one:
            case record.RunStarted():
                return self._started(one)
            case record.Readopted():
                return self._readopted(one)
            case record.StepBegun():
                return ""  # its end tells it
            case record.PlanCommitted(plan=plan, why=why):
                self.plans += 1
                self.plan = plan
                self.roles = {slot_worker(slot): emu.model_stage for emu in plan.emus for slot in emu.slots}
                if why == "transition":
                    return ""  # how the transition ended says the same, and how long it took
                because = _REASONS.get(why, why)
                return f"Plan epoch {plan.epoch} was taken{', because ' + because if because else ''}: {_plan(plan)}."
            case record.TransitionBegun(plan=plan, primitives=primitives, why=why):
                count = f"{len(primitives)} primitive{'' if len(primitives) == 1 else 's'}"
                return f"A change to plan epoch {plan.epoch} began ({count}), because {why}: {_news(self.plan, plan)}."
            case record.TransitionEnded(epoch=epoch, ok=True):
                return self._in_force(one, self.changes.get((self.attempt, epoch)))
            case record.TransitionEnded(epoch=epoch, reason=reason):
                return f"The change to plan epoch {epoch} was given up, and the plan before it stays: {reason}."
            case record.Decided():
                self.decided = True
                return _decided(one)
            case record.Compared():
                return _compared(one)
            case record.WorkerJoined(worker=worker, incarnation=life):
                return self._joined(worker, life)
            case record.WorkerGone(worker=worker, why=why, expected=True):
                return f"{worker} left, as it was asked to ({why})."
            case record.WorkerGone():
                return self._lost(one)
            case record.Dropped(group=group, attempt=attempt, reason=reason):
                return f"Group {group} was given up in attempt {attempt} and will not be trained: {reason}."
            case record.Trained(step=step):
                return f"Step {step} was skipped: its update was not applied."
            case record.CheckpointBegun(step=step):
                self.saving.add(step)
            case record.CheckpointCommitted(step=step, version=version, cursor=cursor, folder=name):
                self.saving.discard(step)
                self.newest = step
                return f"The checkpoint of step {step} (version {version}, {cursor} groups) is complete in {name}."
            case record.Drain(reason=reason):
                return f"The run was asked to end early ({reason}): finish the step, save, leave."
            case record.RunEnded(reason=reason, ok=ok):
                self.ended = True
                return f"The run ended {'well' if ok else 'in failure'}: {reason}." + self._unsaved()
            case _:
                # Kinds that this story has no words for, but that give a reason, are decisions: told in their own.
                why = getattr(one, "why", "") or getattr(one, "reason", "")
                return f"{_kind(one).replace('_', ' ').capitalize()}: {why}." if why else ""
        return ""

    def end(self, t: float) -> Iterator[Told]:
        """Tell what is still open, and what was never decided."""
        if not self.ended:
            says = "The journal ends here: the run goes on, or was killed."
            yield Told(t, "open", says + self._unsaved())
        if self.plans <= 1 and not self.decided:
            yield Told(t, "no_change", NO_CHANGE)

    def _in_force(self, one: record.TransitionEnded, change: Change | None) -> str:
        size = format_bytes(one.moved_bytes)
        says = f"Plan epoch {one.epoch} is in force after {one.seconds:.2f} s; {size} of state went between slots"
        if change is None or not math.isfinite(change.step_after_s):
            return f"{says}."
        before, after = format_seconds(change.step_before_s), format_seconds(change.step_after_s)
        if not math.isfinite(change.step_before_s):
            return f"{says}. A step takes {after} since."
        return f"{says}. A step took {before} before and takes {after} since."

    def _started(self, one: record.RunStarted) -> str:
        self.attempt += 1
        died = "" if one.attempt == 1 or self.ended else "The attempt before did not end in good order. "
        self.ended = False
        self.lost, self.joined = {}, set()
        unsaved = self._unsaved()
        self.saving = set()
        if one.attempt in self.readopted:
            return f"{died}Attempt {one.attempt} took the run over before step {one.step}.{unsaved}"
        if one.step == 0:
            again = "" if one.attempt == 1 else " from the beginning"
            return f"{died}Attempt {one.attempt} of {one.run} began{again} (seed {one.seed})."
        return (
            f"{died}Attempt {one.attempt} went on from the checkpoint of step {one.step} (version {one.version}, "
            f"{one.cursor} groups); what was trained after it is void and is trained again.{unsaved}"
        )

    def _readopted(self, one: record.Readopted) -> str:
        says = f"It went on with the workers of the attempt before ({', '.join(one.workers)}), from what they hold, "
        says += f"under plan epoch {one.epoch}; nothing that was trained is void."
        if one.completed:
            says += f" The trainers had made step {one.step - 1} when their supervisor died; it counts."
        return says + (f" Lost with the supervisor: {', '.join(one.lost)}." if one.lost else "")

    def _lost(self, one: record.WorkerGone) -> str:
        if one.worker in self.lost:
            return f"What is left of {one.worker} is refused: {one.why}."
        self.lost[one.worker] = one.why
        role = self.roles.get(one.worker)
        if role == POLICY_GENERATION:
            return f"{one.worker} ({role}) was lost: {one.why}. Others take over its groups."
        if one.worker == REWARD:
            return f"{one.worker} was lost: {one.why}. A replacement is due."
        return f"{one.worker}{f' ({role})' if role else ''} was lost: {one.why}."

    def _joined(self, worker: str, life: str) -> str:
        why = self.lost.pop(worker, "")
        if why:
            return f"{worker} was replaced (incarnation {life}) after it was lost: {why}."
        again = worker in self.joined
        self.joined.add(worker)
        return f"{worker} joined again (incarnation {life})." if again else ""

    def _unsaved(self) -> str:
        if not self.saving:
            return ""
        steps = listed(sorted(self.saving))
        return f" The checkpoint of step {steps} was begun and never completed; it does not count."


def _reissues(t: float, reissued: dict[str, list[int]]) -> Iterator[Told]:
    for reason, groups in reissued.items():
        count = f"{len(groups)} group{'s' if len(groups) > 1 else ''}"
        yield Told(t, "reissued", f"{count} ({listed(groups)}) will be generated again: {reason}.")
    reissued.clear()


def _kind(one: record.Record) -> str:
    return str(one.__struct_config__.tag)


def _decided(one: record.Decided) -> str:
    """Return what the controller weighed: its own sentence, introduced, and the numbers that this does not hold."""
    numbers = one.numbers
    refused = one.decision == "stay" and "latency_new_s" in numbers
    opening = "A plan on offer was refused" if refused else _DECISIONS.get(one.decision, one.decision.capitalize())
    says = f"{opening}: {one.because}."
    new_s, now_s, way_s = (numbers.get(name) for name in ("latency_new_s", "latency_now_s", "transition_s"))
    if new_s is not None:
        now = "one that the current plan cannot do" if now_s is None else f"{format_seconds(now_s)} now"
        says += f" Predicted: a step of {format_seconds(new_s)} instead of {now}"
        says += "" if way_s is None else f", after a change of {format_seconds(way_s)}"
        peak = numbers.get("peak_bytes")
        says += f"; the fullest slot holds {format_bytes(peak)}." if peak else "."
    horizon = numbers.get("horizon_steps")
    if horizon is not None:
        says += f" The next such event is expected in about {horizon:.3g} steps."
    return says


def _compared(one: record.Compared) -> str:
    what = f"A step under plan epoch {one.epoch}" if one.what == "step" else f"The change to plan epoch {one.epoch}"
    error = (one.measured_s - one.predicted_s) / one.predicted_s if one.predicted_s > 0 else 0.0
    beside = f", {abs(error):.0%} {'more' if error > 0 else 'less'}" if abs(error) >= 0.005 else ""
    measured, predicted = format_seconds(one.measured_s), format_seconds(one.predicted_s)
    return f"{what} took {measured}{beside}; predicted were {predicted}."


def _plan(plan: Plan) -> str:
    """Return all model-stages that use devices, with their slots."""
    return "; ".join(f"{stage} {layout} on {_slots(plan.of(stage))}" for stage, layout in _stages(plan))


def _news(before: Plan | None, after: Plan) -> str:
    """Return what ``after`` changes: what stays as it is, units and slots, is not listed."""
    if before is None:
        return _plan(after)
    known, now = layouts(before), layouts(after)
    parts = list[str]()
    for stage, layout in _stages(after):
        units = after.of(stage)
        if units != before.of(stage):
            change = "stays" if known.get(stage) == layout else f"{known[stage]} →" if stage in known else "new:"
            parts.append(f"{stage} {change} {layout} on {_slots(units)}")
    parts += [f"{stage} ends" for stage in sorted(known.keys() - now.keys())]
    return "; ".join(parts) or "the same units on the same slots"


def _stages(plan: Plan) -> list[tuple[ModelStage, Replication]]:
    return sorted(layouts(plan).items())


def _slots(units: Sequence[Emu]) -> str:
    return f"slot{'s' if len(units) > 1 else ''} " + ", ".join("+".join(map(str, emu.slots)) for emu in units)


def _clock(t: float) -> str:
    return f"+{format_seconds(t) if t >= 1 else f'{t:.1f} s'}".rjust(9)
