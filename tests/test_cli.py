"""Does every command line end with the right text, on the right stream, with the right code?"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from nereus.cli import _extras, execute
from nereus.errors import ConfigError, NereusError
from nereus.runtime.daemon import main as supervisor
from nereus.runtime.exits import guarded
from nereus.runtime.folder import RunFolder

ROOT = Path(__file__).parents[1]

SIZES = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SIZES))
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).write_bytes(b"{}")
    path = tmp_path / "job.toml"
    path.write_text(f'[run]\ndir = "{tmp_path}/runs"\n\n[model]\npath = "{model}"\n')
    return path


def test_dry_run_prints_a_job_that_loads_and_starts_nothing(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["run", str(job), "--dry-run", "--train.layout", "d1t2", "--run.steps=7", "--no-track.tensorboard"]
    assert execute(line) == 0
    text, errors = capsys.readouterr()
    assert errors == ""
    settings = tomllib.loads(text)
    assert settings["train"]["layout"] == "d1t2"
    assert settings["track"]["tensorboard"] is False
    assert "steps = 7  # command line" in text
    assert f'path = "{tmp_path}/model"  # {job}:5' in text
    assert "policy.training/0 t2p1 on 0,1" in text
    assert "slot 0 (policy.training/0)" in text
    assert "KV cache" in text
    assert "slot-3: policy.generation/1" in text
    assert not (tmp_path / "runs").exists()
    again = tmp_path / "again.toml"
    again.write_text(text)
    assert execute(["run", str(again), "--dry-run"]) == 0
    assert tomllib.loads(capsys.readouterr().out) == settings


WRONG: list[tuple[list[str], tuple[str, ...]]] = [
    ([], ("no job file",)),
    (["nowhere.toml"], ("nowhere.toml: no such file",)),
    (["JOB", "--train.lr", "1"], ("unknown key train.lr",)),
    (["JOB", "--train.learning-rat", "1"], ("did you mean train.learning_rate?",)),
    (["JOB", "--run.steps", "many"], ("run.steps must be a whole number >= 1, got 'many'",)),
    (["JOB", "--train.layout", "d4"], ("together 6", "cluster.slots is 4")),
    (["JOB", "--train.layout", "q4"], ("'q4' is not a layout",)),
    (["JOB", "--train.layout", "t4", "--cluster.slots", "8"], ("tensor degree 4", "2 key-value heads")),
    (["JOB", "--model.path", "nowhere"], ("nowhere does not exist",)),
    (["JOB", "--data.source", "rows.jsonl", "--reward.function", "m:f"], ("rows.jsonl does not exist",)),
    (["JOB", "--run.steps"], ("--run.steps has no value",)),
    (["JOB", "--unknown"], ("--unknown",)),
    (["JOB", "--workers", "many"], ("many",)),
]


@pytest.mark.parametrize(("words", "parts"), WRONG)
@pytest.mark.parametrize("entry", ["nereus", "nereus-supervisor"])
def test_wrong_input_is_one_line_and_code_2(
    entry: str,
    words: list[str],
    parts: tuple[str, ...],
    job: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = [str(job) if word == "JOB" else word for word in words]
    if entry == "nereus":
        assert execute(["run", *line]) == 2
    elif words:  # argparse words its own complaint about missing files
        with pytest.raises(SystemExit) as left:
            supervisor(line)
        assert left.value.code == 2
    else:
        return
    text, errors = capsys.readouterr()
    assert text == ""
    assert errors.count("\n") == 1
    assert errors.startswith("nereus: ")
    for part in parts:
        assert part in errors
    assert not (tmp_path / "runs").exists()


def fail(error: BaseException) -> Callable[[], int]:
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            ConfigError("is taken", where="bus.port", remedy="use\nport 0"),
            2,
            "nereus: bus.port: is taken; use port 0\n",
        ),
        (NereusError("slot-0 is lost"), 1, "nereus: slot-0 is lost\n"),
        (KeyboardInterrupt(), 130, "nereus: interrupted\n"),
    ],
)
def test_failures_of_any_origin_are_one_line(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(fail(error)) == code
    assert capsys.readouterr().err == line


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        guarded(fail(ZeroDivisionError()))


def test_config_show_and_why(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["config", "show", str(job), "--train.loss.clip-low", "0.1", "--why", "train.loss.clip-low"]) == 0
    assert "train.loss.clip_low = 0.1\n  from:    command line\n" in capsys.readouterr().out
    assert execute(["config", "show", str(job), "--why", "model.path"]) == 0
    assert f"{job}:5" in capsys.readouterr().out
    assert execute(["config", "show", str(job), "--why", "model.paht"]) == 2
    assert "did you mean model.path?" in capsys.readouterr().err


def test_settings_belong_to_some_commands_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["status", ".", "--run.steps", "3"]) == 2
    assert "this command takes none" in capsys.readouterr().err


def test_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["status", str(tmp_path)]) == 2
    assert "STATUS" in capsys.readouterr().err
    folder = RunFolder.create(tmp_path, "run")
    folder.write_status("running", step=3, version=3)
    folder.metrics.write_text('{"step":2,"reward/mean":0.25}\n{"step":3,"reward/mean":null}\n{"step":4,"rew')
    assert execute(["status", str(folder.path)]) == 0
    text = capsys.readouterr().out
    assert f"running (pid {os.getpid()})" in text
    assert "step 3, version 3" in text
    assert "reward/mean nan" in text
    assert execute(["status", str(folder.path), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["status"]["state"] == "running"
    assert seen["alive"] is True
    assert seen["metrics"] == {"step": 3, "reward/mean": None}
    folder.close()


def test_missing_inputs_of_other_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["import", str(tmp_path / "a.gguf"), str(tmp_path / "out")], ["report", str(tmp_path)]):
        assert execute(words) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_extra_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        with _extras():
            importlib.import_module("no_such_package")
        return 0

    assert guarded(command) == 2
    assert "needs the Python package no_such_package; pip install 'nereus[train]'" in capsys.readouterr().err


def test_version_help_and_completion(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--version"], ["--help"], ["run", "--help"], ["completion", "bash"], ["config", "reference"]):
        assert execute(words) == 0
        assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(("words", "loaded"), [(["--help"], "set()"), (["run", "JOB", "--dry-run"], "{'numpy'}")])
def test_quick_commands_import_nothing_heavy(words: list[str], loaded: str, job: Path) -> None:
    """The dry run shares the planner's memory model, and so its numpy."""
    line = [str(job) if word == "JOB" else word for word in words]
    script = (
        "import sys; from nereus.cli import _extras, execute; execute(sys.argv[1:]);"
        "print({'torch', 'zmq', 'transformers', 'numpy', 'asyncio', 'structlog'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *line], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert done.stderr.strip() == loaded
