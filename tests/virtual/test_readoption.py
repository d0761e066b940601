"""The supervisor dies in a running job, on virtual time: the next one takes the workers over, and nothing is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from inprocess import World
from test_losses import STEPS, _job, _kill, _newest, _storm, _whole
from test_supervisor import _run, _trained

from nereus.actors.names import RELAY
from nereus.runtime.journal import Readopted, WorkerGone, read_journal
from nereus.runtime.regroup import StateLost
from tests.tiers import spread


def _readopted(folder: Path) -> list[Readopted]:
    entries = read_journal(folder / "journal.jsonl").entries
    return [entry.record for entry in entries if isinstance(entry.record, Readopted)]


def _killed(*after_s: float) -> Callable[[World], None]:
    def act(world: World) -> None:
        for moment in after_s:
            asyncio.get_running_loop().call_later(moment, world.kill_supervisor)

    return act


def _announced(make: Callable[[], World]) -> Callable[[], World]:
    def announced() -> World:
        world = make()
        world.announce()
        return world

    return announced


@pytest.mark.parametrize("moment", spread(range(20), 1))
@pytest.mark.parametrize("staleness", spread([0, 2], 1))
def test_a_killed_supervisor_costs_nothing_but_what_was_being_generated(
    tmp_path: Path, staleness: int, moment: int
) -> None:
    config = _job(tmp_path, "d2t1p1", staleness=staleness)
    outcome, world = _run(_announced(lambda: World(config, tmp_path)), _killed(3.0 + 0.13 * moment))
    _whole(outcome, tmp_path, staleness=staleness)
    assert sorted(group for step in _trained(tmp_path) for group in step) == list(range(4 * STEPS))
    [readopted] = _readopted(tmp_path)
    assert not readopted.lost
    assert world.running == {}


@pytest.mark.parametrize("moment", spread(range(10), 1))
def test_a_step_that_only_the_trainers_know_of_is_neither_lost_nor_made_twice(tmp_path: Path, moment: int) -> None:
    """The supervisor dies while the trainers agree on a step, one after the other."""
    config = _job(tmp_path, "d2t1p1")

    def act(world: World) -> None:
        async def strike() -> None:
            for _ in range(20000):
                if any(trainer.ready for trainer in world.trainers.values()):
                    break
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.005 * moment)
            world.kill_supervisor()

        world.strike = asyncio.create_task(strike())  # type: ignore[attr-defined]

    outcome, _ = _run(_announced(lambda: World(config, tmp_path)), act)
    _whole(outcome, tmp_path)
    assert sorted(group for step in _trained(tmp_path) for group in step) == list(range(4 * STEPS))
    assert _readopted(tmp_path)[0].completed


@pytest.mark.parametrize("victim", spread([RELAY, "slot-0", "slot-1", "slot-2"], 1))
@pytest.mark.parametrize("after_s", spread([-0.1, 0.1], 1))
def test_a_worker_that_dies_with_the_supervisor_is_replaced(tmp_path: Path, victim: str, after_s: float) -> None:
    config = _job(tmp_path, "d2t1p1")

    def act(world: World) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(5.0, world.kill_supervisor)
        loop.call_later(5.0 + after_s, world.kill, victim)

    outcome, _ = _run(_announced(lambda: World(config, tmp_path)), act)
    _whole(outcome, tmp_path)
    assert sorted(group for step in _trained(tmp_path) for group in step) == list(range(4 * STEPS))


def test_supervisors_may_die_one_after_the_other(tmp_path: Path) -> None:
    config = _job(tmp_path, "d2t1p1")
    outcome, world = _run(_announced(lambda: World(config, tmp_path)), _killed(*(3.0 + 2.3 * i for i in range(6))))
    _whole(outcome, tmp_path)
    assert world.attempt == 7
    entries = read_journal(tmp_path / "journal.jsonl").entries
    assert not [entry for entry in entries if isinstance(entry.record, WorkerGone)]


@pytest.mark.parametrize("seed", spread(range(24), 1))
def test_supervisors_and_workers_die_amid_plan_changes(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    walk = "; ".join(
        f"{step} {draw.choice(('d2t1p1', 'd3t1p1', 'd2t2p1', 'd2t1p2', 'd4t1p1'))} d{draw.randint(1, 2)}t1p1"
        for step in range(2, STEPS - 2, 3)
    )
    staleness = seed % 3
    config = _job(tmp_path, "d2t1p1", at=walk, staleness=staleness, every=3)

    def strike(world: World, draw: random.Random, worker: str) -> None:
        if seed % 2 and draw.random() < 0.3:
            _kill(world, draw, worker)
        else:
            world.kill_supervisor()

    for _ in range(6):
        try:
            outcome, _ = _run(
                _announced(lambda: World(config, tmp_path, origin=_newest(tmp_path, config))), _storm(draw, 6, strike)
            )
        except StateLost:
            continue
        break
    _whole(outcome, tmp_path, staleness=staleness)
    assert _readopted(tmp_path) or seed % 2
