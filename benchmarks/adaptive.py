"""What does a job gain by changing its plan while it runs?

    python benchmarks/adaptive.py [--json] [--seeds N] [--job JOB.toml] [--runs DIR]

The same job, the same seeds, the same emulated slots and pool, in turns: *adaptive* (``adapt.mode on``: layouts and the
split between training and generation), *replicas* (``adapt.mode replicas``: tensor and pipeline degrees stay as the job
file has them, only units come and go). Figures are means over all steps of a run, read from metrics.jsonl and the
journal: seconds a step, plan changes and what they took, samples trained, reward of the first and last ten steps.
Target: adaptive at least 15 % below replicas, every group trained once, rewards of the same spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from nereus.algo.history import check_history
from nereus.runtime import journal as record
from nereus.runtime.journal import plain, read_journal
from nereus.runtime.metrics import read_metrics

ROOT = Path(__file__).parents[1]
MODES = {"adaptive": "on", "replicas": "replicas"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, default=ROOT / "launchers" / "adaptive_quickstart.toml")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (given.runs or Path(scratch)).absolute()
        rows = [run(given.job, mode, seed, folder) for seed in range(given.seeds) for mode in MODES]
    print(table(rows))
    gains = [gain(rows, seed) for seed in range(given.seeds)]
    worst = min(gains)
    print(f"\nadaptive below replicas by {', '.join(f'{one:.0%}' for one in gains)}; at least 15 %: {worst >= 0.15}")
    if given.json:
        print(json.dumps({"benchmark": "adaptive", "rows": rows, "gains": gains}))


def run(job: Path, mode: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run the job once and read its figures."""
    target = folder / f"{mode}-{seed}"
    command = [sys.executable, "-m", "nereus", "run", str(job), "--run-dir", str(target)]
    command += ["--adapt.mode", MODES[mode], "--run.seed", str(seed), "--no-track.report", "--no-track.tensorboard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    rows = read_metrics(target / "metrics.jsonl")
    entries = read_journal(target / "journal.jsonl").entries
    changes = [
        entry.record for entry in entries if isinstance(entry.record, record.TransitionEnded) and entry.record.ok
    ]
    steps = [entry for entry in entries if isinstance(entry.record, record.Trained)]
    staleness = int(max(row["staleness/max"] for row in rows))
    return {
        "plan": mode,
        "seed": seed,
        "steps": len(rows),
        "step_s": statistics.mean(row["timing_s/step"] for row in rows),
        "changes": len(changes),
        "changes_s": sum(change.seconds for change in changes),
        "moved_mb": sum(change.moved_bytes for change in changes) / 1e6,
        "groups": len({ref.group for entry in steps for ref in entry.record.groups}),  # type: ignore[union-attr]
        "problems": len(check_history(plain(entries), staleness=staleness)),
        "reward_first": statistics.mean(row["reward/mean"] for row in rows[:10]),
        "reward_last": statistics.mean(row["reward/mean"] for row in rows[-10:]),
        "blocked_ms": 1e3 * max(row.get("supervisor/blocked_s", 0.0) for row in rows),
    }


def gain(rows: list[dict[str, Any]], seed: int) -> float:
    """Return by which share the adaptive run's steps are shorter."""
    by_mode = {row["plan"]: row["step_s"] for row in rows if row["seed"] == seed}
    return float(1 - by_mode["adaptive"] / by_mode["replicas"])


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    names = list(rows[0])
    cells = [
        names,
        *([f"{row[name]:.3g}" if isinstance(row[name], float) else str(row[name]) for name in names] for row in rows),
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


if __name__ == "__main__":
    main()
