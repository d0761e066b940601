"""How long does it take to double the replicas of a trained actor and critic, or to change their layouts?

Ours is priced by ``control/move.py``, as in every admission; other systems by ``policies/restart.py``. Policy and
critic stand on slots of their own, as they train at the same time; a replica is as wide as half the pool allows, at
most 4 tensor ranks, so that every doubling but the first fills new nodes.
Invariants (tests/sim/test_doubling.py): both plans are valid, and a doubling keeps every replica that runs.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from nereus.control.breakdown import Pricing
from nereus.control.efficiency import Efficiencies, OperationClass
from nereus.control.move import move
from nereus.core.cluster import Cluster
from nereus.core.plan import Emu, Layout, ModelStage, Plan, Stage
from nereus.core.shape import ModelShape
from nereus.core.workflow import Algorithm, workflow
from nereus.core.workload import Lengths, Workload
from nereus.sim.policies.restart import BYTES_PER_PARAMETER, Growth

TRAINED = (ModelStage(Stage.TRAINING, "critic"), ModelStage(Stage.TRAINING))
WIDEST_TP = 4


class Change(Struct, frozen=True):
    """One change of plan, priced for us and described for the others."""

    name: str
    seconds: float
    """Ours."""
    growth: Growth


FULL_LINKS = Efficiencies.of({OperationClass.P2P_IN_NODE: 1.0, OperationClass.P2P_CROSS_NODE: 1.0})
"""What the models of other systems are given."""


def doubling(cluster: Cluster, shape: ModelShape, slots: int, efficiencies: Efficiencies | None = None) -> Change:
    """Return the change from ``slots`` slots to twice as many; by default with what the planner starts from."""
    layout = Layout(min(WIDEST_TP, slots // 2))
    before, after = (_plan(epoch, layout, count) for epoch, count in ((0, slots), (1, 2 * slots)))
    return _change(f"{slots} to {2 * slots}", cluster, shape, before, after, efficiencies)


def resharding(
    cluster: Cluster,
    shape: ModelShape,
    slots: int,
    before: Layout,
    after: Layout,
    efficiencies: Efficiencies | None = None,
) -> Change:
    """Return the change of both models' layouts on ``slots`` slots."""
    plans = _plan(0, before, slots), _plan(1, after, slots)
    return _change(f"{slots} slots, {before} to {after}", cluster, shape, *plans, efficiencies)


def _plan(epoch: int, layout: Layout, slots: int) -> Plan:
    """Give each model one half of every node, or of the pool where it is smaller than a node."""
    width = layout.slots
    groups = [tuple(range(first, first + width)) for first in range(0, slots, width)]
    return Plan(
        epoch,
        tuple(
            sorted(
                Emu(TRAINED[index % len(TRAINED)], 1000 * epoch + index, layout, group)
                for index, group in enumerate(groups)
            )
        ),
    )


def _change(
    name: str, cluster: Cluster, shape: ModelShape, before: Plan, after: Plan, efficiencies: Efficiencies | None
) -> Change:
    slots = max(after.slots()) + 1
    pool = cluster.resized(slots)
    flow = workflow(Algorithm.PPO, reference=False, reward_model=False)
    work = Workload(Lengths.fixed(512), Lengths.fixed(1536), 128)
    """Moves do not depend on it."""
    pricing = Pricing(pool, {"policy": shape}, flow, work, efficiencies or Efficiencies.prior())
    pricing = replace(pricing, calibration=replace(pricing.calibration, workspace_bytes=0.0))
    way = move(pricing, before, after)
    if way.stuck:
        raise ValueError(f"{name}: {way.stuck}")
    state = BYTES_PER_PARAMETER * float(shape.parameters)
    each = after.emus[0].layout.slots
    on_a_node = min(slots, pool.slots_per_node) / each
    nodes = [-(-(max(plan.slots()) + 1) // pool.slots_per_node) for plan in (before, after)]
    relayout = before.emus[0].layout != after.emus[0].layout
    growth = Growth(nodes[0], nodes[1], len(TRAINED) * state, max(1.0, on_a_node) * state, relayout)
    return Change(name, way.seconds, growth)
