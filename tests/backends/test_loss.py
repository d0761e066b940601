"""Is the loss the formula that its module states, and does it stay finite?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nereus.backends.torch.loss import Targets, grpo_loss, log_probabilities
from nereus.config import LossConfig

VOCABULARY = 11
COUNT = 7


def logits_and_tokens(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(COUNT, VOCABULARY, generator=generator, dtype=dtype) * 3
    return logits.requires_grad_(), torch.randint(0, VOCABULARY, (COUNT,), generator=generator)


def targets(now: Tensor, spread: float = 0.5, *, proximal: bool = False, reference: bool = False) -> Targets:
    generator = torch.Generator().manual_seed(2)

    def near() -> Tensor:
        return now.detach() + spread * torch.randn(COUNT, generator=generator, dtype=now.dtype)

    return Targets(
        torch.zeros(COUNT, dtype=torch.int64),
        torch.randn(COUNT, generator=generator, dtype=now.dtype),
        near(),
        torch.rand(COUNT, generator=generator, dtype=now.dtype),
        near() if proximal else None,
        near() if reference else None,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_equal_log_softmax(temperature: float) -> None:
    logits, tokens = logits_and_tokens()
    other = logits.detach().clone().requires_grad_()
    found, entropy = log_probabilities(logits, tokens, temperature, with_entropy_gradient=True)
    table = (other / temperature).log_softmax(-1)
    wanted, wanted_entropy = table.gather(-1, tokens[:, None])[:, 0], -(table.exp() * table).sum(-1)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(entropy, wanted_entropy)
    scale = torch.arange(1.0, COUNT + 1, dtype=torch.float64)
    (found @ scale + entropy @ scale.flip(0)).backward()
    (wanted @ scale + wanted_entropy @ scale.flip(0)).backward()
    torch.testing.assert_close(logits.grad, other.grad)


def test_bfloat16_logits_are_normalized_in_float32() -> None:
    logits, tokens = logits_and_tokens(torch.bfloat16)
    found, _ = log_probabilities(logits, tokens, 1.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0])


def number(tensor: Tensor) -> float:
    return tensor.detach().item()


def formula(now: Tensor, entropy: Tensor, aim: Targets, config: LossConfig) -> Tensor:
    """Write the loss out token by token, with plain numbers for what is held constant."""
    total = torch.zeros((), dtype=now.dtype)
    for i in range(COUNT):
        advantage, behaviour = number(aim.advantages[i]), number(aim.behaviour[i])
        proximal = number(now[i]) if aim.proximal is None else number(aim.proximal[i])
        if config.correction == "truncated":
            ratio = min(config.correction_cap, number((now[i] - behaviour).exp()))
            loss = -ratio * advantage * now[i]
        else:
            ratio = (now[i] - (behaviour if config.correction == "none" else proximal)).exp()
            low, high = 1 - config.clip_low, 1 + config.clip_high
            bounded = ratio if low <= number(ratio) <= high else torch.tensor(min(max(number(ratio), low), high))
            straight, clipped = ratio * advantage, bounded * advantage
            loss = -(straight if number(straight) <= number(clipped) else clipped)
            if config.correction == "decoupled":
                loss = loss * min(config.correction_cap, torch.tensor(proximal - behaviour).exp().item())
        if aim.reference is not None:
            gap = number(aim.reference[i]) - now[i]
            loss = loss + config.kl_coefficient * (gap.exp() - gap - 1)
        total = total + aim.weights[i] * (loss - config.entropy_coefficient * entropy[i])
    return total


@pytest.mark.parametrize("correction", ["decoupled", "truncated", "none"])
@pytest.mark.parametrize("proximal", [False, True])
@pytest.mark.parametrize("extras", [{}, {"kl_coefficient": 0.3, "entropy_coefficient": 0.2}])
def test_loss_and_gradient_equal_the_formula(correction: Any, proximal: bool, extras: dict[str, float]) -> None:
    config = LossConfig(correction=correction, correction_cap=1.3, **extras)
    logits, tokens = logits_and_tokens()
    now, entropy = log_probabilities(logits, tokens, 1.0, with_entropy_gradient=True)
    aim = targets(now, proximal=proximal, reference=bool(extras))
    outcome = grpo_loss(now, entropy, aim, config)
    wanted = formula(now, entropy, aim, config)
    torch.testing.assert_close(outcome.loss, wanted)
    (found,) = torch.autograd.grad(outcome.loss, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(wanted, logits)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("correction", ["decoupled", "truncated", "none"])
@pytest.mark.parametrize("gap", [-200.0, 100.0, 1000.0])
def test_any_log_ratio_gives_finite_loss_and_gradient(correction: Any, gap: float) -> None:
    logits, tokens = logits_and_tokens(torch.float32)
    now, entropy = log_probabilities(logits, tokens, 1.0)
    aim = targets(now, reference=True)
    aim = aim._replace(behaviour=now.detach() - gap, reference=now.detach() + gap, proximal=now.detach() + gap / 2)
    outcome = grpo_loss(now, entropy, aim, LossConfig(correction=correction, kl_coefficient=0.1))
    outcome.loss.backward()
    assert outcome.loss.isfinite()
    assert logits.grad is not None and logits.grad.isfinite().all()
    assert outcome.largest[0] == pytest.approx(gap * 1.5, rel=1e-4), "the raw ratio is reported, not the bounded one"


def test_the_kl_coefficient_acts() -> None:
    logits, tokens = logits_and_tokens()
    now, entropy = log_probabilities(logits, tokens, 1.0)
    aim = targets(now, reference=True)
    without, with_kl = (grpo_loss(now, entropy, aim, LossConfig(kl_coefficient=c)).loss for c in (0.0, 1.0))
    assert with_kl > without


def test_on_policy_tokens_have_ratio_one_and_no_mismatch() -> None:
    logits, tokens = logits_and_tokens()
    now, entropy = log_probabilities(logits, tokens, 1.0)
    aim = targets(now)._replace(behaviour=now.detach())
    outcome = grpo_loss(now, entropy, aim, LossConfig())
    torch.testing.assert_close(outcome.loss, -(aim.advantages @ aim.weights))
    torch.testing.assert_close(outcome.sums[1:], torch.zeros(5, dtype=torch.float64))
    assert outcome.largest.tolist() == [0.0, 0.0]
