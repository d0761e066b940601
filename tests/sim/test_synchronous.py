"""A synchronous job on virtual time: phases in order, slots used once, memory, plan changes, losses, equal seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nereus.core.profiles import load_cluster, load_model
from nereus.core.workflow import Algorithm
from nereus.runtime.journal import PlanCommitted, Trained, TransitionBegun, read_journal
from nereus.sim.job import SynchronousJob
from nereus.sim.policy import Nereus
from nereus.sim.synchronous import SynchronousRun, run_synchronous
from nereus.sim.trace import Failure, StepLengths, StepSupply, Trace
from tests.tiers import spread

STEADY = Trace("steady", "test", steps=(StepLengths(800, 1200),), step_supply=(StepSupply(0, 8),))
GROWING = Trace("growing", "test", (StepLengths(800, 1200),), step_supply=(StepSupply(0, 8), StepSupply(3, 16)))
SHRINKING = Trace("shrinking", "test", (StepLengths(800, 1200),), step_supply=(StepSupply(0, 16), StepSupply(3, 8)))


def job(slots: int = 16, steps: int = 6, **fields: Any) -> SynchronousJob:
    cluster = load_cluster("a100-64g-256", slots)
    return SynchronousJob(cluster=cluster, model=load_model("llama-3.1-8b"), steps=steps, prompts=256, **fields)


def run(made: SynchronousJob, trace: Trace, **options: Any) -> SynchronousRun:
    return run_synchronous(made, trace, Nereus(), **options)


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_phases_follow_each_other_and_add_up_to_the_step(algorithm: Algorithm) -> None:
    done = run(job(8, 3, algorithm=algorithm), STEADY)
    for taken in done.steps:
        assert list(taken.phases_s) == ["boundary", "generation", "inference", "training", "weight_sync"]
        assert taken.seconds == pytest.approx(sum(taken.phases_s.values()))
        assert all(seconds > 0 for name, seconds in taken.phases_s.items() if name != "boundary")
    assert [taken.step for taken in done.steps] == [0, 1, 2]
    assert done.virtual_s == pytest.approx(sum(taken.seconds for taken in done.steps))


@pytest.mark.deep
def test_equal_seeds_give_byte_identical_journals_and_others_do_not(tmp_path: Path) -> None:
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        run(job(), GROWING, seed=seed, journal=tmp_path / name)
    one, two, other = ((tmp_path / name).read_bytes() for name in ("one", "two", "other"))
    assert one == two != other


def test_slots_that_come_are_used_and_the_change_costs_time(tmp_path: Path) -> None:
    done = run(job(), GROWING, journal=tmp_path / "journal")
    (change,) = done.changes
    assert change.ok and change.step == 3 and change.seconds > 1 and change.moved_bytes > 1e9
    assert done.steps[3].phases_s["boundary"] >= change.seconds
    last, before = done.steps[5], done.steps[2]
    assert last.seconds < 0.7 * before.seconds
    records = [entry.record for entry in read_journal(tmp_path / "journal").entries]
    assert [len(one.plan.slots()) for one in records if isinstance(one, PlanCommitted)] == [8, 16]
    assert sum(isinstance(one, TransitionBegun) for one in records) == 1
    assert [one.step for one in records if isinstance(one, Trained)] == list(range(6))


def test_slots_that_go_are_left_before_the_next_step_and_nothing_is_lost() -> None:
    done = run(job(), SHRINKING)
    assert [(change.step, change.ok) for change in done.changes] == [(3, True)]
    assert not done.restores
    assert [taken.slots for taken in done.steps] == [16, 16, 16, 8, 8, 8]


@pytest.mark.parametrize("kind", spread(["kill", "reclaim", "hang"], 1))
def test_a_slot_that_fails_costs_its_step_and_the_run_goes_on(kind: str) -> None:
    failing = Trace("failing", "test", (StepLengths(800, 1200),), failures=(Failure(30.0, 9, kind),))  # type: ignore[arg-type]
    done = run(job(), failing)
    whole = run(job(), Trace("whole", "test", (StepLengths(800, 1200),)))
    assert len(done.steps) == 6 and done.virtual_s > whole.virtual_s
