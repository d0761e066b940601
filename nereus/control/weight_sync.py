"""What does the layout of a model-stage add to the weight sync of a synchronous step?

After each step, trained weights go to where generation and inference read them: into each node once whatever no trainer
there holds, through the network of all its slots, then from slot to slot inside the node. So a unit of trainers that
spans nodes costs what its nodes lack, and a reader its own share. Owner: ``candidates``, which counts these seconds to
the model-stage, so that the search needs no term that joins two of them; in return it is a bound where a reader has
part of its share already, or where a node reads several models (``placement`` sees to that). Asynchronous workflows
hide the sync behind generation and have a term of their own (``problem.exposed_s``).

Invariants (tests/control/test_weight_sync.py): nothing for models that are not trained, nothing between nodes for units
inside one; more slots than a node has never make a trainer's sync cheaper.
"""

from __future__ import annotations

import numpy as np

from nereus.control.cost import Setups
from nereus.control.efficiency import Array
from nereus.core.cluster import Cluster
from nereus.core.plan import ModelStage, Stage
from nereus.core.shape import ModelShape
from nereus.core.workflow import Workflow

REACHED = 0.8
"""Ours: share of a link's bandwidth that large one-way transfers reach; far above that of small collectives."""


def sync_seconds(
    stage: ModelStage, shape: ModelShape, workflow: Workflow, cluster: Cluster, setups: Setups, compute_bytes: float
) -> Array:
    """Return the seconds that each alternative of ``stage`` adds, (alternatives,)."""
    if workflow.asynchronous or stage.model not in workflow.trained:
        return np.zeros(len(setups))
    weights_bytes = shape.parameters * compute_bytes
    slots = setups.tp * setups.pp
    if stage.stage is not Stage.TRAINING:
        received: Array = weights_bytes / slots / (cluster.in_node.bytes_per_s * REACHED)
        return received
    lacking = 1.0 - np.minimum(1.0, cluster.slots_per_node / slots)
    entering: Array = lacking * weights_bytes / (cluster.slots_per_node * cluster.cross_node.bytes_per_s * REACHED)
    return entering
