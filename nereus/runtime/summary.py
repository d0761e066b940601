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

BESIDE = frozenset(("step", "generate", "reward"))
"""Names under ``timing_s/`` that are the total of a step, or that run beside the training side."""


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
    changes: int = 0
    """Plan changes that came into force."""
    changes_s: float = 0.0
    """What plan changes took together, those given up included."""
    moved_bytes: int = 0
    given_up: int = 0
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
        changes=progress.changes,
        changes_s=progress.changes_s,
        moved_bytes=progress.moved_bytes,
        given_up=progress.given_up,
        time_split_s=time_split(rows),
        step_s=mean(column(rows, "timing_s/step")),
    )


def time_split(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean seconds per step of each part of the training side, largest first."""
    split = {part: mean(values) for part, values in time_parts(rows).items()}
    return dict(sorted(split.items(), key=lambda item: -item[1]))


def time_parts(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Cut each step's seconds into parts that add up to ``timing_s/step``.

    ``timing_s/train`` holds the parts that the trainer measured inside it, so only its remainder counts as ``train``;
    a plan change came before its step, while the trainers waited, and counts as ``plan_change``; what no part explains
    is ``other``. Parts below a thousandth of the step are left out.
    """
    names = {name.removeprefix("timing_s/") for row in rows for name in row if name.startswith("timing_s/")} - BESIDE
    inner = {name for name in names if name != "train" and not name.startswith("wait_")}
    parts: dict[str, list[float]] = {name: [] for name in sorted({*names, "plan_change"})}
    parts["other"] = []
    for row in rows:
        seconds = {name: _or_zero(row.get(f"timing_s/{name}")) for name in names}
        if "train" in seconds:
            seconds["train"] = max(0.0, seconds["train"] - math.fsum(seconds[name] for name in inner))
        waited = seconds.get("wait_for_batch", 0.0)
        seconds["plan_change"] = min(_or_zero(row.get("plan/transition_s")), waited)
        if waited:
            seconds["wait_for_batch"] = waited - seconds["plan_change"]
        for name, value in seconds.items():
            parts[name].append(value)
        parts["other"].append(max(0.0, _or_zero(row.get("timing_s/step")) - math.fsum(seconds.values())))
    least = 1e-3 * mean(_or_zero(row.get("timing_s/step")) for row in rows)
    return {name: values for name, values in parts.items() if values and mean(values) > max(least, 0.0)}


def _or_zero(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


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
