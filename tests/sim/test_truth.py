"""The world's own account of time and memory is sane, and not the planner's."""

from __future__ import annotations

import math

import pytest

from nereus.control.efficiency import CLASSES
from nereus.core.plan import POLICY_TRAINING, Emu, Layout
from nereus.core.profiles import load_cluster, load_model
from nereus.sim.noise import Noise
from nereus.sim.trace import Drift, Trace
from nereus.sim.truth import Step, Truth, tensors_of

SHAPE = load_model("llama-3.1-8b")
CLUSTER = load_cluster("a100-64g-256", 64)
LENGTHS = [(256, 500 + 37 * n % 3000) for n in range(256)]


def _truth(**changes: object) -> Truth:
    return Truth(SHAPE, CLUSTER, Noise(0, scale=0.0), **changes)  # type: ignore[arg-type]


def _units(dp: int, tp: int, pp: int) -> list[Emu]:
    layout = Layout(tp, pp)
    slots = [tuple(range(n * layout.slots, (n + 1) * layout.slots)) for n in range(dp)]
    return [Emu(POLICY_TRAINING, n, layout, held) for n, held in enumerate(slots)]


def _step(truth: Truth, dp: int = 2, tp: int = 4, pp: int = 2, lengths: list[tuple[int, int]] = LENGTHS) -> Step:
    return truth.step(_units(dp, tp, pp), lengths, 3, 8192, recompute=False)


def test_longer_sequences_and_fewer_slots_take_longer() -> None:
    truth = _truth()
    twice = [(prompt, 2 * response) for prompt, response in LENGTHS]
    assert _step(truth, lengths=twice).seconds > 1.8 * _step(truth).seconds
    assert _step(truth, dp=1).seconds > 1.8 * _step(truth, dp=2).seconds
    assert _step(truth, tp=2).seconds > 1.5 * _step(truth, tp=4).seconds


def test_utilization_is_that_of_real_steps() -> None:
    flops = 6 * SHAPE.parameters * sum(map(sum, LENGTHS))
    reached = flops / _step(_truth()).seconds / 16 / CLUSTER.device.flops_per_s
    assert 0.25 < reached < 0.55


def test_a_tensor_group_over_nodes_is_slow() -> None:
    assert _step(_truth(), dp=1, tp=8, pp=2).seconds > 2 * _step(_truth(), dp=1, tp=4, pp=4).seconds


def test_a_pipeline_that_leaves_its_node_anywhere_sends_over_the_network() -> None:
    """Nodes have four slots: of four ranks of two slots each, the first two share a node."""
    over = _step(_truth(), dp=1, tp=2, pp=4)
    assert "p2p/cross_node" in over.operations
    assert "p2p/in_node" in _step(_truth(), dp=1, tp=2, pp=2).operations


def test_operations_are_classes_and_part_of_the_step() -> None:
    step = _step(_truth())
    assert set(step.operations) <= set(map(str, CLASSES))
    assert 0.7 * step.seconds < sum(step.operations.values()) < 1.3 * step.seconds


def test_recomputation_costs_time_and_saves_memory() -> None:
    truth, units = _truth(), _units(2, 4, 2)
    kept = truth.step(units, LENGTHS, 3, 8192, recompute=False)
    again = truth.step(units, LENGTHS, 3, 8192, recompute=True)
    assert again.seconds > 1.2 * kept.seconds
    assert again.peak_bytes < 0.8 * kept.peak_bytes


def test_decoding_takes_longer_with_more_alive_and_less_with_more_slots() -> None:
    truth, one, four = _truth(), Layout(1, 1), Layout(4, 1)
    seconds = [truth.decode_s(one, (0,), live, 0) for live in (1, 2, 8, 64, 500, 4096)]
    assert seconds == sorted(seconds)
    assert truth.decode_s(four, (0, 1, 2, 3), 64, 0) < 0.6 * truth.decode_s(one, (0,), 64, 0)
    assert truth.cache_tokens(four) > 4 * truth.cache_tokens(one)
    assert truth.prefill_s(one, 1000) > 4 * truth.prefill_s(one, 100)


def test_drift_slows_its_class_from_its_step_on() -> None:
    drifting = _truth(trace=Trace("t", "test", efficiency=(Drift(3, "gemm", 0.5), Drift(4, "cache", 0.5))))
    assert _step(drifting).operations["gemm"] == pytest.approx(2 * _step(_truth()).operations["gemm"])
    assert drifting.cached_s(Layout(), 4) == 2 * drifting.cached_s(Layout(), 3)


def test_equal_seeds_take_equal_time_and_others_do_not() -> None:
    seconds = [_step(Truth(SHAPE, CLUSTER, Noise(seed))).seconds for seed in (1, 1, 2)]
    assert seconds[0] == seconds[1] != seconds[2]


def test_the_state_has_the_models_size() -> None:
    whole = sum(spec.shape[0] * spec.shape[1] for spec in tensors_of(SHAPE))
    assert whole == pytest.approx(SHAPE.parameters, rel=0.01)


def test_samples_longer_than_a_micro_batch_take_one_each() -> None:
    short, long = [(100, 8000)] * 64, [(500, 16000)] * 64
    assert math.isfinite(_step(_truth(), lengths=long).seconds)
    assert 1.5 < _step(_truth(), lengths=long).seconds / _step(_truth(), lengths=short).seconds < 4
