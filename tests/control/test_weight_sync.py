"""What do layouts add to the weight sync?"""

from __future__ import annotations

import numpy as np
import pytest

from nereus.control.cost import Recompute, Setups
from nereus.control.weight_sync import REACHED, sync_seconds
from nereus.core.plan import Layout, ModelStage, Stage
from nereus.core.profiles import load_cluster, load_model
from nereus.core.workflow import Algorithm, Workflow, workflow

CLUSTER = load_cluster("a100-64g-256", 64)
SHAPE = load_model("llama-3.1-8b")
PPO = workflow(Algorithm.PPO)
WEIGHTS_BYTES = 2.0 * SHAPE.parameters
INTO_NODE = CLUSTER.slots_per_node * CLUSTER.cross_node.bytes_per_s * REACHED


def _seconds(stage: ModelStage, *layouts: Layout, flow: Workflow = PPO) -> list[float]:
    setups = Setups.grid([(layout, 1, 1, Recompute.NONE) for layout in layouts])
    found: list[float] = sync_seconds(stage, SHAPE, flow, CLUSTER, setups, 2.0).tolist()
    return found


def test_trainers_cost_what_their_nodes_lack() -> None:
    one, node, two, four = _seconds(ModelStage(Stage.TRAINING), Layout(1), Layout(4), Layout(4, 2), Layout(4, 4))
    assert one == node == 0.0
    assert two == pytest.approx(WEIGHTS_BYTES / 2 / INTO_NODE)
    assert four == pytest.approx(WEIGHTS_BYTES * 3 / 4 / INTO_NODE)


def test_more_slots_never_make_a_trainers_sync_cheaper() -> None:
    seconds = _seconds(ModelStage(Stage.TRAINING), *(Layout(1, pp) for pp in (1, 2, 4, 8, 16, 32)))
    assert np.all(np.diff(seconds) >= 0)


@pytest.mark.parametrize("stage", [ModelStage(Stage.GENERATION), ModelStage(Stage.INFERENCE, "critic")], ids=str)
def test_readers_cost_their_own_share(stage: ModelStage) -> None:
    one, four = _seconds(stage, Layout(1), Layout(4))
    assert one == pytest.approx(4 * four)
    assert one == pytest.approx(WEIGHTS_BYTES / (CLUSTER.in_node.bytes_per_s * REACHED))


def test_models_that_are_not_trained_and_steps_that_hide_the_sync_cost_nothing() -> None:
    assert _seconds(ModelStage(Stage.INFERENCE, "reference"), Layout(1)) == [0.0]
    hidden = workflow(Algorithm.GRPO, asynchronous=True)
    assert _seconds(ModelStage(Stage.TRAINING), Layout(4, 4), flow=hidden) == [0.0]
