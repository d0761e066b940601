"""Does a job that adapts find better plans by itself, on real processes, and leave a journal that explains them?"""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from jobs import ROOT, Job, finish

from nereus.algo.history import check_history
from nereus.core.plan import POLICY_TRAINING
from nereus.runtime import journal as record
from nereus.runtime.journal import Entry
from nereus.runtime.metrics import read_metrics

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

MOST_BLOCKED_S = 0.05
"""Of the supervisor's processor time at a stretch, on a core that sums up ten million numbers in ``SUMMED_S``."""

SUMMED_S = 0.3


def _slowness() -> float:
    """Return how much slower than such a core this one is, with what runs beside it; 1 if it is not."""
    began = time.thread_time()
    sum(range(10**7))
    return max(1.0, (time.thread_time() - began) / SUMMED_S)


def _nereus(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nereus", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540, check=False)


def test_the_adaptive_quick_start_changes_for_gain_and_because_it_must(job: Job) -> None:
    """Two slots are taken away after step 9; the run is told to leave when what followed has been measured."""
    job.file = ROOT / "launchers" / "adaptive_quickstart.toml"
    words = ("--emulate.slots", "9 4", "--checkpoint.every", "0", "--no-track.report", "--no-track.tensorboard")
    slowness, process = _slowness(), job.start(*words)

    def measured(entry: Entry) -> bool:
        compared = entry.record
        return isinstance(compared, record.Compared) and compared.what == "step" and compared.epoch >= 2

    job.wait_for(process, measured)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 0, output[-3000:]
    entries = job.entries()
    verdicts = {
        entry.record.decision: entry.record.because for entry in entries if isinstance(entry.record, record.Decided)
    }
    assert {"opportunistic", "urgent"} <= verdicts.keys()
    assert "2 to be taken away" in verdicts["urgent"]
    changes = [entry.record for entry in entries if isinstance(entry.record, record.TransitionEnded)]
    assert len([change for change in changes if change.ok]) >= 2
    plans = [entry.record.plan for entry in entries if isinstance(entry.record, record.PlanCommitted)]
    assert plans[0].replication(POLICY_TRAINING) != plans[1].replication(POLICY_TRAINING)
    assert plans[-1].slots() & set(range(6)) <= {0, 1, 2, 3}
    assert check_history(job.history(), staleness=1, groups_per_step=12) == []
    blocked = [row.get("supervisor/blocked_s", 0.0) for row in read_metrics(job.folder / "metrics.jsonl")]
    assert max(blocked) < MOST_BLOCKED_S * max(slowness, _slowness()), blocked
    explained = _nereus("explain", str(job.folder))
    assert explained.returncode == 0
    assert "A better plan was found and is taken" in explained.stdout
    assert "Another plan is needed and was found" in explained.stdout
    replayed = _nereus("replay", str(job.folder))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
