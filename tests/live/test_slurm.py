"""Does the launcher for Slurm carry a run through being signalled and queued again?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ROOT, Job, finish

from nereus.algo.history import check_history
from nereus.runtime.journal import Trained

SCRIPT = ROOT / "launchers" / "slurm_async.sh"


class Slurm:
    """What Slurm is to its batch script: variables, a signal, and a command that puts a job back into the queue."""

    def __init__(self, folder: Path, run: Path) -> None:
        self.queued = folder / "queued"
        commands = folder / "bin"
        commands.mkdir()
        requeue = commands / "scontrol"
        requeue.write_text(f'#!/bin/sh\necho "$@" >> {self.queued}\n')
        requeue.chmod(0o755)
        path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": "7", "NEREUS_ROOT": str(ROOT)}
        self.environment |= {"NEREUS_RUN": str(run), "NEREUS_SLOTS": "4"}

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = ["bash", str(SCRIPT), *words]
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


@pytest.mark.live
def test_a_signalled_job_saves_is_queued_again_and_goes_on(job: Job, tmp_path: Path) -> None:
    slurm = Slurm(tmp_path, job.folder)
    process = slurm.start(str(job.file), "--run.steps", "400")
    job.wait_for(process, lambda entry: isinstance(entry.record, Trained) and entry.record.step >= 1)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 0, output
    assert job.status()["state"] == "stopped"
    assert slurm.queued.read_text() == "requeue 7\n"
    done = job.status()["step"]
    code, output = finish(slurm.start(str(job.file), "--run.steps", str(done + 2)))
    assert code == 0, output
    assert (job.status()["state"], job.status()["step"]) == ("finished", done + 2)
    assert slurm.queued.read_text() == "requeue 7\n", "a finished run is not queued again"
    assert not check_history(job.history(), staleness=2)


def test_a_wrong_call_says_what_is_missing(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "NEREUS"))}
    for words, complaint in (([], "name a job file"), (["job.toml"], "name the run folder")):
        command = ["bash", str(SCRIPT), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2 and complaint in done.stderr
