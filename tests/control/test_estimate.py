"""What do steps teach the estimate?"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.control.breakdown import Pricing
from nereus.control.efficiency import Efficiencies
from nereus.control.estimate import WINDOW, Decoded, Estimate, StepFacts, live_space
from nereus.control.memory import MemoryCalibration
from nereus.control.propose import latency_now
from nereus.core.cluster import Cluster, Device, Link, uniform_nodes
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, Emu, Layout, Plan
from nereus.core.shape import ModelShape
from nereus.core.workflow import Algorithm, workflow
from nereus.core.workload import Lengths, Workload

SHAPE = ModelShape(4, 128, 4, 4, 32, 256, 512, 1024)
SLOTS = 8


def _estimate() -> Estimate:
    cluster = Cluster(
        "test",
        Device("slot", 1e9, 2e9, 2e9),
        uniform_nodes(SLOTS, SLOTS),
        Link(1e-4, 5e8),
        Link(1e-4, 5e8),
    )
    flow = workflow(Algorithm.GRPO, asynchronous=True, reference=False, reward_model=False, group_size=8)
    load = Workload(Lengths.fixed(16), Lengths.fixed(16), 32, 8)
    space = live_space(micro_batch_tokens=2048, max_live=64, compute_bytes=4.0, recompute=False)
    memory = MemoryCalibration(workspace_bytes=0.0)
    return Estimate.starting(Pricing(cluster, {"policy": SHAPE}, flow, load, Efficiencies.prior(), memory, space))


def _plan(tp: int = 1, dp: int = 2, rollouts: int = 2) -> Plan:
    layout = Layout(tp, 1)
    train = tuple(Emu(POLICY_TRAINING, i, layout, tuple(range(i * tp, i * tp + tp))) for i in range(dp))
    first = tp * dp
    return Plan(0, (*train, *(Emu(POLICY_GENERATION, i, Layout(), (first + i,)) for i in range(rollouts))))


def _facts(train_s: float, generate_s: float, response: int = 16, **more: object) -> StepFacts:
    return StepFacts(
        (16,) * 256,
        (response,) * 256,
        {POLICY_TRAINING: train_s, POLICY_GENERATION: generate_s},
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.deep
@given(
    train_s=st.floats(0.2, 40.0),
    generate_s=st.floats(0.2, 40.0),
    tp=st.sampled_from((1, 2)),
    dp=st.sampled_from((1, 2)),
)
@settings(max_examples=25, deadline=None)
def test_predictions_of_what_runs_come_to_what_was_measured(
    train_s: float, generate_s: float, tp: int, dp: int
) -> None:
    estimate, plan = _estimate(), _plan(tp, dp)
    for _ in range(20):
        estimate = estimate.observed(plan, _facts(train_s, generate_s))
    now = latency_now(estimate.question(estimate.pricing.cluster, plan, {}))
    assert now == pytest.approx(max(train_s, generate_s), rel=0.25)


def test_lengths_are_those_of_the_newest_steps() -> None:
    estimate, plan = _estimate(), _plan()
    for response in (16, 16, 16, *([64] * WINDOW)):
        estimate = estimate.observed(plan, _facts(1.0, 1.0, response))
    assert estimate.pricing.workload.responses.mean == pytest.approx(64)
    signals = estimate.signals(plan)
    assert (signals.mean_tokens, signals.p95_tokens) == (80.0, 80.0)


def test_only_operations_that_matter_are_watched() -> None:
    plan = _plan()
    estimate = _estimate().observed(plan, _facts(1.0, 1.0, operations={"gemm": 0.9, "optimizer": 0.01}))
    assert set(estimate.signals(plan).efficiency) == {"gemm"}


def test_measured_peaks_correct_what_is_kept_of_activations() -> None:
    estimate, plan = _estimate(), _plan()
    for _ in range(8):
        estimate = estimate.observed(plan, _facts(1.0, 1.0, peak_bytes=60_000_000))
    state, transient, peak = estimate.peaks[-1]
    assert peak == 60_000_000
    assert state + transient * estimate.pricing.calibration.transient_factor == pytest.approx(peak)


def test_a_peak_that_did_not_fit_is_believed_at_once() -> None:
    estimate, plan = _estimate(), _plan()
    for _ in range(20):
        estimate = estimate.observed(plan, _facts(1.0, 1.0, peak_bytes=30_000_000))
    estimate = estimate.observed(plan, _facts(0.0, 0.0, peak_bytes=90_000_000))
    state, transient, peak = estimate.peaks[-1]
    assert state + transient * estimate.pricing.calibration.transient_factor >= peak


@pytest.mark.parametrize(("predicted", "measured", "changes"), [(1.0, 3.0, 1.0), (1.0, 0.5, -0.25), (9.0, 0.1, -0.5)])
def test_transitions_teach_what_a_pause_costs(predicted: float, measured: float, changes: float) -> None:
    estimate = _estimate()
    moved = estimate.moved(predicted, measured)
    assert moved.pricing.overheads.pause_s == pytest.approx(estimate.pricing.overheads.pause_s + changes)


def test_engines_counters_count_and_not_what_units_wait_for_orders() -> None:
    """A bound of staleness keeps units busy for as long as a step takes, whatever they could do."""
    plan, found = _plan(), list[float]()
    for seconds in (1.0, 4.0):
        decoded = Decoded(2 * seconds, 128, 256 * 16, 256 * 16 * 24)
        estimate = _estimate()
        for _ in range(20):
            estimate = estimate.observed(plan, _facts(0.1, 30.0, decoded=decoded))
        found.append(latency_now(estimate.question(estimate.pricing.cluster, plan, {})))
    assert found[0] < 10.0
    assert 2.0 < found[1] / found[0] < 6.0
