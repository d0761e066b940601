"""How much better was each completion than its siblings?

Owner: the trainer, once per optimizer step, on the whole batch (never per rank or per micro-batch).

Invariants (tests/algo/test_advantage.py): only siblings that have a reward count; a group without spread, with one
scorable sample or with none contributes exactly 0; the result is finite for finite rewards; it depends neither on the
order of the samples nor on what else is in the batch.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-6
"""Added to the standard deviation, so that a group of rewards on a minute scale is not blown up."""
SPREAD = 1e-6
"""A group whose spread is below this fraction of its largest magnitude is constant up to float32 rounding."""


def group_advantages(
    rewards: NDArray[np.float64], group_of: NDArray[np.int32] | NDArray[np.int64], mode: Literal["std", "mean"]
) -> NDArray[np.float64]:
    """Return the group-relative advantage of every sample, float64 [N].

    ``rewards`` float64 [N], NaN where a sample has none; ``group_of`` int [N], any labels in any order. Mode ``mean``
    gives r - mean, mode ``std`` gives (r - mean) / (std + 1e-6) with the sample (n - 1) standard deviation, both over
    the scorable siblings. Samples without a reward get 0 and are to be masked from the loss (see ``scorable``).
    ``ValueError`` on an infinite reward, on shapes that differ and on an unknown mode.
    """
    if mode not in ("std", "mean"):
        raise ValueError(f"advantage mode must be 'std' or 'mean', got {mode!r}")
    if rewards.ndim != 1 or rewards.shape != group_of.shape:
        raise ValueError(f"rewards {rewards.shape} and group_of {group_of.shape} must be flat and of one length")
    if np.isinf(rewards).any():
        raise ValueError(f"reward of sample {int(np.flatnonzero(np.isinf(rewards))[0])} is infinite")
    advantages = np.zeros(rewards.shape, np.float64)
    known = scorable(rewards)
    if not known.any():
        return advantages
    values = rewards[known].astype(np.float64)
    _, group = np.unique(group_of[known], return_inverse=True)
    count = np.bincount(group).astype(np.float64)
    low = np.full(count.shape, np.inf)
    high = np.full(count.shape, -np.inf)
    np.minimum.at(low, group, values)
    np.maximum.at(high, group, values)
    spread = high - low
    varied = (count > 1) & (spread > SPREAD * np.maximum(np.abs(low), np.abs(high)))
    # Work on the unit interval: a large common offset would cost digits, a large scale would overflow the squares.
    scale = np.where(varied, spread, 1.0)
    unit = np.where(varied[group], (values - low[group]) / scale[group], 0.0)
    centred = unit - (np.bincount(group, unit) / count)[group]
    if mode == "std":
        deviation = np.sqrt(np.bincount(group, centred**2) / np.maximum(count - 1, 1))
        advantages[known] = centred / (deviation + EPSILON / scale)[group]
    else:
        advantages[known] = centred * scale[group]
    return advantages


def scorable(rewards: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which samples have a reward, bool [N]."""
    return ~np.isnan(rewards)


def zero_std_groups(rewards: NDArray[np.float64], group_of: NDArray[np.int32] | NDArray[np.int64]) -> int:
    """Count the groups that teach nothing because their advantages are all 0 (metric ``reward/zero_std_groups``)."""
    useful = group_of[group_advantages(rewards, group_of, "mean") != 0.0]
    return len(np.unique(group_of)) - len(np.unique(useful))
