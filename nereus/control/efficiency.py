"""Which share of its peak does each class of operation reach, and how does measurement refine it?

One efficiency per operation class, never one per shape or plan, so that a plan which never ran is predicted from what
others taught. Work is written as seconds at efficiency 1, so predicted time is linear in the inverse efficiencies and
the fit is a robust regression in their logarithms that starts from a prior. Invariants
(tests/control/test_efficiency.py): without measurements the prior stands; a class that no measurement touches keeps
its prior; one wild measurement does not move the fit; predictions are kept beside what came true.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import numpy as np
import numpy.typing as npt
from msgspec import Struct

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class OperationClass(enum.StrEnum):
    """Classes of operations that share one efficiency."""

    GEMM = "gemm"
    ATTENTION = "attention"
    VOCABULARY = "vocabulary"
    MEMORY = "memory"
    """Reads and writes of activations and weights around the matrix products."""
    DECODE = "decode"
    """Reading weights for every decode step."""
    CACHE = "cache"
    """Reading cached keys and values for every decode step."""
    OPTIMIZER = "optimizer"
    ALLREDUCE_IN_NODE = "allreduce/in_node"
    ALLREDUCE_CROSS_NODE = "allreduce/cross_node"
    GRADIENTS_IN_NODE = "gradients/in_node"
    """Summing gradients over replicas: apart from other all-reduces because backends hide a part behind compute."""
    GRADIENTS_CROSS_NODE = "gradients/cross_node"
    P2P_IN_NODE = "p2p/in_node"
    P2P_CROSS_NODE = "p2p/cross_node"
    LAUNCH = "launch"
    """Starting kernels and other work of the host, as a share of the stated time."""
    LATENCY = "latency"
    """Starting messages, as a share of the links' stated latency."""


CLASSES = tuple(OperationClass)
COLUMN = {name: index for index, name in enumerate(CLASSES)}

PRIOR_SPREAD = 0.5
"""Standard deviation of the prior in log efficiency: a factor of 1.65 either way is nothing special."""

NOISE = 0.05
"""Relative error of a measurement that is nothing special; larger ones count less and less (Huber)."""

_PRIORS = {
    OperationClass.GEMM: 0.35,
    OperationClass.ATTENTION: 0.25,
    OperationClass.VOCABULARY: 0.35,
    OperationClass.MEMORY: 0.50,
    OperationClass.DECODE: 0.50,
    OperationClass.CACHE: 0.50,
    OperationClass.OPTIMIZER: 0.50,
    OperationClass.LAUNCH: 1.0,
    OperationClass.LATENCY: 1.0,
}
_COLLECTIVE_PRIOR = 0.40


class Efficiencies(Struct, frozen=True):
    """One efficiency per operation class, in the order of ``CLASSES``."""

    values: tuple[float, ...]

    @classmethod
    def prior(cls, **stated: float) -> Efficiencies:
        """Return the conservative efficiencies for classes never measured; keywords replace those of named classes."""
        return cls.of({OperationClass(name): value for name, value in stated.items()})

    @classmethod
    def of(cls, stated: Mapping[OperationClass, float]) -> Efficiencies:
        """Return the priors with the stated classes replaced; ``ValueError`` for a value that is not positive."""
        for name, value in stated.items():
            if not 0 < value < math.inf:
                raise ValueError(f"the efficiency of {name} must be positive, got {value}")
        return cls(tuple(stated.get(name, _PRIORS.get(name, _COLLECTIVE_PRIOR)) for name in CLASSES))

    def __getitem__(self, name: OperationClass) -> float:
        return self.values[COLUMN[name]]

    def inverse(self) -> Array:
        return 1.0 / np.array(self.values)

    def table(self) -> dict[str, float]:
        """Return the efficiencies by the names of their classes."""
        return {str(name): value for name, value in zip(CLASSES, self.values, strict=True)}


