"""How would a job go on a cluster that is not here? The command ``nereus simulate``.

The live supervisor, controller and planner on virtual time; slots, links and losses are the simulated world's
(``nereus/sim``). Leaves a run folder like a live run's. Invariants (tests/commands/test_simulate.py): wrong jobs and
traces are refused in one line; the run folder is read by the other commands.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from nereus.config import JobConfig
from nereus.configuration.load import load_job
from nereus.configuration.render import to_toml
from nereus.core.profiles import load_model
from nereus.errors import ConfigError
from nereus.runtime.display import make_display
from nereus.runtime.folder import RunFolder
from nereus.runtime.placement import initial_plan
from nereus.runtime.resume import JOB_FILE
from nereus.runtime.wire import store_config
from nereus.sim.course import Failures
from nereus.sim.policies.named import named
from nereus.sim.policy import Given, Nereus
from nereus.sim.recorded import Recorded, record
from nereus.sim.simulation import check_start
from nereus.sim.trace import Trace, load_trace

UNCHANGING = Trace("none", "nothing changes")


def simulate(
    files: Sequence[Path],
    overrides: Sequence[tuple[str, str]],
    *,
    trace: str | None,
    policy: str,
    seed: int | None,
    mtbf_h: float,
    run_dir: Path | None,
    as_json: bool,
) -> int:
    """Simulate a job to its end and show it; return the exit code. ``ConfigError`` for wrong input."""
    job = load_job(list(files), list(overrides))
    config = job.config
    course = UNCHANGING if trace is None else load_trace(trace)
    check(config, course)
    decider = named(policy)
    if isinstance(decider, Nereus | Given):
        check_start(initial_plan(config), course.slots_at(0, 0.0) or config.cluster.slots)
    shape = load_model(config.model.path)
    folder = RunFolder.create(Path(config.run.dir), config.run.name, path=run_dir)
    try:
        (folder.configs / JOB_FILE).write_text(to_toml(job), encoding="utf-8")
        store_config(folder, config)
        display = make_display(Console(stderr=as_json), run=folder.name, steps=config.run.steps)
        display.start()
        done: Recorded | None = None
        try:
            done = record(
                config,
                shape,
                course,
                folder,
                display,
                policy=decider,
                seed=config.run.seed if seed is None else seed,
                failures=Failures(mtbf_h * 3600),
            )
        finally:
            display.close(done.summary if done else None, [("run folder", str(folder.path))])
        if as_json:
            sys.stdout.write(msgspec.json.encode(done).decode() + "\n")
    finally:
        folder.close()
    return 0


def check(config: JobConfig, trace: Trace) -> None:
    """Refuse what cannot be simulated; ``ConfigError`` says why."""
    if config.cluster.device == "cpu" or not config.cluster.profile:
        raise ConfigError(
            "a simulated job needs accelerators that are described",
            where="cluster.profile",
            remedy='set cluster.device to "cuda" and cluster.profile to one of profiles/clusters',
        )
    if not config.model.path:
        raise ConfigError(
            "no model is named", where="model.path", remedy="name a profile of profiles/models, or a config.json"
        )
    check_slots(trace, config.cluster.slots, where="cluster.slots")


def check_slots(trace: Trace, slots: int, *, where: str) -> None:
    """Refuse a trace that comes to more slots than the cluster has."""
    if trace.most_slots is not None and trace.most_slots > slots:
        raise ConfigError(
            f"trace {trace.name} comes to {trace.most_slots} slots, the cluster has {slots}",
            where=where,
            remedy=f"set it to {trace.most_slots} or more",
        )
