"""Error, ranking and memory figures of predictions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from public_tables.fitting import family, fold
from public_tables.training import Row

from nereus.control.memory import MARGIN, MemoryCalibration, training_memory

Array = npt.NDArray[np.float64]


def errors(predicted: Array, measured: Array) -> dict[str, float]:
    """Return MAPE, median and worst error in percent, and R² of log seconds and of seconds."""
    relative = np.abs(predicted / measured - 1) * 100
    return {
        "n": len(measured),
        "mape": float(relative.mean()),
        "median": float(np.median(relative)),
        "worst": float(relative.max()),
        "r2": r2(predicted, measured),
        "r2_log": r2(np.log(predicted), np.log(measured)),
    }


def noise_floor(rows: Sequence[Row]) -> float:
    """Return the MAPE that one number per configuration leaves on those measured more than once; NaN if none is.

    No model that sees only the configuration can be better on such rows. Parts of a configuration that the cost model
    ignores (the number of heads apart from their width, say) count as equal here.
    """
    times: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row in rows:
        times[(*row.configuration, row.testbed, str(row.shape.heads))].append(row.measured_s)
    error = [abs(float(np.median(same)) / one - 1) * 100 for same in times.values() if len(same) > 1 for one in same]
    return float(np.mean(error)) if error else float("nan")


def r2(predicted: Array, measured: Array) -> float:
    spread = float(((measured - measured.mean()) ** 2).sum())
    return 1.0 - float(((predicted - measured) ** 2).sum()) / spread if spread > 0 else float("nan")


def ranks(values: Array) -> Array:
    """Return ranks with ties shared."""
    _, index, count = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(count)
    return np.asarray((ends - (count - 1) / 2.0)[index], dtype=float)


def spearman(one: Array, other: Array) -> float:
    a, b = ranks(one), ranks(other)
    if a.std() == 0 or b.std() == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def rankings(rows: Sequence[Row], predicted: Array, least: int = 4) -> list[dict[str, Any]]:
    """Return for every sweep (one model, batch and pool; only the layout differs) how well layouts are ranked.

    Several measurements of one configuration count as their mean. Regret: how much longer the layout predicted
    fastest took than the truly fastest.
    """
    sweeps: dict[tuple[str, ...], dict[tuple[str, ...], list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row, guess in zip(rows, predicted, strict=True):
        sweeps[row.sweep][row.configuration].append((float(guess), row.measured_s))
    found = list[dict[str, Any]]()
    for sweep, configurations in sweeps.items():
        if len(configurations) < least:
            continue
        table = np.array([np.mean(pairs, axis=0) for pairs in configurations.values()])
        chosen = table[np.argmin(table[:, 0]), 1]
        found.append(
            {
                "sweep": " ".join(sweep[:4]) + f" s{sweep[6]} b{sweep[7]}",
                "source": sweep[0],
                "layouts": len(configurations),
                "spearman": spearman(table[:, 0], table[:, 1]),
                "regret": float(chosen / table[:, 1].min() - 1) * 100,
            }
        )
    return found


def predicted_memory(row: Row) -> tuple[float, float]:
    """Return (state, transient) bytes of a row's fullest slot."""
    micro = row.setups.micro_batch
    batches = np.maximum(1.0, np.ceil(row.gbs / (row.setups.dp * micro)))
    memory = training_memory(
        row.shape,
        row.setups,
        micro * row.seq_len,
        batches,
        gradient_bytes=row.gradient_bytes,
        sequence_parallel=row.sequence_parallel,
        scored_square=0.0 if row.fused_attention else micro * float(row.seq_len) ** 2,
    )
    return float(memory.resident_bytes()[0]), float(np.asarray(sum(memory.transient.values())).ravel()[0])


def has_peak(row: Row) -> bool:
    """Return whether a row states a peak that its device can hold (a few sources count in powers of two)."""
    return not row.out_of_memory and 0 < row.memory_gb * 1e9 <= row.cluster.device.memory_bytes * 1.08


def peaks(rows: Sequence[Row]) -> list[tuple[float, float, float]]:
    return [(*predicted_memory(row), row.memory_gb * 1e9) for row in rows]


def memory_figures(rows: Sequence[Row], seed: int, folds: int, known: Sequence[Row] = ()) -> dict[str, Any]:
    """Calibrate on a part of each source's peaks, then its framework's; check the rest, and what ran out of memory.

    ``known`` are rows of another table to calibrate on as well, but for the configurations that are checked.
    """
    by_source: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_source[row.source].append(row)
    checked = {row.configuration for row in rows}
    others = [row for row in known if row.configuration not in checked and has_peak(row)]
    table = dict[str, Any]()
    for source, listed in sorted(by_source.items()):
        told = [row for row in listed if has_peak(row)]
        same = [row for row in others if row.source == source]
        if len({row.configuration for row in (*told, *same)}) < 4 or not told:
            continue
        error, called, out = list[float](), 0, 0
        for index in range(folds):
            seen = same + [row for row in told if fold(row, seed, folds) != index]
            wide = MemoryCalibration().refined(peaks(seen))
            learned = {
                name: wide.refined(peaks([row for row in seen if row.framework == name]))
                for name in {row.framework for row in listed}
            }
            for row in listed:
                if fold(row, seed, folds) != index:
                    continue
                mine = learned[row.framework]
                state, transient = predicted_memory(row)
                peak = state + transient * mine.transient_factor + mine.workspace_bytes
                if row.out_of_memory:
                    out += 1
                    called += peak * MARGIN > row.cluster.device.memory_bytes
                elif has_peak(row):
                    error.append(abs(peak / (row.memory_gb * 1e9) - 1) * 100)
        within = float(np.mean(np.array(error) <= 15) * 100) if error else float("nan")
        table[source] = {
            "n": len(error),
            "mape": float(np.mean(error)) if error else float("nan"),
            "median": float(np.median(error)) if error else float("nan"),
            "within_15": within,
            "oom": out,
            "oom_called": int(called),
        }
    return table


def by_family(rows: Sequence[Row]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        found[family(row)].append(index)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))
