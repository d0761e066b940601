"""Each baseline of synchronous runs does what its rule says."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from nereus.control.admission import Offer
from nereus.control.monitor import Signals
from nereus.core.plan import Replication
from nereus.core.profiles import load_cluster, load_model
from nereus.runtime.journal import Decided, Happened, PlanCommitted, read_journal
from nereus.sim.job import SynchronousJob
from nereus.sim.policies.dynarl import DynaRL, any_gain
from nereus.sim.policies.every_k import Clock, EveryK, go
from nereus.sim.policies.fixed_dp import FixedDP
from nereus.sim.synchronous import run_synchronous
from nereus.sim.trace import StepLengths, StepSupply, Trace

pytestmark = pytest.mark.deep

GROWING = Trace("growing", "test", (StepLengths(800, 1200),), step_supply=(StepSupply(0, 8), StepSupply(3, 16)))
JOB = SynchronousJob(
    cluster=load_cluster("a100-64g-256", 16), model=load_model("llama-3.1-8b"), steps=7, prompts=128, calibrate_steps=99
)
OFFER = Offer("test", 100.0, 99.0, 500.0, 1.0, 1, 2)


def test_a_clock_triggers_every_so_many_steps_whatever_they_are_like() -> None:
    clock, due = Clock(3), []
    for step in range(9):
        clock, triggers = clock.observe(Signals(1.0 + step, 2.0))
        due.append(bool(triggers))
    assert due == [False, False, True] * 3


def test_any_gain_is_admitted_however_dear_and_no_gain_is_not() -> None:
    assert any_gain(OFFER, gamma=0.5).admitted
    assert not any_gain(replace(OFFER, latency_new_s=100.0), gamma=0.5).admitted
    assert not any_gain(replace(OFFER, peak_bytes=3), gamma=0.5).admitted


def test_every_k_goes_wherever_it_can() -> None:
    assert go(replace(OFFER, latency_new_s=200.0), gamma=0.5).path == "opportunistic"
    assert go(replace(OFFER, urgent=True), gamma=0.5).path == "urgent"
    assert not go(replace(OFFER, stuck="a cycle"), gamma=0.5).admitted


def test_every_k_searches_every_k_steps(tmp_path: Path) -> None:
    run_synchronous(JOB, replace(GROWING, step_supply=(StepSupply(0, 8),)), EveryK(), journal=tmp_path / "j")
    records = [entry.record for entry in read_journal(tmp_path / "j").entries]
    clocks = [one for one in records if isinstance(one, Decided) and one.because == "3 steps are over"]
    assert len(clocks) == 2
    assert sum(isinstance(one, Happened) and one.event["type"] == "PlanFound" for one in records) == 2


def test_fixed_layouts_stay_and_replicas_follow_the_slots(tmp_path: Path) -> None:
    done = run_synchronous(JOB, GROWING, FixedDP(), journal=tmp_path / "j")
    records = [entry.record for entry in read_journal(tmp_path / "j").entries]
    first, *later = [one.plan for one in records if isinstance(one, PlanCommitted)]
    assert later and done.changes[0].step == 3
    for plan in later:
        before, after = _layouts(first), _layouts(plan)
        assert {stage: one.layout for stage, one in after.items()} == {s: one.layout for s, one in before.items()}
        assert sum(one.dp for one in after.values()) > sum(one.dp for one in before.values())


def _layouts(plan: object) -> dict[str, Replication]:
    found = {}
    for stage in plan.model_stages():  # type: ignore[attr-defined]
        found[str(stage)] = plan.replication(stage)  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("policy", [EveryK(), DynaRL(), FixedDP()])
def test_baselines_reach_the_end(policy: EveryK | DynaRL | FixedDP) -> None:
    done = run_synchronous(JOB, GROWING, policy)
    assert len(done.steps) == JOB.steps and done.policy == policy.name
