"""Is the planner's answer the best there is? Compared with every combination, on small problems made to be awkward."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.planning.problems import TRAINING, comparable, realistic, small
from benchmarks.planning.solvers import CLOSED, exhaustive, same, scip
from nereus.control.boxes import Boxes
from nereus.control.problem import (
    Candidate,
    Infeasible,
    Member,
    Phase,
    Problem,
    Solution,
    evaluate,
    groupings,
    usable_bytes,
)
from nereus.control.search import _SideCurve, alternatives, solve, solve_groupings
from nereus.core.plan import Layout, ModelStage, Replication


def check(seed: int, most: int = 4) -> str:
    """Compare one problem; return what kind of answer it had."""
    problem = small(seed, most=most)
    answer, expected = solve(problem), exhaustive(problem)
    if expected is None:
        assert isinstance(answer, Infeasible), (seed, answer)
        return answer.constraint
    assert isinstance(answer, Solution), (seed, answer)
    assert answer.latency_s == pytest.approx(expected, rel=1e-12), seed
    assert evaluate(problem, answer.candidates) == answer
    return "async" if problem.concurrent else f"sync with {len(problem.sides)} side(s)"


def check_groupings(seed: int, most: int = 4) -> bool:
    """Compare the best grouping with every combination of every grouping; return whether phases got slots apart."""
    drawn = small(seed, most=most)
    problem = drawn if drawn.concurrent else replace(drawn, sides=(tuple(drawn.phases()),))
    grouped, answer = solve_groupings(problem)
    every = [found for other in groupings(problem) if (found := exhaustive(other)) is not None]
    if not every:
        assert isinstance(answer, Infeasible), (seed, answer)
        return False
    assert isinstance(answer, Solution), (seed, answer)
    assert answer.latency_s == pytest.approx(min(every), rel=1e-12), seed
    assert evaluate(grouped, answer.candidates) == answer
    return len(grouped.sides) > len(problem.sides)


def test_the_best_grouping_equals_exhaustive_enumeration() -> None:
    assert sum(check_groupings(seed, most=3) for seed in range(60)) >= 5


@pytest.mark.slow
def test_the_best_grouping_equals_exhaustive_enumeration_on_many() -> None:
    for seed in range(2000, 2200):
        check_groupings(seed, most=4)


def test_every_grouping_of_phases_is_tried_once() -> None:
    colocated = next(problem for seed in range(100) if len((problem := small(seed)).sides) == 1)
    found = [tuple(tuple(phase.name for phase in side) for side in other.sides) for other in groupings(colocated)]
    assert found[0] == (("generation", "inference", "training"),)
    assert {frozenset(sides) for sides in found} == {
        frozenset(sides)
        for sides in (
            (("generation", "inference", "training"),),
            (("generation",), ("inference", "training")),
            (("generation", "inference"), ("training",)),
            (("generation", "training"), ("inference",)),
            (("generation",), ("inference",), ("training",)),
        )
    }
    assert len(found) == 5


def test_groupings_that_lost_say_why() -> None:
    for seed in range(100):
        grouped, answer = solve_groupings(small(seed), runners_up=100)
        if isinstance(answer, Solution) and len(grouped.sides) > 1 and len(small(seed).sides) == 1:
            colocated = next(lost for lost in answer.runners_up if lost.choice == "generation + inference + training")
            assert "slower" in colocated.because or "does not fit" in colocated.because
            return
    raise AssertionError("no problem of these is solved on separate slots")


def test_equals_exhaustive_enumeration() -> None:
    kinds = {check(seed) for seed in range(60)}
    assert kinds >= {"async", "sync with 1 side(s)", "sync with 3 side(s)", "slots", "memory"}, kinds


@pytest.mark.slow
def test_equals_exhaustive_enumeration_on_many() -> None:
    for seed in range(1000, 1600):
        check(seed, most=6)


def check_against_scip(seed: int, limit_s: float) -> bool:
    """Give SCIP the same problem; return whether it closed it within the limit."""
    problem = comparable(seed)
    theirs, status, _ = scip(problem, limit_s)
    if status not in CLOSED:
        return False
    ours = solve(problem)
    assert same(ours, theirs), (seed, ours, theirs)
    return True


def test_equals_scip() -> None:
    assert sum(check_against_scip(seed, limit_s=10.0) for seed in range(1, 13, 2)) >= 4


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_equals_scip_on_sixty_larger_problems() -> None:
    closed = 0
    for seed in range(200):
        closed += check_against_scip(seed, limit_s=60.0)
        if closed == 60:
            return
    raise AssertionError(f"SCIP closed {closed} of 200 problems")


def test_an_answer_does_not_depend_on_what_was_asked_before() -> None:
    """Tables, and what they remember, serve every pool and every capacity."""
    asked = realistic(64, concurrent=True)
    for pool, capacity in ((64, 1.0), (24, 1.0), (64, 0.7), (48, 1.3), (64, 1.0)):
        again = replace(asked, pool=pool, capacity_bytes=int(asked.capacity_bytes * capacity))
        phases = tuple(tuple(Phase(phase.name, phase.members) for phase in side) for side in again.sides)
        assert solve(again) == solve(replace(again, sides=phases))


@pytest.mark.parametrize("seed", range(200, 220))
def test_a_memory_shortfall_is_exact(seed: int) -> None:
    problem = small(seed)
    tight = Problem(problem.sides, pool=64, capacity_bytes=1, concurrent=problem.concurrent)
    answer = solve(tight)
    assert isinstance(answer, Infeasible) and answer.constraint == "memory"
    needed = tight.usable_bytes + answer.shortfall
    enough = next(size for size in range(needed, 2 * needed + 8) if usable_bytes(size) >= needed)
    assert isinstance(solve(Problem(tight.sides, 64, enough, tight.concurrent)), Solution)
    assert isinstance(solve(Problem(tight.sides, 64, enough - 1, tight.concurrent)), Infeasible)


def test_a_slot_shortfall_is_exact() -> None:
    problem = small(7)
    answer = solve(Problem(problem.sides, pool=0, capacity_bytes=1 << 20))
    assert isinstance(answer, Infeasible) and answer.constraint == "slots"
    assert isinstance(solve(Problem(problem.sides, answer.shortfall, 1 << 20)), Solution)
    assert isinstance(solve(Problem(problem.sides, answer.shortfall - 1, 1 << 20)), Infeasible)


def test_a_model_stage_without_candidates_is_named() -> None:
    problem = Problem(((Phase("training", (Member(TRAINING[0], ()),)),),), pool=4, capacity_bytes=100)
    answer = solve(problem)
    assert isinstance(answer, Infeasible) and answer.constraint == "candidates"
    assert "policy.training" in answer.because


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_more_slots_or_memory_never_make_it_slower(seed: int) -> None:
    problem = small(seed)
    answer = solve(problem)
    if isinstance(answer, Solution):
        for larger in (
            Problem(problem.sides, problem.pool + 1, problem.capacity_bytes, problem.concurrent, problem.exposed_s),
            Problem(problem.sides, problem.pool, problem.capacity_bytes + 5, problem.concurrent, problem.exposed_s),
        ):
            wider = solve(larger)
            assert isinstance(wider, Solution)
            assert wider.latency_s <= answer.latency_s * (1 + 1e-12)


def test_runners_up_say_why_they_lost() -> None:
    answer = next(found for seed in range(100) if isinstance(found := solve(small(seed), runners_up=50), Solution))
    assert answer.runners_up
    timed = [lost.latency_s for lost in answer.runners_up if lost.latency_s is not None]
    assert timed == sorted(timed) and all(latency >= answer.latency_s * (1 - 1e-12) for latency in timed)
    assert all("slower" in lost.because or "does not fit" in lost.because for lost in answer.runners_up)


def test_equal_problems_get_equal_answers() -> None:
    for seed in range(20):
        assert solve(small(seed)) == solve(small(seed))


def test_spare_slots_go_to_the_next_slowest() -> None:
    def member(stage: ModelStage, *times: tuple[int, float]) -> Member:
        return Member(stage, tuple(Candidate(stage, Layout(), dp, seconds, 1, 0) for dp, seconds in times))

    slow, quick = member(TRAINING[0], (4, 10.0)), member(TRAINING[1], (1, 9.0), (4, 3.0))
    answer = solve(Problem(((Phase("training", (slow, quick)),),), pool=8, capacity_bytes=100))
    assert isinstance(answer, Solution) and [one.dp for one in answer.candidates] == [4, 4]


@pytest.mark.deep
def test_alternatives_keep_model_stages_as_they_are_within_the_limit() -> None:
    met = 0
    for seed in range(60):
        problem = small(seed)
        best = solve(problem)
        if isinstance(best, Infeasible):
            continue
        now = {member.model_stage: member.candidates[0] for member in problem.members()}
        current = {stage: Replication(one.dp, one.layout) for stage, one in now.items()}
        for other in alternatives(problem, best, current, within=0.5):
            met += 1
            assert evaluate(problem, other.candidates) == other
            assert best.latency_s * (1 - 1e-12) <= other.latency_s <= best.latency_s * 1.5
            assert any(Replication(one.dp, one.layout) == current[one.model_stage] for one in other.candidates)
    assert met > 20


def test_boxes_and_tables_agree() -> None:
    for seed in range(60):
        problem = small(seed)
        for side in problem.sides:
            tabled, boxed = _SideCurve(side, problem.usable_bytes), Boxes(side, problem.usable_bytes).fit(problem.pool)
            assert tabled.seconds(problem.pool) == (boxed.seconds if boxed else math.inf), seed
