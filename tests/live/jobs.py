"""How do the live tests start a job and look at what came of it?"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nereus.backends.manifest import read_manifest
from nereus.runtime.folder import RunPaths
from nereus.runtime.journal import Entry, Trained, plain, read_journal

ROOT = Path(__file__).parents[2]

JOB = """
[run]
name = "live"
steps = 6
[cluster]
slots = 4
[model]
recipe = "{root}/tests/recipes/tiny.toml"
cache = "{cache}"
[data]
source = "{data}"
[reward]
function = "{root}/tests/live/reward.py:digits"
[rollout]
layout = "d2t1p1"
group_size = 4
max_prompt_tokens = 64
max_new_tokens = 12
max_live = 16
[train]
layout = "d1t1p1"
groups_per_step = 4
learning_rate = 3e-3
[checkpoint]
every = 3
[bus]
liveness_s = 30.0
start_timeout_s = 300.0
[track]
tensorboard = false
report = false
"""

DETERMINISTIC = (
    *("--run.deterministic", "true", "--async.staleness", "0", "--rollout.interrupt", "wait"),
    *("--model.dtype", "float64", "--train.schedule", "cosine", "--train.warmup_steps", "2"),
)
"""Settings under which equal jobs train the same numbers, whatever their layouts."""


class Job:
    """One run folder and the command that works on it."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder / "run"
        self.file = folder / "job.toml"
        data = folder / "rows.jsonl"
        data.write_text("".join(f'{{"prompt": "{i} + {i % 7} =", "answer": "{i + i % 7}"}}\n' for i in range(37)))
        self.file.write_text(JOB.format(root=ROOT, cache=cache, data=data))

    def start(self, *words: str, folder: Path | None = None) -> subprocess.Popen[str]:
        """Start ``nereus run`` on this job in the background."""
        command = [
            sys.executable,
            "-m",
            "nereus",
            "run",
            str(self.file),
            "--run-dir",
            str(folder or self.folder),
            *words,
        ]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, *words: str, folder: Path | None = None, timeout_s: float = 900.0) -> tuple[int, str]:
        """Run the job to its end; return exit code and output."""
        return finish(self.start(*words, folder=folder), timeout_s)

    def entries(self, folder: Path | None = None) -> tuple[Entry, ...]:
        path = (folder or self.folder) / "journal.jsonl"
        return read_journal(path).entries if path.exists() else ()

    def history(self) -> list[dict[str, Any]]:
        return list(plain(self.entries()))

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads((self.folder / "STATUS").read_text())
        return status

    def wait_for(
        self, process: subprocess.Popen[str], what: Callable[[Entry], bool], *, timeout_s: float = 300.0
    ) -> Entry:
        """Wait until the journal holds a fitting entry; fail if the run ends first."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = next((entry for entry in self.entries() if what(entry)), None)
            if found is not None:
                return found
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            output = process.stdout.read() if process.stdout else ""
            raise AssertionError(f"the run ended with code {process.returncode} before that: {output[-3000:]}")
        process.kill()
        raise AssertionError(f"not in the journal after {timeout_s:g} s")


def finish(process: subprocess.Popen[str], timeout_s: float = 900.0) -> tuple[int, str]:
    """Wait for the end of a run; return exit code and output."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout_s:g} s: {output[-3000:]}") from None
    return process.returncode, output


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def leftovers(run: Path) -> Iterator[str]:
    """Yield what the run in a folder has left behind: shared memory and processes, which hold its logs open."""
    yield from (str(path) for path in Path("/dev/shm").glob(f"nereus-{RunPaths(run, 0).host_name}-*"))
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if any(handle.readlink().is_relative_to(run) for handle in (process / "fd").iterdir()):
                    yield (process / "cmdline").read_text().replace("\0", " ")


def trained(job: Job, folder: Path | None = None) -> list[int]:
    """Return the numbers of all groups that were trained, in order."""
    return [
        ref.group for entry in job.entries(folder) if isinstance(entry.record, Trained) for ref in entry.record.groups
    ]


def state(folder: Path) -> dict[tuple[str, str], np.ndarray]:
    """Return every element of a checkpoint's tensors, put together whole, by kind and name."""
    import torch
    from safetensors.torch import load_file

    whole: dict[tuple[str, str], torch.Tensor] = {}
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    manifest = read_manifest(folder)
    for slot in manifest.slots:
        for piece in slot.pieces:
            key = (piece.kind, piece.name)
            shapes[key] = tuple(map(max, zip(shapes.get(key, piece.stop), piece.stop, strict=True)))
    for slot in manifest.slots:
        arrays = load_file(folder / slot.file)
        for piece in slot.pieces:
            key = (piece.kind, piece.name)
            target = whole.setdefault(key, torch.full(shapes[key], torch.nan, dtype=torch.float64))
            target[tuple(map(slice, piece.start, piece.stop))] = arrays[piece.key].double()
    return {key: tensor.numpy() for key, tensor in whole.items()}
