"""The counting job: is its data what the script writes, do its answers grow, and how is a count rewarded?"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from statistics import mean
from types import ModuleType

import msgspec
import pytest

from nereus.config import JobConfig

ROOT = Path(__file__).parents[2]
DATA = ROOT / "launchers" / "data"
JOB = ROOT / "launchers" / "adaptive_quickstart.toml"


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def job() -> JobConfig:
    return msgspec.toml.decode(JOB.read_bytes(), type=JobConfig)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return [json.loads(line) for line in (DATA / "counting.jsonl").read_text().splitlines()]


def test_the_files_are_what_the_script_writes(tmp_path: Path) -> None:
    module(DATA / "counting.py").write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in DATA.glob("*.jsonl")}
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (DATA / path.name).read_bytes()
        assert path.stat().st_size < 200_000


def test_every_answer_counts_down_from_its_prompt_to_zero(rows: list[dict[str, str]]) -> None:
    for row in rows:
        first = int(row["prompt"].removeprefix("Count down from ").removesuffix(":"))
        assert row["answer"] == " ".join(map(str, range(first, -1, -1)))


def test_answers_of_the_job_grow_and_all_steps_have_prompts(job: JobConfig, rows: list[dict[str, str]]) -> None:
    assert not job.data.shuffle
    groups, steps = job.train.groups_per_step, job.run.steps
    assert len(rows) >= groups * (steps + job.async_.staleness)
    lengths = [mean(len(row["answer"].split()) for row in rows[at : at + groups]) for at in range(0, len(rows), groups)]
    early, late = mean(lengths[:10]), mean(lengths[steps - 8 : steps])
    assert 4 <= late / early <= 8
    assert max(lengths[:20]) < 1.5 * early


def test_prompts_and_answers_fit_the_job_and_the_model(
    job: JobConfig, rows: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from nereus.backends.recipe import read_recipe
    from nereus.backends.torch.warmstart import build_tokenizer

    monkeypatch.chdir(ROOT)
    recipe = read_recipe(Path(job.model.recipe))
    tokenizer = build_tokenizer(recipe.tokenizer, recipe.model.context)
    assert len(tokenizer) % 4 == 0
    for row in rows:
        assert len(tokenizer.encode(row["prompt"])) == 3 <= job.rollout.max_prompt_tokens
        answer = len(tokenizer.encode(f" {row['answer']}"))
        assert answer == len(row["answer"].split())  # one token a number
        assert answer + 1 < job.rollout.max_new_tokens
    assert job.rollout.max_prompt_tokens + job.rollout.max_new_tokens <= recipe.model.context


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (" 3 2 1 0", 1.0),
        ("3 2 1", 0.75),
        ("3 2 2 0", 0.5),
        ("3 1 2 0", 0.25),
        ("4 3 2 1 0", 0.0),
        ("3 2 1 0 0 0 0 0", 0.5),
        ("3, 2", 0.0),
        ("", 0.0),
    ],
)
def test_a_count_is_worth_what_was_right_before_the_first_mistake(completion: str, score: float) -> None:
    counted = module(ROOT / "launchers" / "rewards" / "counting.py").counted
    assert counted([completion, completion], ["3 2 1 0"] * 2, prompts=["", ""]) == [score, score]
