"""How is an operator's plain Python function found, understood and called?

Owner: a reward process (``reward_child.py``); the operator's code is imported nowhere else.

Two signatures are understood, told apart by their parameters, each sync or async:

* TRL: ``f(prompts, completions, **columns) -> list[float | None]``, called once for a group. A column arrives as a list
  with one value per completion; only columns that the function names are passed, unless it takes ``**kwargs``. For
  chat prompts a completion is ``[{"role": "assistant", "content": text}]``, else it is the text.
* verl: ``compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float``, called for each completion
  (if async, for all at once); a dictionary with ``score`` is taken too.

Invariants (tests/actors/test_reward_function.py): whatever the function raises or returns becomes rewards and counted
failures; a value counts as a reward only if it is a finite number of reasonable size.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import importlib.util
import inspect
import itertools
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec import Struct

from nereus.actors.reasoning_task import is_task, task_scorer
from nereus.config import DataConfig
from nereus.errors import ConfigError

WHERE = "reward.function"
LIMIT = 1e30
"""Beyond this magnitude a number is no reward: its square would overflow float64 statistics."""
MESSAGE_CHARACTERS = 2000
TRL_ARGUMENTS = ("prompts", "completions")
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


class Judgement(Struct, frozen=True):
    """What a call came to: one reward per completion; None where there is none.

    ``failed`` lists the completions whose None is a failure rather than the function's word; ``failures`` counts by
    kind: ``error`` (raised) and ``invalid`` (not a number). ``message`` tells about the first one.
    """

    rewards: tuple[float | None, ...]
    failed: tuple[int, ...] = ()
    failures: dict[str, int] = {}
    message: str = ""


class _Raised(Struct, frozen=True):
    """The outcome of a call that raised."""

    message: str


_ANYTHING = (Exception, SystemExit, KeyboardInterrupt)
"""What the operator's code may raise without ending its process."""


class RewardFunction:
    """A function with a known signature."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        """Inspect ``function``; ``ConfigError`` if it has neither signature."""
        self.name = name
        self._function = function
        self._runner = asyncio.Runner()
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            raise _refused(f"{name} is not a function with a readable signature") from None
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._names = {p.name for p in named}
        self._required = {p.name for p in named if p.default is p.empty}
        self._per_completion = "solution_str" in self._names
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters) or not self._names & {"completions", "solution_str"}:
            raise _refused(
                f"{name}{inspect.signature(function)} takes neither completions (TRL) nor solution_str (verl)"
            )
        if "completion_ids" in self._required:
            raise _refused(f"{name} requires completion_ids, but rewards are given text; give the parameter a default")

    def check_columns(self, columns: Iterable[str]) -> None:
        """Refuse a function that requires a column which the data does not have."""
        known = {"data_source", "ground_truth", "extra_info"} if self._per_completion else set(columns)
        for name in sorted(self._required - {*TRL_ARGUMENTS, "solution_str"} - known):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the columns are {', '.join(sorted(known))}"
            raise ConfigError(f"{self.name} needs {name!r}, which no row has", where=WHERE, remedy=hint)

    def judge(self, prompt: Any, completions: Sequence[str], columns: Mapping[str, Any]) -> Judgement:
        """Score the completions of one prompt; never raises what the function raises."""
        count = len(completions)
        if self._per_completion:
            outcomes = self._settle([self._call(self._own_arguments(text, columns)) for text in completions])
            return _joined([self._read(_score_of(outcome)) for outcome in outcomes])
        (outcome,) = self._settle([self._call(self._group_arguments(prompt, completions, columns))])
        if isinstance(outcome, _Raised):
            return _failure("error", count, outcome.message)
        try:
            values = list(itertools.islice(outcome, count + 1))
        except _ANYTHING as error:
            return _failure("error", count, _explain(error))
        if len(values) != count:
            many = str(len(values)) if len(values) < count else "more"
            return _failure("invalid", count, f"{self.name} returned {many} rewards for {count} completions")
        return _joined([self._read(value) for value in values])

    def close(self) -> None:
        """Close the event loop that asynchronous functions ran on."""
        self._runner.close()

    def _call(self, arguments: dict[str, Any]) -> Any:
        try:
            return self._function(**arguments)
        except _ANYTHING as error:
            return _Raised(_explain(error))

    def _settle(self, outcomes: list[Any]) -> list[Any]:
        """Wait for the outcomes that are awaitable, all at once.

        Plain functions are called outside any event loop, so they may use ``asyncio.run`` themselves.
        """

        async def wait(outcome: Any) -> Any:
            try:
                return await outcome
            except _ANYTHING as error:
                return _Raised(_explain(error))

        async def all_of(pending: list[int]) -> list[Any]:
            return await asyncio.gather(*(wait(outcomes[index]) for index in pending))

        pending = [index for index, outcome in enumerate(outcomes) if inspect.isawaitable(outcome)]
        if pending:
            for index, settled in zip(pending, self._runner.run(all_of(pending)), strict=True):
                outcomes[index] = settled
        return outcomes

    def _own_arguments(self, completion: str, columns: Mapping[str, Any]) -> dict[str, Any]:
        arguments = {
            "data_source": columns.get("data_source", ""),
            "solution_str": completion,
            "ground_truth": columns.get("ground_truth"),
            "extra_info": columns.get("extra_info"),
        }
        return self._accepted(arguments)

    def _group_arguments(self, prompt: Any, completions: Sequence[str], columns: Mapping[str, Any]) -> dict[str, Any]:
        chat = not isinstance(prompt, str)
        said = [[{"role": "assistant", "content": text}] if chat else text for text in completions]
        repeated = {name: [value] * len(said) for name, value in columns.items()}
        return self._accepted({**repeated, "prompts": [prompt] * len(said), "completions": said})

    def _accepted(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Leave out what the function does not take."""
        return arguments if self._takes_any else {k: v for k, v in arguments.items() if k in self._names}

    def _read(self, value: Any) -> Judgement:
        """Turn one returned value into a reward."""
        if isinstance(value, _Raised):
            return _failure("error", 1, value.message)
        if value is None:
            return Judgement((None,))
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            number = math.nan
        if not abs(number) <= LIMIT:  # also refuses NaN
            return _failure("invalid", 1, f"{self.name} returned {_shown(value)}, which is not a finite number")
        return Judgement((number,))


