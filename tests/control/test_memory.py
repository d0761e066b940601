"""Does every memory term move the right way, and do measured peaks correct the model?"""

from __future__ import annotations

import pytest

from nereus.control.cost import Recompute, Setups, Sharding
from nereus.control.memory import (
    Memory,
    MemoryCalibration,
    SlotLoad,
    generation_memory,
    relay_bytes,
    scoring_memory,
    shortfall_bytes,
    training_memory,
    transition_load,
)
from nereus.core.plan import Layout
from nereus.core.profiles import load_model

SHAPE = load_model("llama-3.1-8b")
NONE, FULL = Recompute.NONE, Recompute.FULL


def setups(layout: Layout, dp: int = 1, again: Recompute = NONE, sharding: Sharding = Sharding.NONE) -> Setups:
    return Setups.grid([(layout, dp, 1, again)], sharding=sharding)


def training(layout: Layout, tokens: int = 2048, again: Recompute = NONE, batches: int = 16) -> Memory:
    return training_memory(SHAPE, setups(layout, again=again), tokens, batches)


def transient(memory: Memory) -> float:
    return float(memory.transient_bytes(MemoryCalibration(workspace_bytes=0)).ravel()[0])


def test_state_is_eighteen_bytes_a_parameter() -> None:
    """2 for the weight, 4 each for master, gradient and two moments."""
    table = training(Layout(1, 1)).table()
    assert table["parameters"] == pytest.approx(2 * SHAPE.parameters, rel=1e-3)
    assert table["masters"] == table["gradients"] == table["moments"] / 2 == 2 * table["parameters"]


def test_state_falls_with_both_degrees() -> None:
    whole, by_tp, by_pp = (
        float(training(layout).resident_bytes()[0]) for layout in (Layout(1, 1), Layout(4, 1), Layout(1, 4))
    )
    assert by_tp == pytest.approx(whole / 4, rel=1e-3) and by_tp < by_pp < whole / 2


def test_activations_follow_tokens_recomputation_and_micro_batches_in_flight() -> None:
    base = transient(training(Layout(2, 2)))
    assert transient(training(Layout(2, 2), tokens=4096)) == pytest.approx(2 * base)
    assert transient(training(Layout(2, 2), again=FULL)) < base / 4
    assert transient(training(Layout(2, 2), batches=1)) < base


def test_pipelines_keep_as_many_layers_alive_as_one_rank() -> None:
    """The first of four ranks holds a quarter of the layers for four micro-batches; tensor parallelism really cuts."""
    one = training(Layout(1, 1)).table()["activations"]
    assert training(Layout(1, 4)).table()["activations"] == pytest.approx(one)
    assert training(Layout(4, 1)).table()["activations"] < one / 2


def test_sharing_the_optimizer_leaves_weights_and_gradients() -> None:
    alone = training_memory(SHAPE, setups(Layout(1, 1), dp=4), 1, 1).table()
    shared = training_memory(SHAPE, setups(Layout(1, 1), dp=4, sharding=Sharding.OPTIMIZER), 1, 1).table()
    assert shared["moments"] == alone["moments"] / 4 and shared["gradients"] == alone["gradients"]
    scattered = training_memory(SHAPE, setups(Layout(1, 1), dp=4, sharding=Sharding.GRADIENTS), 1, 1).table()
    assert scattered["gradients"] == alone["gradients"] / 4 and scattered["parameters"] == alone["parameters"]


def test_sharing_parameters_gathers_two_layers_unless_a_pipeline_keeps_all() -> None:
    alone = training_memory(SHAPE, setups(Layout(1, 1), dp=4), 1, 1).table()
    shared = training_memory(SHAPE, setups(Layout(1, 1), dp=4, sharding=Sharding.PARAMETERS), 1, 1).table()
    assert shared["parameters"] < alone["parameters"] / 4 and shared["masters"] == alone["masters"] / 4
    assert shared["gradients"] == alone["gradients"] / 4
    piped = training_memory(SHAPE, setups(Layout(1, 4), dp=4, sharding=Sharding.PARAMETERS), 1, 1).table()
    whole = training_memory(SHAPE, setups(Layout(1, 4), dp=4), 1, 1).table()
    assert piped["parameters"] == whole["parameters"] and piped["gradients"] == whole["gradients"]
    assert piped["masters"] == whole["masters"] / 4


