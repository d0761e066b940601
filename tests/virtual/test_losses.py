"""Trainers, relays and rollouts die in a running job, on virtual time: the job goes on and loses nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from inprocess import World, model_files
from test_supervisor import _config, _records, _run, _trained

from nereus.actors.names import RELAY, REWARD, slot_worker
from nereus.algo.history import check_history
from nereus.algo.sampler import Cursor
from nereus.config import AdaptConfig, BusConfig, ClusterConfig, JobConfig
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING
from nereus.runtime.checkpoints import CheckpointStore
from nereus.runtime.journal import PlanCommitted, WorkerGone, read_journal
from nereus.runtime.regroup import StateLost
from nereus.runtime.resume import committed_checkpoints
from nereus.runtime.surroundings import Origin, Outcome
from tests.tiers import spread

STEPS = 20


def _job(
    tmp_path: Path, train: str, rollout: str = "d2t1p1", *, at: str = "", staleness: int = 1, every: int = 4
) -> JobConfig:
    config = _config(tmp_path, steps=STEPS, staleness=staleness, every=every)
    return msgspec.structs.replace(
        config,
        cluster=ClusterConfig(slots=6, group_timeout_s=20.0),
        bus=BusConfig(start_timeout_s=30.0),
        train=msgspec.structs.replace(config.train, layout=train),
        rollout=msgspec.structs.replace(config.rollout, layout=rollout),
        adapt=AdaptConfig(at=at, timeout_s=30.0),
    )


def _plans(folder: Path) -> list[str]:
    entries = read_journal(folder / "journal.jsonl").entries
    plans = [entry.record.plan for entry in entries if isinstance(entry.record, PlanCommitted)]
    return [str(plan.replication(POLICY_TRAINING)) for plan in plans]


def _whole(outcome: Outcome, folder: Path, *, staleness: int = 1) -> None:
    assert outcome.finished
    assert check_history(_records(folder), staleness=staleness) == []


def _at(*kills: tuple[float, str]) -> Callable[[World], None]:
    def act(world: World) -> None:
        for after_s, worker in kills:
            asyncio.get_running_loop().call_later(after_s, world.kill, worker)

    return act


@pytest.mark.parametrize("moment", spread(range(16), 1))
@pytest.mark.parametrize("victim", spread(["slot-0", "slot-1"], 1))
def test_a_lost_trainer_costs_at_most_the_step_in_flight(tmp_path: Path, victim: str, moment: int) -> None:
    config = _job(tmp_path, "d2t1p1")
    outcome, _ = _run(lambda: World(config, tmp_path), _at((3.0 + 0.17 * moment, victim)))
    _whole(outcome, tmp_path)
    assert sorted(group for step in _trained(tmp_path) for group in step) == list(range(4 * STEPS))
    assert _plans(tmp_path) == ["d2t1p1", "d1t1p1", "d2t1p1"]


@pytest.mark.parametrize("moment", spread(range(12), 1))
def test_a_lost_slot_of_a_sharded_unit_takes_its_unit_along(tmp_path: Path, moment: int) -> None:
    config = _job(tmp_path, "d2t2p1")
    victim = f"slot-{moment % 4}"
    outcome, _ = _run(lambda: World(config, tmp_path), _at((3.0 + 0.23 * moment, victim)))
    _whole(outcome, tmp_path)
    assert _plans(tmp_path) == ["d2t2p1", "d1t2p1", "d2t2p1"]


@pytest.mark.parametrize("moment", spread(range(12), 1))
def test_a_lost_relay_comes_back_and_gets_the_newest_weights(tmp_path: Path, moment: int) -> None:
    config = _job(tmp_path, "d2t1p1", staleness=moment % 3)
    outcome, _ = _run(lambda: World(config, tmp_path), _at((2.0 + 0.31 * moment, RELAY)))
    _whole(outcome, tmp_path, staleness=moment % 3)
    assert _plans(tmp_path) == ["d2t1p1"]


def test_two_units_of_three_may_die_at_once(tmp_path: Path) -> None:
    config = _job(tmp_path, "d3t1p1")
    outcome, _ = _run(lambda: World(config, tmp_path), _at((5.0, "slot-0"), (5.0, "slot-2")))
    _whole(outcome, tmp_path)
    assert _plans(tmp_path) == ["d3t1p1", "d1t1p1", "d3t1p1"]


def test_another_unit_that_dies_during_the_recovery_is_seen_to_as_well(tmp_path: Path) -> None:
    config = _job(tmp_path, "d3t1p1")
    outcome, _ = _run(lambda: World(config, tmp_path), _at((5.0, "slot-0"), (5.05, "slot-1"), (5.2, "slot-3")))
    _whole(outcome, tmp_path)
    assert _plans(tmp_path)[-1] == "d3t1p1"


def test_when_no_unit_is_whole_any_more_only_a_checkpoint_helps(tmp_path: Path) -> None:
    config = _job(tmp_path, "d1t2p1")
    with pytest.raises(StateLost, match="no trainer unit is whole"):
        _run(lambda: World(config, tmp_path), _at((5.0, "slot-1")))


@pytest.mark.parametrize("staleness", spread([0, 1], 1))
@pytest.mark.parametrize(
    "pair",
    spread([("slot-0", "slot-2"), ("slot-2", RELAY), ("slot-0", RELAY), ("slot-1", RELAY), ("slot-2", REWARD)], 1),
)
def test_workers_that_lose_each_other_find_each_other_again(
    tmp_path: Path, pair: tuple[str, str], staleness: int
) -> None:
    config = _job(tmp_path, "d2t1p1", "d1t1p1", staleness=staleness)

    def act(world: World) -> None:
        asyncio.get_running_loop().call_later(3.0, world.drop, 7.0, *pair)

    outcome, _ = _run(lambda: World(config, tmp_path), act)
    _whole(outcome, tmp_path, staleness=staleness)
    assert _gone(tmp_path) == []


@pytest.mark.parametrize("after_ms", spread(range(0, 100, 10), 1))
def test_a_server_that_dies_while_others_are_told_where_it_is_takes_nobody_along(tmp_path: Path, after_ms: int) -> None:
    config = _job(tmp_path, "d2t1p1", staleness=0)
    again = 3.2 + after_ms / 1e3  # a worker takes 0.2 s to come back
    outcome, _ = _run(
        lambda: World(config, tmp_path), _at((3.0, RELAY), (again, RELAY), (3.0, REWARD), (again, REWARD))
    )
    _whole(outcome, tmp_path, staleness=0)
    assert {worker.partition("-")[0] for worker in _gone(tmp_path)} == {"weights", "reward"}


def _gone(folder: Path) -> list[str]:
    entries = read_journal(folder / "journal.jsonl").entries
    return [entry.record.worker for entry in entries if isinstance(entry.record, WorkerGone)]


Strike = Callable[[World, random.Random, str], None]


def _kill(world: World, draw: random.Random, worker: str) -> None:
    world.kill(worker)


def _any(world: World, draw: random.Random, worker: str) -> None:
    """Kill a worker, let it hang or stall, or cut it off, from all or from one, for a while that may go unnoticed."""
    how = draw.randrange(4)
    if how == 0:
        world.kill(worker)
    elif how == 1:
        world.hang(worker)
    elif how == 2 and not world.collectives.hanging:
        world.stall(worker)
    else:
        lead = slot_worker(world.supervisor._changes.plan.of(POLICY_TRAINING)[0].slots[0])
        world.drop(draw.uniform(0.2, 9.0), *sorted({worker, draw.choice((worker, RELAY, lead))}))


@pytest.mark.parametrize("units", spread([2, 1], 1))
def test_trainers_that_all_hang_are_noticed(tmp_path: Path, units: int) -> None:
    config, hanging = _job(tmp_path, f"d{units}t1p1"), [f"slot-{number}" for number in range(units)]

    def act(world: World) -> None:
        for worker in hanging:
            asyncio.get_running_loop().call_later(5.0, world.stall, worker)

    with pytest.raises(StateLost, match=rf"takes more than 50 s on {', '.join(hanging)}"):
        _run(lambda: World(config, tmp_path), act)


def _storm(draw: random.Random, count: int, strike: Strike) -> Callable[[World], None]:
    """Strike workers of every kind, several of them during plan changes."""

    def act(world: World) -> None:
        async def blow() -> None:
            for _ in range(count):
                await asyncio.sleep(draw.uniform(0.3, 4.0))
                if draw.random() < 0.4:
                    for _ in range(400):  # until state is being moved
                        if world.supervisor._changes.running:
                            break
                        await asyncio.sleep(0.01)
                    await asyncio.sleep(draw.uniform(0.0, 0.05))
                plan = world.supervisor._changes.plan
                trainers = plan.of(POLICY_TRAINING)
                kind = draw.choice(("train", "train", "generate", RELAY))
                if kind == RELAY:
                    strike(world, draw, RELAY)
                elif kind == "generate":
                    strike(world, draw, slot_worker(draw.choice(plan.of(POLICY_GENERATION)).slots[0]))
                else:
                    strike(world, draw, slot_worker(draw.choice(draw.choice(trainers).slots)))

        world.chaos = asyncio.create_task(blow())  # type: ignore[attr-defined]

    return act


def _newest(folder: Path, config: JobConfig) -> Origin:
    """Return what a run goes on from when its state is lost."""
    found = committed_checkpoints(folder)
    if not found:
        return Origin(folder, model_files(folder))
    path = found[max(found)]
    extra = CheckpointStore(folder / "checkpoints", keep=config.checkpoint.keep).read(path)
    cursor = msgspec.convert(extra["cursor"], Cursor)
    return Origin(path, model_files(folder), extra["step"], extra["version"], cursor)


def weather(folder: Path, seed: int, strike: Strike) -> None:
    """Run a job that changes its plan again and again through a storm, and see that it ends well."""
    draw = random.Random(seed)
    walk = "; ".join(
        f"{step} {draw.choice(('d2t1p1', 'd3t1p1', 'd2t2p1', 'd2t1p2', 'd4t1p1'))} d{draw.randint(1, 2)}t1p1"
        for step in range(2, STEPS - 2, 3)
    )
    staleness = seed % 3
    config = _job(folder, "d2t1p1", at=walk, staleness=staleness, every=3)
    for _ in range(6):
        try:
            outcome, _ = _run(lambda: _resumed(config, folder), _storm(draw, 6, strike))
        except StateLost:
            continue
        break
    _whole(outcome, folder, staleness=staleness)


@pytest.mark.parametrize("seed", spread(range(24), 1))
def test_storms_of_losses_amid_plan_changes(tmp_path: Path, seed: int) -> None:
    weather(tmp_path, seed, _kill)
    assert _gone(tmp_path)


@pytest.mark.parametrize("seed", spread(range(12), 1))
def test_storms_of_losses_hangs_and_cut_connections_amid_plan_changes(tmp_path: Path, seed: int) -> None:
    weather(tmp_path, seed, _any)


def _resumed(config: JobConfig, folder: Path) -> World:
    world = World(config, folder, origin=_newest(folder, config))
    world.announce()
    return world
