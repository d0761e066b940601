"""On which line of a TOML file does each key stand?

``tomllib`` keeps no positions, so the text is cut into statements: a statement is the shortest run of lines, from where
the last one ended, that ``tomllib`` accepts. Invariant: every key of the parsed document has a line.
"""

from __future__ import annotations

import tomllib
from typing import Any

KeyPath = tuple[str, ...]


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the 1-based line of every table and key of ``text``, which must be valid TOML.

    Keys inside an inline table or an array of tables have the line on which their statement begins.
    """
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    pending: list[str] = []
    first = 1
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        if not pending:
            first = number
        pending.append(line)
        try:
            parsed = tomllib.loads("\n".join(pending))
        except tomllib.TOMLDecodeError:
            continue
        pending = []
        paths = list(_paths(parsed))
        if line.lstrip().startswith("[") and first == number:
            table = paths[-1]
            paths = [table[:depth] for depth in range(1, len(table) + 1)]
        else:
            paths = [table + path for path in paths]
        for path in paths:
            lines.setdefault(path, first)
    return lines


def _paths(value: Any) -> list[KeyPath]:
    """Return the paths of all keys in ``value``, outer ones first."""
    if isinstance(value, list):
        return [path for item in value for path in _paths(item)]
    if not isinstance(value, dict):
        return []
    found: list[KeyPath] = []
    for key, inner in value.items():
        found.append((key,))
        found += [(key, *path) for path in _paths(inner)]
    return found
