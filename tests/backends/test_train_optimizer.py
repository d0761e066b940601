"""Do the schedule and the flat optimizer do what AdamW on separate tensors does?"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from nereus.backends.torch.optimizer import FlatAdamW, learning_rate
from nereus.config import TrainConfig


def test_warm_up_rises_to_the_peak_and_schedules_end_at_the_floor() -> None:
    for schedule in ("constant", "cosine", "linear"):
        config = TrainConfig(learning_rate=1.0, min_learning_rate=0.25, warmup_steps=4, schedule=schedule)
        rates = [learning_rate(config, update, 14) for update in range(15)]
        assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
        assert rates[4] == 1.0
        assert rates[14] == pytest.approx(1.0 if schedule == "constant" else 0.25)
        assert all(later <= earlier for earlier, later in pairwise(rates[4:]))
        assert learning_rate(config, 99, 14) == rates[14]
    assert learning_rate(TrainConfig(learning_rate=1.0, schedule="cosine"), 5, 10) == pytest.approx(0.5)
    assert learning_rate(TrainConfig(learning_rate=1.0, schedule="linear"), 5, 10) == pytest.approx(0.5)


def test_flat_updates_equal_separate_ones() -> None:
    config = TrainConfig(weight_decay=0.1)
    flat = FlatAdamW(12, torch.float64, torch.device("cpu"), config)
    flat.master.copy_(torch.linspace(-1, 1, 12))
    parts = [torch.nn.Parameter(flat.master[:5].clone()), torch.nn.Parameter(flat.master[5:].clone())]
    plain = torch.optim.AdamW(parts, lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        gradient = torch.randn(12, generator=generator, dtype=torch.float64)
        flat.gradient.copy_(gradient)
        parts[0].grad, parts[1].grad = gradient[:5] * 0.5, gradient[5:] * 0.5
        plain.param_groups[0]["lr"] = 1e-2
        plain.step()
        flat.step(1e-2, 0.5)
    torch.testing.assert_close(flat.compute, torch.cat([part.detach() for part in parts]), rtol=1e-13, atol=1e-13)
    assert flat.updates == 5


def test_bfloat16_parameters_move_although_each_update_is_below_their_precision() -> None:
    flat = FlatAdamW(4, torch.bfloat16, torch.device("cpu"), TrainConfig())
    flat.master.fill_(1.0)
    flat.refresh()
    for _ in range(100):
        flat.gradient.fill_(1.0)
        flat.step(1e-4, 1.0)
    assert flat.master.dtype == torch.float32
    assert flat.compute.dtype == torch.bfloat16
    assert flat.compute[0] < 1.0
    assert flat.master[0] == pytest.approx(0.99, abs=1e-4)


def test_restored_counters_continue_the_bias_correction() -> None:
    def trained(steps: int) -> FlatAdamW:
        flat = FlatAdamW(2, torch.float64, torch.device("cpu"), TrainConfig())
        for step in range(steps):
            flat.gradient.fill_(math.sin(step))
            flat.step(1e-3, 1.0)
        return flat

    straight, half, resumed = trained(6), trained(3), FlatAdamW(2, torch.float64, torch.device("cpu"), TrainConfig())
    for kind, buffer in half.buffers().items():
        resumed.buffers()[kind].copy_(buffer)
    resumed.updates = half.updates
    for step in range(3, 6):
        resumed.gradient.fill_(math.sin(step))
        resumed.step(1e-3, 1.0)
    assert torch.equal(resumed.master, straight.master)
