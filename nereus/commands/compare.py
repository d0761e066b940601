"""Which policy brings a job through a trace fastest? The command ``nereus compare``.

Runs one job, trace and seeds under several policies on virtual time (``sim/comparing.py``) and puts them side by side:
a table, a picture, a page, and one JSON object. Invariants (tests/commands/test_compare.py): table and JSON say the
same; equal words give equal figures; wrong policies, traces and jobs are refused in one line before anything runs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from nereus.commands.comparison import picture
from nereus.commands.comparison.page import page
from nereus.commands.comparison.table import as_text
from nereus.commands.simulate import UNCHANGING, check
from nereus.configuration.load import load_job
from nereus.core.profiles import load_model
from nereus.core.units import format_seconds
from nereus.errors import ConfigError
from nereus.runtime.folder import empty_folder, next_folder
from nereus.sim.comparing import run_under
from nereus.sim.comparison import RunResult, Standing, mean_latency_s, standings
from nereus.sim.policies.named import named
from nereus.sim.policy import Policy
from nereus.sim.trace import load_trace

PAGE, PICTURE, FIGURES = "comparison.html", "comparison", "comparison.json"


def compare(
    files: Sequence[Path],
    overrides: Sequence[tuple[str, str]],
    *,
    trace: str | None,
    policies: str,
    seeds: int,
    out: Path | None,
    as_json: bool,
) -> int:
    """Compare policies and return the exit code. ``ConfigError`` for wrong input."""
    chosen = _chosen(policies)
    if seeds < 1:
        raise ConfigError(f"{seeds} runs cannot be compared", where="--seeds", remedy="give 1 or more")
    config = load_job(list(files), list(overrides)).config
    config = replace(config, track=replace(config.track, tensorboard=False))
    course = UNCHANGING if trace is None else load_trace(trace)
    check(config, course)
    shape = load_model(config.model.path)
    folder = next_folder(Path(config.run.dir), "compared") if out is None else empty_folder(out)
    results: list[RunResult] = []
    for seed in range(config.run.seed, config.run.seed + seeds):
        for policy in chosen:
            made = run_under(config, shape, course, policy, seed, folder / f"{policy.name}-{seed}")
            results.append(made)
            _tell(made)
    table = standings(results, {policy.name: policy.source for policy in chosen})
    job, about = Path(files[-1]).stem, f"trace {course.name}, {config.run.steps} steps"
    title = f"{job}: {', '.join(policy.name for policy in chosen)}"
    said = f"{about}, {seeds} seed{'s' if seeds > 1 else ''}"
    figures = _figures(job, course.name, seeds, folder, table, results)
    (folder / FIGURES).write_bytes(msgspec.json.format(figures) + b"\n")
    (folder / PAGE).write_text(page(title, said, results, table), encoding="utf-8")
    with contextlib.suppress(ImportError):  # of matplotlib: the page says so
        (folder / f"{PICTURE}.svg").write_text(picture.svg(results), encoding="utf-8")
        (folder / f"{PICTURE}.png").write_bytes(picture.png(results))
    if as_json:
        sys.stdout.write(figures.decode() + "\n")
    else:
        sys.stdout.write(f"{job}, {said}\n\n{as_text(table)}\n\npage  {folder / PAGE}\n")
    return 0


def _chosen(policies: str) -> list[Policy]:
    names = [name.strip() for name in policies.split(",") if name.strip()]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name} is named twice", where="--policies", remedy="name each once")
    if not names:
        raise ConfigError("no policy is named", where="--policies", remedy="write --policies nereus,given")
    return [named(name) for name in names]


def _tell(made: RunResult) -> None:
    """Say on stderr that one more run is done."""
    changes = sum(switch.ok for switch in made.switches)
    said = f"{made.policy}, seed {made.seed}: {format_seconds(mean_latency_s(made))} a step, {changes} transitions"
    if made.failure:
        said += f"; ended after {len(made.latency_s)} steps: {made.failure}"
    sys.stderr.write(said + "\n")


def _figures(
    job: str, trace: str, seeds: int, folder: Path, table: Sequence[Standing], results: Sequence[RunResult]
) -> bytes:
    found: dict[str, Any] = {
        "job": job,
        "trace": trace,
        "seeds": seeds,
        "folder": str(folder),
        "policies": table,
        "runs": results,
    }
    return msgspec.json.encode(found)
