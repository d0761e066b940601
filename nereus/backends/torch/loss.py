"""What is minimized? The GRPO loss of one micro-batch, and the sums behind its metrics.

Owner: the trainer. A micro-batch's loss is a *sum* over its tokens, already divided once by the count over all
micro-batches and replicas; metrics are (sum, count) pairs and are divided once at the end. So neither depends on how
samples are packed or placed.

Log-probabilities are those of the sampling distribution: of logits divided by the temperature, in float32 (float64 for
float64). With prox = log-probability under the policy at the start of the step, behaviour = under the policy that
sampled, A = advantage, every log-ratio bounded to +-20 before exp:

* ``decoupled``: r = exp(logp - prox); loss = -w min(r A, clip(r, 1 - low, 1 + high) A), w = min(cap, exp(prox -
  behaviour));
* ``truncated``: loss = -w A logp with w = min(cap, exp(logp - behaviour)), held constant; clip_low, clip_high do not
  act;
* ``none``: r = exp(logp - behaviour), clipped as above.

Plus ``kl_coefficient`` times k3 = exp(ref - logp) - (ref - logp) - 1, minus ``entropy_coefficient`` times the entropy.

Invariants (tests/backends/test_loss.py): gradients equal those of the plain formula; log-ratios of any size give finite
losses; a vocabulary split over slots changes nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nereus.config import LossConfig

LOG_RATIO_BOUND = 20.0

METRICS = (
    "policy/entropy",
    "policy/clip_frac",
    "kl/old",
    "kl/ref",
    "mismatch/kl",
    "mismatch/abs_diff",
)
"""Token means, in the order of ``Outcome.sums``."""


class Targets(NamedTuple):
    """What a micro-batch's n completion tokens are measured against; all [n]."""

    tokens: Tensor
    """int64: the token that was drawn."""
    advantages: Tensor
    behaviour: Tensor
    """Log-probability under the policy that drew it."""
    weights: Tensor
    """The token's share in the loss: 1 / tokens, or 1 / (samples * tokens of its sample), global counts."""
    proximal: Tensor | None = None
    """Log-probability under the policy at the start of the step; None: that is the present one."""
    reference: Tensor | None = None


class Outcome(NamedTuple):
    """What became of one micro-batch."""

    loss: Tensor
    sums: Tensor
    """Sums over tokens of METRICS, float64 [6]."""
    largest: Tensor
    """float64 [2]: the largest log-ratio of trainer to behaviour policy, and the largest absolute one."""


class _LogProbabilities(torch.autograd.Function):  # type: ignore[misc]
    """Log-probability of given tokens and entropy, from (this slot's part of) the logits.

    One pass over the logits each way; the parts of a split vocabulary are combined by one MAX and one SUM over [n]
    numbers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        tokens: Tensor,
        temperature: float,
        start: int | None,
        group: dist.ProcessGroup | None,
        with_entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
        scaled = logits.to(exact, copy=True)
        if temperature != 1.0:
            scaled /= temperature
        largest = scaled.amax(-1)
        if group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        scaled -= largest[:, None]
        powers = scaled.exp()
        total = powers.sum(-1)
        weighted = torch.linalg.vecdot(powers, scaled)
        if start is None:
            mine, column = None, tokens
        else:
            mine = (tokens >= start) & (tokens < start + logits.shape[-1])
            column = (tokens - start).where(mine, 0)
        chosen = scaled.gather(-1, column[:, None])[:, 0]
        if mine is not None:
            chosen = chosen.where(mine, 0)
        if group is not None:
            combined = torch.stack((total, weighted, chosen))
            dist.all_reduce(combined, group=group)
            total, weighted, chosen = combined.unbind()
        log_total = total.log()
        entropy = log_total - weighted / total
        kept = (scaled, entropy, log_total) if with_entropy_gradient else ()
        ctx.save_for_backward(powers, total, column, mine, *kept)
        ctx.temperature = temperature
        ctx.dtype = logits.dtype
        ctx.set_materialize_grads(False)
        if not with_entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, d_log_probability: Tensor | None, d_entropy: Tensor | None) -> Any:
        powers, total, column, mine, *kept = ctx.saved_tensors
        d_chosen = torch.zeros_like(total) if d_log_probability is None else d_log_probability / ctx.temperature
        result = powers * (-d_chosen / total)[:, None]
        here = d_chosen if mine is None else d_chosen.where(mine, 0)
        result.scatter_add_(-1, column[:, None], here[:, None])
        if d_entropy is not None and kept:
            scaled, entropy, log_total = kept
            share = (d_entropy / total / ctx.temperature)[:, None]
            result -= share * powers * (scaled + (entropy - log_total)[:, None])
        return result.to(ctx.dtype), None, None, None, None, None


def log_probabilities(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    *,
    start: int | None = None,
    group: dist.ProcessGroup | None = None,
    with_entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log-probability of ``tokens`` and entropy, both [n], of logits [n, vocabulary] divided by ``temperature``.

    With ``start`` and ``group``, ``logits`` are the columns from ``start`` on of a vocabulary that is split over
    ``group``. Without ``with_entropy_gradient`` the entropy is a plain number for the metrics.
    """
    result: tuple[Tensor, Tensor] = _LogProbabilities.apply(
        logits, tokens, temperature, start, group, with_entropy_gradient
    )
    return result


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _k3(log_ratio: Tensor) -> Tensor:
    """Return the non-negative estimate of a KL divergence from log q - log p of samples of p."""
    bounded = _bounded(log_ratio)
    return bounded.exp() - bounded - 1


def grpo_loss(log_probability: Tensor, entropy: Tensor, targets: Targets, config: LossConfig) -> Outcome:
    """Return the weighted loss of n tokens and the sums of its metrics; see the module's text for the formulas."""
    now = log_probability.detach()
    proximal = now if targets.proximal is None else targets.proximal
    advantages = targets.advantages
    anchor = targets.behaviour if config.correction == "none" else proximal
    if config.correction == "truncated":
        ratio = _bounded(now - targets.behaviour).exp()
        clipped = ratio > config.correction_cap
        per_token = ratio.clamp(max=config.correction_cap) * advantages * -log_probability
    else:
        ratio = _bounded(log_probability - anchor).exp()
        straight = ratio * advantages
        bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
        clipped = bounded < straight
        per_token = -torch.minimum(straight, bounded)
        if config.correction == "decoupled":
            per_token = per_token * _bounded(proximal - targets.behaviour).exp().clamp(max=config.correction_cap)
    kl = None
    if targets.reference is not None:
        kl = _k3(targets.reference - log_probability)
        per_token = per_token + config.kl_coefficient * kl
    if config.entropy_coefficient:
        per_token = per_token - config.entropy_coefficient * entropy
    loss = torch.dot(per_token, targets.weights)
    with torch.no_grad():
        drift = proximal - targets.behaviour
        sums = torch.stack(
            (
                entropy.sum(),
                clipped.sum(dtype=now.dtype),
                (proximal - now).sum(),
                kl.sum() if kl is not None else now.new_zeros(()),
                _k3(drift).sum(),
                drift.abs().sum(),
            )
        ).double()
        largest = torch.stack((drift.amax(), drift.abs().amax())).double()
    return Outcome(loss, sums, largest)
