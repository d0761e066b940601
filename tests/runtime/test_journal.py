"""Does the journal survive crashes and full disks, and does it tell the run's whole story?"""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.bus.messages import GroupRef
from nereus.core.plan import POLICY_GENERATION, Emu, Layout, Plan
from nereus.runtime.journal import (
    Accepted,
    CheckpointBegun,
    CheckpointCommitted,
    Compared,
    Decided,
    Drain,
    Dropped,
    Entry,
    Granted,
    Happened,
    Journal,
    JournalError,
    PlanCommitted,
    Readopted,
    Record,
    Reissued,
    RunEnded,
    RunStarted,
    StepBegun,
    Trained,
    TransitionBegun,
    TransitionEnded,
    VersionReady,
    WeightsLive,
    WorkerGone,
    WorkerJoined,
    plain,
    read_journal,
    replay,
)

START = RunStarted(run="demo-001", attempt=1, config="c0", data="d0", seed=7, wall=1.0)

ALL: tuple[Record, ...] = (
    START,
    Readopted(attempt=2, epoch=3, step=4, workers=("slot-0",), lost=("slot-1",), completed=True),
    WorkerJoined(worker="slot-0", incarnation="a", host="h", pid=1),
    PlanCommitted(plan=Plan(0, (Emu(POLICY_GENERATION, 0, Layout(), (0,)),)), why="start"),
    TransitionBegun(plan=Plan(1, ()), primitives=("policy.training.split.1",), why="asked for"),
    TransitionEnded(epoch=1, ok=False, reason="slot-1 refused", seconds=0.5, moved_bytes=12),
    Decided(decision="stay", because="saves nothing", numbers={"gain_s": -0.5, "payback_steps": None}),
    Happened(event={"type": "Calibrated", "step": 4, "remaining": 96}),
    Compared(epoch=1, what="transition", predicted_s=0.25, measured_s=0.5),
    Granted(groups=(GroupRef(0, 0), GroupRef(1, 0)), owner="slot-0", version=0),
    Accepted(group=0, attempt=0, row=5, rollout="slot-0", version_first=0, version_last=0, rewards=(1.0, None, 0.25)),
    Reissued(group=1, attempt=1, reason="slot-0 lost"),
    Dropped(group=2, attempt=3, reason="reward raised"),
    StepBegun(step=0, version=0, groups=(GroupRef(0, 0),)),
    Trained(step=0, version=0, groups=(GroupRef(0, 0),), samples=3),
    VersionReady(version=1, checksum="00ff"),
    WeightsLive(worker="slot-0", version=1, checksum="00ff"),
    WorkerGone(worker="slot-0", incarnation="a", why="exit code -9"),
    CheckpointBegun(step=1, folder="step_1.tmp"),
    CheckpointCommitted(step=1, version=1, cursor=1, folder="step_1"),
    Drain(reason="SIGTERM"),
    RunEnded(reason="drained", ok=True),
)


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_every_kind_of_record_comes_back_equal(tmp_path: Path) -> None:
    assert {type(record) for record in ALL} == set(Record.__args__)
    journal = Journal(tmp_path / "journal.jsonl")
    for record in ALL:
        journal.append(record)
    journal.close()
    contents = read_journal(journal.path)
    assert tuple(entry.record for entry in contents.entries) == ALL
    assert [entry.seq for entry in contents.entries] == list(range(len(ALL)))
    assert contents.torn_bytes == 0


