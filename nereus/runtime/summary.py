"""What came of a run, in figures that fit on one screen?

Owner: the supervisor at the end, and the report; both read the same files, so they cannot disagree.
Invariant (tests/runtime/test_report.py): every figure follows from metrics.jsonl and the journal alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from nereus.runtime.journal import Progress

WINDOW = 10
"""The first and the last so many steps are compared."""

OVERLAPPED = frozenset(("step", "generate", "reward", "sync", "switch", "publish_async"))
"""Names under ``timing_s/`` that run beside the training side, or that are its total; all others add up to the step."""


class Summary(Struct, frozen=True, kw_only=True):
    """The closing figures of a run; NaN: was not measured."""

    run: str
    outcome: str
    """One sentence: why the run ended."""
    ok: bool = True
    steps: int = 0
    attempts: int = 1
    wall_s: float = 0.0
    reward_first: float = math.nan
    """Mean reward of the first steps (``WINDOW``; fewer in a short run)."""
    reward_last: float = math.nan
    window: int = 0
    tokens: float = 0.0
    tokens_per_s: float = math.nan
    response_first: float = math.nan
    response_last: float = math.nan
    staleness_mean: float = math.nan
    staleness_max: float = math.nan
    lost: int = 0
    """Workers that were lost (and replaced)."""
    reissued: int = 0
    time_split_s: dict[str, float] = {}
    """Mean seconds of a step by part of the training side, largest first."""
    step_s: float = math.nan


def summarize(
    rows: Sequence[Mapping[str, float]], progress: Progress, *, run: str, outcome: str, ok: bool = True
) -> Summary:
    """Condense the rows of metrics.jsonl and the journal's counters."""
    window = min(WINDOW, max(1, len(rows) // 2)) if rows else 0
    first, last = rows[:window], rows[-window:] if window else []
    return Summary(
        run=run,
        outcome=outcome,
        ok=ok,
        steps=progress.step or len(rows),
        attempts=max(progress.attempt, 1),
        wall_s=rows[-1].get("wall_s", math.nan) if rows else 0.0,
        reward_first=mean(column(first, "reward/mean")),
        reward_last=mean(column(last, "reward/mean")),
        window=window,
        tokens=math.fsum(finite(column(rows, "perf/tokens"))),
        tokens_per_s=mean(column(rows, "perf/tokens_per_s")),
        response_first=mean(column(first, "response_length/mean")),
        response_last=mean(column(last, "response_length/mean")),
        staleness_mean=mean(column(rows, "staleness/mean")),
        staleness_max=max(finite(column(rows, "staleness/max")), default=math.nan),
        lost=progress.lost,
        reissued=progress.reissued,
        time_split_s=time_split(rows),
        step_s=mean(column(rows, "timing_s/step")),
    )


def time_split(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean seconds per step of each part of the training side, largest first; the rest is ``other``."""
    names = {name for row in rows for name in row if name.startswith("timing_s/")}
    parts = {name.removeprefix("timing_s/") for name in names} - OVERLAPPED
    split = {part: mean(column(rows, f"timing_s/{part}")) for part in parts}
    split = {part: seconds for part, seconds in split.items() if seconds > 0}
    rest = mean(column(rows, "timing_s/step")) - math.fsum(split.values())
    if rest > 0:
        split["other"] = rest
    return dict(sorted(split.items(), key=lambda item: -item[1]))


def column(rows: Iterable[Mapping[str, float]], name: str) -> list[float]:
    """Return the figure ``name`` of every row; NaN where a row has none."""
    return [row.get(name, math.nan) for row in rows]


def finite(values: Iterable[float]) -> list[float]:
    """Return the values without NaN and infinities."""
    return [value for value in values if math.isfinite(value)]


def mean(values: Iterable[float]) -> float:
    """Return the mean of the finite values, NaN if there are none."""
    kept = finite(values)
    return statistics.fmean(kept) if kept else math.nan
