"""Small plans and ways to run a transition, for the tests of this folder."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from nereus.core.plan import (
    POLICY_GENERATION,
    POLICY_TRAINING,
    REFERENCE_INFERENCE,
    Emu,
    Layout,
    ModelStage,
    Plan,
    Stage,
)
from nereus.transition.compile import compile_transition
from nereus.transition.primitive import Memory, Replica, TransitionDag
from nereus.transition.run import TransitionRun

GENERATION, TRAINING, REFERENCE = POLICY_GENERATION, POLICY_TRAINING, REFERENCE_INFERENCE
CRITIC = ModelStage(Stage.TRAINING, "critic")
ALL_AT_ONCE = ((GENERATION, REFERENCE, CRITIC, TRAINING),)


def units(model_stage: ModelStage, layout: Layout, *slots: Sequence[int], first: int = 0) -> tuple[Emu, ...]:
    return tuple(Emu(model_stage, first + i, layout, tuple(numbers)) for i, numbers in enumerate(slots))


def plans(before: Sequence[Emu], after: Sequence[Emu]) -> tuple[Plan, Plan]:
    return Plan(0, tuple(before)), Plan(1, tuple(after))


def compiled(
    before: Sequence[Emu],
    after: Sequence[Emu],
    groups: Sequence[Sequence[ModelStage]] = ALL_AT_ONCE,
    memory: Memory | None = None,
) -> TransitionDag:
    dag = compile_transition(*plans(before, after), groups=groups, memory=memory)
    assert isinstance(dag, TransitionDag), dag
    return dag


def finish_in_random_order(
    dag: TransitionDag, rng: random.Random, check: Callable[[TransitionRun], None] = lambda run: None
) -> TransitionRun:
    """Run ``dag``, finishing whichever running primitive the generator picks; call ``check`` at every cut."""
    run = TransitionRun(dag)
    while not run.finished:
        run.ready()
        check(run)
        assert run.running, "primitives are left, none runs and none is ready: deadlock"
        run.done(rng.choice(run.running).id)
        check(run)
    return run


def reached(run: TransitionRun, dag: TransitionDag) -> bool:
    """Whether exactly the replicas of the target plan are there."""
    model_stages = {*dag.current.model_stages(), *dag.target.model_stages()}
    return all(
        sorted(run.ledger.replicas(model_stage)) == sorted(map(Replica.of, dag.target.of(model_stage)))
        and run.ledger.parked(model_stage) is None
        for model_stage in model_stages
    )
