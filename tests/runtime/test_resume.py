"""Is the right run folder and the right checkpoint chosen?"""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus.backends.manifest import MANIFEST
from nereus.configuration.job import LoadedJob
from nereus.configuration.load import load_job
from nereus.configuration.render import to_toml
from nereus.errors import ConfigError
from nereus.runtime.checkpoints import CheckpointStore
from nereus.runtime.folder import RunFolder
from nereus.runtime.resume import changes, committed_checkpoints, open_run


def job(tmp_path: Path, *overrides: tuple[str, str]) -> LoadedJob:
    return load_job([], [("model.path", "/m"), ("run.dir", str(tmp_path / "runs")), *overrides])


def started(loaded: LoadedJob, *steps: int) -> Path:
    """Make a run folder that an earlier run has left, with committed checkpoints."""
    folder = RunFolder.create(Path(loaded.config.run.dir), loaded.config.run.name)
    folder.write_status("stopped")
    store = CheckpointStore(folder.checkpoints, keep=99)
    for step in steps:
        store.begin(step)
        store.commit(step, [], {})
    folder.close()
    return folder.path


def chosen(loaded: LoadedJob, resume: str | None, run_dir: Path | None = None) -> tuple[Path, Path | None]:
    folder, checkpoint = open_run(loaded, resume=resume, run_dir=run_dir, warn=print)
    folder.close()
    return folder.path, checkpoint


def test_without_resume_a_new_folder_is_made(tmp_path: Path) -> None:
    loaded = job(tmp_path)
    old = started(loaded, 5)
    path, checkpoint = chosen(loaded, None)
    assert path != old
    assert checkpoint is None


def test_auto_goes_on_if_there_is_something(tmp_path: Path) -> None:
    loaded = job(tmp_path)
    assert chosen(loaded, "auto")[1] is None
    path = started(loaded, 5, 10)
    assert chosen(loaded, "auto") == (path, path / "checkpoints" / "step_00000010")
    bare = started(loaded)
    assert chosen(loaded, "auto") == (bare, None)


def test_auto_with_a_named_folder(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    assert chosen(job(tmp_path), "auto", path) == (path, None)


def test_latest_and_steps_must_exist(tmp_path: Path) -> None:
    loaded = job(tmp_path)
    with pytest.raises(ConfigError, match="no run to resume"):
        chosen(loaded, "latest")
    path = started(loaded, 9, 10)
    assert chosen(loaded, "latest")[1] == path / "checkpoints" / "step_00000010"
    assert chosen(loaded, "9")[1] == path / "checkpoints" / "step_00000009"
    with pytest.raises(ConfigError, match="step 8; choose one of 9, 10"):
        chosen(loaded, "8")


def test_uncommitted_folders_are_never_chosen(tmp_path: Path) -> None:
    path = started(job(tmp_path), 5)
    for name in ("step_00000007", "step_00000008.tmp", ".step_00000009", "other"):
        (path / "checkpoints" / name).mkdir()
    (path / "checkpoints" / "step_00000008.tmp" / MANIFEST).write_text("{}")
    assert list(committed_checkpoints(path)) == [5]
    assert chosen(job(tmp_path), "latest") == (path, path / "checkpoints" / "step_00000005")


def test_damaged_checkpoints_are_passed_over_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = job(tmp_path)
    path = started(loaded, 5, 10)
    (path / "checkpoints" / "step_00000010" / MANIFEST).write_text("{}")
    for resume in ("auto", "latest"):
        assert chosen(loaded, resume)[1] == path / "checkpoints" / "step_00000005"
        assert "step_00000010" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="choose another checkpoint"):
        chosen(loaded, "10")
    (path / "checkpoints" / "step_00000005" / MANIFEST).write_text("{}")
    for resume in ("auto", "latest"):
        with pytest.raises(ConfigError, match="no checkpoint to resume from is whole"):
            chosen(loaded, resume)
    assert chosen(loaded, None)[1] is None


def test_a_run_folder_continues_and_a_checkpoint_forks(tmp_path: Path) -> None:
    loaded = job(tmp_path)
    path = started(loaded, 5)
    assert chosen(loaded, str(path)) == (path, path / "checkpoints" / "step_00000005")
    forked, checkpoint = chosen(loaded, str(path / "checkpoints" / "step_00000005"))
    assert forked != path
    assert checkpoint == path / "checkpoints" / "step_00000005"
    with pytest.raises(ConfigError, match="neither a run folder nor"):
        chosen(loaded, str(tmp_path))
    with pytest.raises(ConfigError, match="names another one"):
        chosen(loaded, str(path), tmp_path / "other")


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    loaded = job(tmp_path)
    path = started(loaded, 5)
    held = RunFolder.open(path)
    with pytest.raises(ConfigError, match="in use"):
        chosen(loaded, "latest")
    held.close()


def test_other_runs_of_longer_names_are_not_taken(tmp_path: Path) -> None:
    started(job(tmp_path, ("run.name", "run-long")), 5)
    with pytest.raises(ConfigError, match="no run to resume"):
        chosen(job(tmp_path), "latest")


def test_changes_are_named(tmp_path: Path) -> None:
    stored = tmp_path / "job.toml"
    stored.write_text(to_toml(job(tmp_path)))
    assert list(changes(stored, job(tmp_path))) == []
    after = job(tmp_path, ("train.layout", "d2"), ("train.learning_rate", "1e-3"))
    assert list(changes(stored, after)) == [
        'train.layout: "d1t1p1" -> "d2"',
        "train.learning_rate: 0.0001 -> 0.001",
    ]
    stored.write_text("[run]\nold_key = 1\n")
    assert "cannot be compared" in next(changes(stored, after))
