"""Nereus beside fixed placements, on steady workloads."""

from __future__ import annotations

import math

import pytest

from nereus.core.profiles import load_model
from nereus.core.workflow import Algorithm
from nereus.sim.evaluation import throughput
from nereus.sim.evaluation.throughput import A100, BASE, H200, MI250X, NEREUS, OPENRLHF, VERL, Case, measure


def test_what_fits_nowhere_is_told_and_counts_in_no_ratio() -> None:
    runs = {(Case(H200, 2), name): measure(Case(H200, 2), name, 1, 1) for name in (OPENRLHF, VERL)}
    assert all(math.isnan(one.step_s) and "fits" in one.failure for one in runs.values())
    runs[Case(H200, 2), NEREUS] = throughput.Ran(10.0, {"generation": 10.0})
    rows = [*throughput._summary(runs, [Case(H200, 2)]), *throughput._cases(runs)]
    assert len(rows) == 9
    assert [row.note for row in rows[:6]] == ["0 of 1 pools"] * 6
    assert sum("fits" in row.note for row in rows) == 2


def test_paper_figures_stand_only_beside_the_same_pools() -> None:
    ratio = {32: 100.0, 64: 60.0, 256: 25.0, 1024: 10.0}
    runs = {
        (Case(cluster, slots), name): throughput.Ran(ratio[slots])
        for cluster in (MI250X, A100)
        for slots in ratio
        for name in (NEREUS, OPENRLHF, VERL)
    }
    short = [*throughput._scaling(runs, {MI250X: (32, 64), A100: (32, 64)})]
    assert all(math.isnan(row.paper) and "not comparable" in row.note for row in short)
    whole = [*throughput._scaling(runs, {MI250X: (32, 1024), A100: (8, 32, 256)})]
    assert [row.paper for row in whole] == [15, 10, 3.1, 2.7]
    assert [row.ours for row in whole] == [10, 10, 4, 4]


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_every_algorithm_trains_on_as_many_samples(algorithm: Algorithm) -> None:
    job = throughput.job_of(Case(H200, 8, algorithm), 3)
    assert job.prompts * job.group_size == throughput.SAMPLES
    assert (job.steps, job.model, job.cluster.size) == (3, load_model(BASE), 8)
