"""In which folder does this run keep its files, and from which checkpoint does it go on?

``--resume`` takes ``auto`` (go on if there is something, else start afresh), ``latest`` (there must be something), a
step, or a folder: a run folder is continued, a checkpoint starts a new run from that state.
Invariant (tests/runtime/test_resume.py): a folder that is not a committed checkpoint is never chosen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from nereus.backends.manifest import MANIFEST
from nereus.configuration.job import LoadedJob
from nereus.configuration.load import load_job
from nereus.configuration.render import setting, toml_value
from nereus.errors import CheckpointError, ConfigError
from nereus.runtime.checkpoints import CheckpointStore
from nereus.runtime.folder import RunFolder

JOB_FILE = "job.toml"

Warn = Callable[[str], None]

_STEP = re.compile(r"step_(\d+)")


def committed_checkpoints(run: Path) -> dict[int, Path]:
    """Return the committed checkpoints of a run folder by step, oldest first.

    They are committed by renaming (``checkpoints.py``); whether they are whole is another question.
    """
    found = {
        int(match[1]): entry
        for entry in (run / "checkpoints").glob("step_*")
        if (match := _STEP.fullmatch(entry.name)) and (entry / MANIFEST).is_file()
    }
    return dict(sorted(found.items()))


def newest_run(root: Path, name: str) -> Path | None:
    """Return the run folder ``<root>/<name>-NNN`` with the highest number."""
    numbered = (
        (int(match[1]), entry)
        for entry in root.glob("*")
        if (match := re.fullmatch(re.escape(name) + r"-(\d{3,})", entry.name)) and (entry / "STATUS").is_file()
    )
    return max(numbered, default=(0, None), key=lambda pair: pair[0])[1]


def open_run(job: LoadedJob, *, resume: str | None, run_dir: Path | None, warn: Warn) -> tuple[RunFolder, Path | None]:
    """Make or take over the run folder; return it, locked, with the checkpoint to go on from (None: afresh).

    ``warn`` hears of damaged checkpoints that were passed over.
    """
    root, name = Path(job.config.run.dir), job.config.run.name
    if resume is None:
        return RunFolder.create(root, name, path=run_dir), None
    if resume not in ("auto", "latest") and not resume.isdigit():
        return _from_folder(job, Path(resume), run_dir, warn)
    run = run_dir if run_dir is not None else newest_run(root, name)
    if run is None or not (run / "STATUS").is_file():
        if resume == "auto":
            return RunFolder.create(root, name, path=run_dir), None
        raise ConfigError(
            "there is no run to resume", where=str(run or root), remedy="use --resume auto, or no --resume"
        )
    folder = RunFolder.open(run)
    try:
        return folder, _choose(folder, resume, warn)
    except ConfigError:
        folder.close()
        raise


def _choose(folder: RunFolder, resume: str, warn: Warn) -> Path | None:
    """Return the checkpoint that ``resume`` names; damaged ones are passed over, but never silently."""
    store = CheckpointStore(folder.checkpoints, keep=1)
    if resume.isdigit():
        known = committed_checkpoints(folder.path)
        if int(resume) not in known:
            raise ConfigError(
                f"there is no committed checkpoint of step {resume}",
                where=str(folder.path),
                remedy=f"choose one of {', '.join(map(str, known))}" if known else "there is none at all",
            )
        try:
            store.validate(known[int(resume)])
        except CheckpointError as error:
            raise ConfigError(str(error), where=str(folder.path), remedy="choose another checkpoint") from None
        return known[int(resume)]
    search = store.newest()
    if search.folder is None and (resume == "latest" or search.passed_over):
        why = "; ".join(search.passed_over) or "there is none"
        raise ConfigError(
            f"no checkpoint to resume from is whole: {why}",
            where=str(folder.path),
            remedy="name another run folder, or start afresh without --resume",
        )
    for damage in search.passed_over:
        warn(f"checkpoint passed over: {damage}")
    return search.folder


def _from_folder(job: LoadedJob, folder: Path, run_dir: Path | None, warn: Warn) -> tuple[RunFolder, Path | None]:
    if (folder / MANIFEST).is_file():
        root, name = Path(job.config.run.dir), job.config.run.name
        return RunFolder.create(root, name, path=run_dir), folder.absolute()
    if (folder / "STATUS").is_file():
        if run_dir is not None and run_dir.absolute() != folder.absolute():
            raise ConfigError(
                f"--resume {folder} continues that run folder, --run-dir {run_dir} names another one",
                where="command line",
                remedy="leave --run-dir out, or resume from one of the run's checkpoints",
            )
        return open_run(job, resume="latest", run_dir=folder.absolute(), warn=warn)
    raise ConfigError(
        "is neither a run folder nor a committed checkpoint",
        where=f"--resume {folder}",
        remedy="write auto, latest, a step, a run folder or a checkpoint folder",
    )


def changes(before: Path, job: LoadedJob) -> Iterator[str]:
    """Yield one line for each setting that differs from the job file ``before``."""
    try:
        old = load_job([before])
    except ConfigError as error:
        yield f"the earlier configuration cannot be compared: {error}"
        return
    for name in job.provenance:
        if name in old.provenance and setting(old, name) != setting(job, name):
            yield f"{name}: {toml_value(setting(old, name))} -> {toml_value(setting(job, name))}"
