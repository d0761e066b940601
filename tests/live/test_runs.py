"""Whole runs on real processes."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest
from jobs import DETERMINISTIC, Job, finish, kill, leftovers, state, trained

from nereus.algo.history import check_history
from nereus.core.plan import POLICY_TRAINING
from nereus.runtime import journal as record
from nereus.runtime.metrics import read_metrics

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]


def _pid(job: Job, worker: str) -> int:
    """Return the pid of the newest incarnation of ``worker``."""
    joined = [entry.record for entry in job.entries() if isinstance(entry.record, record.WorkerJoined)]
    return [found.pid for found in joined if found.worker == worker][-1]


@pytest.mark.slow
def test_two_hundred_steps_with_a_killed_rollout(job: Job) -> None:
    process = job.start("--run.steps", "200", "--checkpoint.every", "0", "--async.staleness", "2")
    job.wait_for(process, lambda entry: isinstance(entry.record, record.Trained) and entry.record.step == 40)
    kill(_pid(job, "slot-2"))
    code, output = finish(process)
    assert code == 0, output[-3000:]
    assert check_history(job.history(), staleness=2, groups_per_step=4) == []
    assert sorted(trained(job)) == list(range(800))
    gone = [entry.record for entry in job.entries() if isinstance(entry.record, record.WorkerGone)]
    assert [found.worker for found in gone] == ["slot-2"]
    rows = read_metrics(job.folder / "metrics.jsonl")
    assert max(row["staleness/max"] for row in rows) <= 2
    assert (
        np.mean([row["reward/mean"] for row in rows[-20:]]) > np.mean([row["reward/mean"] for row in rows[:20]]) + 0.2
    )
    assert not list(leftovers(job.folder))


def _kill_after(job: Job, victim: str, step: int, *words: str) -> str:
    """Run, kill ``victim`` once ``step`` is trained, and see the run to its good end; return what it printed."""
    process = job.start(*words)
    job.wait_for(process, lambda entry: isinstance(entry.record, record.Trained) and entry.record.step == step)
    kill(_pid(job, victim))
    code, output = finish(process)
    assert code == 0, output[-3000:]
    assert check_history(job.history(), staleness=1, groups_per_step=4) == []
    assert job.status()["state"] == "finished"
    assert not list(leftovers(job.folder))
    assert _longest_wait_s(job) < 30
    return output


def _longest_wait_s(job: Job) -> float:
    """Return the longest time from the loss of a worker to the next step that is done."""
    waiting, longest = math.inf, 0.0
    for entry in job.entries():
        if isinstance(entry.record, record.WorkerGone) and not entry.record.expected:
            waiting = min(waiting, entry.t)
        elif isinstance(entry.record, record.Trained) and waiting < math.inf:
            longest, waiting = max(longest, entry.t - waiting), math.inf
    assert longest > 0, "nobody was lost"
    return longest


def _attempts(job: Job) -> int:
    return sum(isinstance(entry.record, record.RunStarted) for entry in job.entries())


def _layouts(job: Job, folder: Path | None = None) -> list[str]:
    plans = [entry.record.plan for entry in job.entries(folder) if isinstance(entry.record, record.PlanCommitted)]
    return [str(plan.replication(POLICY_TRAINING)) for plan in plans]


@pytest.mark.parametrize("victim", ["slot-0", "slot-1"])
def test_a_killed_trainer_costs_no_more_than_a_step(job: Job, victim: str) -> None:
    _kill_after(job, victim, 6, "--run.steps", "16", "--train.layout", "d2t1p1")
    assert _attempts(job) == 1
    assert sorted(trained(job)) == list(range(64))
    assert _layouts(job) == ["d2t1p1", "d1t1p1", "d2t1p1"]


def test_a_killed_relay_comes_back(job: Job) -> None:
    _kill_after(job, "weights-0", 6, "--run.steps", "16")
    assert _attempts(job) == 1
    assert sorted(trained(job)) == list(range(64))


def test_a_killed_trainer_without_a_copy_takes_the_run_back_to_the_checkpoint(job: Job) -> None:
    output = _kill_after(job, "slot-1", 7, "--run.steps", "12", "--train.layout", "d1t2p1")
    assert "going on from step_00000006" in output
    assert _attempts(job) == 2


def test_sigterm_drains_and_the_resumed_run_neither_skips_nor_repeats(job: Job) -> None:
    process = job.start("--run.steps", "60")
    job.wait_for(process, lambda entry: isinstance(entry.record, record.Trained) and entry.record.step == 4)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 0, output[-3000:]
    assert job.status()["state"] == "stopped"
    done = len(trained(job)) // 4
    code, output = job.run("--run.steps", str(done + 4), "--resume", "--train.layout", "d1t2p1")
    assert code == 0, output[-3000:]
    assert sorted(trained(job)) == list(range(4 * (done + 4)))
    assert check_history(job.history(), staleness=1, groups_per_step=4) == []


def test_a_second_interrupt_leaves_at_once_and_leaves_nothing_behind(job: Job) -> None:
    process = job.start("--run.steps", "60")
    job.wait_for(process, lambda entry: isinstance(entry.record, record.Trained) and entry.record.step == 2)
    os.kill(_pid(job, "slot-0"), signal.SIGSTOP)  # the step in flight does not end
    process.send_signal(signal.SIGINT)
    job.wait_for(process, lambda entry: isinstance(entry.record, record.Drain))
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output[-3000:]
    assert not list(leftovers(job.folder))


def _logs(folder: Path, worker: str) -> list[str]:
    return (folder / "logs/latest" / f"{worker}.log").read_text().splitlines()


def test_a_run_resumed_changed_to_other_layouts_or_bereft_of_a_trainer_equals_the_straight_one(
    job: Job, tmp_path: Path
) -> None:
    """With a reference model, which a recipe has made: every new process has to find it again."""
    straight, broken, changed, killed = (tmp_path / name for name in ("straight", "broken", "changed", "killed"))
    settings = (*DETERMINISTIC, "--train.loss.kl_coefficient", "0.05")
    code, output = job.run(*settings, "--rollout.layout", "d1t1p1", folder=straight)
    assert code == 0, output[-3000:]
    process = job.start(*settings, "--train.layout", "d2t1p1", folder=broken)
    job.folder = broken
    job.wait_for(process, lambda entry: isinstance(entry.record, record.CheckpointCommitted))
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 0, output[-3000:]
    code, output = job.run(*settings, "--resume", "3", "--train.layout", "d1t2p1", folder=broken)
    assert code == 0, output[-3000:]
    walk = "1 d1t2p1 d1t1p1; 2 d1t1p2 d1t1p1; 3 d1t1p1 d2t1p1; 4 d2t1p1 d1t1p1; 5 d1t2p1 d1t1p1"
    start = ("--rollout.layout", "d1t1p1", "--train.layout", "d2t1p1")
    code, output = job.run(*settings, *start, "--adapt.at", walk, folder=changed)
    assert code == 0, output[-3000:]
    ended = [entry.record for entry in job.entries(changed) if isinstance(entry.record, record.TransitionEnded)]
    assert [change.reason for change in ended] == [""] * 5
    assert not list(leftovers(changed))
    told = [line for line in _logs(changed, "slot-0") if "what=take" in line]
    wanted = ("run=changed", "worker=slot-0", "emu=policy.training/", "epoch=", "step=", "version=")
    assert told and all(part in line for line in told for part in wanted)
    job.folder = killed
    process = job.start(*settings, *start, folder=killed)
    job.wait_for(process, lambda entry: isinstance(entry.record, record.Trained) and entry.record.step == 2)
    kill(_pid(job, "slot-0"))
    code, output = finish(process)
    assert code == 0, output[-3000:]
    assert _layouts(job)[:2] == ["d2t1p1", "d1t1p1"]
    one, *others = (state(folder / "checkpoints" / "step_00000006") for folder in (straight, broken, changed, killed))
    assert {kind for kind, _ in one} == {"parameter", "exp_avg", "exp_avg_sq"}
    for other in others:
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert np.abs(value - other[key]).max() <= 1e-9 * max(1.0, np.abs(value).max()), key
    for folder in (straight, changed, killed):
        assert trained(job, folder) == list(range(24))


def test_the_exported_model_is_what_wastrained(job: Job, tmp_path: Path) -> None:
    import subprocess
    import sys

    import torch
    from safetensors.torch import load_file

    code, output = job.run("--run.steps", "3", "--train.layout", "d1t1p2")
    assert code == 0, output[-3000:]
    out = tmp_path / "exported"
    command = [sys.executable, "-m", "nereus", "export", str(job.folder), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    saved = state(job.folder / "checkpoints" / "step_00000003")
    exported = load_file(out / "model.safetensors")
    for name, tensor in exported.items():
        assert torch.equal(tensor.double(), torch.from_numpy(saved["parameter", name]))
    assert (out / "tokenizer.json").exists()
    manifest = msgspec.json.decode((out / "config.json").read_bytes())
    assert manifest["architectures"] == ["LlamaForCausalLM"]