def load_reward(function: str, data: DataConfig, base: Path) -> RewardFunction:
    """Import ``file.py:fn`` (relative to ``base``) or ``pkg.mod:fn``; empty means the reasoning-gym task's own scorer.

    ``ConfigError`` when it cannot be found, imported or called.
    """
    if not function:
        if not is_task(data):
            raise ConfigError(
                "empty, but only reasoning_gym data has a scorer of its own",
                where=WHERE,
                remedy="name a function as file.py:fn or pkg.mod:fn",
            )
        return RewardFunction(task_scorer(data), f"{data.source} scorer")
    place, colon, name = function.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ConfigError(f"{function!r} names no function", where=WHERE, remedy="write file.py:fn or pkg.mod:fn")
    module = _import_file(base / place) if place.endswith(".py") else _import_module(place, base)
    found = getattr(module, name, None)
    if not callable(found):
        near = difflib.get_close_matches(name, [n for n, v in vars(module).items() if callable(v)], n=1)
        hint = f"did you mean {near[0]}?" if near else "define it there"
        raise ConfigError(f"{place} has no function {name!r}", where=WHERE, remedy=hint)
    return RewardFunction(found, function)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        siblings = [item.name for item in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f"did you mean {near[0]}?" if near else "give the path of a Python file, relative to where you start"
        raise ConfigError(f"there is no file {path}", where=WHERE, remedy=hint)
    sys.path.insert(0, str(path.resolve().parent))  # so that it can import its neighbours
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise _refused(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    return _guarded(str(path), lambda: (spec.loader.exec_module(module), module)[1])  # type: ignore[union-attr]


def _import_module(name: str, base: Path) -> ModuleType:
    sys.path.insert(0, str(base.resolve()))
    return _guarded(name, lambda: importlib.import_module(name))


def _guarded(what: str, run: Callable[[], ModuleType]) -> ModuleType:
    """Import, and turn whatever the operator's code raises into a ``ConfigError``."""
    try:
        return run()
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the operator's code may raise anything)
        raise ConfigError(
            f"importing {what} failed: {_explain(error)}", where=WHERE, remedy="correct it, or install what it imports"
        ) from None


def _refused(what: str) -> ConfigError:
    return ConfigError(what, where=WHERE, remedy="use f(prompts, completions, **kwargs) or compute_score(...) of verl")


def _joined(parts: Sequence[Judgement]) -> Judgement:
    """Put judgements of single completions together."""
    failures: dict[str, int] = {}
    for part in parts:
        for kind, count in part.failures.items():
            failures[kind] = failures.get(kind, 0) + count
    return Judgement(
        tuple(part.rewards[0] for part in parts),
        tuple(index for index, part in enumerate(parts) if part.failed),
        failures,
        next((part.message for part in parts if part.message), ""),
    )


def _score_of(outcome: Any) -> Any:
    """Return the score of what a verl function returned."""
    return outcome["score"] if isinstance(outcome, dict) and "score" in outcome else outcome


def _failure(kind: str, count: int, message: str) -> Judgement:
    return Judgement((None,) * count, tuple(range(count)), {kind: 1}, message[:MESSAGE_CHARACTERS])


def _explain(error: BaseException) -> str:
    """Say what was raised and in which line, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 (the operator's exception may not even have a text)
        text = "without a readable message"
    return f"{type(error).__name__}: {' '.join(text.split())}"[: MESSAGE_CHARACTERS - 100] + where


def _shown(value: Any) -> str:
    if isinstance(value, str | bytes | int | float):
        return repr(value[:80] if isinstance(value, str | bytes) else value)[:80]
    return f"a {type(value).__name__}"
