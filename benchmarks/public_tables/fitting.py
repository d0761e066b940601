"""Which efficiencies explain a part of a table, and how well do they predict the rest?

Offsets in log efficiency add up over five levels: everywhere, hardware and precision, source, family (source on one
hardware and precision) and testbed (one software revision on one machine; one offset for all its classes). All shrink
to the prior, so small families lean on what others taught; one never seen is predicted from the levels that were. The
split is by a hash of the whole configuration and a fixed seed, so equal configurations measured twice are never on
both sides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from public_tables.training import Row

from nereus.control.efficiency import CLASSES, Efficiencies, regress

Array = npt.NDArray[np.float64]

NOISE = 0.03
"""Relative error of a published figure that is nothing special: means over many steps."""

LEVELS = ((0.7, 0.0), (0.2, 0.3), (0.3, 0.3), (0.3, 0.2), (0.0, 0.15))
"""Prior standard deviations of each level's offsets: one class, and all classes together."""


def family(row: Row) -> str:
    return f"{row.source} {row.arch} {row.precision}"


def labels(row: Row) -> tuple[str, ...]:
    return "everywhere", f"{row.arch} {row.precision}", row.source, family(row), row.testbed


def fold(row: Row, seed: int, folds: int) -> int:
    """Return which part of the table a configuration belongs to."""
    digest = hashlib.sha256(repr((seed, row.configuration)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % folds


def stack(rows: Sequence[Row]) -> tuple[Array, Array, Array]:
    unit_s = np.concatenate([row.work.unit_s for row in rows])
    fixed_s = np.concatenate([row.work.fixed_s for row in rows])
    return unit_s, fixed_s, np.array([row.measured_s for row in rows])


class Fit:
    """Offsets by level and label."""

    def __init__(self, rows: Sequence[Row], iterations: int = 14) -> None:
        ids: dict[tuple[int, str], int] = {}
        spread = list[list[float]]()
        members = list[list[int]]()
        for row in rows:
            member = list[int]()
            for level, label in enumerate(labels(row)):
                key = (level, label)
                if key not in ids:
                    ids[key] = len(ids)
                    one, together = LEVELS[level]
                    spread.append([one] * len(CLASSES) + [together])
                member.append(ids[key])
            members.append(member)
        self.ids = ids
        self.prior = np.log(np.array(Efficiencies.prior().values))
        self.offsets = regress(*stack(rows), self.prior, np.array(spread), np.array(members), iterations, NOISE)

    def efficiencies(self, row: Row) -> Array:
        """Return the efficiencies for a row; levels never seen add nothing."""
        found = [self.ids[key] for key in enumerate(labels(row)) if key in self.ids]
        offsets = self.offsets[found]
        total: Array = np.exp(self.prior + (offsets[:, :-1] + offsets[:, -1:]).sum(axis=0))
        return total

    def shared(self, row: Row) -> Efficiencies:
        """Return what holds everywhere and on a row's hardware, without the habits of its source."""
        found = [self.ids[key] for key in list(enumerate(labels(row)))[:2] if key in self.ids]
        offsets = self.offsets[found]
        values = np.exp(self.prior + (offsets[:, :-1] + offsets[:, -1:]).sum(axis=0))
        return Efficiencies(tuple(values.tolist()))

    def predict(self, rows: Sequence[Row]) -> Array:
        return np.array(
            [float((row.work.unit_s[0] / self.efficiencies(row)).sum() + row.work.fixed_s[0]) for row in rows]
        )


class ConstantMfu:
    """The baseline: a family computes at the median utilization of its fitted rows, an unseen one at that of all."""

    def __init__(self, rows: Sequence[Row]) -> None:
        found: dict[str, list[float]] = {}
        for row in rows:
            for name in (family(row), ""):
                found.setdefault(name, []).append(row.flops / row.peak / row.measured_s)
        self.utilization = {name: float(np.median(values)) for name, values in found.items()}

    def predict(self, rows: Sequence[Row]) -> Array:
        used = (self.utilization.get(family(row), self.utilization[""]) for row in rows)
        return np.array([row.flops / row.peak / share for row, share in zip(rows, used, strict=True)])


def cross_predict(rows: Sequence[Row], seed: int, folds: int) -> tuple[Array, Array]:
    """Predict every row by a fit on the other parts; return the model's and the baseline's predictions."""
    part = np.array([fold(row, seed, folds) for row in rows])
    ours, baseline = np.zeros(len(rows)), np.zeros(len(rows))
    for index in range(folds):
        seen = [row for row, mine in zip(rows, part, strict=True) if mine != index]
        unseen = [row for row, mine in zip(rows, part, strict=True) if mine == index]
        if unseen:
            ours[part == index] = Fit(seen).predict(unseen)
            baseline[part == index] = ConstantMfu(seen).predict(unseen)
    return ours, baseline
