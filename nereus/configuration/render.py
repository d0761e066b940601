"""How is a job description written back as TOML, and how does an operator see where its values come from?

Invariant (tests/configuration/test_render.py): what ``to_toml`` writes loads to the same job.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from nereus.configuration import schema
from nereus.configuration.job import LoadedJob


def toml_value(value: Any) -> str:
    """Write one TOML value on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_key(key)} = {toml_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, int | float):
        return repr(value)
    return str(value.isoformat())


def toml_key(key: str) -> str:
    """Write one key, quoted where it must be."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def setting(job: LoadedJob, name: str) -> Any:
    """Return the value of a key, such as ``train.loss.clip_low``."""
    value = msgspec.to_builtins(job.config)
    for part in name.split("."):
        value = value[part]
    return value


def to_toml(job: LoadedJob, *, provenance: bool = False) -> str:
    """Write the whole job description; ``provenance`` adds where each value that is not a default comes from."""
    lines: list[str] = []
    table = ""
    for key in schema.settings().values():
        owner, _, name = key.name.rpartition(".")
        if owner != table:
            lines += ["", f"[{owner}]"] if lines else [f"[{owner}]"]
            table = owner
        line = f"{name} = {toml_value(setting(job, key.name))}"
        origins = dict.fromkeys(job.provenance[inner] for inner in _inside(job, key) if job.is_set(inner))
        lines.append(f"{line}  # {', '.join(origins)}" if provenance and origins else line)
    return "\n".join(lines) + "\n"


def _inside(job: LoadedJob, key: schema.Key) -> list[str]:
    """Return the names with provenance that make up the value of ``key``."""
    return [name for name in job.provenance if name == key.name or (key.is_free_table and schema.find(name) == key)]


def why(job: LoadedJob, name: str) -> str:
    """Explain one key: its value, where that comes from, its default and what it may hold."""
    key = schema.settings()[name]
    origins = {inner: job.provenance[inner] for inner in _inside(job, key) if job.is_set(inner)}
    source = ", ".join(f"{inner} from {origin}" if inner != name else origin for inner, origin in origins.items())
    return (
        f"{name} = {toml_value(setting(job, name))}\n"
        f"  from:    {source or 'default'}\n"
        f"  default: {toml_value(key.default)}\n"
        f"  expects: {key.expected}\n"
    )
