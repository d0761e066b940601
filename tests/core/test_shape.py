"""Are parameters counted as published, and misfitting layouts refused with both numbers?"""

from __future__ import annotations

import msgspec
import pytest

from nereus.core.memory import relay_memory, rollout_memory, training_memory
from nereus.core.plan import Layout
from nereus.core.shape import ModelShape

SMOLLM2_135M = ModelShape(30, 576, 9, 3, 64, 1536, 49152, 8192, tied=True)
QWEN2_5_05B = ModelShape(24, 896, 14, 2, 64, 4864, 151936, 32768, tied=True, qkv_bias=True)
QWEN3_06B = ModelShape(28, 1024, 16, 8, 128, 3072, 151936, 40960, tied=True, qk_norm=True)


@pytest.mark.parametrize(
    ("shape", "parameters"), [(SMOLLM2_135M, 134_515_008), (QWEN2_5_05B, 494_032_768), (QWEN3_06B, 596_049_920)]
)
def test_parameters_are_those_of_the_published_models(shape: ModelShape, parameters: int) -> None:
    assert shape.parameters == parameters


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (Layout(4, 1), ("tensor degree 4", "2 key-value heads")),
        (Layout(1, 25), ("pipeline degree 25", "24 layers")),
        (Layout(3, 1), ("tensor degree 3", "14 attention heads", "2 key-value heads", "4864 feed-forward")),
    ],
)
def test_misfits_name_both_numbers(layout: Layout, parts: tuple[str, ...]) -> None:
    said = "; ".join(QWEN2_5_05B.misfits(layout))
    for part in parts:
        assert part in said


def test_fitting_layouts_have_no_misfits() -> None:
    assert not list(QWEN2_5_05B.misfits(Layout(2, 24)))
    assert not list(SMOLLM2_135M.misfits(Layout(3, 30)))


def test_optimizer_state_follows_the_dtype() -> None:
    count = SMOLLM2_135M.parameters
    memory = {
        dtype: training_memory(
            SMOLLM2_135M, Layout(), 0, layers=30, dtype=dtype, micro_batch_tokens=1024, recompute=False
        )
        for dtype in ("bfloat16", "float32", "float64")
    }
    state = ("parameters", "masters", "gradients", "moments")
    assert [memory["bfloat16"][name] for name in state] == [2 * count, 4 * count, 4 * count, 8 * count]
    assert [memory["float32"][name] for name in state] == [4 * count, 0, 4 * count, 8 * count]
    assert [memory["float64"][name] for name in state] == [8 * count, 0, 8 * count, 16 * count]


def test_parts_of_a_model_sum_to_the_whole() -> None:
    shape = msgspec.structs.replace(SMOLLM2_135M, tied=False)
    halves = [
        training_memory(shape, Layout(1, 2), rank, layers=15, dtype="float32", micro_batch_tokens=8, recompute=False)
        for rank in (0, 1)
    ]
    assert sum(half["parameters"] for half in halves) == 4 * shape.parameters


def test_recomputation_and_tensor_parallelism_save_activations() -> None:
    def activations(layout: Layout, recompute: bool) -> int:
        return training_memory(
            SMOLLM2_135M, layout, 0, layers=30, dtype="float32", micro_batch_tokens=1024, recompute=recompute
        )["activations"]

    assert activations(Layout(), True) < activations(Layout(), False) / 5
    assert activations(Layout(3, 1), False) < activations(Layout(), False)


def test_cache_and_relay() -> None:
    rollout = rollout_memory(SMOLLM2_135M, Layout(), dtype="float32", max_live=64, max_tokens=320)
    assert rollout["KV cache"] == 64 * 320 * 30 * 2 * 3 * 64 * 4
    assert relay_memory(SMOLLM2_135M, dtype="float32")["published versions"] == 8 * SMOLLM2_135M.parameters
