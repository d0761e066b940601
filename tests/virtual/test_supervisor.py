"""The real supervisor and the real actors, on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from inprocess import World, model_files

from nereus.algo.history import check_history
from nereus.algo.sampler import Cursor
from nereus.backends.fake import Pace
from nereus.bus.messages import StepReport
from nereus.config import (
    AsyncConfig,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    JobConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from nereus.runtime.checkpoints import CheckpointStore
from nereus.runtime.journal import Trained, WorkerGone, plain, read_journal
from nereus.runtime.surroundings import Origin, Outcome, RunFailed
from nereus.sim.loop import run_virtual
from tests.tiers import spread

LIMIT_S = 300.0


def _config(tmp_path: Path, *, steps: int = 12, staleness: int = 1, every: int = 5, **rollout: object) -> JobConfig:
    data = tmp_path / "rows.jsonl"
    if not data.exists():
        data.write_text("".join(f'{{"prompt": "p{"x" * (i % 5)}", "answer": "{i}"}}\n' for i in range(11)))
    return JobConfig(
        run=RunConfig(steps=steps, seed=3),
        cluster=ClusterConfig(slots=5),
        data=DataConfig(source=str(data)),
        rollout=RolloutConfig(layout="d3t1p1", group_size=3, max_live=6, **rollout),  # type: ignore[arg-type]
        train=TrainConfig(layout="d1t2p1", groups_per_step=4),
        async_=AsyncConfig(staleness=staleness),
        checkpoint=CheckpointConfig(every=every),
    )


def _train_s(result: object) -> float:
    return result.seconds if isinstance(result, StepReport) else 0.0


def _run(make: Callable[[], World], act: Callable[[World], object] = lambda world: None) -> tuple[Outcome, World]:
    """Run a world to its end on virtual time."""

    async def main() -> tuple[Outcome, World]:
        world = make()
        act(world)
        async with asyncio.timeout(LIMIT_S):
            return await world.run(), world

    return run_virtual(main(), work_s=_train_s)


def _records(folder: Path) -> list[dict[str, object]]:
    return list(plain(read_journal(folder / "journal.jsonl").entries))


def _trained(folder: Path) -> list[list[int]]:
    entries = read_journal(folder / "journal.jsonl").entries
    return [[ref.group for ref in entry.record.groups] for entry in entries if isinstance(entry.record, Trained)]


@pytest.mark.parametrize("staleness", spread([0, 1, 3], 2))
@pytest.mark.parametrize("interrupt", spread(["keep", "wait"], 1))
def test_a_run_trains_every_group_once_and_within_the_bound(tmp_path: Path, staleness: int, interrupt: str) -> None:
    config = _config(tmp_path, staleness=staleness, interrupt=interrupt)
    outcome, world = _run(lambda: World(config, tmp_path))
    assert outcome.finished
    assert check_history(_records(tmp_path), staleness=staleness) == []
    assert sorted(group for step in _trained(tmp_path) for group in step) == list(range(48))
    assert max(metrics["staleness/max"] for _, metrics in world.steps) == staleness
    assert not list(tmp_path.glob("nereus-*")), "shared files are left behind"


def test_on_policy_steps_train_the_sample_order_as_it_is(tmp_path: Path) -> None:
    config = _config(tmp_path, staleness=0, interrupt="wait")
    _run(lambda: World(config, tmp_path))
    assert _trained(tmp_path) == [list(range(4 * step, 4 * step + 4)) for step in range(12)]


@pytest.mark.parametrize("seed", spread(range(8), 1))
def test_rollouts_that_die_cost_only_their_running_groups(tmp_path: Path, seed: int) -> None:
    config = _config(tmp_path, steps=25, staleness=seed % 3)
    random_source = random.Random(seed)

    def killer(world: World) -> None:
        async def kill() -> None:
            for _ in range(4):
                await asyncio.sleep(random_source.uniform(0.3, 6.0))
                world.kill(random_source.choice(["slot-2", "slot-3", "slot-4"]))

        world.chaos = asyncio.create_task(kill())  # type: ignore[attr-defined]

    outcome, _ = _run(lambda: World(config, tmp_path), killer)
    assert outcome.finished
    assert check_history(_records(tmp_path), staleness=seed % 3) == []
    assert sorted(group for step in _trained(tmp_path) for group in step) == list(range(100))


def test_a_rollout_that_hangs_is_given_up_replaced_and_never_believed_again(tmp_path: Path) -> None:
    config = _config(tmp_path, steps=30)

    def partition(world: World) -> None:
        async def cut() -> None:
            await asyncio.sleep(3.0)
            world.bus.cut("slot-3")
            await asyncio.sleep(20.0)
            world.bus.heal("slot-3")

        world.chaos = asyncio.create_task(cut())  # type: ignore[attr-defined]

    outcome, _ = _run(lambda: World(config, tmp_path), partition)
    assert outcome.finished
    assert check_history(_records(tmp_path), staleness=1) == []
    gone = [e.record for e in read_journal(tmp_path / "journal.jsonl").entries if isinstance(e.record, WorkerGone)]
    assert any(record.worker == "slot-3" for record in gone)


def test_a_reward_service_that_dies_is_replaced_and_no_group_is_lost(tmp_path: Path) -> None:
    config = _config(tmp_path, steps=25)

    def killer(world: World) -> None:
        world.on_step = lambda step: world.kill("reward-0") if step in (5, 11) else None

    outcome, world = _run(lambda: World(config, tmp_path), killer)
    assert outcome.finished
    assert check_history(_records(tmp_path), staleness=1) == []
    assert sorted(group for step in _trained(tmp_path) for group in step) == list(range(100))
    gone = [e.record for e in read_journal(tmp_path / "journal.jsonl").entries if isinstance(e.record, WorkerGone)]
    assert [record.worker for record in gone] == ["reward-0", "reward-0"]
    assert not any("slot" in note for note in world.notes)


def _origin(folder: Path) -> Origin:
    """Read the newest checkpoint of a virtual run."""
    newest = sorted((folder / "checkpoints").glob("step_????????"))[-1]
    extra = CheckpointStore(newest.parent, keep=1).read(newest)
    cursor = msgspec.convert(extra["cursor"], Cursor)
    return Origin(newest, model_files(folder), extra["step"], extra["version"], cursor)


@pytest.mark.parametrize("victim_step", spread([5, 7, 11], 1))
def test_a_resumed_run_neither_skips_nor_repeats_a_group(tmp_path: Path, victim_step: int) -> None:
    config = _config(tmp_path, steps=16, staleness=2, every=3)

    def killer(world: World) -> None:
        world.on_step = lambda step: world.kill("slot-0") if step == victim_step else None

    with pytest.raises(RunFailed):
        _run(lambda: World(config, tmp_path), killer)
    origin = _origin(tmp_path)
    before = _trained(tmp_path)[: origin.step]
    again = tmp_path / "again"
    again.mkdir()
    outcome, world = _run(lambda: World(config, again, origin=origin))
    assert outcome.finished
    after = _trained(again)
    assert len(before) + len(after) == 16
    assert sorted(group for step in before + after for group in step) == list(range(64))
    assert max(metrics["staleness/max"] for _, metrics in world.steps) <= 2


@pytest.mark.parametrize("after_s", spread([0.1, 1.0, 4.0, 8.0], 2))
def test_an_interrupt_drains_to_a_checkpoint_of_the_last_step(tmp_path: Path, after_s: float) -> None:
    config = _config(tmp_path, steps=500)

    def interrupt(world: World) -> None:
        asyncio.get_running_loop().call_later(after_s, world.supervisor.interrupt, "SIGTERM")

    outcome, world = _run(lambda: World(config, tmp_path), interrupt)
    assert not outcome.finished and "SIGTERM" in outcome.reason
    if world.steps:
        assert _origin(tmp_path).step == len(world.steps)


def test_a_second_interrupt_leaves_at_once(tmp_path: Path) -> None:
    config = _config(tmp_path, steps=500)

    def interrupt(world: World) -> None:
        for after_s in (4.2, 4.25):
            asyncio.get_running_loop().call_later(after_s, world.supervisor.interrupt, "SIGINT")

    with pytest.raises(RunFailed, match="second SIGINT"):
        _run(lambda: World(config, tmp_path), interrupt)


def test_a_worker_that_never_comes_is_named_in_time(tmp_path: Path) -> None:
    config = _config(tmp_path)

    def lose(world: World) -> None:
        boot_s = world.processes._boot_s
        world.processes._boot_s = lambda worker: float("inf") if worker == "slot-4" else boot_s(worker)

    with pytest.raises(RunFailed, match=r"slot-4"):
        _run(lambda: World(config, tmp_path), lose)


def test_equal_seeds_give_equal_journals(tmp_path: Path) -> None:
    journals = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        config = _config(tmp_path, staleness=2)
        _run(lambda: World(config, folder, pace=Pace(token_s=0.013)))  # noqa: B023
        journals.append((folder / "journal.jsonl").read_bytes())
    assert journals[0] == journals[1]
