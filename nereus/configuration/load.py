"""How do TOML files and dotted overrides become one job description, and where does each value come from?

Precedence: defaults < files from left to right < command line. Tables merge, lists replace. Relative paths resolve
against the current directory, not the file's folder; ``~`` and ``$NAME`` in paths are expanded.
Invariants (tests/configuration): every wrong input is a ``ConfigError`` that names the key, the file and line or the
command line, and the remedy; provenance has exactly one entry for each key.
"""

from __future__ import annotations

import contextlib
import math
import re
import string
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

import msgspec

from nereus.config import JobConfig, environment
from nereus.configuration import rules, schema
from nereus.configuration.job import COMMAND_LINE, DEFAULT, LoadedJob
from nereus.configuration.locate import KeyPath, key_lines
from nereus.configuration.render import toml_value
from nereus.errors import ConfigError

_PATH_KEYS = ("run.dir", "model.path", "model.recipe", "model.cache", "data.source", "reward.function")


def load_job(
    files: Sequence[Path],
    overrides: Sequence[tuple[str, str]] = (),
    environ: Mapping[str, str] | None = None,
    *,
    directory: Path | None = None,
) -> LoadedJob:
    """Read ``files`` in order, apply ``overrides`` (dotted key, text) and check that the values fit together.

    ``environ`` serves ``$NAME`` in paths (default: the process environment), ``directory`` is what relative paths are
    relative to (default: the current directory). Raises ``ConfigError``; reads nothing but ``files``.
    """
    values: dict[str, Any] = {}
    provenance: dict[str, str] = {}
    for path in files:
        for name, value, where in _read(path):
            _set(values, provenance, name, value, where)
    for name, text in overrides:
        name = schema.normalize(name)
        key = schema.find(name)
        if key is None:
            raise _unknown(name, COMMAND_LINE)
        _set(values, provenance, name, _parse(key, name, text), COMMAND_LINE)
    for name in _PATH_KEYS:
        text = values.get(name, schema.settings()[name].default)
        origin = provenance.get(name, DEFAULT)
        values[name] = _absolute(
            name, text, origin, environment() if environ is None else environ, directory or Path.cwd()
        )
    job = LoadedJob(
        msgspec.convert(_nested(values), JobConfig),
        {name: provenance.get(name, DEFAULT) for name in [*schema.settings(), *sorted(provenance)]},
    )
    rules.check(job)
    return job


def read_document(path: Path) -> tuple[dict[str, Any], str]:
    """Parse one TOML file; ``ConfigError`` if it is missing, unreadable or not TOML."""
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text), text
    except FileNotFoundError:
        raise ConfigError(
            "no such file", where=str(path), remedy=f"relative paths start at the current directory, {Path.cwd()}"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot be read ({error.strerror})", where=str(path), remedy="name a readable TOML file"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text ({error.reason})", where=str(path), remedy="save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        where = f"{path}:{line[1]}" if line else str(path)
        raise ConfigError(f"is not TOML: {error}", where=where, remedy="correct the syntax there") from None


def _read(path: Path) -> Iterator[tuple[str, Any, str]]:
    """Yield (key, checked value, where) for every setting of one file."""
    document, text = read_document(path)
    lines = key_lines(text)
    seen: dict[str, str] = {}
    for raw, value in _leaves(document, ()):
        where = f"{path}:{lines[raw]}"
        name = schema.normalize(".".join(raw))
        if name in seen:
            raise ConfigError(f"{name} is also set at {seen[name]}", where=where, remedy="remove one of the two")
        seen[name] = where
        key = schema.find(name)
        if key is None:
            raise _unknown(name, where)
        yield name, _checked(key, name, value, where), where


def _leaves(document: Mapping[str, Any], prefix: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the settings of a parsed file: everything that is not a table of ours, and unknown tables whole."""
    for raw, value in document.items():
        path = (*prefix, raw)
        name = schema.normalize(".".join(path))
        free = (key := schema.find(name)) is not None and key.name == name and key.is_free_table
        if isinstance(value, dict) and (free or name in schema.tables()):
            yield from _leaves(value, path)
        else:
            yield path, value


def _set(values: dict[str, Any], provenance: dict[str, str], name: str, value: Any, where: str) -> None:
    values[name] = value
    provenance[name] = where


def _unknown(name: str, where: str) -> ConfigError:
    what = f"{name} is a table, not a setting" if name in schema.tables() else f"unknown key {name}"
    return ConfigError(what, where=where, remedy=schema.nearest(name))


def _parse(key: schema.Key, name: str, text: str) -> Any:
    """Read an override's text as the key's type; text needs no quotes."""
    bare = key.bare_type
    value: Any = text
    if get_origin(bare) in (list, dict):
        if name == key.name and get_origin(bare) is dict:
            raise ConfigError(
                f"{name} is a table", where=COMMAND_LINE, remedy=f"set its keys one by one: --{name}.KEY VALUE"
            )
        value = _toml_value(text)
    elif bare is bool:
        value = {"true": True, "false": False}.get(text, text)
    elif bare in (int, float):
        with contextlib.suppress(ValueError):
            value = bare(text)
    return _checked(key, name, value, COMMAND_LINE)


def _toml_value(text: str) -> Any:
    """Read ``text`` as a TOML value; what is not one is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _checked(key: schema.Key, name: str, value: Any, where: str) -> Any:
    """Return ``value`` if it is of the key's type, inside its bounds and finite. Free keys may hold anything."""
    if name != key.name:
        return value
    try:
        checked = msgspec.convert(value, key.type)
        valid = not isinstance(checked, float) or math.isfinite(checked)
    except msgspec.ValidationError:
        valid = False
    if not valid:
        raise ConfigError(
            f"{name} must be {key.expected}, got {value!r}", where=where, remedy=f"for example {_example(key)}"
        )
    return checked


def _example(key: schema.Key) -> str:
    """Show the default as the operator would write it."""
    return f"{key.name.rpartition('.')[2]} = {toml_value(key.default)} (the default)"


def _absolute(name: str, text: str, origin: str, environ: Mapping[str, str], directory: Path) -> str:
    """Expand and resolve a path-valued setting; other forms (``reasoning_gym:NAME``, ``pkg.mod:fn``) stay."""
    path, suffix = text, ""
    if name == "reward.function":
        path, _, function = text.rpartition(":")
        suffix = f":{function}"
        if not path.endswith(".py"):
            return text
    if not path or (name == "data.source" and _is_named_source(path)):
        return text
    try:
        expanded = string.Template(path).substitute(environ)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{name} = {text!r} names an environment variable that is not set ({error})",
            where=origin,
            remedy="set it, or write $$ for a dollar sign",
        ) from None
    if expanded == "~" or expanded.startswith("~/"):
        expanded = environ.get("HOME", "~") + expanded[1:]
    return str(directory / expanded) + suffix


def _is_named_source(source: str) -> bool:
    """True for ``reasoning_gym:NAME`` and the like; a colon after a slash or a dot belongs to a path."""
    return re.match(r"[A-Za-z_]\w*:", source) is not None


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted names into tables inside tables."""
    root: dict[str, Any] = {}
    for name, value in values.items():
        key = schema.find(name)
        owner = key.name if key is not None and name != key.name else name.rpartition(".")[0]
        table = root
        for part in owner.split("."):
            table = table.setdefault(part, {})
        table[name[len(owner) + 1 :]] = value
    return root
