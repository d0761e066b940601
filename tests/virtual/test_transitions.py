"""Plan changes in a running job, on virtual time: the real supervisor, actors and executor.

``FakeTrainer.adopt`` compares every element of the state with what training has made of it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path

import msgspec
import pytest
from inprocess import World
from test_supervisor import _config, _records, _run, _trained

from nereus.algo.history import check_history
from nereus.backends.fake import FakeTrainer
from nereus.config import AdaptConfig, JobConfig
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING
from nereus.errors import TransitionError
from nereus.runtime.journal import PlanCommitted, TransitionEnded, read_journal
from nereus.runtime.surroundings import Outcome
from tests.tiers import spread

TRAIN = ("d1t1p1", "d2t1p1", "d1t2p1", "d1t1p2", "d3t1p1", "d2t2p1", "d1t2p2")


def _changing(tmp_path: Path, at: str, *, steps: int = 25, staleness: int = 1, every: int = 0) -> JobConfig:
    return msgspec.structs.replace(
        _config(tmp_path, steps=steps, staleness=staleness, every=every), adapt=AdaptConfig(at=at, timeout_s=20.0)
    )


def _walk(draw: random.Random, steps: int) -> str:
    """Return a plan change at about every second step: five slots, at least one that generates."""
    changes = []
    for step in range(1, steps - 1):
        if draw.random() < 0.6:
            train = draw.choice(TRAIN)
            slots = {"d1t1p1": 1, "d3t1p1": 3, "d2t2p1": 4, "d1t2p2": 4}.get(train, 2)
            changes.append(f"{step} {train} d{draw.randint(1, 5 - slots)}t1p1")
    return "; ".join(changes)


def _ended(folder: Path) -> list[TransitionEnded]:
    entries = read_journal(folder / "journal.jsonl").entries
    return [entry.record for entry in entries if isinstance(entry.record, TransitionEnded)]


def _whole(outcome: Outcome, folder: Path, *, steps: int, staleness: int) -> None:
    assert outcome.finished
    assert check_history(_records(folder), staleness=staleness) == []
    assert sorted(group for step in _trained(folder) for group in step) == list(range(4 * steps))


@pytest.mark.parametrize("seed", spread(range(12), 1))
def test_a_job_walks_from_plan_to_plan_and_loses_nothing(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    at = _walk(draw, 25)
    config = _changing(tmp_path, at, staleness=seed % 3, every=(0, 4)[seed % 2])
    outcome, _ = _run(lambda: World(config, tmp_path))
    _whole(outcome, tmp_path, steps=25, staleness=seed % 3)
    ended = _ended(tmp_path)
    assert all(record.ok for record in ended), ended
    plans = [
        entry.record.plan
        for entry in read_journal(tmp_path / "journal.jsonl").entries
        if isinstance(entry.record, PlanCommitted)
    ]
    assert [plan.epoch for plan in plans] == list(range(len(ended) + 1))
    there = [f"{plan.replication(POLICY_TRAINING)} {plan.replication(POLICY_GENERATION)}" for plan in plans]
    asked = ["d1t2p1 d3t1p1", *(change.partition(" ")[2] for change in at.split("; "))]
    assert there == [layouts for layouts, _ in itertools.groupby(asked)]


@pytest.mark.parametrize("seed", spread(range(8), 1))
def test_rollouts_that_die_during_plan_changes_cost_only_their_groups(tmp_path: Path, seed: int) -> None:
    draw = random.Random(100 + seed)
    config = _changing(tmp_path, _walk(draw, 25), staleness=1)

    def killer(world: World) -> None:
        async def kill() -> None:
            for _ in range(5):
                await asyncio.sleep(draw.uniform(0.2, 3.0))
                plan = world.supervisor._changes.plan
                world.kill(f"slot-{draw.choice(plan.of(POLICY_GENERATION)).slots[0]}")

        world.chaos = asyncio.create_task(kill())  # type: ignore[attr-defined]

    outcome, _ = _run(lambda: World(config, tmp_path), killer)
    _whole(outcome, tmp_path, steps=25, staleness=1)


def test_a_change_that_fails_is_tried_again_at_the_next_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = FakeTrainer.take

    def damaged(self: FakeTrainer, *arguments: object) -> int:
        taken.append(1)
        if len(taken) == 1:
            raise TransitionError("the first row of embed from slot 0 arrived damaged")
        return take(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeTrainer, "take", damaged)
    config = _changing(tmp_path, "3 d2t1p1 d2t1p1; 6 d1t2p1 d1t1p1", steps=10)
    outcome, world = _run(lambda: World(config, tmp_path))
    _whole(outcome, tmp_path, steps=10, staleness=1)
    first, second, third = _ended(tmp_path)
    assert (first.ok, second.ok, third.ok) == (False, True, True)
    assert (first.epoch, second.epoch, third.epoch) == (1, 2, 3)
    assert "arrived damaged" in first.reason
    assert any("was given up" in note and "arrived damaged" in note for note in world.notes)


@pytest.mark.parametrize("after_s", spread([1.0, 3.0, 3.4, 4.0, 4.6, 6.0], 2))
def test_an_interrupt_at_any_moment_of_a_change_drains_to_a_checkpoint(tmp_path: Path, after_s: float) -> None:
    config = _changing(tmp_path, "1 d2t1p1 d2t1p1; 2 d1t1p2 d3t1p1; 3 d2t2p1 d1t1p1; 4 d1t1p1 d2t1p1", steps=40)

    def interrupt(world: World) -> None:
        asyncio.get_running_loop().call_later(after_s, world.supervisor.interrupt, "SIGTERM")

    outcome, world = _run(lambda: World(config, tmp_path), interrupt)
    assert not outcome.finished
    assert "drained" in outcome.reason
    assert check_history(_records(tmp_path), staleness=1) == []
    if world.steps:
        assert (tmp_path / "checkpoints" / f"step_{len(world.steps):08d}").is_dir()
