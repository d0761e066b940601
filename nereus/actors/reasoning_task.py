"""Which reasoning-gym task does ``[data]`` name, and how is an answer to it scored?

Owner: the data set (prompts) and the reward processes (scores) open the same task from the same configuration, so both
see the same entries: entry i depends on the seed and i alone. reasoning_gym is imported only when a job uses it.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from nereus.config import DataConfig
from nereus.errors import ConfigError

PREFIX = "reasoning_gym:"


class Task(Protocol):
    """A procedural data set of reasoning_gym."""

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


def is_task(data: DataConfig) -> bool:
    """Tell whether the data source is a reasoning-gym task."""
    return data.source.startswith(PREFIX)


def open_task(data: DataConfig) -> Task:
    """Create the task that ``data.source`` names; ``ConfigError`` on an unknown name or option or a bad value."""
    name = data.source.removeprefix(PREFIX)
    try:
        factory = importlib.import_module("reasoning_gym.factory")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed",
            where="data.source",
            remedy="pip install 'nereus[train]' or use a JSONL file",
        ) from None
    if name not in factory.DATASETS:
        raise ConfigError(
            f"reasoning_gym has no task {name!r}",
            where="data.source",
            remedy=_nearest(name, factory.DATASETS, "see reasoning_gym's gallery for the names"),
        )
    known = [key for key in inspect.signature(factory.DATASETS[name][1]).parameters if key not in ("seed", "size")]
    for key in data.options:
        if key not in known:
            remedy = "set data.seed and data.rows" if key in ("seed", "size") else _nearest(key, known, "remove it")
            raise ConfigError(f"task {name} has no option {key!r}", where=f"data.options.{key}", remedy=remedy)
    try:
        return cast(Task, factory.create_dataset(name, size=data.rows, seed=data.seed, **data.options))
    except (AssertionError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"task {name} refuses its options: {error}", where="data.options", remedy="correct the value"
        ) from error


def task_columns(data: DataConfig, index: int, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the reward function gets to know of an entry, as JSON values.

    The metadata loses what JSON cannot say (tuples become lists, keys become strings), which is why the task's own
    scorer goes by ``task_index`` and looks at the entry itself.
    """
    plain = json.loads(json.dumps({"answer": entry["answer"], "metadata": entry["metadata"]}, default=str))
    return {
        "data_source": data.source,
        "task_index": index,
        "answer": plain["answer"],
        "ground_truth": plain["answer"],
        "metadata": plain["metadata"],
    }


def extract_answer(completion: str) -> str:
    """Return what a completion answers: the text of its last ``<answer>`` tag, closed or not; without one, all of it.

    White space around the answer is stripped.
    """
    _, tag, rest = completion.rpartition("<answer>")
    return (rest.partition("</answer>")[0] if tag else completion).strip()


def task_scorer(data: DataConfig) -> Callable[..., list[float]]:
    """Return the task's own scorer as a reward function."""
    task = open_task(data)

    def score(prompts: list[str], completions: list[str], task_index: list[int]) -> list[float]:
        entry = task[task_index[0]]  # one group has one prompt
        if entry["question"] != prompts[0]:
            raise ValueError(f"entry {task_index[0]} of {data.source} asks something else here than in the data set")
        return [task.score_answer(extract_answer(completion), entry) for completion in completions]

    return score


def _nearest(name: str, known: Any, otherwise: str) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else otherwise
