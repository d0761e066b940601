"""Does a plan change move what the new plan's slots lack, and nothing twice, whatever primitives it is made of?"""

from __future__ import annotations

import random

import pytest

from nereus.core.plan import POLICY_TRAINING, Emu, Layout, Plan, SlotId
from nereus.runtime.transform import Ends, takers
from nereus.transition.compile import compile_transition
from nereus.transition.primitive import Destroy, Extend, Merge, Primitive, Replica, Split, TransitionDag
from nereus.transition.reshard import Piece, TensorSpec, elements, held_to_train, intersection, moves, remainder

SPECS = (
    TensorSpec("embed", (8, 4), "float32", split=0, layer=-1),
    *(TensorSpec(f"layers.{layer}.up", (16, 4), "float32", split=0, layer=layer) for layer in range(4)),
    *(TensorSpec(f"layers.{layer}.down", (4, 16), "float32", split=1, layer=layer) for layer in range(4)),
    TensorSpec("norm", (4,), "float32"),
)
LAYERS = 4
HELD = held_to_train(frozenset({"embed"}))
LAYOUTS = [Layout(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4)]


def plan_of(epoch: int, layout: Layout, slots: list[SlotId]) -> Plan:
    groups = [tuple(slots[start : start + layout.slots]) for start in range(0, len(slots), layout.slots)]
    return Plan(epoch, tuple(Emu(POLICY_TRAINING, 100 * epoch + i, layout, group) for i, group in enumerate(groups)))


def shares(plan: Plan) -> dict[SlotId, list[Piece]]:
    return {
        slot: [piece for spec in SPECS if (piece := HELD(spec, LAYERS, emu.layout, index)) is not None]
        for emu in plan.emus
        for index, slot in enumerate(emu.slots)
    }


def units(replicas: tuple[Replica, ...]) -> list[Emu]:
    return [replica.unit for replica in replicas]


@pytest.mark.parametrize("seed", range(40))
def test_every_missing_element_moves_once_from_a_slot_of_the_plan_in_force(seed: int) -> None:
    rng = random.Random(seed)
    plans = []
    for epoch in range(2):
        layout = rng.choice(LAYOUTS)
        dp = rng.randint(1, max(1, 16 // layout.slots))
        plans.append(plan_of(epoch, layout, rng.sample(range(16), dp * layout.slots)))
    dag = compile_transition(*plans, groups=[(POLICY_TRAINING,)])
    if not isinstance(dag, TransitionDag):
        pytest.skip("a swap of the only copy wants host memory")
    before, ends = shares(plans[0]), Ends.of(dag.primitives)
    arrived: dict[SlotId, list[Piece]] = {}
    for primitive in dag.primitives:
        targets = tuple(replica for replica in takers(primitive) if replica in ends.targets)
        for move in moves(SPECS, LAYERS, units(ends.origins), units(targets), held=HELD):
            there = [piece for piece in before[move.from_slot] if piece.name == move.name]
            assert any(intersection(piece, move.piece) == move.piece for piece in there)
            arrived.setdefault(move.to_slot, []).append(move.piece)
    for slot, share in shares(plans[1]).items():
        lacking = sum(
            sum(map(elements, remainder(piece, [old for old in before.get(slot, []) if old.name == piece.name])))
            for piece in share
        )
        assert sum(map(elements, arrived.pop(slot, []))) == lacking
    assert not arrived


T1, T2 = Layout(), Layout(tp=2)
PAIR = Replica(POLICY_TRAINING, T2, (0, 1))
ONE, OTHER, THIRD = (Replica(POLICY_TRAINING, T1, (slot,)) for slot in (0, 1, 2))


def test_what_is_made_only_to_be_made_into_something_else_is_no_end() -> None:
    split = Split("split", PAIR, (ONE, OTHER))
    extend = Extend("extend", (ONE, OTHER), THIRD)
    steps: list[Primitive] = [split, extend]
    assert Ends.of(steps) == Ends((PAIR,), frozenset({ONE, OTHER, THIRD}))
    assert Ends.of([*steps, Destroy("destroy", OTHER)]) == Ends((PAIR,), frozenset({ONE, THIRD}))
    merged = Replica(POLICY_TRAINING, Layout(pp=2), (0, 1))
    assert Ends.of([split, Merge("merge", (ONE, OTHER), merged, aligned=False)]) == Ends((PAIR,), frozenset({merged}))
