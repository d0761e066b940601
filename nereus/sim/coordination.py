"""How many transitions arrive when model-stages trade slots: in one graph, and each by itself?

Random transitions (``scenarios.py``) with one kind of overlap in them; ours runs in random finishing order with the
books checked, the baseline is ``policies/per_component.py``. Invariant (tests/sim/test_coordination.py): every trial
has the overlap it counts for, and equal arguments give equal counts.
"""

from __future__ import annotations

import random

from msgspec import Struct

from nereus.sim.policies.per_component import deadlocks
from nereus.sim.scenarios import overlaps, scenario
from nereus.transition.compile import compile_transition
from nereus.transition.primitive import Replica, TransitionDag
from nereus.transition.run import TransitionRun

MOST_TRIED = 50
"""So many random transitions are looked at, at most, for each trial that is asked for."""


class Coordination(Struct, frozen=True):
    """Of ``trials`` transitions that have an overlap of one kind, how many arrive."""

    kind: str
    slots: int
    trials: int
    arrived: int
    """In our graph."""
    one_by_one: int
    """Per component, each making its new replicas in the order of its plan."""
    side_by_side: int
    """Per component, each going on with any replica that has its slots."""


def coordination(kind: str, slots: int, trials: int) -> Coordination:
    """Run ``trials`` random transitions over ``slots`` slots that have an overlap of this ``kind``."""
    counted = arrived = 0
    alone = {True: 0, False: 0}
    for seed in range(trials * MOST_TRIED):
        if counted == trials:
            break
        case = scenario(random.Random(seed), slots)
        dag = compile_transition(case.current, case.target, groups=case.groups, memory=case.memory, variants=0)
        if not isinstance(dag, TransitionDag) or kind not in overlaps(dag):
            continue
        counted += 1
        arrived += arrives(dag, random.Random(seed))
        for one_by_one in alone:
            alone[one_by_one] += not deadlocks(case, random.Random(seed), one_by_one=one_by_one)
    return Coordination(kind, slots, counted, arrived, alone[True], alone[False])


def arrives(dag: TransitionDag, rng: random.Random) -> bool:
    """Run in random finishing order and return whether the target is reached; the books raise at the first error."""
    run = TransitionRun(dag)
    running: list[str] = []
    try:
        while not run.finished:
            running += [primitive.id for primitive in run.ready()]
            if not running:
                return False
            run.done(running.pop(rng.randrange(len(running))))
    except ValueError:
        return False
    return all(
        sorted(run.ledger.replicas(model_stage)) == sorted(map(Replica.of, dag.target.of(model_stage)))
        for model_stage in {*dag.current.model_stages(), *dag.target.model_stages()}
    )
