"""Which courses of lengths and of slots do the public logs show?

Reads tables with one row per optimizer step (``run_id, step, resp_len_mean, resp_len_max``), one row per change of a
pool (``trace_id, t_s, available``) and one per request (``dataset, out_tokens``), as they are collected for
``nereus/sim/traces``. Invariants (tests/sim/test_public.py): a spread that a log does not state is inferred from the
longest response, never invented; a course that is not in the table is refused with those that are.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import NormalDist, fmean, median

from nereus.errors import ConfigError
from nereus.sim.trace import StepLengths, Supply

P95 = NormalDist().inv_cdf(0.95)


def read_lengths(path: Path, run_id: str, *, samples: int, limit: int) -> tuple[StepLengths, ...]:
    """Return the lengths of each logged step of ``run_id``; ``samples`` responses a step, at most ``limit`` tokens.

    Logs state the mean and the longest. The spread is that of the log-normal whose longest of ``samples`` is expected
    there: the median over the steps whose longest response is below ``limit``, over all if none is (then it is a lower
    bound, because long responses were cut).
    """
    steps = [
        (_number(path, row, "resp_len_mean"), _number(path, row, "resp_len_max"))
        for row in _chosen(path, "run_id", run_id)
        if row.get("resp_len_mean") and row.get("resp_len_max")
    ]
    if not steps:
        raise ConfigError(f"{run_id} has no lengths", where=str(path), remedy="choose another run")
    whole = [(mean, longest) for mean, longest in steps if longest < limit]
    sigma = median([_spread(longest / mean, samples) for mean, longest in whole or steps])
    factor = math.exp(P95 * sigma - sigma**2 / 2)
    return tuple(StepLengths(round(mean, 1), round(mean * factor, 1)) for mean, _ in steps)


def _spread(ratio: float, samples: int) -> float:
    """Return sigma of the log-normal whose quantile at samples / (samples + 1) is ``ratio`` times its mean."""
    quantile = NormalDist().inv_cdf(samples / (samples + 1))
    inside = quantile**2 - 2 * math.log(max(1.0, ratio))
    return min(P95, quantile - math.sqrt(inside) if inside > 0 else quantile)


def read_supply(
    path: Path, trace_id: str, *, start_s: float = 0.0, end_s: float = math.inf, least: int = 1, slots_each: int = 1
) -> tuple[Supply, ...]:
    """Return the slots of a pool from ``start_s`` to ``end_s`` of its log, ``slots_each`` for each unit available.

    Fewer than ``least`` slots count as ``least``: a job that owns some is never without any.
    """
    found = list[Supply]()
    for row in _chosen(path, "trace_id", trace_id):
        at_s = _number(path, row, "t_s")
        slots = max(least, round(_number(path, row, "available")) * slots_each)
        if at_s >= end_s:
            break
        if at_s <= start_s:
            found = [Supply(0.0, slots)]
        elif not found or found[-1].slots != slots:
            found.append(Supply(round(at_s - start_s, 1) if found else 0.0, slots))
    return tuple(found)


def read_requests(path: Path, dataset: str, *, limit: int) -> StepLengths:
    """Return the lengths of the answers of a log of requests, those above ``limit`` tokens cut."""
    tokens = sorted(min(limit, _number(path, row, "out_tokens")) for row in _chosen(path, "dataset", dataset))
    return StepLengths(round(fmean(tokens), 1), tokens[math.ceil(0.95 * len(tokens)) - 1])


def interruptions_per_slot_s(path: Path, source: str, left_out: Sequence[str] = ("planned",)) -> float:
    """Return how many unexpected interruptions a slot has in a second, by the counts that ``source`` gives.

    Rows of a category in ``left_out`` were no failures.
    """
    rows = [row for row in _chosen(path, "source", source) if row["count"] and row["category"] not in left_out]
    days = {row["period"] for row in rows if row["period"].endswith(" days")}
    if len(days) != 1:
        raise ConfigError(f"{source} states no one period", where=str(path), remedy="choose another source")
    seconds = 86400.0 * float(days.pop().removesuffix(" days"))
    return sum(_number(path, row, "count") for row in rows) / (_number(path, rows[0], "gpus") * seconds)


def _chosen(path: Path, column: str, name: str) -> list[dict[str, str]]:
    rows = list(_rows(path))
    known = sorted({row.get(column) or "" for row in rows})
    if name not in known:
        remedy = f"it has {', '.join(known[:8])}{' ...' if len(known) > 8 else ''}"
        raise ConfigError(f"there is no {column} {name!r}", where=str(path), remedy=remedy)
    return [row for row in rows if row[column] == name]


def _rows(path: Path) -> Iterator[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            yield from csv.DictReader(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", where="table", remedy="name a CSV table") from None


def _number(path: Path, row: dict[str, str], column: str) -> float:
    try:
        value = float(row[column])
    except (KeyError, TypeError, ValueError):
        what = f"{row.get(column)!r} is no number in column {column}"
        raise ConfigError(what, where=str(path), remedy="correct the table") from None
    return value
