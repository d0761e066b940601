"""Do placed plans fit, stay inside nodes, and leave in place what can stay?"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.control.placement import Placement, place
from nereus.control.problem import Candidate, Infeasible, Member, Phase, Problem, Solution, evaluate
from nereus.control.search import solve
from nereus.core.plan import Layout, ModelStage, Plan, Stage

GENERATION, TRAINING = ModelStage(Stage.GENERATION), ModelStage(Stage.TRAINING)
REFERENCE, CRITIC = ModelStage(Stage.INFERENCE, "reference"), ModelStage(Stage.INFERENCE, "critic")
EMPTY = Plan(0, ())


def nodes(count: int, width: int = 4) -> list[tuple[int, ...]]:
    return [tuple(range(first, first + width)) for first in range(0, count * width, width)]


def choose(stage: ModelStage, dp: int, tp: int, pp: int = 1) -> Candidate:
    return Candidate(stage, Layout(tp, pp), dp, 1.0, 1000 // (tp * pp), 100)


def problem(*sides: list[list[Candidate]], pool: int, concurrent: bool = False, capacity: int = 10_000) -> Problem:
    """Return the problem that has one candidate for each member."""
    shaped = tuple(
        tuple(
            Phase(f"phase {at}", tuple(Member(one.model_stage, (one,)) for one in phase))
            for at, phase in enumerate(side)
        )
        for side in sides
    )
    return Problem(shaped, pool, capacity, concurrent)


def placed(asked: Problem, current: Plan = EMPTY, machine: list[tuple[int, ...]] | None = None) -> Placement:
    answer = evaluate(asked, tuple(member.candidates[0] for member in asked.members()))
    assert isinstance(answer, Solution), answer
    found = place(asked, answer, machine or nodes(asked.pool // 4), current)
    assert isinstance(found, Placement), found
    check(asked, answer, found)
    return found


def check(asked: Problem, solution: Solution, found: Placement) -> None:
    """Hold a placement to the rules that need no outside knowledge."""
    plan = found.plan
    for candidate in solution.candidates:
        units = plan.of(candidate.model_stage)
        assert len(units) == candidate.dp and all(emu.layout == candidate.layout for emu in units)
    used = []
    for side in asked.sides:
        for phase in side:
            assert not plan.overlaps(member.model_stage for member in phase.members)
        stages = {member.model_stage for phase in side for member in phase.members}
        used.append({slot for emu in plan.emus if emu.model_stage in stages for slot in emu.slots})
    assert sum(map(len, used)) == len(set().union(*used)), "sides share a slot"
    assert found.memory_bytes <= max(solution.memory_bytes)


def test_an_unchanged_choice_stays_where_it_is() -> None:
    asked = problem([[choose(GENERATION, 4, 2)], [choose(TRAINING, 1, 4, 2)]], pool=8)
    first = placed(asked)
    again = placed(asked, first.plan)
    assert again.plan.emus == first.plan.emus and again.plan.epoch == first.plan.epoch + 1
    assert again.moved_bytes == 0 and again.kept_bytes == first.moved_bytes


def test_more_replicas_leave_the_old_ones_and_ordinals_go_on() -> None:
    before = placed(problem([[choose(GENERATION, 2, 2)]], pool=8))
    after = placed(problem([[choose(GENERATION, 4, 2)]], pool=8), before.plan)
    assert set(before.plan.emus) <= set(after.plan.emus)
    assert [emu.ordinal for emu in after.plan.of(GENERATION)] == [0, 1, 2, 3]


def test_ordinals_are_not_reused() -> None:
    wide = problem([[choose(GENERATION, 4, 2)]], pool=8)
    narrow = problem([[choose(GENERATION, 1, 2)]], pool=8)
    first = placed(wide)
    second = placed(narrow, first.plan)
    answer = evaluate(wide, tuple(member.candidates[0] for member in wide.members()))
    assert isinstance(answer, Solution)
    third = place(wide, answer, nodes(2), second.plan, second.next_ordinals)
    assert isinstance(third, Placement)
    assert sorted(emu.ordinal for emu in third.plan.emus) == [0, 4, 5, 6]


def test_fewer_wider_units_reuse_the_shards_in_place() -> None:
    before = placed(problem([[choose(TRAINING, 2, 2)]], pool=4))
    after = placed(problem([[choose(TRAINING, 1, 4)]], pool=4), before.plan)
    assert after.kept_bytes == 4 * 250 and after.moved_bytes == 0
    assert [emu.slots for emu in after.plan.emus] == [(0, 2, 1, 3)]


def test_tensor_groups_stay_in_a_node() -> None:
    found = placed(problem([[choose(GENERATION, 1, 1), choose(REFERENCE, 1, 4), choose(CRITIC, 1, 2)]], pool=8))
    assert found.cross_node == ()


def test_a_group_that_must_span_nodes_is_named() -> None:
    machine = [(0, 1, 2), (4, 5, 6)]
    found = placed(problem([[choose(TRAINING, 1, 4)]], pool=6), machine=machine)
    assert found.cross_node == ("policy.training/0",)


def test_lost_slots_are_avoided_and_the_intact_units_kept() -> None:
    before = placed(problem([[choose(GENERATION, 4, 2)]], pool=8))
    machine = [(0, 1, 2, 3), (4, 5, 6)]
    after = placed(problem([[choose(GENERATION, 3, 2)]], pool=7), before.plan, machine)
    assert after.plan.emus == tuple(emu for emu in before.plan.emus if 7 not in emu.slots)


def test_too_few_slots_are_an_answer() -> None:
    asked = problem([[choose(GENERATION, 4, 2)]], pool=8)
    answer = evaluate(asked, tuple(member.candidates[0] for member in asked.members()))
    assert isinstance(answer, Solution)
    found = place(asked, answer, nodes(1), EMPTY)
    assert isinstance(found, Infeasible) and found.constraint == "slots" and found.shortfall == 4


def random_problem(draw: random.Random, pool: int) -> Problem:
    def member(stage: ModelStage) -> Member:
        return Member(
            stage,
            tuple(
                Candidate(stage, layout, dp, draw.random(), draw.randint(1, 900) // layout.slots, draw.randint(0, 100))
                for layout in (Layout(1, 1), Layout(2, 1), Layout(4, 1), Layout(2, 2))
                for dp in (1, 2, 3, 4)
                if draw.random() < 0.7
            )
            or (Candidate(stage, Layout(), 1, 1.0, 10, 10),),
        )

    generation, training = Phase("generation", (member(GENERATION),)), Phase("training", (member(TRAINING),))
    inference = Phase("inference", (member(REFERENCE), member(CRITIC)))
    concurrent = draw.random() < 0.5
    sides = ((generation,), (inference, training)) if concurrent else ((generation, inference, training),)
    return Problem(sides, pool, 4000, concurrent)


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_any_plan_after_any_plan_fits(seed: int) -> None:
    draw, plan, ordinals = random.Random(seed), EMPTY, None
    seen: dict[str, tuple[object, ...]] = {}
    for _ in range(3):
        width = draw.choice([2, 4, 8])
        machine = [node[: draw.randint(1, width)] if draw.random() < 0.2 else node for node in nodes(4, width)]
        asked = random_problem(draw, sum(map(len, machine)))
        answer = solve(asked)
        if isinstance(answer, Solution):
            found = place(asked, answer, machine, plan, ordinals)
            assert isinstance(found, Placement), found
            check(asked, answer, found)
            assert found.plan.slots() <= {slot for node in machine for slot in node}
            for emu in found.plan.emus:
                assert seen.setdefault(emu.id, (emu.layout, emu.slots)) == (emu.layout, emu.slots)
            gone = {emu.id for emu in plan.emus} - {emu.id for emu in found.plan.emus}
            seen.update(dict.fromkeys(gone, ("gone",)))
            plan, ordinals = found.plan, found.next_ordinals


def test_what_reads_a_second_trained_model_goes_where_the_first_one_needs_least_from_outside() -> None:
    """Nodes 0 and 1 have the policy's trainers and lack half of it, nodes 2 to 5 lack all of it."""
    critic_training = ModelStage(Stage.TRAINING, "critic")
    asked = problem(
        [
            [choose(GENERATION, 6, 4)],
            [choose(CRITIC, 1, 1, 2), choose(REFERENCE, 1, 1, 2)],
            [choose(TRAINING, 1, 4, 2), choose(critic_training, 1, 4, 4)],
        ],
        pool=24,
    )
    found = placed(asked)
    (policy,), (critic,) = found.plan.of(TRAINING), found.plan.of(CRITIC)
    assert set(critic.slots) < set(policy.slots)