class Work:
    """The work of one or many alternatives: seconds of each class at efficiency 1, and seconds that no class owns.

    ``unit_s`` has shape (alternatives, classes); ``fixed_s`` (alternatives,) is what no efficiency scales.
    ``waiting_s`` (alternatives, classes) is the part of ``unit_s`` in which a slot waits for other pipeline ranks: the
    step lasts that long, but whoever times the operations themselves does not see it.
    """

    __slots__ = ("fixed_s", "unit_s", "waiting_s")

    def __init__(self, unit_s: Array, fixed_s: Array, waiting_s: Array) -> None:
        self.unit_s = unit_s
        self.fixed_s = fixed_s
        self.waiting_s = waiting_s

    @classmethod
    def none(cls, alternatives: int) -> Work:
        return cls(
            np.zeros((alternatives, len(CLASSES))), np.zeros(alternatives), np.zeros((alternatives, len(CLASSES)))
        )

    def add(self, name: OperationClass, seconds: Array | float, fixed_s: Array | float = 0.0) -> None:
        """Add ``seconds`` at efficiency 1 to a class, and ``fixed_s`` to none."""
        self.unit_s[:, COLUMN[name]] += seconds
        self.fixed_s += fixed_s

    def seconds(self, efficiencies: Efficiencies) -> Array:
        """Return the predicted seconds of every alternative."""
        predicted: Array = self.unit_s @ efficiencies.inverse() + self.fixed_s
        return predicted

    def split(self, efficiencies: Efficiencies, index: int = 0) -> dict[str, float]:
        """Return the predicted seconds of one alternative by class, ``fixed`` for the rest; zeros are left out."""
        parts = {str(name): float(s) for name, s in zip(CLASSES, self._parts(efficiencies, index), strict=True) if s}
        return parts | ({"fixed": float(self.fixed_s[index])} if self.fixed_s[index] else {})

    def _parts(self, efficiencies: Efficiencies, index: int) -> Array:
        parts: Array = self.unit_s[index] * efficiencies.inverse()
        return parts

    def __getitem__(self, index: int) -> Work:
        one = slice(index, index + 1)
        return Work(self.unit_s[one], self.fixed_s[one], self.waiting_s[one])

    def busy_s(self, index: int = 0) -> Array:
        """Return the seconds at efficiency 1 that one alternative's slots spend in each class, (classes,)."""
        busy: Array = self.unit_s[index] - self.waiting_s[index]
        return busy


class Observation(Struct, frozen=True):
    """What some work took: a kernel's or collective's time (one class not zero) or that of a whole step."""

    unit_s: tuple[float, ...]
    fixed_s: float
    measured_s: float

    @classmethod
    def of_class(cls, name: OperationClass, unit_s: float, measured_s: float, fixed_s: float = 0.0) -> Observation:
        row = tuple(unit_s if other is name else 0.0 for other in CLASSES)
        return cls(row, fixed_s, measured_s)

    @classmethod
    def of_step(cls, work: Work, measured_s: float, index: int = 0) -> Observation:
        return cls(tuple(work.unit_s[index].tolist()), float(work.fixed_s[index]), measured_s)


def fit(prior: Efficiencies, observations: Sequence[Observation], *, spread: float = PRIOR_SPREAD) -> Efficiencies:
    """Return the most likely efficiencies, given the observations and the prior."""
    usable = [seen for seen in observations if 0 < seen.measured_s < math.inf and any(seen.unit_s)]
    if not usable:
        return prior
    unit_s = np.array([seen.unit_s for seen in usable])
    fixed_s = np.array([seen.fixed_s for seen in usable])
    measured_s = np.array([seen.measured_s for seen in usable])
    start = np.log(np.array(prior.values))
    spreads = np.full((1, len(CLASSES) + 1), spread)
    spreads[0, -1] = 0.0
    offsets = regress(unit_s, fixed_s, measured_s, start, spreads)[0, :-1]
    return Efficiencies(tuple(np.exp(start + offsets).tolist()))