def test_stored_scores_grow_with_the_square_and_recomputation_drops_them() -> None:
    def kept(again: Recompute, square: float) -> float:
        memory = training_memory(SHAPE, setups(Layout(1, 1), again=again), 2048, 16, scored_square=square)
        return memory.table()["activations"]

    fused = kept(NONE, 0.0)
    scores = kept(NONE, 2048.0**2) - fused
    assert scores == pytest.approx(5 * 2048**2 * SHAPE.heads * SHAPE.layers)
    assert kept(Recompute.ATTENTION, 2048.0**2) == fused
    assert kept(FULL, 2048.0**2) - kept(FULL, 0.0) == pytest.approx(scores / SHAPE.layers), "one layer at a time"
    assert kept(FULL, 0.0) < kept(Recompute.ALTERNATE, 0.0) < fused


def test_a_rollout_holds_weights_and_cache() -> None:
    table = generation_memory(SHAPE, setups(Layout(2, 1)), 16, 16 * 2048, 512).table()
    assert table["KV cache"] == 16 * 2048 * SHAPE.layers * 2 * SHAPE.kv_heads * SHAPE.head_dim * 2 / 2
    assert table["parameters"] == pytest.approx(SHAPE.parameters, rel=1e-3)
    assert relay_bytes(SHAPE) == 4 * SHAPE.parameters


def test_a_scoring_slot_has_no_optimizer() -> None:
    memory = scoring_memory(SHAPE, setups(Layout(2, 1)), 2048, head=False)
    assert set(memory.resident) == {"parameters"} and "logits" not in memory.table()


def test_peaks_correct_the_transient_terms_only() -> None:
    truth = MemoryCalibration(1.6, 3e9)
    peaks = [(30e9, size, 30e9 + size * 1.6 + 3e9) for size in (5e9, 10e9, 15e9, 20e9)]
    learned = MemoryCalibration(workspace_bytes=3e9).refined(peaks)
    assert learned.transient_factor == pytest.approx(truth.transient_factor)
    assert learned.workspace_bytes == pytest.approx(truth.workspace_bytes)
    once = MemoryCalibration(workspace_bytes=3e9).refined(peaks[:1])
    assert 1.0 < once.transient_factor < 1.6
    assert MemoryCalibration().refined([]) == MemoryCalibration()


@pytest.mark.parametrize("size", [1e9, 5e9, 40e9])
def test_peaks_of_one_size_are_explained_by_workspace_and_factor_together(size: float) -> None:
    """Where activations are small, a gap is mostly workspace: larger ones are not thought far larger still."""
    learned = MemoryCalibration().refined([(40e9, size, 40e9 + size + 3.5e9)] * 5)
    assert learned.workspace_bytes + learned.transient_factor * size == pytest.approx(size + 3.5e9)
    assert learned.workspace_bytes > 1.5e9 and learned.transient_factor > 1.0
    assert (learned.workspace_bytes - 1.5e9 > 1e9) == (size < 6e9)
    without = MemoryCalibration(workspace_bytes=0.0).refined([(40e9, size, 40e9 + 1.2 * size)] * 5)
    assert without.transient_factor == pytest.approx(1.2) and without.workspace_bytes == 0.0


def test_many_peaks_tell_the_workspace_from_the_factor() -> None:
    """Six rows of different size, one of them wild."""
    peaks = [(20e9, size, 20e9 + size * 1.3 + 4e9) for size in (2e9, 5e9, 8e9, 12e9, 20e9, 30e9)]
    learned = MemoryCalibration().refined([*peaks, (20e9, 10e9, 75e9)])
    assert learned.transient_factor == pytest.approx(1.3, rel=0.1)
    assert learned.workspace_bytes == pytest.approx(4e9, rel=0.3)
    shrinking = [(20e9, size, 60e9 - size) for size in (2e9, 5e9, 8e9, 12e9, 20e9, 30e9)]
    assert MemoryCalibration().refined(shrinking).transient_factor > 1.0, "a slope of -1 was believed"


def test_a_slot_sums_all_that_is_on_it() -> None:
    load = SlotLoad((10e9, 5e9), (20e9,), split_replicas=2e9, buffers=1e9)
    assert load.total == 38e9
    assert shortfall_bytes(load, 40e9) == pytest.approx(1.8e9) and shortfall_bytes(load, 42e9) < 0
    assert transition_load([10e9], [10e9], buffers=1e9).total == 21e9
