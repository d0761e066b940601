"""Which transition does a planner ask for at each cluster size? The same drift at every size, so that times compare.

Asynchronous PPO with six model-stages of a large model. Responses have become longer: generation takes an eighth of the
pool more, scoring and training go on with what is left. Either only training changes its layout, or (``relayout``)
generation and training do, so that nearly every unit is cut up.
"""

from __future__ import annotations

from collections.abc import Iterator

from nereus.core.plan import Emu, Layout, ModelStage, Plan, SlotId
from nereus.core.workflow import Algorithm, workflow
from nereus.sim.scenarios import GIB, SLOTS_PER_NODE, Scenario, hosts
from nereus.transition.primitive import Memory

FLOW = workflow(Algorithm.PPO, asynchronous=True)
Layouts = tuple[Layout, Layout, Layout]
"""Of generation, inference and training."""

DRIFT: tuple[Layouts, Layouts] = (
    (Layout(8, 1), Layout(8, 1), Layout(8, 4)),
    (Layout(8, 1), Layout(8, 1), Layout(8, 2)),
)
RELAYOUT: tuple[Layouts, Layouts] = (
    (Layout(4, 1), Layout(4, 1), Layout(8, 1)),
    (Layout(8, 1), Layout(4, 1), Layout(4, 4)),
)


def growth(slots: int, *, relayout: bool = False, capacity_bytes: int = 192 * GIB) -> Scenario:
    """Return the transition at ``slots`` slots, 32 or more."""
    state = {member: (280 if member.stage.name == "TRAINING" else 40) * GIB for member in FLOW.model_stages}
    memory = Memory(capacity_bytes, state, host_bytes=16 * SLOTS_PER_NODE * capacity_bytes, host_of=hosts(slots))
    before, after = RELAYOUT if relayout else DRIFT
    current, target = _plan(slots, slots // 2, before, 0), _plan(slots, slots * 5 // 8, after, 1)
    return Scenario(current, target, tuple(FLOW.concurrency_groups()), memory)


def _plan(slots: int, generating: int, layouts: Layouts, epoch: int) -> Plan:
    generation, learning = FLOW.sides
    emus = list(_units(generation[0][0], layouts[0], range(generating), epoch))
    for phase in learning:
        first = generating
        share = (slots - generating) // len(phase)
        for member in phase:
            emus += _units(member, layouts[member.stage], range(first, first + share), epoch)
            first += share
    return Plan(epoch, tuple(emus))


def _units(member: ModelStage, layout: Layout, slots: range, epoch: int) -> Iterator[Emu]:
    if len(slots) < layout.slots:
        layout = Layout(1 << len(slots).bit_length() - 1, 1)
    for i in range(len(slots) // layout.slots):
        taken: tuple[SlotId, ...] = tuple(slots[i * layout.slots : (i + 1) * layout.slots])
        yield Emu(member, 10_000 * epoch + i, layout, taken)
