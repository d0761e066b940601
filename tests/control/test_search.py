"""Is the planner's answer the best there is? Compared with every combination, on small problems made to be awkward."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

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
from nereus.core.plan import Layout, ModelStage, Replication, Stage

GENERATION = ModelStage(Stage.GENERATION)
INFERENCE = [ModelStage(Stage.INFERENCE, model) for model in ("reference", "reward", "critic")]
TRAINING = [ModelStage(Stage.TRAINING, model) for model in ("policy", "critic")]


def candidates(draw: random.Random, stage: ModelStage, pool: int, count: int) -> tuple[Candidate, ...]:
    """Return candidates with a rough trade of slots, seconds and memory, with many ties."""
    found = []
    for _ in range(count):
        layout = Layout(draw.choice([1, 1, 1, 2, 4]), draw.choice([1, 1, 2]))
        dp = draw.randint(1, max(1, pool // layout.slots // draw.choice([2, 4, 8])))
        found.append(
            Candidate(
                model_stage=stage,
                layout=layout,
                dp=dp,
                seconds=draw.randint(8, 40) / (dp * layout.slots) ** draw.choice([0.5, 0.9]),
                resident_bytes=draw.randint(1, 8) * 8 // layout.slots,
                transient_bytes=draw.randint(0, 20),
            )
        )
    return tuple(found)


def problems(seed: int, most: int = 4) -> Problem:
    """Return a random problem with six model-stages: sync colocated, sync with two sides, or async."""
    draw = random.Random(seed)
    pool = draw.randint(6, 16)

    def phase(name: str, stages: list[ModelStage]) -> Phase:
        return Phase(
            name, tuple(Member(stage, candidates(draw, stage, pool, draw.randint(1, most))) for stage in stages)
        )

    generation, inference = phase("generation", [GENERATION]), phase("inference", INFERENCE)
    training = phase("training", TRAINING)
    sides = draw.choice(
        [
            ((generation, inference, training),),
            ((generation,), (inference, training)),
            ((generation,), (inference,), (training,)),
        ]
    )
    return Problem(
        sides=sides,
        pool=pool,
        capacity_bytes=draw.randint(40, 170),
        concurrent=len(sides) > 1 and draw.random() < 0.7,
        exposed_s=draw.choice([0.0, 0.25]),
    )


def exhaustive(problem: Problem) -> float | None:
    """Return the least latency over all combinations, None where none fits. Written on plain numbers for speed."""
    rows = [
        [(one.slots, one.seconds, one.resident_bytes, one.transient_bytes) for one in member.candidates]
        for member in problem.members()
    ]
    usable, best = problem.usable_bytes, None
    cuts, spans = 0, []
    for side in problem.sides:
        spans.append([])
        for phase in side:
            spans[-1].append((cuts, cuts + len(phase.members)))
            cuts += len(phase.members)
    for chosen in itertools.product(*rows):
        times, total, fits = [], 0, True
        for side in spans:
            time, slots, resident, transient = 0.0, 0, 0, 0
            for start, end in side:
                group = chosen[start:end]
                slots = max(slots, sum(one[0] for one in group))
                time += max(one[1] for one in group)
                resident += max(one[2] for one in group)
                transient = max(transient, max(one[3] for one in group))
            total += slots
            times.append(time)
            fits = fits and resident + transient <= usable
        if fits and total <= problem.pool:
            latency = (max(times) if problem.concurrent else sum(times)) + problem.exposed_s
            best = latency if best is None else min(best, latency)
    return best


def check(seed: int, most: int = 4) -> str:
    """Compare one problem; return what kind of answer it had."""
    problem = problems(seed, most)
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
    drawn = problems(seed, most)
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
    colocated = next(problem for seed in range(100) if len((problem := problems(seed)).sides) == 1)
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
        grouped, answer = solve_groupings(problems(seed), runners_up=100)
        if isinstance(answer, Solution) and len(grouped.sides) > 1 and len(problems(seed).sides) == 1:
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


@pytest.mark.parametrize("seed", range(200, 220))
def test_a_memory_shortfall_is_exact(seed: int) -> None:
    problem = problems(seed)
    tight = Problem(problem.sides, pool=64, capacity_bytes=1, concurrent=problem.concurrent)
    answer = solve(tight)
    assert isinstance(answer, Infeasible) and answer.constraint == "memory"
    needed = tight.usable_bytes + answer.shortfall
    enough = next(size for size in range(needed, 2 * needed + 8) if usable_bytes(size) >= needed)
    assert isinstance(solve(Problem(tight.sides, 64, enough, tight.concurrent)), Solution)
    assert isinstance(solve(Problem(tight.sides, 64, enough - 1, tight.concurrent)), Infeasible)


def test_a_slot_shortfall_is_exact() -> None:
    problem = problems(7)
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
    problem = problems(seed)
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
    answer = next(found for seed in range(100) if isinstance(found := solve(problems(seed), runners_up=50), Solution))
    assert answer.runners_up
    timed = [lost.latency_s for lost in answer.runners_up if lost.latency_s is not None]
    assert timed == sorted(timed) and all(latency >= answer.latency_s * (1 - 1e-12) for latency in timed)
    assert all("slower" in lost.because or "does not fit" in lost.because for lost in answer.runners_up)


def test_equal_problems_get_equal_answers() -> None:
    for seed in range(20):
        assert solve(problems(seed)) == solve(problems(seed))


def test_spare_slots_go_to_the_next_slowest() -> None:
    def member(stage: ModelStage, *times: tuple[int, float]) -> Member:
        return Member(stage, tuple(Candidate(stage, Layout(), dp, seconds, 1, 0) for dp, seconds in times))

    slow, quick = member(TRAINING[0], (4, 10.0)), member(TRAINING[1], (1, 9.0), (4, 3.0))
    answer = solve(Problem(((Phase("training", (slow, quick)),),), pool=8, capacity_bytes=100))
    assert isinstance(answer, Solution) and [one.dp for one in answer.candidates] == [4, 4]


def test_alternatives_keep_model_stages_as_they_are_within_the_limit() -> None:
    met = 0
    for seed in range(60):
        problem = problems(seed)
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
        problem = problems(seed)
        for side in problem.sides:
            tabled, boxed = _SideCurve(side, problem.usable_bytes), Boxes(side, problem.usable_bytes).fit(problem.pool)
            assert tabled.seconds(problem.pool) == (boxed.seconds if boxed else math.inf), seed
