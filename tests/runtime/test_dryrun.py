"""Does the dry run's memory follow the job's number format, layout and settings?"""

from __future__ import annotations

import pytest

from nereus.configuration.load import load_job
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, POLICY_WEIGHTS, Emu, Layout, ModelStage
from nereus.core.shape import ModelShape
from nereus.runtime.dryrun import unit_memory

SHAPE = ModelShape(30, 576, 9, 3, 64, 1536, 49152, 8192, tied=True)


def memory(stage: ModelStage, *settings: tuple[str, str], layout: Layout | None = None) -> dict[str, float]:
    layout = layout or Layout()
    job = load_job([], [("cluster.slots", "64"), ("model.path", "m"), *settings])
    return unit_memory(job, SHAPE, Emu(stage, 0, layout, tuple(range(layout.slots))))


@pytest.mark.parametrize(
    ("dtype", "bytes_each"),
    [("bfloat16", (2, 4, 4, 8)), ("float32", (4, 0, 4, 8)), ("float64", (8, 0, 8, 16))],
)
def test_optimizer_state_follows_the_dtype(dtype: str, bytes_each: tuple[int, ...]) -> None:
    exact = [("run.deterministic", "true"), ("async.staleness", "0"), ("rollout.interrupt", "wait")]
    found = memory(POLICY_TRAINING, ("model.dtype", dtype), *(exact if dtype == "float64" else []))
    each = [found.get(name, 0.0) / SHAPE.parameters for name in ("parameters", "masters", "gradients", "moments")]
    assert each == pytest.approx(bytes_each, rel=1e-3)


def test_recomputation_and_tensor_parallelism_save_activations() -> None:
    whole = memory(POLICY_TRAINING)["activations"]
    assert memory(POLICY_TRAINING, ("train.recompute", "true"))["activations"] < whole / 5
    assert memory(POLICY_TRAINING, layout=Layout(3, 1))["activations"] < whole


def test_cache_and_relay() -> None:
    rollout = memory(
        POLICY_GENERATION,
        ("model.dtype", "float32"),
        ("rollout.max_live", "64"),
        ("rollout.max_prompt_tokens", "64"),
        ("rollout.max_new_tokens", "256"),
    )
    assert rollout["KV cache"] == 64 * 320 * 30 * 2 * 3 * 64 * 4
    relay = memory(POLICY_WEIGHTS, ("model.dtype", "float32"))
    assert relay["published versions"] == pytest.approx(8 * SHAPE.parameters)
