"""Do efficiencies start from the prior, learn from measurements, and shrug off a wild one?"""

from __future__ import annotations

import math

import numpy as np
import pytest

from nereus.control.efficiency import (
    CLASSES,
    COLUMN,
    Accuracy,
    Calibration,
    Efficiencies,
    Observation,
    OperationClass,
    Work,
    fit,
    regress,
)

TRUE = Efficiencies.of({OperationClass.GEMM: 0.55, OperationClass.MEMORY: 0.8, OperationClass.ALLREDUCE_IN_NODE: 0.65})
USED = (OperationClass.GEMM, OperationClass.MEMORY, OperationClass.ALLREDUCE_IN_NODE)


def steps(count: int, seed: int = 0, noise: float = 0.01) -> list[Observation]:
    """Steps whose work is a random mix of three classes."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        work = Work.none(1)
        for name in USED:
            work.add(name, random.uniform(0.1, 2.0), 1e-3)
        measured = float(work.seconds(TRUE)[0]) * float(np.exp(random.normal(0, noise)))
        found.append(Observation.of_step(work, measured))
    return found


def test_without_measurements_the_prior_stands() -> None:
    prior = Efficiencies.prior()
    assert fit(prior, []) == prior
    assert prior[OperationClass.GEMM] == 0.35 and prior[OperationClass.P2P_CROSS_NODE] == 0.40
    assert prior[OperationClass.DECODE] == 0.50 and prior[OperationClass.ATTENTION] == 0.25


def test_step_times_reveal_the_classes_and_leave_the_others() -> None:
    found = fit(Efficiencies.prior(), steps(60))
    for name in USED:
        assert found[name] == pytest.approx(TRUE[name], rel=0.08), name
    assert found[OperationClass.DECODE] == Efficiencies.prior()[OperationClass.DECODE]


def test_a_kernel_time_reveals_its_class_at_once() -> None:
    kernels = [Observation.of_class(OperationClass.ATTENTION, 1.0, 2.0)] * 8
    assert fit(Efficiencies.prior(), kernels)[OperationClass.ATTENTION] == pytest.approx(0.5, rel=0.02)


def test_one_wild_measurement_does_not_move_the_fit() -> None:
    good = steps(40)
    wild = Observation(good[0].unit_s, good[0].fixed_s, good[0].measured_s * 30)
    before, after = fit(Efficiencies.prior(), good), fit(Efficiencies.prior(), [*good, wild])
    for name in USED:
        assert after[name] == pytest.approx(before[name], rel=0.05)


def test_unseen_mixes_are_predicted_from_the_classes() -> None:
    found = fit(Efficiencies.prior(), steps(40))
    for seen in steps(20, seed=9, noise=0):
        predicted = float(np.array(seen.unit_s) @ found.inverse()) + seen.fixed_s
        assert predicted == pytest.approx(seen.measured_s, rel=0.03)


def test_impossible_measurements_are_left_out() -> None:
    row = (1.0,) * len(CLASSES)
    broken = [Observation(row, 0, math.nan), Observation(row, 0, -1.0), Observation((0.0,) * len(CLASSES), 1.0, 1.0)]
    assert fit(Efficiencies.prior(), broken) == Efficiencies.prior()


def test_groups_share_what_they_have_in_common() -> None:
    """Two groups 20 % apart: each group's offset is found, and a third group would start from the common one."""
    unit_s = np.zeros((40, len(CLASSES)))
    unit_s[:, COLUMN[OperationClass.GEMM]] = 1.0
    members = np.array([[0, 1 + index % 2] for index in range(40)])
    measured = np.where(members[:, 1] == 1, 2.0, 2.4)
    spread = np.zeros((3, len(CLASSES) + 1))
    spread[0, :-1], spread[1:, :-1] = 0.5, 0.2
    prior = np.log(np.array(Efficiencies.prior().values))
    offsets = regress(unit_s, np.zeros(40), measured, prior, spread, members)[:, COLUMN[OperationClass.GEMM]]
    gemm = np.exp(prior[0] + offsets[0] + offsets[1:])
    assert 1 / gemm == pytest.approx([2.0, 2.4], rel=0.01)


def test_a_calibration_forgets_the_oldest() -> None:
    slow = [Observation.of_class(OperationClass.GEMM, 1.0, 4.0)] * 10
    fast = [Observation.of_class(OperationClass.GEMM, 1.0, 2.0)] * 10
    learned = Calibration(Efficiencies.prior(), Efficiencies.prior(), keep=10).observed(slow).observed(fast)
    assert len(learned.window) == 10
    assert learned.efficiencies[OperationClass.GEMM] == pytest.approx(0.5, rel=0.02)


def test_predictions_are_kept_beside_what_came_true() -> None:
    record = Accuracy().add("a", 1.1, 1.0).add("b", 0.8, 1.0)
    assert record.mape == pytest.approx(0.15) and record.median_error == pytest.approx(0.15)
    assert record.worst is not None and record.worst.what == "b"
    assert math.isnan(Accuracy().mape) and Accuracy().worst is None
    with pytest.raises(ValueError, match="positive"):
        record.add("c", 0.0, 1.0)


def test_wrong_efficiencies_are_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Efficiencies.of({OperationClass.GEMM: 0.0})
