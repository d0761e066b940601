"""Are parameters counted as published, and misfitting layouts refused with both numbers?"""

from __future__ import annotations

import pytest

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