def test_numbers_that_are_not_finite_are_read_as_not_known(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.append(Decided(decision="urgent", because="slot 3 was lost", numbers={"latency_now_s": math.inf}))
    journal.close()
    (entry,) = read_journal(journal.path).entries
    assert isinstance(entry.record, Decided) and entry.record.numbers == {"latency_now_s": None}
    with pytest.raises(ValueError, match="finite"):
        Compared(epoch=1, what="step", predicted_s=math.inf, measured_s=1.0)


def test_a_batch_has_one_time_and_consecutive_numbers(tmp_path: Path) -> None:
    clock = Clock()
    journal = Journal(tmp_path / "j", clock=clock)
    clock.now += 2.5
    journal.append(START, Drain(reason="x"))
    assert [(entry.seq, entry.t) for entry in read_journal(journal.path).entries] == [(0, 2.5), (1, 2.5)]


def test_time_and_numbers_go_on_over_attempts_even_if_the_clock_starts_again(tmp_path: Path) -> None:
    clock = Clock()
    journal = Journal(tmp_path / "j", clock=clock)
    clock.now += 50
    journal.append(START)
    journal.close()
    clock.now = 3.0  # another boot
    again = Journal(tmp_path / "j", clock=clock)
    clock.now += 1
    again.append(Drain(reason="x"))
    assert [(entry.seq, entry.t) for entry in read_journal(again.path).entries] == [(0, 50.0), (1, 51.0)]


def test_a_record_is_readable_before_append_returns(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    for count, record in enumerate(ALL, start=1):
        journal.append(record)
        assert len(read_journal(journal.path).entries) == count


@settings(max_examples=15)  # each example waits for the disk
@given(cut=st.integers(min_value=1))
def test_a_torn_last_line_is_reported_and_then_replaced(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "j"
    journal = Journal(path)
    journal.append(*ALL)
    journal.close()
    data = path.read_bytes()
    last = len(data) - data[:-1].rfind(b"\n") - 1
    cut = cut % (last - 1) + 1
    path.write_bytes(data[:-cut])
    contents = read_journal(path)
    assert len(contents.entries) == len(ALL) - 1
    assert contents.torn_bytes == last - cut
    again = Journal(path)
    assert again.torn_bytes == last - cut
    again.append(RunEnded(reason="again", ok=False))
    again.close()
    assert read_journal(path).entries[-1].record == RunEnded(reason="again", ok=False)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{}", "missing required field"),
        (b'{"seq": 1, "t": 0.0, "record": {"kind": "nonsense"}}', "Invalid value 'nonsense'"),
        (b'{"seq": 1, "t": 0.0, "record": {"kind": "drain", "reason": "x", "extra": 1}}', "unknown field"),
        (b'{"seq": 5, "t": 0.0, "record": {"kind": "drain", "reason": "x"}}', "record 5 stands where 1 belongs"),
        (b'{"seq": 1, "t": -1.0, "record": {"kind": "drain", "reason": "x"}}', "time runs backwards"),
        (b"[" * 200_000, "expected `object`"),
        (b"\xff\xfe", "line 2"),
        (b"", "line 2"),
    ],
)
def test_damage_before_the_end_is_an_error_that_names_the_line(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "j"
    Journal(path).append(START)
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(JournalError, match="line 2") as caught:
        read_journal(path)
    assert why.lower() in str(caught.value).lower()


def test_a_full_disk_leaves_no_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "j")
    journal.append(START)
    write = os.pwrite

    def half_then_full(file: int, data: Any, offset: int) -> int:
        if len(data) > 40:
            return write(file, data[:40], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", half_then_full)
        with pytest.raises(OSError, match="No space left"):
            journal.append(Drain(reason="this record does not fit any more on the disk"))
    contents = read_journal(journal.path)
    assert (len(contents.entries), contents.torn_bytes) == (1, 0)
    journal.append(Drain(reason="now there is space"))
    assert [entry.seq for entry in read_journal(journal.path).entries] == [0, 1]


def test_checkpoints_are_on_disk_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "j")
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(file))
    for record in ALL:
        before = len(synced)
        journal.append(record)
        durable = isinstance(
            record, RunStarted | Readopted | PlanCommitted | CheckpointBegun | CheckpointCommitted | RunEnded
        )
        assert len(synced) - before == durable, record


def test_checkers_get_flat_dictionaries() -> None:
    rows = list(plain([Entry(3, 0.5, next(record for record in ALL if isinstance(record, Accepted)))]))
    assert rows == [
        {
            "seq": 3,
            "t": 0.5,
            "kind": "accepted",
            "group": 0,
            "attempt": 0,
            "row": 5,
            "rollout": "slot-0",
            "version_first": 0,
            "version_last": 0,
            "rewards": (1.0, None, 0.25),
        }
    ]


def test_a_line_looks_as_documented(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", clock=lambda: 0.0)
    journal.append(Drain(reason="SIGTERM"))
    assert json.loads(journal.path.read_text()) == {
        "seq": 0,
        "t": 0.0,
        "record": {"kind": "drain", "reason": "SIGTERM"},
    }


def entries(*records: Record) -> list[Entry]:
    return [Entry(seq, float(seq), record) for seq, record in enumerate(records)]


def trained(step: int, *groups: int) -> Trained:
    return Trained(step=step, version=step, groups=tuple(GroupRef(group, 0) for group in groups), samples=8)


def test_replay_counts_what_happened() -> None:
    progress = replay(entries(*ALL))
    assert (progress.step, progress.version, progress.attempt) == (1, 1, 1)
    assert progress.trained == {0: 0}
    assert progress.dropped == {2: "reward raised"}
    assert progress.outstanding == {} and progress.attempts[1] == 1
    assert progress.live == {} and progress.lost == 1 and progress.reissued == 1
    assert progress.committed == {1: "step_1"}
    assert progress.cursor == 1
    assert progress.ended == "drained"


def test_replay_takes_back_what_was_trained_after_the_checkpoint() -> None:
    resumed = msgspec.structs.replace(START, attempt=2, step=1, version=1, cursor=1)
    progress = replay(entries(START, trained(0, 0), trained(1, 1), trained(2, 3), resumed))
    assert (progress.step, progress.version, progress.attempt) == (1, 1, 2)
    assert progress.trained == {0: 0}
    assert progress.cursor == 1
    progress = replay(entries(START, trained(0, 0), trained(1, 1), resumed, trained(1, 2)))
    assert progress.trained == {0: 0, 2: 1}
    assert progress.cursor == 1


def test_the_cursor_skips_only_what_is_trained_or_dropped() -> None:
    dropped = Dropped(group=1, attempt=0, reason="x")
    assert replay(entries(START, trained(0, 0, 2), dropped)).cursor == 3
    assert replay(entries(START, trained(0, 0, 2))).cursor == 1


def test_a_worker_that_was_asked_to_leave_is_not_lost() -> None:
    gone = WorkerGone(worker="slot-0", incarnation="a", why="shutdown", expected=True)
    assert replay(entries(START, gone)).lost == 0
