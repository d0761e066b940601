"""A job that decides about its own plan, on virtual time: the real controller, planner, supervisor and actors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from inprocess import World
from test_supervisor import _config, _records, _run, _trained

from nereus.algo.history import check_history
from nereus.backends.fake import FakeTrainer
from nereus.config import AdaptConfig, ClusterConfig, EmulateConfig, JobConfig
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, Plan
from nereus.core.shape import ModelShape
from nereus.errors import OutOfMemory
from nereus.runtime.journal import Compared, Decided, Happened, PlanCommitted, TransitionEnded, read_journal

STEPS = 40
SHAPE = ModelShape(2, 64, 4, 4, 16, 128, 512, 256)


def _job(tmp_path: Path, *, train: str, rollout: str, slots: int = 6, supply: str = "", **adapt: object) -> JobConfig:
    config = _config(tmp_path, steps=STEPS, every=10)
    return msgspec.structs.replace(
        config,
        cluster=ClusterConfig(slots=slots),
        train=msgspec.structs.replace(config.train, layout=train),
        rollout=msgspec.structs.replace(config.rollout, layout=rollout, max_prompt_tokens=8, max_new_tokens=32),
        adapt=AdaptConfig(mode="on", timeout_s=20.0, **adapt),  # type: ignore[arg-type]
        emulate=EmulateConfig(gflops=0.01, memory_gb_s=0.05, link_gb_s=0.01, link_latency_us=100, slots=supply),
    )


def _of(folder: Path, kind: type) -> list:  # type: ignore[type-arg]
    return [e.record for e in read_journal(folder / "journal.jsonl").entries if isinstance(e.record, kind)]


def _plans(folder: Path) -> list[Plan]:
    return [committed.plan for committed in _of(folder, PlanCommitted)]


def _by_slots(per_token_s: float) -> Callable[[FakeTrainer], float]:
    """Training is as fast as it has slots; two tensor ranks do the work of 1.3."""

    def step_s(trainer: FakeTrainer) -> float:
        layout = trainer.layout
        speed = len(trainer.members) / layout.slots * (1.3 if layout.tp == 2 else layout.slots**0.4)
        return trainer.tokens * per_token_s / speed

    return step_s


def test_a_pool_that_shrinks_is_left_in_time_and_used_again_when_it_grows(tmp_path: Path) -> None:
    config = _job(tmp_path, train="d2t1p1", rollout="d4t1p1", supply="10 3; 24 6")

    def make() -> World:
        return World(config, tmp_path, adapt=SHAPE, step_s=_by_slots(0.004))

    outcome, world = _run(make)
    assert outcome.finished
    assert check_history(_records(tmp_path), staleness=1) == []
    assert sorted(group for step in _trained(tmp_path) for group in step) == list(range(4 * STEPS))
    assert all(ended.ok for ended in _of(tmp_path, TransitionEnded))
    small = [plan for plan in _plans(tmp_path) if len(plan.of(POLICY_TRAINING) + plan.of(POLICY_GENERATION)) <= 3]
    assert small, "the plan never fitted the small pool"
    assert {slot for unit in small[0].emus for slot in unit.slots if slot < 4000} <= {0, 1, 2}
    decisions = _of(tmp_path, Decided)
    assert any(one.decision == "urgent" and "taken away" in one.because for one in decisions)
    assert {one.decision for one in decisions} <= {"trigger", "urgent", "opportunistic", "stay", "stale", "widen"}
    records = [entry.record for entry in read_journal(tmp_path / "journal.jsonl").entries]
    measured = [at for at, one in enumerate(records) if isinstance(one, Compared) and one.what == "step"]
    assert measured
    for at in measured:  # a plan that was chosen is looked at again once it has been measured
        events = [one.event["type"] for one in records[at : at + 8] if isinstance(one, Happened)]
        assert "Calibrated" in events[:3]
    largest = max(len({slot for unit in plan.emus for slot in unit.slots}) for plan in _plans(tmp_path)[2:])
    assert largest > 4, "the plan never grew again"
    assert world.plans


@pytest.mark.deep
def test_a_step_that_does_not_fit_changes_the_plan_and_is_made_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _job(tmp_path, train="d2t1p1", rollout="d2t1p1", slots=4)
    config = msgspec.structs.replace(config, emulate=msgspec.structs.replace(config.emulate, memory_mb=5))
    train = FakeTrainer.train
    refused: list[int] = []

    def limited(self: FakeTrainer, batch):  # type: ignore[no-untyped-def]
        if batch.step >= 12 and self.layout.slots == 1:
            refused.append(batch.step)
            raise OutOfMemory(f"slot {self.slot}", {"activations": 5_200_000}, 5_000_000)
        return train(self, batch)

    monkeypatch.setattr(FakeTrainer, "train", limited)
    outcome, _ = _run(lambda: World(config, tmp_path, adapt=SHAPE, step_s=_by_slots(0.002)))
    assert outcome.finished
    assert check_history(_records(tmp_path), staleness=1) == []
    assert sorted(group for step in _trained(tmp_path) for group in step) == list(range(4 * STEPS))
    assert set(refused) == {12}
    assert _plans(tmp_path)[-1].of(POLICY_TRAINING)[0].layout.slots > 1
