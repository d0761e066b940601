"""Are operators' functions found, told apart and called as their authors expect, whatever they do?"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus.actors.reasoning_task import extract_answer
from nereus.actors.reward_function import Judgement, RewardFunction, load_reward
from nereus.config import DataConfig
from nereus.errors import ConfigError

FILE = DataConfig(source="rows.jsonl")
COLUMNS = {"answer": "4", "ground_truth": "4", "data_source": "sums", "extra_info": {"k": 1}}


def judge(function: Any, completions: tuple[str, ...] = ("4", "5"), prompt: Any = "2+2", **columns: Any) -> Judgement:
    reward = RewardFunction(function, "f")
    try:
        return reward.judge(prompt, completions, {**COLUMNS, **columns})
    finally:
        reward.close()


def test_trl_signature_gets_named_columns_as_lists() -> None:
    def f(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
        assert prompts == ["2+2", "2+2"] and answer == ["4", "4"]
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    assert judge(f) == Judgement((1.0, 0.0))


def test_trl_keywords_get_every_column() -> None:
    def f(completions: list[str], **columns: list[Any]) -> list[float]:
        assert sorted(columns) == ["answer", "data_source", "extra_info", "ground_truth", "prompts"]
        return [len(columns["answer"])] * len(completions)

    assert judge(f).rewards == (2.0, 2.0)


def test_chat_prompts_get_chat_completions() -> None:
    def f(completions: list[list[dict[str, str]]]) -> list[float]:
        assert completions[0] == [{"role": "assistant", "content": "4"}]
        return [1, 0]

    assert judge(f, prompt=[{"role": "user", "content": "2+2"}]).rewards == (1.0, 0.0)


def test_verl_signature() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        assert data_source == "sums" and extra_info == {"k": 1}
        right = solution_str == ground_truth
        return {"score": 1.0, "acc": True} if right else 0

    assert judge(compute_score) == Judgement((1.0, 0.0))


def test_async_functions() -> None:
    barrier = asyncio.Barrier(2)  # only opens if both run at once

    async def trl(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [1.0, 2.0]

    async def verl(solution_str: str) -> float:
        async with asyncio.timeout(10):
            await barrier.wait()
        return float(solution_str)

    assert judge(trl).rewards == (1.0, 2.0)
    assert judge(verl).rewards == (4.0, 5.0)


def test_plain_functions_may_run_their_own_event_loop() -> None:
    async def inner() -> list[float]:
        return [1.0, 0.0]

    assert judge(lambda completions: asyncio.run(inner())).rewards == (1.0, 0.0)


def test_none_is_an_answer_not_a_failure() -> None:
    assert judge(lambda completions: [None, 1]) == Judgement((None, 1.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e31, 10**400, "1", b"1", [], {}, object(), 1j])
def test_what_is_not_a_number_is_invalid(bad: Any) -> None:
    found = judge(lambda completions: [bad, 1])
    assert (found.rewards, found.failed, found.failures) == ((None, 1.0), (0,), {"invalid": 1})
    assert "not a finite number" in found.message


@pytest.mark.parametrize("good", [True, np.float32(1), np.array(1.0), np.int64(1)])
def test_number_types(good: Any) -> None:
    assert judge(lambda completions: [good, 0]).rewards == (1.0, 0.0)
    assert judge(lambda completions: np.array([1, 0])).rewards == (1.0, 0.0)


def test_wrong_count_fails_the_group() -> None:
    found = judge(lambda completions: [1])
    assert found.failed == (0, 1) and "returned 1 rewards for 2 completions" in found.message
    found = judge(lambda completions: iter(int, 1))  # never ends
    assert found.failures == {"invalid": 1} and "more rewards for 2" in found.message


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "error", [ValueError("no\nway"), SystemExit(3), KeyboardInterrupt(), RecursionError(), Unspeakable()]
)
def test_whatever_is_raised_is_counted(error: BaseException) -> None:
    def trl(completions: list[str]) -> list[float]:
        raise error

    async def late(completions: list[str]) -> list[float]:
        raise error

    def verl(solution_str: str) -> float:
        if solution_str == "5":
            raise error
        return 1.0

    for function in (trl, late):
        found = judge(function)
        assert (found.rewards, found.failed, found.failures) == ((None, None), (0, 1), {"error": 1})
        assert type(error).__name__ in found.message and "\n" not in found.message
    assert judge(verl).rewards == (1.0, None)
    assert judge(lambda completions: 3).failures == {"error": 1}


def write(folder: Path, text: str, name: str = "my_reward.py") -> Path:
    (folder / name).write_text(text)
    return folder


GOOD = "def score(completions, answer, **rest):\n    return [0.5] * len(completions)\n"


def test_files_and_modules_are_found(tmp_path: Path) -> None:
    write(tmp_path, "VALUE = 0.25\n", "neighbour_of_reward.py")
    write(tmp_path, "import neighbour_of_reward\ndef score(completions):\n    return [neighbour_of_reward.VALUE]\n")
    assert load_reward("my_reward.py:score", FILE, tmp_path).judge("p", ["c"], {}).rewards == (0.25,)
    write(tmp_path, GOOD, "reward_as_module.py")
    assert load_reward("reward_as_module:score", FILE, tmp_path).judge("p", ["c"], {"answer": 1}).rewards == (0.5,)


@pytest.mark.parametrize(
    ("function", "text", "message"),
    [
        ("my_reword.py:score", GOOD, r"there is no file .*did you mean my_reward\.py\?"),
        ("my_reward.py:scor", GOOD, "has no function 'scor'; did you mean score"),
        ("my_reward.py", GOOD, "names no function"),
        ("my_reward.py:", GOOD, "names no function"),
        ("no_such_package.rewards:score", GOOD, "ModuleNotFoundError: No module named 'no_such_package'"),
        ("my_reward.py:score", "def score(:", r"SyntaxError.*my_reward\.py"),
        ("my_reward.py:score", "import no_such_package", r"No module named 'no_such_package' \(my_reward\.py:1\)"),
        ("my_reward.py:score", "raise SystemExit(3)", r"SystemExit: 3 \(my_reward\.py:1\)"),
        ("my_reward.py:score", "score = 3", "has no function 'score'"),
        ("my_reward.py:score", "def score(queries, labels): ...", "takes neither completions"),
        ("my_reward.py:score", "def score(completions, completion_ids): ...", "requires completion_ids"),
        ("", GOOD, "only reasoning_gym data has a scorer"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, function: str, text: str, message: str) -> None:
    write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_reward(function, FILE, tmp_path)
    assert caught.value.where == "reward.function" and "\n" not in str(caught.value)


def test_missing_columns_are_named_before_anything_runs() -> None:
    def f(completions: list[str], solution: list[str], answer: list[str], extra: Any = None) -> list[float]:
        return []

    with pytest.raises(ConfigError, match="needs 'solution', which no row has; the columns are answer, level"):
        RewardFunction(f, "f").check_columns(["answer", "level"])
    RewardFunction(f, "f").check_columns(["answer", "solution"])


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (" 12\n", "12"),
        ("so <answer> 12 </answer> it is", "12"),
        ("<answer>1</answer> no: <answer>2</answer>", "2"),
        ("cut off <answer>12", "12"),
        ("", ""),
    ],
)
def test_answers_are_extracted(completion: str, answer: str) -> None:
    assert extract_answer(completion) == answer


@pytest.mark.parametrize("task", ["chain_sum", "graph_color", "knights_knaves"])
def test_tasks_score_their_own_answers(task: str) -> None:
    """Also where the metadata has tuples or integer keys, which JSON would lose."""
    pytest.importorskip("reasoning_gym")
    from nereus.runtime.dataset import open_dataset

    data = DataConfig(source=f"reasoning_gym:{task}", rows=5, seed=2)
    dataset = open_dataset(data)
    reward = load_reward("", data, Path())
    reward.check_columns(dataset.row(0).columns)
    row = dataset.row(3)
    answer = row.columns["answer"] or json.dumps(row.columns["metadata"]["possible_answer"])
    found = reward.judge(row.prompt, [answer, f"<answer>{answer}</answer>", "nonsense"], row.columns)
    assert found.failures == {} and found.rewards[:2] == (1.0, 1.0) and found.rewards[2] < 1.0  # type: ignore[operator]
    assert reward.judge("another question", ["1"], row.columns).failures == {"error": 1}
