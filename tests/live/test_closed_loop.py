"""Does a job that adapts find better plans by itself, on real processes, and leave a journal that explains them?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ROOT

from nereus.algo.history import check_history
from nereus.core.plan import POLICY_TRAINING
from nereus.runtime import journal as record
from nereus.runtime.journal import plain, read_journal
from nereus.runtime.metrics import read_metrics

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

MOST_BLOCKED_S = 0.25
"""Of the supervisor's processor time at a stretch: 50 ms on a core that is five times as fast as the slowest known."""


def _nereus(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nereus", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540, check=False)


def test_the_adaptive_quick_start_changes_for_gain_and_because_it_must(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = ("launchers/adaptive_quickstart.toml", "--run-dir", str(run), "--no-track.report", "--no-track.tensorboard")
    done = _nereus("run", *job, "--run.steps", "14", "--emulate.slots", "9 4", "--checkpoint.every", "0")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    entries = read_journal(run / "journal.jsonl").entries
    decided = [entry.record.decision for entry in entries if isinstance(entry.record, record.Decided)]
    assert {"opportunistic", "urgent"} <= set(decided)
    changes = [entry.record for entry in entries if isinstance(entry.record, record.TransitionEnded)]
    assert len([change for change in changes if change.ok]) >= 2
    plans = [entry.record.plan for entry in entries if isinstance(entry.record, record.PlanCommitted)]
    assert plans[0].replication(POLICY_TRAINING) != plans[1].replication(POLICY_TRAINING)
    assert plans[-1].slots() & set(range(6)) <= {0, 1, 2, 3}, "two slots were taken away"
    assert any(isinstance(entry.record, record.Compared) and entry.record.what == "step" for entry in entries)
    assert check_history(plain(entries), staleness=1, groups_per_step=12) == []
    blocked = [row.get("supervisor/blocked_s", 0.0) for row in read_metrics(run / "metrics.jsonl")]
    assert max(blocked) < MOST_BLOCKED_S, blocked
    explained = _nereus("explain", str(run))
    assert explained.returncode == 0
    assert "A better plan was found and is taken" in explained.stdout
    assert "Another plan is needed and was found" in explained.stdout
    replayed = _nereus("replay", str(run))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
