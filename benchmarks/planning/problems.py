"""Which problems is the planner measured and tested on? Seeded generators, shared by the benchmark and the tests."""

from __future__ import annotations

import itertools
import random

from nereus.control.problem import Candidate, Member, Phase, Problem
from nereus.core.plan import Layout, ModelStage, Stage

GIB = 1 << 30
GENERATION = ModelStage(Stage.GENERATION)
INFERENCE = tuple(ModelStage(Stage.INFERENCE, model) for model in ("reference", "reward", "critic"))
TRAINING = tuple(ModelStage(Stage.TRAINING, model) for model in ("policy", "critic"))


def realistic(pool: int, *, concurrent: bool, seed: int = 0, capacity_gib: float = 64.0) -> Problem:
    """Return PPO of an 8B policy with an 8B critic, reference and reward model, priced by simple formulas.

    Every layout with tensor degree up to 8 and pipeline degree up to 16, 2^k and 3 * 2^k replicas, four
    micro-batch sizes, with and without recomputation in training. ``seed`` varies efficiencies, so that no two
    candidates tie.
    """
    draw = random.Random(seed)
    stages = (GENERATION, *INFERENCE, *TRAINING)
    members = [Member(stage, tuple(_priced(stage, pool, draw))) for stage in stages]
    generation = Phase("generation", (members[0],))
    inference, training = Phase("inference", tuple(members[1:4])), Phase("training", tuple(members[4:]))
    sides = ((generation,), (inference, training)) if concurrent else ((generation, inference, training),)
    return Problem(sides, pool, int(capacity_gib * GIB), concurrent, exposed_s=0.5)


def _priced(stage: ModelStage, pool: int, draw: random.Random) -> list[Candidate]:
    training = stage.stage is Stage.TRAINING
    work = (
        {Stage.GENERATION: 40.0, Stage.INFERENCE: 12.0, Stage.TRAINING: 36.0}[stage.stage]
        * pool
        * draw.uniform(0.8, 1.2)
    )
    state = (16.0 if training else 2.0) * 8e9
    found = []
    for tp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
        layout = Layout(tp, pp)
        sharding = (1 + 0.06 * (tp - 1)) * (1 + 0.04 * (pp - 1)) * draw.uniform(0.95, 1.05)
        degrees = (base << shift for base in (1, 3) for shift in range(15))
        for dp in sorted(degree for degree in degrees if degree * layout.slots <= pool):
            slots = dp * layout.slots
            for micro_batch, recompute in itertools.product((1, 2, 4, 8), (False, True) if training else (False,)):
                small = 1 + 0.5 / micro_batch + 0.02 * micro_batch * (pp - 1)
                tail = 0.02 * dp**0.5
                seconds = (
                    work / slots * sharding * small * (1.3 if recompute else 1.0) * draw.uniform(0.99, 1.01) + tail
                )
                kept = micro_batch * (pp if training else 1) * (0.15 if recompute or not training else 1.5) * 8e9
                transient = kept / layout.slots + 0.5e9 * micro_batch
                found.append(
                    Candidate(
                        stage, layout, dp, seconds, int(state / layout.slots), int(transient), micro_batch, recompute
                    )
                )
    return found


def thinned(problem: Problem, seed: int, most: int = 24) -> Problem:
    """Return the problem with a random choice of ``most`` candidates for each model-stage."""
    draw = random.Random(seed)
    members = list(problem.members())
    return problem.restricted(
        {
            member.model_stage: tuple(draw.sample(member.candidates, min(most, len(member.candidates))))
            for member in members
        }
    )


def small(seed: int, *, most: int = 4, pool: int | None = None) -> Problem:
    """Return a random awkward problem with six model-stages: tight memory, many ties, up to ``most`` candidates each.

    Sync colocated, sync with two or three sides, or async; 6 to 16 slots unless ``pool`` is given.
    """
    draw = random.Random(seed)
    slots = pool or draw.randint(6, 16)

    def phase(name: str, *stages: ModelStage) -> Phase:
        members = (Member(stage, _awkward(draw, stage, slots, draw.randint(1, most))) for stage in stages)
        return Phase(name, tuple(members))

    generation, inference = phase("generation", GENERATION), phase("inference", *INFERENCE)
    training = phase("training", *TRAINING)
    sides = draw.choice(
        (
            ((generation, inference, training),),
            ((generation,), (inference, training)),
            ((generation,), (inference,), (training,)),
        )
    )
    concurrent = len(sides) > 1 and draw.random() < 0.7
    return Problem(sides, slots, draw.randint(40, 170), concurrent, exposed_s=draw.choice((0.0, 0.25)))


def _awkward(draw: random.Random, stage: ModelStage, pool: int, count: int) -> tuple[Candidate, ...]:
    """Return candidates with a rough trade of slots, seconds and memory, with many ties."""
    found = []
    for _ in range(count):
        layout = Layout(draw.choice((1, 1, 1, 2, 4)), draw.choice((1, 1, 2)))
        dp = draw.randint(1, max(1, pool // layout.slots // draw.choice((2, 4, 8))))
        seconds = draw.randint(8, 40) / (dp * layout.slots) ** draw.choice((0.5, 0.9))
        resident = draw.randint(1, 8) * 8 // layout.slots
        found.append(Candidate(stage, layout, dp, seconds, resident, draw.randint(0, 20)))
    return tuple(found)


def comparable(seed: int) -> Problem:
    """Return a problem of 16 to 256 slots that SCIP can close: half awkward, half realistic with fewer candidates."""
    pool = (16, 32, 64, 128, 256)[seed % 5]
    if seed % 2:
        return small(seed, pool=pool, most=30)
    capacity = (40.0, 64.0, 30.0)[seed % 3]
    return thinned(realistic(pool, concurrent=seed % 4 == 0, seed=seed, capacity_gib=capacity), seed)
