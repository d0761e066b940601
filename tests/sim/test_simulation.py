"""A whole job at its real size on virtual time: the live supervisor, controller and planner over simulated slots."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from simulated import Watched, job, problems, simulate

from nereus.bus.messages import StepReport
from nereus.errors import ConfigError
from nereus.runtime.journal import Decided, WorkerGone, WorkerJoined, read_journal
from nereus.runtime.regroup import StateLost
from nereus.sim.course import Failures
from nereus.sim.policy import Given, Policy
from nereus.sim.trace import Failure, StepLengths, StepSupply, Supply, Trace
from tests.tiers import spread


def test_equal_seeds_give_byte_identical_journals_and_other_seeds_do_not(tmp_path: Path) -> None:
    journals = []
    for name, seed in (("one", 7), ("two", 7), ("three", 8)):
        folder = tmp_path / name
        folder.mkdir()
        outcome, _ = simulate(job(), folder, seed=seed)
        assert outcome.finished
        assert problems(folder, job()) == []
        joined = [one.record for one in read_journal(folder / "journal.jsonl").entries]
        hosts = {one.host for one in joined if isinstance(one, WorkerJoined) and one.worker.startswith("slot-")}
        assert len(hosts) == job().cluster.slots // 4, "a node of this cluster has four slots"
        journals.append((folder / "journal.jsonl").read_bytes())
    assert journals[0] == journals[1] != journals[2]


def test_what_groups_are_like_depends_on_no_plan(tmp_path: Path) -> None:
    tokens = []
    for name, train, rollout in (("one", "d2t2p2", "d4t2p1"), ("two", "d1t4p2", "d8t1p1")):
        folder = tmp_path / name
        folder.mkdir()
        config = job(train=train, rollout=rollout, steps=4)
        _, watched = simulate(config, folder, policy=Given())
        tokens.append(sum(report.tokens for report in watched.reports))
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("policy", [Given(), None], ids=["given", "adaptive"])
def test_a_slot_that_is_drained_while_trainers_are_at_work_is_left(tmp_path: Path, policy: Policy | None) -> None:
    """Its worker is there until the next boundary, many ticks later, and is no slot to plan with."""

    class Operator(Watched):
        def step(self, report: StepReport, metrics: dict[str, float]) -> None:
            super().step(report, metrics)
            if report.step == 0:  # the samples of the next step are there: it begins with the weights published
                assert self.simulation is not None
                loop, drain = asyncio.get_running_loop(), self.simulation.take_back
                loop.call_later(2.0, lambda: asyncio.ensure_future(drain((5,), math.inf)))

    config = job(slots=14, train="d1t2p2", steps=6)  # training takes longer than a tick
    outcome, watched = simulate(config, tmp_path, watched=Operator(), **({"policy": policy} if policy else {}))
    assert outcome.finished
    assert problems(tmp_path, config) == []
    assert watched.plans and 5 not in watched.plans[-1].slots(), "the first plan uses slots 0 to 11"
    gone = [
        one.record for one in read_journal(tmp_path / "journal.jsonl").entries if isinstance(one.record, WorkerGone)
    ]
    assert [(one.worker, one.expected) for one in gone] == [("slot-5", True)]


@pytest.mark.deep
def test_units_of_several_slots_generate_and_the_controller_watches_them(tmp_path: Path) -> None:
    growing = Trace("growing", "test", steps=tuple(StepLengths(300 + 40 * n, 500 + 70 * n) for n in range(24)))
    outcome, watched = simulate(job(steps=24, train="d1t4p2"), tmp_path, trace=growing)
    assert outcome.finished
    assert problems(tmp_path, job()) == []
    assert any(isinstance(entry.record, Decided) for entry in read_journal(tmp_path / "journal.jsonl").entries)
    assert min(watched.seconds[-4:]) > min(watched.seconds)


def test_slots_that_come_and_go_by_steps_are_followed(tmp_path: Path) -> None:
    supply = (StepSupply(0, 16), StepSupply(6, 8), StepSupply(12, 16))
    outcome, watched = simulate(job(steps=18), tmp_path, trace=Trace("steps", "test", step_supply=supply))
    assert outcome.finished
    assert problems(tmp_path, job()) == []
    used = [len([slot for slot in plan.slots() if slot < 4000]) for plan in watched.plans]
    assert min(used) <= 8 < used[-1]


@pytest.mark.deep
def test_slots_that_come_and_go_by_time_are_followed(tmp_path: Path) -> None:
    supply = (Supply(0.0, 16), Supply(150.0, 10), Supply(600.0, 16))
    outcome, watched = simulate(job(steps=30), tmp_path, trace=Trace("spot", "test", supply=supply))
    assert outcome.finished
    assert problems(tmp_path, job()) == []
    assert min(len([slot for slot in plan.slots() if slot < 4000]) for plan in watched.plans) <= 10


@pytest.mark.parametrize("kind", spread(["kill", "hang", "reclaim"], 1))
def test_a_slot_that_fails_costs_time_and_no_sample(tmp_path: Path, kind: str) -> None:
    failures = tuple(Failure(90.0 + 130.0 * n, slot, kind) for n, slot in enumerate((0, 9, 5)))  # type: ignore[arg-type]
    outcome, _ = simulate(job(steps=14), tmp_path, trace=Trace(kind, "test", failures=failures))
    assert outcome.finished
    assert problems(tmp_path, job()) == []


@pytest.mark.parametrize("seed", spread(range(4), 1))
def test_a_storm_of_failures_loses_and_repeats_nothing(tmp_path: Path, seed: int) -> None:
    outcome, _ = simulate(job(steps=20), tmp_path, seed=seed, failures=Failures(mtbf_s=150.0))
    assert outcome.finished
    assert problems(tmp_path, job()) == []


@pytest.mark.deep
def test_a_plan_that_nothing_leads_away_from_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    config = job(train="d4t1p2", steps=10)
    with pytest.raises(StateLost, match="peaked at"):
        simulate(config, tmp_path)


def test_a_first_plan_without_its_slots_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="8 slots that are not there"):
        simulate(job(), tmp_path, trace=Trace("few", "test", supply=(Supply(0.0, 8),)))
