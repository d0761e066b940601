"""What does every setting mean? The configuration reference, made from the source of ``nereus/config.py``.

Invariant (tests/configuration/test_reference.py): ``docs/configuration.md`` is what ``reference`` returns.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

import msgspec
from msgspec import Struct

import nereus.config
from nereus.config import JobConfig
from nereus.configuration import schema
from nereus.configuration.render import toml_value

_HEAD = """\
# Configuration reference

Made by `nereus config reference` from `nereus/config.py`; do not edit.

A job is one or more TOML files and dotted overrides: `nereus run JOB.toml --train.learning-rate 3e-4`. Later wins:
defaults, files from left to right, command line. Tables merge, lists replace. Hyphens and underscores are the same.
Relative paths start at the current directory; `~` and `$NAME` are expanded in paths. A setting that is unknown, has the
wrong type, contradicts another one or would have no effect is refused before anything starts (exit code 2).
"""


def reference() -> str:
    """Return the reference of all keys as Markdown."""
    docs = _documentation()
    return "\n".join([_HEAD, *_table(JobConfig, "", docs)]).rstrip() + "\n"


def _table(table: type[Struct], name: str, docs: dict[str, dict[str, str]]) -> Iterator[str]:
    fields = msgspec.structs.fields(table)
    leaves = [field for field in fields if schema.struct_of(field.type) is None]
    if leaves:
        yield f"## `[{name}]`\n"
        _, _, about = docs[table.__name__][""].partition(":")
        if about.strip():
            yield about.strip()[:1].upper() + about.strip()[1:] + "\n"
        yield "| key | default | expects | meaning |\n|---|---|---|---|"
        for field in leaves:
            key = schema.settings()[f"{name}.{field.encode_name}"]
            meaning = docs[table.__name__].get(field.name, "")
            cells = (f"`{field.encode_name}`", f"`{toml_value(key.default)}`", key.expected, meaning)
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""
    for field in fields:
        if inner := schema.struct_of(field.type):
            yield from _table(inner, f"{name}.{field.encode_name}".lstrip("."), docs)


def _documentation() -> dict[str, dict[str, str]]:
    """Return class name -> field name -> documentation; the class's own is under the empty name."""
    tree = ast.parse(inspect.getsource(nereus.config))
    return {node.name: _fields(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _fields(node: ast.ClassDef) -> dict[str, str]:
    docs = {"": _flat(ast.get_docstring(node) or "")}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = _flat(text)
    return docs


def _flat(text: str) -> str:
    """Join lines and turn the double backquotes of docstrings into Markdown's single ones."""
    return " ".join(text.split()).replace("``", "`")
