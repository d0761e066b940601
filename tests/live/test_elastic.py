"""Slots join and leave a running job, on real processes."""

from __future__ import annotations

import signal
import subprocess
import sys

import msgspec
import pytest
from jobs import ROOT, Job, finish, leftovers

from nereus.actors.names import slot_worker
from nereus.algo.history import check_history
from nereus.bus.keys import make_pair
from nereus.core.plan import POLICY_GENERATION
from nereus.runtime import journal as record

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def _nereus(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nereus", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def _with_a_key_of_its_own(job: Job, name: str) -> None:
    """Put a valid key that the run does not know in the place of the one that it does."""
    path = job.folder / "keys" / f"{name}.key"
    path.rename(path.with_suffix(".right"))
    path.write_bytes(msgspec.json.encode(make_pair(name)))
    path.chmod(0o600)


def _with_the_right_key(job: Job, name: str) -> None:
    path = job.folder / "keys" / f"{name}.key"
    path.with_suffix(".right").rename(path)


def test_a_slot_joins_takes_over_from_one_that_is_drained_and_leaves_with_the_run(job: Job) -> None:
    process = job.start("--run.steps", "5000", "--cluster.slots", "3", "--checkpoint.every", "0")
    job.wait_for(process, lambda entry: isinstance(entry.record, record.Trained) and entry.record.step == 2)
    refused = _nereus("drain", str(job.folder), "2")
    assert refused.returncode == 2
    assert "need 3 slots and 2 would be left" in refused.stderr
    _with_a_key_of_its_own(job, "operator")
    wrong = _nereus("drain", str(job.folder), "2")
    assert wrong.returncode == 2
    (complaint,) = wrong.stderr.splitlines()
    assert "key" in complaint and "operator" in complaint
    _with_the_right_key(job, "operator")
    guest = subprocess.Popen(
        [sys.executable, "-m", "nereus", "worker", "--join", str(job.folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    new = slot_worker(3)
    job.wait_for(process, lambda entry: isinstance(entry.record, record.WorkerJoined) and entry.record.worker == new)
    drained = _nereus("drain", str(job.folder), "2")
    assert drained.returncode == 0, drained.stderr
    job.wait_for(process, lambda entry: isinstance(entry.record, record.WorkerGone) and entry.record.expected)
    job.wait_for(process, lambda entry: isinstance(entry.record, record.WeightsLive) and entry.record.worker == new)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 0, output[-3000:]
    said, _ = guest.communicate(timeout=60)
    assert guest.returncode == 0, said[-2000:]
    plans = [entry.record.plan for entry in job.entries() if isinstance(entry.record, record.PlanCommitted)]
    assert {slot for unit in plans[-1].of(POLICY_GENERATION) for slot in unit.slots} == {1, 3}
    assert check_history(job.history(), staleness=1, groups_per_step=4) == []
    assert not list(leftovers(job.folder))
    late = _nereus("drain", str(job.folder), "1")
    assert late.returncode == 2
    assert "not going on" in late.stderr
