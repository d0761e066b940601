"""How does a gradient become new weights?

Owner: the trainer. AdamW on flat buffers: masters and moments are float32 (float64 for float64); a float32 or float64
model's parameters *are* the masters, bfloat16 parameters are rounded from them after each update.

Invariants (tests/backends/test_train_optimizer.py): all state exists before the first update; a gradient that is not
finite changes nothing, not even the schedule; warm-up and decay count applied updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from nereus.config import TrainConfig

_MOMENTS = ("exp_avg", "exp_avg_sq")
_KINDS = ("parameter", *_MOMENTS)

Zeros = Callable[[int, torch.dtype], Tensor]
"""``zeros(elements, dtype)``: a flat buffer of zeros."""


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision of masters and moments of a model in ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def learning_rate(config: TrainConfig, update: int, updates: int) -> float:
    """Return the learning rate of update number ``update`` (from 0) out of ``updates`` in the whole run.

    It rises linearly over ``warmup_steps`` updates, then stays, or falls (cosine, linear) to ``min_learning_rate``.
    """
    peak, floor, warmup = config.learning_rate, config.min_learning_rate, config.warmup_steps
    if update < warmup:
        return peak * (update + 1) / warmup
    if config.schedule == "constant":
        return peak
    progress = min(1.0, (update - warmup) / max(1, updates - warmup))
    share = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return floor + (peak - floor) * share


class FlatAdamW:
    """Masters, gradient and moments of one slot as flat buffers of equal layout."""

    def __init__(
        self,
        elements: int,
        dtype: torch.dtype,
        device: torch.device,
        config: TrainConfig,
        state: Mapping[str, Tensor] | None = None,
        *,
        zeros: Zeros | None = None,
    ) -> None:
        """Train in buffers of zeros, or in those of ``state``, by kind, which become the optimizer's own.

        ``zeros`` allocates; by default torch does.
        """
        zeros = zeros or (lambda size, kind: torch.zeros(size, dtype=kind, device=device))
        kept = state or {kind: zeros(elements, exact_dtype(dtype)) for kind in _KINDS}
        self.master = kept["parameter"]
        self.gradient = zeros(elements, self.master.dtype)
        self.compute = self.master if dtype == self.master.dtype else zeros(elements, dtype)
        self._parameter = torch.nn.Parameter(self.master)
        self._parameter.grad = self.gradient
        self._optimizer = torch.optim.AdamW(
            [self._parameter],
            lr=0.0,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._steps = torch.zeros((), dtype=torch.float32, device=device)
        self.moments = {kind: kept[kind] for kind in _MOMENTS}
        self._optimizer.state[self._parameter] = {"step": self._steps, **self.moments}
        self._applied = 0

    @property
    def updates(self) -> int:
        """How many updates were applied."""
        return self._applied

    @updates.setter
    def updates(self, applied: int) -> None:
        self._applied = applied
        self._steps.fill_(applied)

    def buffers(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds, by kind."""
        return {"parameter": self.master, **self.moments}

    def refresh(self) -> None:
        """Round the compute parameters from the masters."""
        if self.compute is not self.master:
            self.compute.copy_(self.master)

    def step(self, rate: float, scale: float) -> None:
        """Apply one update with the gradient times ``scale``."""
        if scale != 1.0:
            self.gradient.mul_(scale)
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()
        self._applied += 1
        self.refresh()
