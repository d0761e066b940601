"""How stale was what a run trained, where did its time go, and how long were the tails? Read from its journal.

Owner: results of simulated runs; any run's journal will do. What an attempt did beyond the checkpoint that the next one
went on from counts as time and not as training. Invariants (tests/sim/test_figures.py): every trained group is counted
once, at the staleness that the trainer met; training, waiting and plan changes never add up to more than the time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from nereus.runtime.journal import Accepted, Entry, RunStarted, StepBegun, Trained, TransitionEnded, VersionReady

LATE_SHARE = 0.1
"""So many groups of a batch are its tail."""


class Figures(Struct, frozen=True):
    """What a journal tells of a run; NaN: nothing was trained."""

    staleness: tuple[int, ...]
    """How many groups were trained at staleness 0, 1, 2 and so on."""
    seconds: float
    """From the first visible weights to the end of the last step."""
    step_s: float
    """Mean latency: ``seconds`` for each step."""
    trained_s: float
    waited_s: float
    """In which the trainers waited for groups or for weights to become visible."""
    changes: int
    changed_s: float
    """In which state moved and plans were put in force."""
    lost_s: float
    """In restores, in losses, and in steps that came to nothing."""
    tail_s: float
    """From the moment that nine tenths of a batch are there until all of it is, mean over the batches."""

    @property
    def staleness_mean(self) -> float:
        count = sum(self.staleness)
        return sum(lag * groups for lag, groups in enumerate(self.staleness)) / count if count else math.nan

    @property
    def changed_share(self) -> float:
        return self.changed_s / self.seconds if self.seconds else math.nan


def figures(entries: Iterable[Entry]) -> Figures:
    """Read a journal, oldest entry first."""
    reader = _Reader()
    for entry in entries:
        reader.read(entry)
    return reader.figures()


class _Step(Struct, frozen=True):
    lags: tuple[int, ...]
    seconds: float
    waited_s: float
    tail_s: float


class _Reader:
    def __init__(self) -> None:
        self._began = math.nan
        self._ended = 0.0
        self._idle_since = math.nan
        self._step_began = math.nan
        self._changed_here = 0.0
        self._steps: dict[int, _Step] = {}
        self._accepted: dict[int, tuple[int, float]] = {}
        self._changes: list[float] = []

    def read(self, entry: Entry) -> None:
        match entry.record:
            case RunStarted(step=step):
                self._steps = {number: one for number, one in self._steps.items() if number < step}
                self._accepted.clear()
                self._idle_since = math.nan
            case VersionReady() if math.isnan(self._idle_since):
                self._idle_since = entry.t
                self._began = entry.t if math.isnan(self._began) else self._began
            case Accepted(group=group, version_first=version):
                self._accepted[group] = version, entry.t
            case StepBegun():
                self._step_began = entry.t
            case TransitionEnded(seconds=seconds):
                self._changes.append(seconds)
                self._changed_here += seconds
            case Trained() as trained:
                self._trained(trained, entry.t)
            case _:
                """Tells nothing of these."""

    def _trained(self, trained: Trained, now: float) -> None:
        held = [self._accepted.pop(ref.group, (trained.version, now)) for ref in trained.groups]
        arrived = sorted(at for _, at in held)
        late = math.ceil(LATE_SHARE * len(arrived))
        waited = max(0.0, self._step_began - self._idle_since - self._changed_here)
        lags = tuple(trained.version - version for version, _ in held)
        tail = arrived[-1] - arrived[-1 - late] if len(arrived) > late else 0.0
        self._steps[trained.step] = _Step(lags, now - self._step_began, waited, tail)
        self._idle_since = self._ended = now
        self._changed_here = 0.0

    def figures(self) -> Figures:
        steps = tuple(self._steps.values())
        lags = Counter(lag for step in steps for lag in step.lags)
        seconds = self._ended - self._began if steps else 0.0
        trained, waited = math.fsum(step.seconds for step in steps), math.fsum(step.waited_s for step in steps)
        changed = math.fsum(self._changes)
        return Figures(
            tuple(lags.get(lag, 0) for lag in range(max(lags, default=-1) + 1)),
            seconds,
            seconds / len(steps) if steps else math.nan,
            trained,
            waited,
            len(self._changes),
            changed,
            max(0.0, seconds - trained - waited - changed),
            math.fsum(step.tail_s for step in steps) / len(steps) if steps else math.nan,
        )
