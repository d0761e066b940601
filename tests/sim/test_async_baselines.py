"""Each asynchronous baseline does what its source says, in the same world, and loses and repeats nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from simulated import SHAPE, Watched, job, simulate

from nereus.algo.history import check_history
from nereus.config import JobConfig
from nereus.core.plan import Plan
from nereus.runtime.journal import plain, read_journal
from nereus.runtime.placement import initial_plan
from nereus.runtime.pool import cluster_of
from nereus.runtime.schedule import GivenPlans, Planning, Schedule
from nereus.sim.course import Failures
from nereus.sim.policies import laminar
from nereus.sim.policies.checkpoint_restart import RESTART_S, CheckpointRestart, Restarts
from nereus.sim.policies.fully_async import FullyAsync
from nereus.sim.policies.laminar import Laminar, Repacking
from nereus.sim.policies.one_step_off import InBatches, OneStepOff
from nereus.sim.policies.restart import System
from nereus.sim.policy import AsStated, Circumstances
from nereus.sim.serving import Finishing, Serving
from nereus.sim.trace import StepLengths, Trace

pytestmark = pytest.mark.deep

GROWING = Trace("growing", "test", steps=tuple(StepLengths(300 + 40 * n, 600 + 90 * n) for n in range(24)))


class Served(AsStated, frozen=True):
    """Layouts as stated, on units that serve in the given way."""

    served: Serving
    name: str = "served"
    source: str = "test"

    def serving(self, config: JobConfig) -> Serving:
        return self.served

    def planning(self, now: Circumstances) -> Planning:
        return GivenPlans(Schedule(now.config, now.plan, now.step))


def records(folder: Path, watched: Watched) -> list[dict[str, Any]]:
    """Return the journal of a run that lost and repeated nothing."""
    assert watched.simulation is not None
    config = watched.simulation.config
    found = list(plain(read_journal(folder / "journal.jsonl").entries))
    bound, size = config.async_.staleness, config.train.groups_per_step
    assert check_history(found, staleness=bound, groups_per_step=size) == []
    return found


def lags(found: list[dict[str, Any]]) -> Counter[int]:
    """Return how many groups were trained at which staleness."""
    first = {(one["group"], one["attempt"]): one["version_first"] for one in found if one["kind"] == "accepted"}
    trained = [one for one in found if one["kind"] == "trained"]
    return Counter(one["version"] - first[ref["group"], ref["attempt"]] for one in trained for ref in one["groups"])


def mixed(found: list[dict[str, Any]]) -> int:
    """Return how many groups saw more than one version."""
    return sum(one["version_first"] != one["version_last"] for one in found if one["kind"] == "accepted")


def stated(staleness: int, **options: Any) -> JobConfig:
    config = job(**options)
    return replace(config, async_=replace(config.async_, staleness=staleness))


def test_one_step_off_trains_what_the_step_before_has_generated(tmp_path: Path) -> None:
    outcome, watched = simulate(job(steps=8), tmp_path, trace=GROWING, policy=OneStepOff())
    assert outcome.finished
    found = records(tmp_path, watched)
    assert lags(found) == {0: 16, 1: 7 * 16}
    assert mixed(found) == 0
    assert len({plan.slots() for plan in watched.plans}) <= 1
    accepted = [one["group"] // 16 for one in found if one["kind"] == "accepted"]
    assert accepted == sorted(accepted)


def test_fully_asynchronous_generation_goes_on_under_new_weights(tmp_path: Path) -> None:
    outcome, watched = simulate(stated(2, steps=8), tmp_path, trace=GROWING, policy=Served(Serving()))
    assert outcome.finished
    found = records(tmp_path, watched)
    assert mixed(found) > 0
    assert max(lags(found)) == 2


def test_the_fixed_split_of_fully_asynchronous_training_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nereus.sim.policies.fully_async.TRIED", 1)
    outcome, watched = simulate(job(steps=4), tmp_path, policy=FullyAsync())
    assert outcome.finished
    records(tmp_path, watched)
    assert watched.simulation is not None
    assert watched.simulation.config.rollout.layout != job().rollout.layout


def test_laminar_units_go_from_batch_to_batch_and_repack_their_tails(tmp_path: Path) -> None:
    serving = Repacking()
    outcome, watched = simulate(stated(16, steps=10), tmp_path, trace=GROWING, policy=Served(serving))
    assert outcome.finished
    found = records(tmp_path, watched)
    assert serving.repacks > 0
    assert mixed(found) == 0
    assert max(lags(found)) > 1


def test_repacking_frees_units_that_would_wait_for_their_tails(tmp_path: Path) -> None:
    tails = Trace("tails", "test", steps=(StepLengths(1500, 5000),))
    seconds = []
    for name, serving in (("with", Repacking()), ("without", _NeverRepacking())):
        folder = tmp_path / name
        folder.mkdir()
        config = stated(16, steps=16)
        config = replace(config, rollout=replace(config.rollout, max_new_tokens=8192))
        outcome, watched = simulate(config, folder, trace=tails, policy=Served(serving))
        assert outcome.finished
        seconds.append(sum(watched.seconds[2:-3]))
    assert seconds[0] < seconds[1]


class _NeverRepacking(Repacking):
    def _repack(self) -> None:
        """Every unit finishes what it has begun."""


@pytest.mark.parametrize("serving", [Repacking, Finishing, lambda: InBatches(16)])
def test_what_a_serving_holds_back_is_made_in_the_end_whatever_is_lost(tmp_path: Path, serving: Any) -> None:
    policy = Served(serving())
    bound = 16 if serving is Repacking else 1
    outcome, watched = simulate(
        stated(bound, steps=12), tmp_path, trace=GROWING, seed=3, policy=policy, failures=Failures(mtbf_s=150.0)
    )
    assert outcome.finished
    records(tmp_path, watched)


def test_laminar_takes_what_was_fastest_in_trials_within_its_staleness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laminar, "IN_FLIGHT", (2.0,))
    monkeypatch.setattr(laminar, "TRIED", 1)
    outcome, watched = simulate(job(steps=6), tmp_path, trace=GROWING, policy=Laminar())
    assert outcome.finished
    found = records(tmp_path, watched)
    assert mixed(found) == 0
    assert 1 < max(lags(found)) <= laminar.MOST_STALENESS


def test_a_change_by_restart_stops_everything_for_as_long_as_it_is_priced(tmp_path: Path) -> None:
    config = job(steps=12)
    config = replace(config, adapt=replace(config.adapt, at="6 d1t4p2 d4t2p1"))
    outcome, watched = simulate(config, tmp_path, trace=GROWING, policy=_RestartedAt())
    assert outcome.finished
    found = records(tmp_path, watched)
    changes = [one for one in found if one["kind"] == "transition_ended"]
    assert changes and all(one["ok"] and one["seconds"] >= RESTART_S for one in changes)
    begun = [one["t"] for one in found if one["kind"] == "transition_begun"]
    quiet = [one for one in found if one["kind"] == "accepted" and begun[0] + 4 < one["t"] < begun[0] + RESTART_S]
    assert quiet == []


class _Halting(GivenPlans):
    def __init__(self, now: Circumstances) -> None:
        super().__init__(Schedule(now.config, now.plan, now.step))
        self._now = now
        self._restarts = Restarts(System.MCP, now.cluster, now.known.shape)

    def began(self, plan: Plan) -> None:
        super().began(plan)
        self._now.halt(self._restarts.seconds(self._now.plan, plan))


class _RestartedAt(CheckpointRestart, frozen=True):
    """What ``adapt.at`` says, by restarts."""

    def planning(self, now: Circumstances) -> Planning:
        return _Halting(now)


def test_a_restart_with_conversion_takes_longer(tmp_path: Path) -> None:
    cluster, plan = cluster_of(job()), initial_plan(job())
    mcp, ucp = (Restarts(system, cluster, SHAPE).seconds(plan, plan) for system in (System.MCP, System.UCP))
    assert RESTART_S < mcp < ucp


def test_equal_seeds_give_byte_identical_journals(tmp_path: Path) -> None:
    journals = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        simulate(stated(16, steps=5), folder, trace=GROWING, seed=5, policy=Served(Repacking()))
        journals.append((folder / "journal.jsonl").read_bytes())
    assert journals[0] == journals[1]
