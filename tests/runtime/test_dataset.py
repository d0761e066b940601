"""Are rows read whole, named keys found and said, and wrong files refused with file and line?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nereus.config import DataConfig
from nereus.errors import ConfigError
from nereus.runtime.dataset import open_dataset


def write(folder: Path, *rows: Any) -> DataConfig:
    path = folder / "data.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return DataConfig(source=str(path))


@pytest.mark.parametrize("prompt_key", ["prompt", "question", "messages"])
@pytest.mark.parametrize("answer_key", ["answer", "ground_truth", "label"])
def test_keys_are_found_and_said(tmp_path: Path, prompt_key: str, answer_key: str) -> None:
    prompt = [{"role": "user", "content": "1+1"}] if prompt_key == "messages" else "1+1"
    data = open_dataset(write(tmp_path, {prompt_key: prompt, answer_key: "2", "extra": [1]}))
    assert len(data) == 1
    assert data.row(0).prompt == prompt
    assert data.row(0).columns == {answer_key: "2", "answer": "2", "ground_truth": "2", "extra": [1]}
    assert f"prompt from {prompt_key}, answer from {answer_key}" in data.description


def test_named_keys_win(tmp_path: Path) -> None:
    config = write(tmp_path, {"prompt": "no", "task": "yes", "answer": "no", "key": 7})
    data = open_dataset(msgspec.structs.replace(config, prompt_key="task", answer_key="key"))
    assert data.row(0).prompt == "yes"
    assert data.row(0).columns["ground_truth"] == 7


def test_verl_rows(tmp_path: Path) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "?"}],
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train"},
    }
    data = open_dataset(write(tmp_path, row))
    columns = data.row(0).columns
    assert (columns["ground_truth"], columns["data_source"], columns["extra_info"]) == (
        "72",
        "openai/gsm8k",
        {"split": "train"},
    )
    assert "answer from reward_model.ground_truth" in data.description


def test_ids_are_stable_and_unique(tmp_path: Path) -> None:
    a, b = {"prompt": "a"}, {"prompt": "b"}
    data = open_dataset(write(tmp_path, a, b, "", a))
    ids = [data.row(i).id for i in range(3)]
    assert ids[2] == f"{ids[0]}-1" and len(set(ids)) == 3
    other = open_dataset(write(tmp_path, b, a))
    assert [other.row(i).id for i in range(2)] == [ids[1], ids[0]]


def test_fingerprint_follows_contents(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
    before = open_dataset(write(tmp_path, *rows)).fingerprint
    assert len(before) == 16
    assert open_dataset(write(tmp_path, *rows)).fingerprint == before
    rows[1]["answer"] = 3
    assert open_dataset(write(tmp_path, *rows)).fingerprint != before
    assert open_dataset(write(tmp_path, *reversed(rows))).fingerprint != before


def test_rows_are_limited(tmp_path: Path) -> None:
    config = write(tmp_path, {"prompt": "a"}, {"prompt": "b"}, "{broken")
    assert len(open_dataset(msgspec.structs.replace(config, rows=2))) == 2
    with pytest.raises(IndexError):
        open_dataset(msgspec.structs.replace(config, rows=2)).row(2)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "not JSON"),
        ("[1]", "a list, not an object"),
        ("[" * 100_000, "not JSON"),
        ({"answer": 1}, "no prompt"),
        ({"prompt": "x"}, "no answer"),
        ({"prompt": "", "answer": 1}, "not a prompt"),
        ({"prompt": 5, "answer": 1}, "not a prompt"),
        ({"prompt": ["hi"], "answer": 1}, "not a message"),
        ({"prompt": [{"role": "user", "content": None}], "answer": 1}, "not a message"),
        ({"prompt": [{"role": "assistant", "content": "done"}], "answer": 1}, "nothing is left to complete"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, row: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.jsonl:3") as caught:
        open_dataset(write(tmp_path, {"prompt": "x", "answer": 1}, "", row))
    assert problem in caught.value.what and caught.value.remedy


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(ConfigError, match="UTF-8"):
        open_dataset(DataConfig(source=str(path)))


def test_missing_and_empty_files(tmp_path: Path) -> None:
    config = write(tmp_path, "")
    with pytest.raises(ConfigError, match="holds no rows"):
        open_dataset(config)
    with pytest.raises(ConfigError, match=r"data\.source: cannot read .*did you mean data\.jsonl\?"):
        open_dataset(DataConfig(source="dota.jsonl"), tmp_path)
    with pytest.raises(ConfigError, match=r"data\.options"):
        open_dataset(msgspec.structs.replace(config, options={"a": 1}))


def test_first_row_without_prompt_lists_its_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.jsonl:1: no prompt: the row has text, answer; name the column"):
        open_dataset(write(tmp_path, {"text": "a", "answer": 1}))


@pytest.fixture(scope="module")
def gym() -> None:
    pytest.importorskip("reasoning_gym")


@pytest.mark.usefixtures("gym")
def test_reasoning_gym_rows_depend_on_seed_and_index_alone() -> None:
    config = DataConfig(source="reasoning_gym:chain_sum", rows=50, seed=3, options={"max_terms": 3})
    data, again = open_dataset(config), open_dataset(config)
    assert len(data) == 50
    assert again.row(49) == data.row(49)
    row = data.row(7)
    assert row.columns["task_index"] == 7 and row.columns["ground_truth"] == row.columns["answer"]
    msgspec.json.encode(row)
    assert data.fingerprint == again.fingerprint
    for change in ({"seed": 4}, {"rows": 51}, {"options": {"max_terms": 4}}):
        assert open_dataset(msgspec.structs.replace(config, **change)).fingerprint != data.fingerprint


@pytest.mark.usefixtures("gym")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(source="reasoning_gym:chain_sun"), r"no task 'chain_sun'; did you mean chain_sum"),
        (DataConfig(options={"max_term": 3}), r"data\.options\.max_term: .*did you mean max_terms"),
        (DataConfig(options={"seed": 3}), r"set data\.seed and data\.rows"),
        (DataConfig(options={"min_terms": -1}), "refuses its options: min_terms must be positive"),
    ],
)
def test_wrong_tasks_are_refused(config: DataConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_dataset(config)
