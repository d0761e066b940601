"""How does the benchmark of live plan changes run a real job, and what does it read from it?

One job whose plan walks through layouts between steps (``adapt.at``). The seconds and bytes of a change are those of
its journal entry; how the seconds divide is what the slots log. A resumed run tells what a restart takes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nereus.core.plan import POLICY_TRAINING, Plan, Replication
from nereus.runtime import journal as record
from nereus.runtime.journal import Entry, read_journal

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 1500

JOB = """
[run]
name = "transition-live"
log_format = "json"
[cluster]
slots = {slots}
threads_per_slot = 1
group_timeout_s = 300.0
[model]
path = "{model}"
dtype = "{dtype}"
[data]
source = "{data}"
[reward]
function = "{reward}:even"
[rollout]
layout = "d1t1p1"
group_size = 4
max_prompt_tokens = 32
max_new_tokens = 4
max_live = 8
[train]
groups_per_step = 1
micro_batch_tokens = 256
learning_rate = 1e-6
[async]
staleness = 1
[adapt]
timeout_s = 600.0
reserve_mb = {reserve_mb}
[checkpoint]
every = 0
keep = 1
[bus]
liveness_s = 300.0
start_timeout_s = 900.0
[track]
tensorboard = false
report = false
"""

REWARD = '''
def even(completions, **columns):
    """Let no two completions earn the same, so that there is a gradient and moments are not zero."""
    return [float(index) for index, _ in enumerate(completions)]
'''


@dataclass
class Change:
    """One plan change as it was."""

    before: str
    after: str
    primitives: tuple[str, ...]
    seconds: float
    moved_bytes: int
    plans: tuple[Plan, Plan]
    parts_s: dict[str, float] = field(default_factory=dict)
    """Longest of all slots, by what they were doing."""


def write_job(folder: Path, model: Path, *, dtype: str, slots: int, reserve_mb: int) -> Path:
    """Write a job on ``model`` into ``folder``: tiny batches, so that nearly all of a run is its plan changes."""
    data, reward, job = folder / "rows.jsonl", folder / "reward.py", folder / "job.toml"
    data.write_text("".join(f'{{"prompt": "{i} + {i % 7} =", "answer": "{i + i % 7}"}}\n' for i in range(64)))
    reward.write_text(REWARD)
    job.write_text(JOB.format(model=model, data=data, reward=reward, dtype=dtype, slots=slots, reserve_mb=reserve_mb))
    return job


def walk_text(layouts: Sequence[str]) -> str:
    """Return the ``adapt.at`` that trains one step under each layout."""
    return "; ".join(f"{step} {layout} d1t1p1" for step, layout in enumerate(layouts, 1))


@dataclass
class Run:
    """A finished ``nereus run``: when the command was given and when its processes were gone, in Unix time."""

    began: float
    ended: float
    trainers_ready: float
    saving: float
    entries: tuple[Entry, ...]
    peak_bytes: int


def run_job(job: Path, folder: Path, *words: str) -> Run:
    """Run the job in ``folder`` to its end; ``RuntimeError`` with its last words if it fails."""
    command = [sys.executable, "-m", "nereus", "run", str(job), "--run-dir", str(folder), *words]
    past = len(_entries(folder))
    log = folder.with_suffix(".out")
    began = time.time()
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=_environment()
        )
    meter = _PeakMemory(process.pid)
    try:
        code = process.wait(RUN_TIMEOUT_S)
    finally:
        peak = meter.stop()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    ended = time.time()
    if code:
        raise RuntimeError(f"nereus run ended with code {code}:\n{log.read_text()[-3000:]}")
    entries = _entries(folder)[past:]
    (started,) = [entry for entry in entries if isinstance(entry.record, record.RunStarted)]
    zero = started.record.wall - started.t  # type: ignore[union-attr]
    saves = [entry.t + zero for entry in entries if isinstance(entry.record, record.CheckpointBegun)]
    return Run(began, ended, _trainers_ready(folder, began), saves[-1], entries, peak)


def changes_of(folder: Path, run: Run) -> list[Change]:
    """Return the plan changes of a run, in order; ``RuntimeError`` if one was given up."""
    started = next(entry for entry in run.entries if isinstance(entry.record, record.RunStarted))
    zero = started.record.wall - started.t  # type: ignore[union-attr]
    plan: Plan | None = None
    begun: Entry | None = None
    found: list[Change] = []
    notes = _notes(folder)
    for entry in run.entries:
        match entry.record:
            case record.PlanCommitted(plan=committed):
                before, plan = plan, committed
            case record.TransitionBegun():
                begun = entry
            case record.TransitionEnded() as ended:
                assert begun is not None and plan is not None and before is not None
                if not ended.ok:
                    raise RuntimeError(f"the change to epoch {ended.epoch} was given up: {ended.reason}")
                within = (begun.t + zero - 0.005, entry.t + zero + 0.5)
                found.append(
                    Change(
                        layout_text(before),
                        layout_text(plan),
                        begun.record.primitives,  # type: ignore[union-attr]
                        ended.seconds,
                        ended.moved_bytes,
                        (before, plan),
                        _parts(notes, within),
                    )
                )
    return found


def layout_text(plan: Plan) -> str:
    units = plan.of(POLICY_TRAINING)
    return str(Replication(len(units), units[0].layout))


def remove(*paths: Path) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}


def _entries(folder: Path) -> tuple[Entry, ...]:
    path = folder / "journal.jsonl"
    return read_journal(path).entries if path.exists() else ()


def _notes(folder: Path) -> list[dict[str, Any]]:
    """Return what slots and supervisor have logged, in order of time."""
    notes = []
    for path in folder.glob("logs/attempt_*/*.log"):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("{"):
                notes.append(json.loads(line) | {"file": path.stem})
    return sorted((note for note in notes if "t" in note), key=lambda note: note["t"])


def _trainers_ready(folder: Path, since: float) -> float:
    """Return when the last trainer slot of the newest attempt had built its share."""
    ready = [
        note["t"]
        for note in _notes(folder)
        if note.get("event") == "unit is ready" and "training" in note["emu"] and note["t"] > since
    ]
    if not ready:
        raise RuntimeError(f"no trainer was ready in {folder}")
    return max(ready)


def _parts(notes: Iterable[dict[str, Any]], within: tuple[float, float]) -> dict[str, float]:
    """Return the longest sum over one slot, for each kind of work, within a time."""
    sums: dict[str, dict[str, float]] = {}
    for note in notes:
        if note.get("event") == "state moved" and within[0] <= note["t"] <= within[1]:
            by_slot = sums.setdefault(note["what"], {})
            by_slot[note["file"]] = by_slot.get(note["file"], 0.0) + note["seconds"]
    return {what: max(by_slot.values()) for what, by_slot in sums.items()}


class _PeakMemory:
    """Watches how much memory of its own (private and shared once) the process tree has."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        before = _available_bytes()
        while not self._over.wait(0.5):
            self._peak = max(self._peak, before - _available_bytes())


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
