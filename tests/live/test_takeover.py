"""The supervisor of a real run is killed or stopped: the next one takes its workers over."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from jobs import Job, finish, kill, leftovers

from nereus.algo.history import check_history
from nereus.runtime import journal as record

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]

WORDS = ("--run.steps", "30", "--train.layout", "d2t1p1", "--checkpoint.every", "4", "--bus.liveness-s", "6")


def _joined(job: Job) -> list[record.WorkerJoined]:
    return [entry.record for entry in job.entries() if isinstance(entry.record, record.WorkerJoined)]


def _pids(job: Job) -> dict[str, int]:
    return {found.worker: found.pid for found in _joined(job)}


def _begun(job: Job, process: subprocess.Popen[str], step: int) -> None:
    job.wait_for(process, lambda entry: isinstance(entry.record, record.StepBegun) and entry.record.step == step)


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _ended_well(job: Job, process: subprocess.Popen[str], *, attempts: int = 2) -> list[record.Readopted]:
    code, output = finish(process)
    assert code == 0, output[-3000:]
    assert job.status()["state"] == "finished"
    assert check_history(job.history(), staleness=1, groups_per_step=4) == []
    trained = [entry.record for entry in job.entries() if isinstance(entry.record, record.Trained)]
    assert [step.step for step in trained] == list(range(30))  # none is made again from a checkpoint
    assert sorted(ref.group for step in trained for ref in step.groups) == list(range(120))
    assert sum(isinstance(entry.record, record.RunStarted) for entry in job.entries()) == attempts
    assert not list(leftovers(job.folder))
    return [entry.record for entry in job.entries() if isinstance(entry.record, record.Readopted)]


def test_a_killed_supervisor_is_replaced_and_its_workers_go_on(job: Job) -> None:
    first = job.start(*WORDS)
    _begun(job, first, 6)
    before = _pids(job)
    _kill(first)
    second = job.start(*WORDS, "--resume")
    [readopted] = _ended_well(job, second)
    assert readopted.step in (6, 7)
    assert sorted(readopted.workers) == sorted(before)
    assert readopted.lost == ()
    assert _pids(job) == before
    explained = subprocess.run(
        [first.args[0], "-m", "nereus", "explain", str(job.folder)],  # type: ignore[index]
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "went on with the workers of the attempt before" in explained


def test_a_stopped_supervisor_that_wakes_up_is_fenced(job: Job) -> None:
    first = job.start(*WORDS)
    _begun(job, first, 6)
    before = _pids(job)
    first.send_signal(signal.SIGSTOP)
    second = job.start(*WORDS, "--resume")
    job.wait_for(second, lambda entry: isinstance(entry.record, record.Readopted))
    first.send_signal(signal.SIGCONT)
    code, output = finish(first, 120.0)
    assert code == 1
    assert "another supervisor" in output.splitlines()[-1]
    _ended_well(job, second)
    assert _pids(job) == before


def test_a_worker_lost_with_the_supervisor_is_replaced(job: Job) -> None:
    first = job.start(*WORDS)
    _begun(job, first, 6)
    before = _pids(job)
    _kill(first)
    kill(before["slot-1"])
    [readopted] = _ended_well(job, job.start(*WORDS, "--resume"))
    assert readopted.lost == ("slot-1",)
    after = _pids(job)
    assert {name for name in before if before[name] != after[name]} == {"slot-1"}


def test_workers_without_a_supervisor_leave(job: Job) -> None:
    first = job.start(*WORDS, "--bus.orphan-s", "3")
    _begun(job, first, 2)
    _kill(first)
    deadline = time.monotonic() + 60.0
    while left := list(leftovers(job.folder)):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    assert not (Path("/proc") / str(_pids(job)["slot-0"])).exists()


def test_other_settings_replace_the_workers_and_go_back_to_the_checkpoint(job: Job) -> None:
    first = job.start(*WORDS)
    _begun(job, first, 6)
    before = _pids(job)
    _kill(first)
    words = ("--run.steps", "10", *WORDS[2:])
    code, output = job.run(*words, "--resume")
    assert code == 0, output[-3000:]
    assert "not taken over: the settings have changed" in output
    assert not set(_pids(job).values()) & set(before.values())
    assert not list(leftovers(job.folder))
