from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from nereus.algo.sampler import Cursor
from nereus.bus.memory import MemoryBus
from nereus.bus.messages import GroupRef, Hello, Welcome
from nereus.core.plan import POLICY_TRAINING, Emu, Layout, Plan
from nereus.errors import ProtocolError
from nereus.runtime.journal import (
    Accepted,
    CheckpointCommitted,
    Entry,
    Granted,
    PlanCommitted,
    Readopted,
    Record,
    RunEnded,
    RunStarted,
    StepBegun,
    Trained,
    TransitionBegun,
    VersionReady,
    WorkerGone,
    WorkerJoined,
)
from nereus.runtime.readopt import Estate, Takeover, estate_of, gather, refusal
from nereus.runtime.regroup import Regrouped
from nereus.sim.loop import run_virtual

UNIT = Emu(POLICY_TRAINING, 0, Layout(), (0,))
STARTED = RunStarted(run="r", attempt=1, config="c", data="d", seed=1, wall=0.0)
RECORDS: tuple[Record, ...] = (
    STARTED,
    PlanCommitted(plan=Plan(0, (UNIT,)), why="start"),
    WorkerJoined(worker="slot-0", incarnation="a", host="h", pid=10),
    WorkerJoined(worker="slot-1", incarnation="b", host="h", pid=11),
    VersionReady(version=0, checksum="x"),
    Granted(groups=(GroupRef(0, 0), GroupRef(1, 0), GroupRef(2, 0), GroupRef(3, 0)), owner="slot-1", version=0),
    Accepted(group=1, attempt=0, row=1, rollout="slot-1", version_first=0, version_last=0, rewards=(1.0, 0.0)),
    StepBegun(step=0, version=0, groups=(GroupRef(1, 0),)),
    Trained(step=0, version=0, groups=(GroupRef(1, 0),), samples=2),
    CheckpointCommitted(step=1, version=1, cursor=0, folder="step_1"),
    TransitionBegun(plan=Plan(7, (UNIT,)), primitives=(), why="asked for"),
    WorkerGone(worker="slot-1", incarnation="b", why="killed"),
    Accepted(group=0, attempt=0, row=0, rollout="slot-1", version_first=0, version_last=0, rewards=(1.0, 0.0, 0.5)),
    StepBegun(step=1, version=1, groups=(GroupRef(0, 0),)),
)


def _estate(records: Sequence[Record]) -> Estate | None:
    return estate_of(Entry(seq, float(seq), one) for seq, one in enumerate(records))


def _left() -> Estate:
    estate = _estate(RECORDS)
    assert estate is not None
    return estate


def test_the_journal_says_what_is_left() -> None:
    estate = _left()
    assert (estate.step, estate.version, estate.saved_step) == (1, 1, 1)
    assert (estate.plan.epoch, estate.tried) == (0, 7)
    assert estate.cursor == Cursor(0, (1,))
    assert estate.unfinished == (0, 2, 3)
    assert list(estate.living) == ["slot-0"]


def test_who_has_ended_or_not_begun_leaves_nothing() -> None:
    assert _estate((*RECORDS, RunEnded(reason="done", ok=True))) is None
    assert _estate(RECORDS[:4]) is None
    assert _estate((*RECORDS, replace(STARTED, attempt=2, step=1, version=1))) is None


@pytest.mark.parametrize("applied", [False, True])
def test_a_step_that_the_trainers_have_applied_is_in_the_journal_once(applied: bool) -> None:
    hello = Hello("slot-0", "c", "h", 10, orphan=True)
    takeover = Takeover(_left(), {"slot-0": hello}, Regrouped((UNIT,), 1 + applied), (), {}, None)
    assert (takeover.step, takeover.version) == (1 + applied, 1 + applied)
    started = replace(STARTED, attempt=2, step=takeover.step, version=takeover.version)
    records = (*RECORDS, *takeover.records(started))
    assert [one.samples for one in records if isinstance(one, Trained)] == [2, 3][: 1 + applied]
    [readopted] = [one for one in records if isinstance(one, Readopted)]
    assert (readopted.workers, readopted.lost, readopted.completed) == (("slot-0",), (), applied)
    again = _estate(records)
    assert again is not None
    assert (again.step, again.begun, again.cursor) == (takeover.step, None, takeover.cursor)
    assert (again.plan, again.tried, list(again.living)) == (takeover.estate.plan, 7, ["slot-0"])


def test_only_a_living_worker_of_the_past_is_taken_over() -> None:
    estate, hello = _left(), Hello("slot-0", "c", "h", 10, orphan=True)
    assert refusal(estate, hello) == ""
    assert "come again" in refusal(estate, replace(hello, orphan=False))
    assert "not among the living" in refusal(estate, replace(hello, pid=12))
    assert "not among the living" in refusal(estate, replace(hello, worker="slot-1", pid=11))
    assert "lives in plan epoch 1" in refusal(estate, replace(hello, epoch=1))


@pytest.mark.parametrize("comes", [True, False])
def test_workers_are_waited_for_in_bounded_time_and_strangers_are_sent_away(comes: bool) -> None:
    async def main() -> tuple[dict[str, Hello], float]:
        bus = MemoryBus()
        endpoint = bus.server("supervisor")
        clock = asyncio.get_running_loop().time
        gathering = asyncio.create_task(gather(endpoint, _left(), "r", lambda: ("slot-0", "slot-1"), timeout_s=9.0))
        stranger = bus.client("slot-1", server="supervisor")
        hello = Hello("slot-1", stranger.incarnation, "h", 11, orphan=True)
        with pytest.raises(ProtocolError, match="not among the living"):
            await stranger.request("supervisor", hello, timeout_s=5.0)
        if comes:
            line = bus.client("slot-0", server="supervisor")
            hello = Hello("slot-0", line.incarnation, "h", 10, orphan=True)
            assert await line.request("supervisor", hello, timeout_s=5.0) == Welcome("r", 0)
        found = await gathering
        return found, clock()

    found, after_s = run_virtual(main())
    assert sorted(found) == (["slot-0"] if comes else [])
    assert (after_s < 1.0) == comes
