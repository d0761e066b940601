"""Which courses of events can be made from a seed?

Growth of lengths, pools that walk, speeds that drift, failures: for what no public log shows. Pure: equal arguments
give equal courses. Invariants (tests/sim/test_generators.py): growth begins and ends where it is told; a walk stays
between its bounds; failures come at the rate asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from nereus.sim.trace import Drift, Failure, StepLengths, StepSupply

Shape = Literal["linear", "geometric", "sigmoid", "late"]


def growth(
    first: StepLengths, last: StepLengths, steps: int, *, shape: Shape = "linear", noise: float = 0.0, seed: int = 0
) -> tuple[StepLengths, ...]:
    """Return lengths from ``first`` to ``last`` over ``steps`` steps.

    ``noise`` is the relative standard deviation of a step's mean and p95 together; the ends have none.
    """
    rng = np.random.default_rng(seed)
    wobbles = np.exp(noise * rng.standard_normal(steps))
    found = list[StepLengths]()
    for step in range(steps):
        along = _along(shape, step / max(1, steps - 1))
        wobble = 1.0 if step in (0, steps - 1) else float(wobbles[step])
        mean = _between(shape, first.mean_tokens, last.mean_tokens, along) * wobble
        p95 = _between(shape, first.p95_tokens, last.p95_tokens, along) * wobble
        found.append(StepLengths(round(mean, 1), round(max(mean, p95), 1)))
    return tuple(found)


def _along(shape: Shape, share: float) -> float:
    match shape:
        case "sigmoid":
            ends = math.tanh(3.0)
            return 0.5 + math.tanh(6.0 * (share - 0.5)) / (2.0 * ends)
        case "late":
            return share**3
        case _:
            return share


def _between(shape: Shape, first: float, last: float, along: float) -> float:
    return first * (last / first) ** along if shape == "geometric" else first + (last - first) * along


def slot_walk(
    steps: int, sizes: Sequence[int], *, hold: int, seed: int, start: int | None = None
) -> tuple[StepSupply, ...]:
    """Return a pool that moves to a neighbour in ``sizes`` every ``hold`` steps in the mean (at least one)."""
    rng = np.random.default_rng(seed)
    ordered = sorted(sizes)
    at = ordered.index(start) if start is not None else int(rng.integers(len(ordered)))
    found = [StepSupply(0, ordered[at])]
    step = int(rng.geometric(1 / hold))
    while step < steps:
        there = [place for place in (at - 1, at + 1) if 0 <= place < len(ordered)]
        at = int(rng.choice(there))
        found.append(StepSupply(step, ordered[at]))
        step += int(rng.geometric(1 / hold))
    return tuple(found)


def drift_walk(
    steps: int, operations: Sequence[str], *, hold: int, spread: float, seed: int, least: float = 0.4
) -> tuple[Drift, ...]:
    """Return speeds that change every ``hold`` steps in the mean, log-normally by ``spread`` around their first one."""
    rng = np.random.default_rng(seed)
    found = list[Drift]()
    step = int(rng.geometric(1 / hold))
    while step < steps:
        operation = operations[int(rng.integers(len(operations)))]
        factor = float(np.clip(np.exp(spread * rng.standard_normal()), least, 1 / least))
        found.append(Drift(step, operation, round(factor, 3)))
        step += int(rng.geometric(1 / hold))
    return tuple(found)


def failures(
    until_s: float, *, every_s: float, seed: int, kinds: Sequence[Literal["kill", "hang", "reclaim"]] = ("kill",)
) -> tuple[Failure, ...]:
    """Return failures of the whole pool, exponentially distributed with ``every_s`` seconds between two in the mean."""
    rng = np.random.default_rng(seed)
    found = list[Failure]()
    at_s = float(rng.exponential(every_s))
    while at_s < until_s:
        found.append(Failure(round(at_s, 1), None, kinds[int(rng.integers(len(kinds)))]))
        at_s += float(rng.exponential(every_s))
    return tuple(found)
