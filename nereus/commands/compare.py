"""Which policy brings a job through a trace fastest? The command ``nereus compare``.

Runs one job, trace and seeds under several policies on virtual time (``sim/comparing.py``) and puts them side by side:
a table, a picture, a page, and one JSON object. Invariants (tests/commands/test_compare.py): table and JSON say the
same; equal words give equal figures; wrong policies, traces and jobs are refused in one line before anything runs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from nereus.commands.comparison import picture
from nereus.commands.comparison.page import page
from nereus.commands.comparison.table import as_text
from nereus.commands.simulate import UNCHANGING, check, check_slots
from nereus.config import RunConfig
from nereus.configuration.load import load_job
from nereus.core.profiles import load_model
from nereus.core.units import format_seconds
from nereus.errors import ConfigError
from nereus.runtime.folder import empty_folder, next_folder
from nereus.runtime.logs import silence
from nereus.sim.comparing import run_synchronous_under, run_under
from nereus.sim.comparison import RunResult, Standing, mean_latency_s, standings
from nereus.sim.jobfile import synchronous_job
from nereus.sim.policies.named import named, named_synchronous
from nereus.sim.trace import Trace, load_trace

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
    names = _names(policies)
    if seeds < 1:
        raise ConfigError(f"{seeds} runs cannot be compared", where="--seeds", remedy="give 1 or more")
    course = UNCHANGING if trace is None else load_trace(trace)
    bout = _bout(files, overrides, course, names)
    silence()
    folder = next_folder(bout.root, "compared") if out is None else empty_folder(out)
    results: list[RunResult] = []
    for seed in range(bout.first_seed, bout.first_seed + seeds):
        for name in names:
            made = bout.run(name, seed, folder / f"{name}-{seed}")
            results.append(made)
            _tell(made)
    table = standings(results, bout.sources)
    job, about = Path(files[-1]).stem, f"trace {course.name}, {bout.steps} steps"
    title = f"{job}: {', '.join(names)}"
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


class _Bout(Struct, frozen=True):
    """What is run under every policy."""

    steps: int
    first_seed: int
    root: Path
    """Below which a new folder is made."""
    sources: dict[str, str]
    run: Callable[[str, int, Path], RunResult]
    """Given a policy's name, a seed and the folder to make."""


def _bout(files: Sequence[Path], overrides: Sequence[tuple[str, str]], trace: Trace, names: Sequence[str]) -> _Bout:
    """Read the job, of either kind, and refuse what cannot be run."""
    job = synchronous_job(files)
    if job is not None:
        if overrides:
            what = f"--{overrides[0][0]} is no setting of a synchronous job"
            raise ConfigError(what, where="command line", remedy=f"change {files[0]}")
        check_slots(trace, job.cluster.size, where=f"{files[0]}: slots")
        deciders = {name: named_synchronous(name) for name in names}
        return _Bout(
            job.steps,
            0,
            Path(RunConfig().dir),
            {name: decider.source for name, decider in deciders.items()},
            lambda name, seed, path: run_synchronous_under(job, trace, deciders[name], seed, path),
        )
    config = load_job(list(files), list(overrides)).config
    config = replace(config, track=replace(config.track, tensorboard=False))
    check(config, trace)
    shape, policies = load_model(config.model.path), {name: named(name) for name in names}
    return _Bout(
        config.run.steps,
        config.run.seed,
        Path(config.run.dir),
        {name: policy.source for name, policy in policies.items()},
        lambda name, seed, path: run_under(config, shape, trace, policies[name], seed, path),
    )


def _names(policies: str) -> list[str]:
    names = [name.strip() for name in policies.split(",") if name.strip()]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name} is named twice", where="--policies", remedy="name each once")
    if not names:
        raise ConfigError("no policy is named", where="--policies", remedy="write --policies nereus,given")
    return names


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
