"""Which prompts does a run train on, and what does the reward get to know about each?

Owner: the supervisor. A data set is a fixed sequence of rows; what is visited when is the sample order's affair.

Invariants (tests/runtime/test_dataset.py): equal configuration and content give equal rows, ids and fingerprint; any
change of a row that is used changes the fingerprint; a row is whole, or refused with file and line; none is skipped.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from msgspec import Struct

from nereus.actors.reasoning_task import is_task, open_task, task_columns
from nereus.config import DataConfig
from nereus.errors import ConfigError

Prompt = str | list[dict[str, str]]

PROMPT_KEYS = ("prompt", "question", "messages")
ANSWER_KEYS = ("answer", "ground_truth", "label")
PROBE_ROWS = 8
"""Generated rows that enter a fingerprint with their contents; making all of them could take minutes."""


class Row(Struct, frozen=True):
    """One prompt. ``columns`` are JSON values."""

    id: str
    """From the content, so that it survives reordering of a file; a repeated row gets ``-1``, ``-2``, ..."""
    prompt: Prompt
    """A string, or chat messages with ``role`` and ``content``."""
    columns: dict[str, Any]
    """The row's other columns; the answer also stands under ``answer`` and ``ground_truth``, whatever its key was."""


class Dataset:
    """Rows by position."""

    def __init__(self, size: int, row: Callable[[int], Row], *, fingerprint: str, description: str) -> None:
        self._size = size
        self._row = row
        self.fingerprint = fingerprint
        """xxh3-64 of the contents, 16 hexadecimal digits."""
        self.description = description
        """One line for the operator: source, rows, and which keys were taken."""

    def __len__(self) -> int:
        return self._size

    def row(self, index: int) -> Row:
        """Return row ``index``; ``IndexError`` outside the data set."""
        if not 0 <= index < self._size:
            raise IndexError(f"row {index} of {self._size}")
        return self._row(index)


def open_dataset(config: DataConfig, base: Path = Path()) -> Dataset:
    """Open what ``[data]`` describes; a relative file is looked for below ``base``.

    ``ConfigError`` names the key, or the file and line, that is wrong.
    """
    if is_task(config):
        return _open_task(config)
    return _open_file(config, base / config.source)


# Generated tasks


def _open_task(config: DataConfig) -> Dataset:
    task = open_task(config)

    @functools.lru_cache(maxsize=1024)
    def row(index: int) -> Row:
        entry = task[index]
        columns = task_columns(config, index, entry)
        return Row(f"{config.source}:{config.seed}:{index}", entry["question"], columns)

    version = importlib.metadata.version("reasoning_gym")
    what = msgspec.json.encode(
        [config.source, version, config.seed, config.rows, config.options], order="deterministic"
    )
    probes = [_canonical(row(index)) for index in range(min(PROBE_ROWS, config.rows))]
    fingerprint = _hash([what, *probes])
    return Dataset(
        config.rows,
        row,
        fingerprint=fingerprint,
        description=f"data: {config.source}, {config.rows} rows (prompt from question, with answer), {fingerprint}",
    )


# Files


def _open_file(config: DataConfig, path: Path) -> Dataset:
    if config.options:
        raise ConfigError("options are for reasoning_gym sources", where="data.options", remedy="remove them")
    rows: list[Row] = []
    seen: Counter[str] = Counter()
    reader: _Reader | None = None
    for number, line in _lines(path):
        where = f"{path}:{number}"
        columns = _decode(line, where)
        if reader is None:
            reader = _Reader(config, columns, where)
        row = reader.read(columns, where)
        repeats = seen[row.id]
        seen[row.id] += 1
        rows.append(msgspec.structs.replace(row, id=f"{row.id}-{repeats}") if repeats else row)
        if len(rows) == config.rows:
            break
    if reader is None:
        raise ConfigError(
            f"{path} holds no rows", where="data.source", remedy="give a file with one JSON object per line"
        )
    fingerprint = _hash(map(_canonical, rows))
    return Dataset(
        len(rows),
        rows.__getitem__,
        fingerprint=fingerprint,
        description=f"data: {path}, {len(rows)} rows ({reader.description}), {fingerprint}",
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            number = 0
            try:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield number, line
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"not UTF-8 ({error.reason})", where=f"{path}:{number + 1}", remedy="save the file as UTF-8"
                ) from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", where="data.source", remedy=_nearby(path)) from None


