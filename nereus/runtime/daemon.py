"""How does a supervisor process start and end? The entry of ``nereus-supervisor`` and of ``nereus run``.

Reads the job, refuses what cannot work, locks the run folder, and hands over to ``supervisor.py``; ``exits.py`` says
how it ends. Nothing heavy is imported before the job has passed its checks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nereus.configuration.arguments import Overrides, complete_option, split_overrides
from nereus.configuration.load import load_job
from nereus.configuration.render import to_toml
from nereus.configuration.rules import notes
from nereus.errors import ConfigError
from nereus.runtime.exits import EXIT_OK, complain, guarded
from nereus.runtime.preflight import preflight

RESUME_HELP = "go on from a checkpoint: auto, latest, a step, a run folder or a checkpoint folder (default: auto)"


def launch(
    files: Sequence[Path],
    overrides: Overrides,
    *,
    resume: str | None = None,
    run_dir: Path | None = None,
    dry_run: bool = False,
    local_workers: bool = True,
) -> int:
    """Check the job and run it to its end; return the exit code. Raises ``ConfigError`` for wrong input."""
    job = load_job(files, overrides)
    shape = preflight(job, quick=dry_run)
    if dry_run:
        from nereus.runtime.dryrun import describe

        sys.stdout.write(describe(job, shape, local_workers=local_workers))
        return EXIT_OK
    for note in notes(job):
        complain(f"note: {note}")

    from nereus.bus.loop import run
    from nereus.runtime.live import supervise
    from nereus.runtime.resume import JOB_FILE, changes, open_run

    folder, checkpoint = open_run(job, resume=resume, run_dir=run_dir, warn=complain)
    try:
        stored = folder.configs / JOB_FILE
        for change in changes(stored, job) if stored.exists() else ():
            complain(f"changed since the last attempt: {change}")
        stored.write_text(to_toml(job), encoding="utf-8")
        # Who names a step wants that state, not what came of it since.
        readopt = resume is not None and not resume.isdigit()
        return run(supervise(job.config, folder, resume=checkpoint, local_workers=local_workers, readopt=readopt))
    finally:
        folder.close()


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage the way all wrong input is reported."""

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse says NoReturn, and so it is
        raise ConfigError(message, where="command line", remedy=f"see {self.prog} --help")


def main(words: Sequence[str] | None = None) -> None:
    """Run ``nereus-supervisor JOB.toml ... [--dotted.key value ...]``."""
    sys.exit(guarded(lambda: _main(sys.argv[1:] if words is None else words)))


def _main(words: Sequence[str]) -> int:
    rest, overrides = split_overrides(words)
    parser = _Parser(
        prog="nereus-supervisor",
        description="Run a job in the foreground until it ends; SIGTERM or SIGINT drains it, a second one leaves now.",
        epilog="Every setting can be overridden: --train.learning-rate 3e-4 (see nereus config reference).",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="JOB.toml", help="job files; later ones win")
    parser.add_argument("--resume", metavar="WHAT", help=RESUME_HELP)
    parser.add_argument("--run-dir", type=Path, help="the run folder itself (default: a new one below run.dir)")
    parser.add_argument("--workers", choices=("local", "external"), default="local", help="who starts the workers")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and stop")
    given = parser.parse_args(complete_option(rest, "--resume", "auto"))
    return launch(
        given.files,
        overrides,
        resume=given.resume,
        run_dir=given.run_dir,
        dry_run=given.dry_run,
        local_workers=given.workers == "local",
    )