def regress(
    unit_s: Array,
    fixed_s: Array,
    measured_s: Array,
    log_prior: Array,
    spread: Array,
    members: npt.NDArray[np.int64] | None = None,
    iterations: int = 30,
    noise: float = NOISE,
) -> Array:
    """Return the offsets of log efficiencies that best explain the measurements (Gauss-Newton, Huber weights).

    Offsets belong to groups of rows: ``spread`` (groups, classes + 1) is the prior standard deviation of each group's
    offsets, the last column being one offset for all classes of the group; 0 leaves an offset out. ``members`` (rows,
    levels) names the groups of each row, whose offsets add up; by default all rows are in group 0. The error of a row
    is log(predicted / measured), so that long and short steps count alike; beyond ``noise`` it counts less. Returns an
    array like ``spread``.
    """
    groups = np.zeros((len(measured_s), 1), np.int64) if members is None else members
    offsets, kept = np.zeros_like(spread), np.zeros_like(spread)
    busy = np.zeros(spread.shape, dtype=bool)
    for level in groups.T:
        for column, work in enumerate(unit_s.T):
            busy[level[work > 0], column] = True
        busy[level, -1] = True
    used = np.flatnonzero((spread > 0) & busy)
    place = np.full(spread.size, -1)
    place[used] = np.arange(len(used))
    columns = place.reshape(spread.shape)[groups]
    """Of every row, level and class: which of the offsets in use."""
    precision = 1.0 / spread.ravel()[used] ** 2
    damping, best = 1e-6, math.inf
    for _ in range(iterations):
        total, share = _predict(unit_s, fixed_s, log_prior, offsets, groups)
        error = np.log(total / measured_s)
        scaled = np.abs(error) / noise
        loss = float(np.where(scaled < 1, scaled**2, 2 * scaled - 1).sum() + precision @ offsets.ravel()[used] ** 2)
        if loss < best:
            finished = best - loss < 1e-5 * loss
            best, kept, damping = loss, offsets, max(1e-9, damping / 4)
            if finished:
                break
            slope = _slope(share, columns, len(used))
            weight = 1.0 / (noise**2 * np.maximum(1.0, scaled))
            normal = slope.T @ (weight[:, None] * slope) + np.diag(precision)
            gradient = slope.T @ (weight * error) + precision * offsets.ravel()[used]
        else:
            damping = max(damping * 16, 1e-3)
            if damping > 1e6:
                break
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
        moved = kept.ravel().copy()
        moved[used] += np.clip(step, -0.7, 0.7)
        offsets = moved.reshape(spread.shape)
    return kept


def _predict(
    unit_s: Array, fixed_s: Array, log_prior: Array, offsets: Array, groups: npt.NDArray[np.int64]
) -> tuple[Array, Array]:
    """Return the predicted seconds of each row, and how they answer to each class's log efficiency."""
    shift = (offsets[groups, :-1] + offsets[groups, -1:]).sum(axis=1)
    parts = unit_s * np.exp(-(log_prior + shift))
    total = parts.sum(axis=1) + fixed_s
    return total, -parts / total[:, None]


def _slope(share: Array, columns: npt.NDArray[np.int64], count: int) -> Array:
    """Return the derivative of each row's log prediction by every one of ``count`` offsets in use."""
    slope = np.zeros((len(share), count + 1))
    whole = np.concatenate([share, share.sum(axis=1, keepdims=True)], axis=1)
    rows = np.arange(len(share))[:, None]
    for level in columns.swapaxes(0, 1):
        slope[rows, level] = whole
    return slope[:, :count]


class Calibration(Struct, frozen=True):
    """Efficiencies as they stand: a prior and the newest observations of each run, refitted when one is added."""

    prior: Efficiencies
    efficiencies: Efficiencies
    window: tuple[Observation, ...] = ()
    keep: int = 128

    @classmethod
    def starting(cls, prior: Efficiencies | None = None) -> Calibration:
        first = prior or Efficiencies.prior()
        return cls(first, first)

    def observed(self, new: Iterable[Observation]) -> Calibration:
        """Return the calibration with the new observations in; the oldest beyond ``keep`` are forgotten."""
        window = (*self.window, *new)[-self.keep :]
        return Calibration(self.prior, fit(self.prior, window), window, self.keep)


class Outcome(Struct, frozen=True):
    """A prediction and what came true."""

    what: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Return the relative error, positive when the prediction was too long."""
        return self.predicted_s / self.measured_s - 1


class Accuracy(Struct, frozen=True):
    """How good have predictions been? The newest outcomes and their errors."""

    outcomes: tuple[Outcome, ...] = ()
    keep: int = 256

    def add(self, what: str, predicted_s: float, measured_s: float) -> Accuracy:
        """Return the record with one outcome more; ``ValueError`` if a time is not positive."""
        if not (0 < predicted_s < math.inf and 0 < measured_s < math.inf):
            raise ValueError(f"{what}: times must be positive, got predicted {predicted_s} and measured {measured_s}")
        return Accuracy((*self.outcomes, Outcome(what, predicted_s, measured_s))[-self.keep :], self.keep)

    @property
    def mape(self) -> float:
        """Return the mean absolute relative error; NaN before the first outcome."""
        return sum(abs(outcome.error) for outcome in self.outcomes) / len(self.outcomes) if self.outcomes else math.nan

    @property
    def median_error(self) -> float:
        return median(abs(outcome.error) for outcome in self.outcomes) if self.outcomes else math.nan

    @property
    def worst(self) -> Outcome | None:
        return max(self.outcomes, key=lambda outcome: abs(outcome.error), default=None)
