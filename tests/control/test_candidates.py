"""Do candidates split the batch, fit the pool and carry consistent prices?"""

from __future__ import annotations

import pytest

from nereus.control.candidates import Space, candidates, host_seconds, layouts, problem
from nereus.control.efficiency import Efficiencies, OperationClass
from nereus.control.memory import MARGIN
from nereus.core.plan import Layout, ModelStage, Stage
from nereus.core.profiles import load_cluster, load_model
from nereus.core.workflow import Algorithm, workflow
from nereus.core.workload import Lengths, Workload

SHAPE = load_model("llama-3.1-8b")
CLUSTER = load_cluster("a100-64g", 32)
WORKLOAD = Workload(Lengths.fixed(512), Lengths.log_normal(1000, 1800, 4096), groups=128)
PPO = workflow(Algorithm.PPO)
PRIOR = Efficiencies.prior()


@pytest.mark.parametrize("stage", PPO.model_stages, ids=str)
def test_candidates_split_the_batch_and_fit(stage: ModelStage) -> None:
    found = candidates(stage, SHAPE, WORKLOAD, PPO, CLUSTER, PRIOR)
    assert found
    for one in found:
        assert one.slots <= CLUSTER.size and one.layout.tp <= CLUSTER.slots_per_node
        assert (one.resident_bytes + one.transient_bytes) * MARGIN <= CLUSTER.device.memory_bytes * 1.000001
        assert 128 % one.dp == 0 and one.seconds > 0
        if stage.stage is Stage.TRAINING:
            assert 128 % (one.dp * one.micro_batch) == 0
    assert len({(one.layout, one.dp, one.micro_batch, one.recompute) for one in found}) == len(found)
    assert list(found) == list(candidates(stage, SHAPE, WORKLOAD, PPO, CLUSTER, PRIOR))


def test_no_candidate_is_beaten_in_everything_by_one_of_equal_slots() -> None:
    found = candidates(ModelStage(Stage.TRAINING), SHAPE, WORKLOAD, PPO, CLUSTER, PRIOR)
    for one in found:
        for other in found:
            if one is not other and one.slots == other.slots:
                assert (
                    one.seconds < other.seconds
                    or one.resident_bytes < other.resident_bytes
                    or one.transient_bytes < other.transient_bytes
                    or (one.seconds, one.resident_bytes, one.transient_bytes)
                    == (other.seconds, other.resident_bytes, other.transient_bytes)
                )


def test_layouts_hold_the_model() -> None:
    found = layouts(SHAPE, CLUSTER, Space())
    assert Layout(4, 1) in found and Layout(8, 1) not in found
    assert Layout(8, 1) in layouts(SHAPE, CLUSTER, Space(tp_across_nodes=True))
    assert all(not list(SHAPE.misfits(layout)) for layout in found)


def test_better_links_favour_wider_groups() -> None:
    """Efficiencies change the prices, not the list's rules."""
    slow = Efficiencies.of({OperationClass.ALLREDUCE_IN_NODE: 0.02})
    stage = ModelStage(Stage.TRAINING)
    fastest = min(candidates(stage, SHAPE, WORKLOAD, PPO, CLUSTER, PRIOR), key=lambda one: one.seconds)
    with_slow = min(candidates(stage, SHAPE, WORKLOAD, PPO, CLUSTER, slow), key=lambda one: one.seconds)
    assert with_slow.layout.tp <= fastest.layout.tp and with_slow.seconds >= fastest.seconds


def test_a_problem_follows_the_workflow() -> None:
    stated = problem({"policy": SHAPE}, WORKLOAD, PPO, CLUSTER, PRIOR)
    assert [[len(phase.members) for phase in side] for side in stated.sides] == [[1, 3, 2]] and not stated.concurrent
    both = problem({"policy": SHAPE}, WORKLOAD, workflow(Algorithm.GRPO, asynchronous=True), CLUSTER, PRIOR)
    with_host = problem({"policy": SHAPE}, WORKLOAD, PPO, CLUSTER, PRIOR, host_s=host_seconds(WORKLOAD, 0.5, 4))
    assert with_host.exposed_s == stated.exposed_s + 16.0
    assert both.concurrent and len(both.sides) == 2 and both.exposed_s > 0


def test_a_model_too_large_has_no_candidates() -> None:
    large, small = load_model("llama-3.1-70b"), CLUSTER.resized(2)
    assert not candidates(ModelStage(Stage.TRAINING), large, WORKLOAD, PPO, small, PRIOR)
