"""How is one job run under several policies, each meeting the same trace and seeds?

Owner: ``nereus compare`` and the evaluation. A policy that cannot bring a run to its end has lost, which is a result;
a job that no policy could begin is the operator's error. Invariants (tests/commands/test_compare.py): equal arguments
give equal results; a run leaves the same files behind as one of ``nereus simulate``.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from nereus.config import JobConfig
from nereus.core.shape import ModelShape
from nereus.errors import ConfigError, NereusError
from nereus.runtime.display import make_display
from nereus.runtime.folder import RunFolder, empty_folder
from nereus.runtime.journal import read_journal, replay
from nereus.runtime.metrics import read_metrics
from nereus.runtime.summary import column, finite, mean
from nereus.runtime.wire import store_config
from nereus.sim.comparison import RunResult, result_of
from nereus.sim.course import Failures
from nereus.sim.job import SynchronousJob
from nereus.sim.policy import Policy, SynchronousPolicy
from nereus.sim.recorded import record
from nereus.sim.synchronous import run_synchronous
from nereus.sim.trace import Trace


def run_under(
    config: JobConfig,
    shape: ModelShape,
    trace: Trace,
    policy: Policy,
    seed: int,
    path: Path,
    *,
    failures: Failures = Failures(),  # noqa: B008 (frozen)
) -> RunResult:
    """Simulate a job under one policy into the new folder ``path`` and return how it went."""
    folder = RunFolder.create(path.parent, path.name, path=path)
    failure, restores = "", 0
    try:
        store_config(folder, config)
        display = make_display(Console(quiet=True), run=folder.name, steps=config.run.steps)
        done = record(config, shape, trace, folder, display, policy=policy, seed=seed, failures=failures)
        restores = done.restores
    except ConfigError:
        raise
    except NereusError as error:
        failure = str(error)
    finally:
        folder.close()
    entries = read_journal(folder.journal).entries
    rows, progress = read_metrics(folder.metrics), replay(entries)
    return result_of(
        entries,
        policy=policy.name,
        seed=seed,
        staleness_mean=mean(column(rows, "staleness/mean")),
        staleness_max=max(finite(column(rows, "staleness/max")), default=0.0),
        restores=restores or max(0, progress.attempt - 1),
        lost=progress.lost,
        folder=path.name,
        failure=failure,
    )


def run_synchronous_under(
    job: SynchronousJob, trace: Trace, policy: SynchronousPolicy, seed: int, path: Path
) -> RunResult:
    """Simulate a synchronous job under one policy; the new folder ``path`` holds its journal alone."""
    journal, failure, restores = empty_folder(path) / "journal.jsonl", "", 0
    try:
        restores = run_synchronous(job, trace, policy, seed=seed, journal=journal).restores
    except ConfigError:
        raise
    except NereusError as error:
        failure = str(error)
    entries = read_journal(journal).entries
    return result_of(entries, policy=policy.name, seed=seed, restores=restores, folder=path.name, failure=failure)
