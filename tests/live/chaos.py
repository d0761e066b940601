"""Does a job survive whatever strikes its processes, at any moment? A runner of seeded trials.

``python tests/live/chaos.py --seeds 100``: each seed is one run of a tiny job that changes its plan again and again,
and one to three strikes: SIGKILL, SIGSTOP (for good, or for a moment), or all connections of a process cut. Any process
of the run may be struck, a third of the strikes fall inside a plan change. After each run everything that was promised
is checked: it ends well, or says why in one line and ``--resume`` ends it well; the history is whole, no step lacks its
figures, and nothing is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":  # as a script, it finds the package by itself
    sys.path.insert(0, str(ROOT))

from jobs import Job, leftovers  # noqa: E402

from nereus.algo.history import check_history  # noqa: E402
from nereus.core.plan import POLICY_TRAINING  # noqa: E402
from nereus.runtime.journal import PlanCommitted  # noqa: E402
from nereus.runtime.metrics import read_metrics  # noqa: E402

STEPS = 24
STALENESS = 1
LIVENESS_S = 4.0
RUN_LIMIT_S = 300.0
SLOTS = 5
TRAIN_SLOTS = {"d2t1p1": 2, "d3t1p1": 3, "d2t2p1": 4, "d1t2p1": 2, "d2t1p2": 4, "d1t1p1": 1}
_PIDFD_GETFD = 438
"""The system call that lends a descriptor of another process; the same number on every architecture."""


@dataclass(frozen=True)
class Strike:
    """One thing that goes wrong: what is done to whom, and when."""

    victim: str
    how: str
    """``kill``, ``stop``, ``pause`` (stopped for a moment) or ``drop`` (all TCP connections)."""
    inside: bool
    """Inside a plan change."""
    after: int
    """So many steps or plan changes after the strike before."""
    delay_s: float
    pause_s: float

    def __str__(self) -> str:
        how = f"pause {self.pause_s:.1f} s" if self.how == "pause" else self.how
        where = "change" if self.inside else "step"
        return f"{how} {self.victim} (+{self.after} {where} +{self.delay_s * 1e3:.0f} ms)"


@dataclass(frozen=True)
class Trial:
    """What one seed stands for."""

    seed: int
    train: str
    rollout: str
    walk: str
    strikes: tuple[Strike, ...]

    @classmethod
    def draw(cls, seed: int) -> Trial:
        """Return the trial of a seed."""
        rng = random.Random(seed)
        train = rng.choice(("d2t1p1", "d2t1p1", "d3t1p1", "d2t2p1", "d1t2p1"))
        changes = []
        for step in itertools.count(rng.randint(2, 4), 4):
            if step > STEPS - 4:
                break
            layout = rng.choice(tuple(TRAIN_SLOTS))
            changes.append(f"{step} {layout} d{rng.randint(1, SLOTS - TRAIN_SLOTS[layout])}t1p1")
        strikes = []
        for _ in range(rng.choice((1, 1, 2, 3))):
            kind = rng.choice(("trainer", "trainer", "slot", "slot", "weights-0", "reward-0", "rare"))
            victim = rng.choice(("store", "forkserver", "supervisor")) if kind == "rare" else kind
            how = rng.choice(("kill", "kill", "stop", "pause", "drop"))
            if victim == "supervisor" and how == "stop":
                how = "pause"  # nobody is there to see to it
            inside = rng.random() < 1 / 3
            delay_s = rng.uniform(0.0, 0.3) if inside else rng.uniform(0.0, 1.0)
            after = 1 if inside else rng.randint(1, 5)
            strikes.append(Strike(victim, how, inside, after, delay_s, rng.choice((1.0, LIVENESS_S + 3.0))))
        rollout = f"d{SLOTS - TRAIN_SLOTS[train]}t1p1"
        return cls(seed, train, rollout, "; ".join(changes), tuple(strikes))

    @property
    def words(self) -> list[str]:
        """Return the settings of the job."""
        return [
            *("--run.steps", str(STEPS), "--cluster.slots", str(SLOTS), "--cluster.group_timeout_s", "15"),
            *("--train.layout", self.train, "--rollout.layout", self.rollout, "--adapt.at", self.walk),
            *("--bus.liveness_s", str(LIVENESS_S), "--checkpoint.every", "5", "--async.staleness", str(STALENESS)),
        ]


@dataclass
class Result:
    """What came of a trial."""

    trial: Trial
    outcome: str = ""
    problems: list[str] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)
    gap_s: float = 0.0
    """The longest time without a step, after the first strike."""
    seconds: float = 0.0
    folder: Path | None = None


class _Story:
    """Counts what is written to a journal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.steps = self.changes = 0
        self.trained_at = time.monotonic()
        self.gap_s = 0.0

    def look(self) -> None:
        """Take in what is new."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        self._read += len(new)
        trained = new.count(b'"kind":"trained"')
        self.changes += new.count(b'"kind":"transition_begun"')
        now = time.monotonic()
        if self.steps:
            self.gap_s = max(self.gap_s, now - self.trained_at)
        if trained:
            self.steps, self.trained_at = self.steps + trained, now


def processes(run: Path) -> dict[str, int]:
    """Return the live processes of a run by name: each keeps its log open."""
    found = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
            for number in ("2", "1"):
                target = (process / "fd" / number).readlink()
                if target.is_relative_to(run / "logs"):
                    found[target.stem] = int(process.name)
                    break
    return found


def cut_connections(pid: int) -> int:
    """Shut every established TCP connection of a process down, as if the network had; return how many there were."""
    libc = ctypes.CDLL(None, use_errno=True)
    count = 0
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        handle = os.pidfd_open(pid)
        try:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if not str(entry.readlink()).startswith("socket:"):
                        continue
                    own = libc.syscall(_PIDFD_GETFD, handle, int(entry.name), 0)
                    if own < 0:
                        continue
                    with socket.socket(fileno=own) as connection:
                        if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername():
                            connection.shutdown(socket.SHUT_RDWR)
                            count += 1
        finally:
            os.close(handle)
    return count


def _find(run: Path, strike: Strike, supervisor: int, rng: random.Random, job: Job) -> tuple[str, int] | None:
    """Return name and pid of the process that is to be struck."""
    if strike.victim == "supervisor":
        return "supervisor", supervisor
    there = processes(run)
    slots = sorted(name for name in there if name.startswith("slot-"))
    if strike.victim == "slot":
        names = slots
    elif strike.victim == "trainer":
        names = [name for name in slots if name in _trainers(job)]
    else:
        names = [strike.victim] if strike.victim in there else []
    if not names:
        return None
    name = rng.choice(names)
    return name, there[name]


def _trainers(job: Job) -> set[str]:
    plans = [entry.record.plan for entry in job.entries() if isinstance(entry.record, PlanCommitted)]
    return {f"slot-{slot}" for unit in plans[-1].of(POLICY_TRAINING) for slot in unit.slots}


def _do(strike: Strike, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if strike.how == "kill":
            os.kill(pid, signal.SIGKILL)
        elif strike.how == "drop":
            cut_connections(pid)
        else:
            os.kill(pid, signal.SIGSTOP)


def run_trial(trial: Trial, folder: Path, cache: Path) -> Result:
    """Run one trial in an empty folder, and see what came of it."""
    began = time.monotonic()
    rng = random.Random(trial.seed + 1_000_000)
    result = Result(trial, folder=folder)
    job = Job(folder, cache)
    code, output = _struck_run(trial, job, rng, result)
    supervisor_struck = any("supervisor" in struck for struck in result.struck)
    how = _judge_end(code, output, result, excused=supervisor_struck)
    resumed = 0
    while code and not result.problems and resumed < 3:
        resumed += 1
        if code > 0:  # the workers of a killed supervisor wait for the next one
            _await_end(job.folder, result)
        code, output = _run(job.start(*trial.words, "--resume"), result)
        _judge_end(code, output, result, excused=False)
    result.outcome = "finished" if not how else f"{how}; resumed" + (f" x{resumed}" if resumed > 1 else "")
    if code:
        result.problems.append(f"resumed {resumed} times and still not finished: {output[-1500:]}")
    if not result.problems:
        _check(job, result)
    result.seconds = time.monotonic() - began
    return result


def _struck_run(trial: Trial, job: Job, rng: random.Random, result: Result) -> tuple[int, str]:
    """Run the job and strike; return exit code and output."""
    process = job.start(*trial.words)
    story = _Story(job.folder / "journal.jsonl")
    pauses: list[tuple[float, int]] = []
    try:
        for strike in trial.strikes:
            _wait(process, story, strike, pauses)
            found = _find(job.folder, strike, process.pid, rng, job) if process.poll() is None else None
            if found is None:
                continue
            if not result.struck:
                story.gap_s = 0.0
            _do(strike, found[1])
            result.struck.append(f"{strike} -> {found[0]} in step {story.steps}")
            if strike.how == "pause":
                pauses.append((time.monotonic() + strike.pause_s, found[1]))
        limit = time.monotonic() + RUN_LIMIT_S
        while process.poll() is None and time.monotonic() < limit:
            _pass(story, pauses)
        if process.poll() is None:
            result.problems.append(f"still running after {RUN_LIMIT_S:g} s")
    finally:
        for _, pid in pauses:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if process.poll() is None:
            process.kill()
        output, _ = process.communicate()
    result.gap_s = story.gap_s
    return process.returncode, output


def _wait(process: subprocess.Popen[str], story: _Story, strike: Strike, pauses: list[tuple[float, int]]) -> None:
    """Wait for the moment of a strike, or the end of the run."""
    story.look()
    steps, changes = story.steps + strike.after, story.changes + strike.after
    limit = time.monotonic() + RUN_LIMIT_S
    while process.poll() is None and time.monotonic() < limit:
        if (story.changes >= changes) if strike.inside else (story.steps >= steps):
            time.sleep(strike.delay_s)
            return
        _pass(story, pauses)


def _pass(story: _Story, pauses: list[tuple[float, int]]) -> None:
    """Let a moment pass."""
    time.sleep(0.02)
    story.look()
    for due, pid in tuple(pauses):
        if time.monotonic() >= due:
            pauses.remove((due, pid))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _run(process: subprocess.Popen[str], result: Result) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=RUN_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        result.problems.append(f"the resumed run is still running after {RUN_LIMIT_S:g} s: {output[-1500:]}")
    return process.returncode, output


def _judge_end(code: int, output: str, result: Result, *, excused: bool) -> str:
    """Return how a run ended short of its goal; note an end that explains nothing."""
    if "Traceback" in output:
        result.problems.append(f"a traceback: {output[-3000:]}")
    if not code:
        return ""
    lines = [line for line in output.splitlines() if line.startswith("nereus: ") and "note:" not in line]
    if code < 0:
        if not excused:
            result.problems.append(f"ended by signal {-code}: {output[-1500:]}")
        return f"signal {-code}"
    if not lines:
        result.problems.append(f"code {code} without an explanation: {output[-1500:]}")
        return f"code {code}"
    return f"stopped ({lines[-1].removeprefix('nereus: ')[:120]})"


def _await_end(run: Path, result: Result) -> None:
    """Wait until no process of a run is left."""
    limit = time.monotonic() + 30.0
    while (left := processes(run)) and time.monotonic() < limit:
        time.sleep(0.05)
    if left:
        result.problems.append(f"orphans: {left}")


def _check(job: Job, result: Result) -> None:
    """Note what a run that has ended well has not kept of what is promised."""
    result.problems += check_history(job.history(), staleness=STALENESS, groups_per_step=4)
    rows = [int(row["step"]) for row in read_metrics(job.folder / "metrics.jsonl")]
    if len(rows) != STEPS or rows != list(range(rows[0], rows[0] + STEPS)):
        result.problems.append(f"steps in metrics.jsonl: {rows}")
    if job.status()["state"] != "finished":
        result.problems.append(f"STATUS says {job.status()}")
    _await_end(job.folder, result)
    result.problems += [f"left behind: {left}" for left in leftovers(job.folder)]


def table(results: list[Result]) -> Iterator[str]:
    """Yield the lines of the table of results."""
    yield f"{'seed':>4}  {'train':7} {'longest gap':>11}  {'seconds':>7}  {'verdict':8} strikes; outcome"
    for result in results:
        verdict = "FAILED" if result.problems else "ok"
        struck = "; ".join(result.struck) or "(the run was over first)"
        head = f"{result.trial.seed:>4}  {result.trial.train:7} {result.gap_s:>9.1f} s  {result.seconds:>7.1f}"
        yield f"{head}  {verdict:8} {struck}; {result.outcome}"
        yield from (f"      {problem}" for problem in result.problems)
    failed = sum(bool(result.problems) for result in results)
    gaps = sorted(result.gap_s for result in results)
    inside = sum("change" in struck for result in results for struck in result.struck)
    count = sum(len(result.struck) for result in results)
    yield (
        f"{len(results)} runs, {count} strikes ({inside} after the start of a plan change), {failed} failed; "
        f"longest time without a step: median {gaps[len(gaps) // 2]:.1f} s, worst {gaps[-1]:.1f} s"
    )


def _run_seed(base: Path, seed: int) -> Result:
    """Run the trial of a seed in a folder of its own; keep the folder if it failed."""
    folder = base / f"seed-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    result = run_trial(Trial.draw(seed), folder, base / "models")
    if not result.problems:
        shutil.rmtree(folder)
    return result


def main() -> int:
    """Run the trials of the given seeds; return 1 if any failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=6, help="how many (default: 6)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--folder", type=Path, help="keep models and failed runs here (default: a temporary folder)")
    given = parser.parse_args()
    base = given.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    results = []
    with ThreadPoolExecutor(given.jobs) as pool:
        for result in pool.map(partial(_run_seed, base), range(given.first, given.first + given.seeds)):
            results.append(result)
            for line in list(table([result]))[1:-1]:
                print(line, flush=True)
    print()
    for line in table(results):
        print(line)
    failed = any(result.problems for result in results)
    if not failed and given.folder is None:
        shutil.rmtree(base)
    elif failed:
        print(f"failed runs are in {base}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
