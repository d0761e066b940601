"""Which pairs of plans are worth trying? Random ones, valid for their workflow, in which model-stages change places."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from msgspec import Struct

from nereus.core.plan import Emu, Layout, ModelStage, Plan, SlotId
from nereus.core.workflow import Algorithm, Workflow, workflow
from nereus.transition.primitive import Destroy, Memory, Park, TransitionDag, model_stage_of

SLOTS_PER_NODE = 8
GIB = 1 << 30
OVERLAPS = ("same model, cross stage", "cross model, same stage", "cross model, cross stage", "same model-stage")


class Scenario(Struct, frozen=True):
    """A transition to make."""

    current: Plan
    target: Plan
    groups: tuple[tuple[ModelStage, ...], ...]
    memory: Memory


def scenario(rng: random.Random, slots: int, *, tightness: float = 0.0) -> Scenario:
    """Return two random plans over ``slots`` slots and the memory to go from one to the other.

    ``tightness`` 0: any state fits everywhere; 1: slots hold just what the fuller of both plans needs.
    """
    flow = _workflow(rng)
    current, target = _plan(rng, flow, slots, 0), _plan(rng, flow, slots, 1)
    state = {model_stage: rng.randint(1, 16) * GIB for model_stage in flow.model_stages}
    roomy = 2 * sum(state.values())
    memory = Memory(roomy, state, host_bytes=2 * roomy * SLOTS_PER_NODE, host_of=hosts(slots))
    need = max(fullest(plan, memory) for plan in (current, target))
    return Scenario(
        current,
        target,
        tuple(flow.concurrency_groups()),
        Memory(
            int(need + (1 - tightness) * (roomy - need)), state, host_bytes=memory.host_bytes, host_of=memory.host_of
        ),
    )


def hosts(slots: int) -> dict[SlotId, str]:
    return {slot: f"node-{slot // SLOTS_PER_NODE}" for slot in range(slots)}


def fullest(plan: Plan, memory: Memory) -> int:
    """Return the bytes on the fullest slot of a plan."""
    held: dict[SlotId, int] = {}
    for emu in plan.emus:
        for slot in emu.slots:
            held[slot] = held.get(slot, 0) + memory.footprint(emu.model_stage, emu.layout)
    return max(held.values())


def overlaps(dag: TransitionDag) -> Iterator[str]:
    """Yield the kinds of overlap in which one unit takes slots that another one releases."""
    for primitive, before in zip(dag.primitives, dag.resource, strict=True):
        taker = model_stage_of(primitive)
        for index in before:
            if isinstance(dag.primitives[index], Destroy | Park):
                giver = model_stage_of(dag.primitives[index])
                same_model, same_stage = taker.model == giver.model, taker.stage == giver.stage
                yield OVERLAPS[3 if same_model and same_stage else 0 if same_model else 1 if same_stage else 2]


def _workflow(rng: random.Random) -> Workflow:
    algorithm = rng.choice((Algorithm.PPO, Algorithm.PPO, Algorithm.GRPO))
    return workflow(algorithm, asynchronous=rng.random() < 0.6, reward_model=rng.random() < 0.5)


def _plan(rng: random.Random, flow: Workflow, slots: int, epoch: int) -> Plan:
    """Cut the pool over the sides, each side's share over the members of each of its phases, and that into units."""
    order = _order(rng, slots)
    emus: list[Emu] = []
    for share, side in zip(_cut(rng, order, [len(max(s, key=len)) for s in flow.sides]), flow.sides, strict=True):
        for phase in side:
            offset = rng.randrange(len(share)) if rng.random() < 0.3 else 0
            members = rng.sample(phase, len(phase))
            for part, member in zip(_cut(rng, share[offset:] + share[:offset], [1] * len(phase)), members, strict=True):
                emus += _units(rng, member, part, epoch)
    return Plan(epoch, tuple(emus))


def _order(rng: random.Random, slots: int) -> list[SlotId]:
    """Return the slots in order, by blocks in another order, or wildly."""
    block = rng.choice((slots, 4, 2, 1))
    blocks = [list(range(first, min(first + block, slots))) for first in range(0, slots, block)]
    rng.shuffle(blocks)
    return [slot for one in blocks for slot in one]


def _cut(rng: random.Random, slots: Sequence[SlotId], least: Sequence[int]) -> Iterator[list[SlotId]]:
    """Cut into consecutive shares of at least ``least`` slots."""
    spare = len(slots) - sum(least)
    cuts = sorted(rng.randint(0, spare) for _ in least[1:])
    first = 0
    for size, low, high in zip(least, [0, *cuts], [*cuts, spare], strict=True):
        yield list(slots[first : first + size + high - low])
        first += size + high - low


def _units(rng: random.Random, member: ModelStage, slots: Sequence[SlotId], epoch: int) -> list[Emu]:
    degrees = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4) if tp * pp <= len(slots)]
    layout = Layout(*rng.choice(degrees))
    most = len(slots) // layout.slots
    count = most if rng.random() < 0.7 else rng.randint(1, most)
    return [
        Emu(member, 1000 * epoch + i, layout, tuple(slots[i * layout.slots : (i + 1) * layout.slots]))
        for i in range(count)
    ]
