"""Do files and overrides become the right job, and is every wrong input refused with name, place and remedy?"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.configuration import schema
from nereus.configuration.job import LoadedJob
from nereus.configuration.load import load_job
from nereus.errors import ConfigError

MODEL = [("model.path", "/models/tiny")]


def write(folder: Path, text: str, name: str = "job.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def load(*overrides: tuple[str, str], files: tuple[Path, ...] = ()) -> LoadedJob:
    return load_job(files, [*MODEL, *overrides], {"HOME": "/home/me", "SCRATCH": "/scratch"}, directory=Path("/here"))


def refusal(*overrides: tuple[str, str], files: tuple[Path, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, files=files)
    return str(caught.value)


def test_later_files_win_tables_merge_and_lists_replace(tmp_path: Path) -> None:
    first = write(tmp_path, '[rollout]\nstop = ["a", "b"]\ntop_k = 5\n[data.options]\nx = 1\ny = 1\n', "one.toml")
    second = write(tmp_path, '\n[rollout]\nstop = ["c"]\n\n[data]\noptions.y = 2\n', "two.toml")
    job = load(("rollout.top-k", "7"), files=(first, second))
    assert job.config.rollout.stop == ["c"]
    assert job.config.rollout.top_k == 7
    assert job.config.data.options == {"x": 1, "y": 2}
    assert job.provenance["rollout.stop"] == f"{second}:3"
    assert job.provenance["rollout.top_k"] == "command line"
    assert job.provenance["data.options.x"] == f"{first}:5"
    assert job.provenance["data.options.y"] == f"{second}:6"
    assert job.provenance["train.layout"] == "default"


def test_provenance_has_every_key() -> None:
    assert set(load().provenance) == set(schema.settings())


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.learning-rate", "3e-4", 3e-4),
        ("train.learning_rate", ".5", 0.5),
        ("train.learning_rate", "1", 1.0),
        ("train.recompute", "true", True),
        ("track.tensorboard", "false", False),
        ("async.staleness", "4", 4),
        ("run.name", "17", "17"),
        ("rollout.stop", '["</a>", "b"]', ["</a>", "b"]),
        ("train.loss.clip-low", "0.1", 0.1),
    ],
)
def test_overrides_take_the_type_of_their_key(key: str, text: str, value: object) -> None:
    found: object = load((key, text)).config
    for part in schema.normalize(key).replace("async.", "async_.").split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_free_tables_take_any_key_with_toml_values() -> None:
    job = load(("data.options.max-terms", "3"), ("data.options.words", "plain"))
    assert job.config.data.options == {"max-terms": 3, "words": "plain"}


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (
            "[train]\nlearnig_rate = 1.0",
            ("job.toml:2", "unknown key train.learnig_rate", "did you mean train.learning_rate?"),
        ),
        ("[run]\n\n\nlearning_rate = 1.0", ("job.toml:4", "run.learning_rate", "did you mean train.learning_rate?")),
        ("[tran]\nlearning_rate = 1.0", ("job.toml:1", "unknown key tran", "did you mean train?")),
        ("[train]\nlayout.dp = 2", ("job.toml:2", "train.layout must be text, got {'dp': 2}")),
        ('[cluster]\nslots = "four"', ("job.toml:2", "cluster.slots must be a whole number >= 1", "got 'four'")),
        ("[cluster]\nslots = 2.0", ("job.toml:2", "cluster.slots must be a whole number", "got 2.0")),
        ("[cluster]\nslots = true", ("job.toml:2", "cluster.slots", "got True")),
        ("[cluster]\nslots = 0", ("cluster.slots must be a whole number >= 1, got 0",)),
        ("[train]\nlearning_rate = nan", ("train.learning_rate must be a number > 0, got nan",)),
        ("[train]\nlearning_rate = inf", ("train.learning_rate must be a number > 0, got inf",)),
        ("[train.loss]\nentropy_coefficient = -inf", ("train.loss.entropy_coefficient must be a number",)),
        ('[model]\ndtype = "fp16"', ("model.dtype must be one of 'float32', 'bfloat16', 'float64', got 'fp16'",)),
        ("[rollout]\nstop = [1]", ("rollout.stop must be a list of text, got [1]",)),
        ("train = 3", ("job.toml:1", "train is a table, not a setting")),
        ("[train]\ngroup = 1\nx = ]", ("job.toml:3", "is not TOML")),
        ("[[train]]\nlayout = 'd1'", ("job.toml:1", "train is a table")),
        ("[train]\nlearning_rate = 0.1\nlearning-rate = 0.2", ("job.toml:3", "also set at", "job.toml:2")),
        ("[zzzzz]\nx = 1", ("unknown key zzzzz", "valid here: adapt, async, bus")),
        ("[data]\noptions = 3", ("data.options must be a table, got 3",)),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, line: str, parts: tuple[str, ...]) -> None:
    message = refusal(files=(write(tmp_path, line),))
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("key", "text", "part"),
    [
        ("train.lerning-rate", "1", "did you mean train.learning_rate?"),
        ("train", "{}", "train is a table, not a setting"),
        ("data.options", "{a = 1}", "set its keys one by one"),
        ("track.tensorboard", "yes", "must be true or false, got 'yes'"),
        ("rollout.stop", "a", "must be a list of text, got 'a'"),
        ("train.learning_rate", "fast", "must be a number > 0, got 'fast'"),
        ("train.learning_rate", "nan", "must be a number > 0"),
        ("run.steps", "1.5", "must be a whole number >= 1, got '1.5'"),
        ("train.beta1", "1", "must be a number >= 0 and < 1, got 1.0"),
        ("model.path", "$NOWHERE/x", "'NOWHERE'"),
    ],
)
def test_wrong_overrides_are_refused(key: str, text: str, part: str) -> None:
    message = refusal((key, text))
    assert "command line" in message
    assert part in message


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    assert "no such file" in refusal(files=(tmp_path / "missing.toml",))
    assert "cannot be read" in refusal(files=(tmp_path,))
    (tmp_path / "latin.toml").write_bytes(b'[run]\nname = "\xe9"\n')
    assert "not UTF-8" in refusal(files=(tmp_path / "latin.toml",))


def test_paths_start_at_the_current_directory_and_expand(tmp_path: Path) -> None:
    config = load(
        ("model.path", "models/a"),
        ("run.dir", "$SCRATCH/runs"),
        ("data.source", "~/rows.jsonl"),
        ("reward.function", "score.py:fn"),
    ).config
    assert config.model.path == "/here/models/a"
    assert config.run.dir == "/scratch/runs"
    assert config.data.source == "/home/me/rows.jsonl"
    assert config.reward.function == "/here/score.py:fn"
    assert load(("reward.function", "pkg.mod:fn")).config.reward.function == "pkg.mod:fn"
    assert load().config.data.source == "reasoning_gym:chain_sum"


@given(st.sampled_from(sorted(schema.settings())), st.text(max_size=30))
def test_any_text_is_taken_or_refused_with_one_line(key: str, text: str) -> None:
    try:
        load((key, text))
    except ConfigError as error:
        assert error.where
        assert error.remedy


def test_every_misspelt_key_finds_its_way_home() -> None:
    for name in schema.settings():
        table, _, last = name.rpartition(".")
        if len(last) > 4:
            misspelt = f"{table}.{last[0]}{last[2]}{last[1]}{last[3:]}"
            if misspelt not in schema.settings():
                assert schema.nearest(misspelt) == f"did you mean {name}?"