def _nearby(path: Path) -> str:
    """Say which file may have been meant."""
    siblings = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return f"did you mean {near[0]}?" if near else "give a JSONL file, or reasoning_gym:NAME"


def _decode(line: str, where: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"not JSON ({error})", where=where, remedy="put one JSON object on each line") from None
    if not isinstance(value, dict):
        raise ConfigError(
            f"a {type(value).__name__}, not an object", where=where, remedy="put one JSON object on each line"
        )
    return value


class _Reader:
    """Reads rows by the keys that the configuration names or that the first row has."""

    def __init__(self, config: DataConfig, first: dict[str, Any], where: str) -> None:
        self._first = where
        self._prompt_key = config.prompt_key or next((key for key in PROMPT_KEYS if key in first), "")
        if not self._prompt_key:
            raise ConfigError(
                f"no prompt: the row has {', '.join(first) or 'no keys'}",
                where=where,
                remedy=f"name the column by data.prompt_key, or use one of {', '.join(PROMPT_KEYS)}",
            )
        self._answer_key = config.answer_key or next((key for key in ANSWER_KEYS if key in first), "")
        nested = first.get("reward_model")
        self._nested = not self._answer_key and isinstance(nested, dict) and "ground_truth" in nested
        answer = "reward_model.ground_truth" if self._nested else self._answer_key
        self.description = f"prompt from {self._prompt_key}, " + (f"answer from {answer}" if answer else "no answer")

    def read(self, columns: dict[str, Any], where: str) -> Row:
        """Turn one decoded line into a row."""
        if self._prompt_key not in columns:
            raise self._missing(self._prompt_key, "data.prompt_key", where)
        identity = xxhash.xxh3_64_hexdigest(msgspec.json.encode(columns, order="deterministic"))
        prompt = _prompt(columns.pop(self._prompt_key), f"{where}, {self._prompt_key}")
        answer = None
        if self._nested:
            nested = columns.get("reward_model")
            if not isinstance(nested, dict) or "ground_truth" not in nested:
                raise self._missing("reward_model.ground_truth", "data.answer_key", where)
            answer = nested["ground_truth"]
        elif self._answer_key:
            if self._answer_key not in columns:
                raise self._missing(self._answer_key, "data.answer_key", where)
            answer = columns[self._answer_key]
        if self._nested or self._answer_key:
            columns.setdefault("answer", answer)
            columns.setdefault("ground_truth", answer)
        return Row(identity, prompt, columns)

    def _missing(self, key: str, option: str, where: str) -> ConfigError:
        return ConfigError(
            f"no {key}", where=where, remedy=f"add it as in {self._first}, or set {option} to another column"
        )


def _prompt(value: Any, where: str) -> Prompt:
    """Check a prompt: text, or chat messages that leave something to say."""
    if isinstance(value, str) and value.strip():
        return value
    if not isinstance(value, list) or not value:
        raise ConfigError("not a prompt", where=where, remedy="give text, or a list of messages with role and content")
    for message in value:
        texts = isinstance(message, dict) and message.keys() >= {"role", "content"}
        if not texts or not all(isinstance(text, str) for text in message.values()):
            raise ConfigError("not a message", where=where, remedy="give each message a role and a content, both text")
    if value[-1]["role"] == "assistant":
        raise ConfigError(
            "the last message is the assistant's, so nothing is left to complete", where=where, remedy="remove it"
        )
    return value


def _canonical(row: Row) -> bytes:
    return msgspec.json.encode(row, order="deterministic")


def _hash(parts: Any) -> str:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()
