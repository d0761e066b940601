"""Draws follow the exact distribution, stay in their support and depend on their stream only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereus.backends.torch.sampling import Controls, controls, draw, stream_key, truncate, uniforms

CPU = torch.device("cpu")
CHI_SQUARE_999 = {7: 24.3, 15: 37.7, 31: 61.1, 99: 148.2}
"""Degrees of freedom -> the value exceeded with probability 0.001."""


def numbers(count: int, seed: int = 0) -> NDArray[np.float64]:
    keys = np.array([stream_key((seed, group, 0)) for group in range(32)], np.uint64)
    return uniforms(np.tile(keys, count // 32), np.repeat(np.arange(count // 32), 32))


def settings(
    count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, vocabulary: int = 16
) -> Controls:
    return controls(np.full(count, temperature), np.full(count, top_k), np.full(count, top_p), vocabulary, CPU)


def test_uniforms_are_uniform() -> None:
    observed = np.bincount((numbers(32000) * 100).astype(int), minlength=100)
    assert ((observed - 320) ** 2 / 320).sum() < CHI_SQUARE_999[99]


@pytest.mark.parametrize("neighbour", [(0, 0, 1), (0, 1, 0), (1, 0, 0)])
def test_neighbouring_streams_are_uncorrelated(neighbour: tuple[int, int, int]) -> None:
    positions = np.arange(10000)
    a, b = (uniforms(np.full(10000, stream_key(seed), np.uint64), positions) for seed in ((0, 0, 0), neighbour))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.04
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.04


def test_stream_keys_are_stable() -> None:
    """Golden: a resumed or upgraded run draws as before."""
    assert [stream_key(seed) for seed in ((0, 0, 0), (7, 3, 1), (2**63, 1, 2))] == [
        10891570291429925902,
        17193983740152763982,
        11087900070127903100,
    ]
    assert len({stream_key((s, g, i)) for s in range(5) for g in range(40) for i in range(8)}) == 1600


def exact(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The distribution by its definition, in plain Python."""
    scaled = logits.double() / temperature
    order = sorted(range(len(logits)), key=lambda i: (-float(scaled[i]), i))
    kept = order[:top_k] if top_k else order
    weights = {i: float(torch.exp(scaled[i] - scaled.max())) for i in kept}
    total, mass, support = sum(weights.values()), 0.0, []
    for token in kept:
        if support and mass >= top_p * total:
            break
        support.append(token)
        mass += weights[token]
    result = torch.zeros(len(logits), dtype=torch.float64)
    for token in support:
        result[token] = weights[token] / mass
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.7, 5, 1.0), (1.0, 0, 0.8), (0.9, 9, 0.7)]
)
def test_draws_follow_the_exact_distribution(temperature: float, top_k: int, top_p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    logits = torch.randn(16, dtype=dtype) * 1.5
    count = 19200
    how = settings(count, temperature, top_k, top_p)
    tokens, logprobs = draw(logits.expand(count, 16), numbers(count), how)
    expected = exact(logits, temperature, top_k, top_p)
    observed = torch.bincount(tokens, minlength=16).double()
    assert observed[expected == 0].sum() == 0
    torch.testing.assert_close(logprobs.double(), expected[tokens].log(), rtol=0, atol=1e-5)
    likely = expected * count >= 5
    chi_square = ((observed - expected * count) ** 2 / (expected * count))[likely].sum()
    assert chi_square < CHI_SQUARE_999[15]


def test_a_row_draws_alike_alone_and_among_rows_with_other_settings() -> None:
    torch.manual_seed(6)
    logits = torch.randn(4, 16, dtype=torch.float64)
    values = numbers(32)[:4]
    mixed = controls(np.array([1.0, 0.5, 1, 2]), np.array([0, 3, 0, 0]), np.array([1, 1, 0.5, 1.0]), 16, CPU)
    tokens, logprobs = draw(logits, values, mixed)
    single = [settings(1), settings(1, 0.5, 3), settings(1, 1.0, 0, 0.5), settings(1, 2.0)]
    for row, how in enumerate(single):
        token, logprob = draw(logits[row : row + 1], values[row : row + 1], how)
        assert token == tokens[row]
        torch.testing.assert_close(logprob[0], logprobs[row], rtol=0, atol=1e-12)


def test_ties_at_the_cut_keep_exactly_k() -> None:
    kept = truncate(torch.zeros(1, 8), torch.tensor([[3]]), None)
    assert torch.isfinite(kept[0]).tolist() == [True] * 3 + [False] * 5


def test_the_extremes_of_the_uniform_number_stay_in_the_support() -> None:
    logits = torch.full((2, 50), -torch.inf)
    logits[:, 20:23] = torch.tensor([0.1, 0.7, 0.3])
    tokens, logprobs = draw(logits, np.array([0.0, 1 - 2.0**-53]), Controls())
    assert tokens.tolist() == [20, 22]
    assert torch.isfinite(logprobs).all()


def test_top_p_of_almost_nothing_keeps_the_most_probable_token() -> None:
    tokens, logprobs = draw(torch.tensor([[0.0, 1.0, 0.5]]).repeat(32, 1), numbers(32), settings(32, 1.0, 0, 1e-9, 3))
    assert set(tokens.tolist()) == {1}
    assert logprobs.abs().max() == 0


def test_nan_is_told_by_the_logprob() -> None:
    _, logprobs = draw(torch.tensor([[0.0, float("nan")], [0.0, 1.0]]), np.array([0.5, 0.5]), Controls())
    assert torch.isnan(logprobs).tolist() == [True, False]
