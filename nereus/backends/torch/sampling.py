"""Which token comes next, and how probable was it?

Owner: the generation engine. Tokens are drawn by inverting the cumulative distribution in vocabulary order at one
uniform number, which is a hash of (run seed, group, index, position) and of nothing else: a completion depends neither
on the place it is drawn at nor on what else is in the batch. The log-probability is that of the distribution drawn
from: softmax of logits / temperature, renormalized over what top-k, then top-p, leave.

Invariants (tests/backends/test_sampling.py): draws follow the exact distribution; a token outside the support is never
drawn; equal streams give equal tokens in any batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_UINT64 = (1 << 64) - 1


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finalize as splitmix64 does: a bijection of 64 bits in which an input bit flips each output bit half the time."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def stream_key(seed: tuple[int, int, int]) -> int:
    """Return the 64-bit key of the random stream of (run seed, group, index)."""
    key = np.zeros(1, np.uint64)
    for part in seed:
        key = _mix(key * _GOLDEN + np.array([part & _UINT64], np.uint64) + _GOLDEN)
    return int(key[0])


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return number ``positions[i]`` of stream ``keys[i]``: in [0, 1), 53 random bits."""
    bits = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Controls(NamedTuple):
    """How to sample each of n rows; None where no row asks for it. Tensors on the logits' device, ``[n, 1]``."""

    temperature: Tensor | None = None
    top_k: Tensor | None = None
    """int64; the vocabulary's size or more where a row is not cut."""
    top_p: Tensor | None = None
    """float64; 1 where a row is not cut."""


def controls(
    temperature: NDArray[Any], top_k: NDArray[Any], top_p: NDArray[Any], vocabulary: int, device: torch.device
) -> Controls:
    """Return the controls of rows with these settings; ``top_k`` 0 means no cut."""

    def column(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values.copy()).to(device).unsqueeze(1)

    return Controls(
        column(temperature) if (temperature != 1).any() else None,
        column(np.where(top_k == 0, vocabulary, top_k)) if (top_k != 0).any() else None,
        column(top_p) if (top_p < 1).any() else None,
    )


def draw(logits: Tensor, numbers: NDArray[np.float64], how: Controls) -> tuple[Tensor, Tensor]:
    """Draw a token from each row; return tokens int64 ``[n]`` and their log-probabilities ``[n]``.

    A row with a NaN has the log-probability NaN. Half-precision logits are raised to float32 first.
    """
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    if how.temperature is not None:
        logits = logits / how.temperature.to(logits.dtype)
    if how.top_k is not None or how.top_p is not None:
        logits = truncate(logits, how.top_k, how.top_p)
    probabilities = torch.softmax(logits, -1)
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1:]
    # As many bits as the dtype holds, truncated: then number * total < total also after rounding, and the first sum
    # above it belongs to a token of positive probability.
    bits = 24 if logits.dtype == torch.float32 else 53
    number = torch.from_numpy(np.floor(numbers * 2.0**bits) * 2.0**-bits).to(logits.device, logits.dtype)
    tokens = torch.searchsorted(cumulative, number.unsqueeze(1) * total, right=True)
    tokens.clamp_(max=logits.shape[1] - 1)  # Only a row with NaN exceeds it.
    return tokens.squeeze(1), probabilities.gather(1, tokens).log_().squeeze(1)


def truncate(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Set to -inf what is outside the ``top_k`` highest, then outside the smallest set of probability ``top_p``.

    Among equal logits the lower token goes first; the most probable token always stays.
    """
    values, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    if top_k is not None:
        ranks = torch.arange(logits.shape[1], device=logits.device)
        values = values.masked_fill(ranks >= top_k, -torch.inf)
    if top_p is not None:
        probabilities = torch.softmax(values.double(), -1)
        before = probabilities.cumsum(-1) - probabilities
        before[:, 0] = 0.0
        values = values.masked_fill((before >= top_p) & (top_p < 1), -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, values)
