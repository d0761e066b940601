"""Which keys does a job description have, and what may each hold?

The structs of ``nereus.config`` are the only source: this module walks them and gives every leaf its dotted key. Keys
are written with underscores here; hyphens are accepted wherever an operator types one.
"""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from nereus.config import JobConfig

_KINDS = {str: "text", bool: "true or false", int: "a whole number", float: "a number", list: "a list", dict: "a table"}


class Key(Struct, frozen=True):
    """One setting: its dotted name, its type (with bounds) and its default."""

    name: str
    type: Any
    default: Any

    @property
    def bare_type(self) -> Any:
        """The type without its bounds."""
        return get_args(self.type)[0] if get_origin(self.type) is Annotated else self.type

    @property
    def is_bool(self) -> bool:
        return self.bare_type is bool

    @property
    def is_free_table(self) -> bool:
        """True for a table whose own keys are free, such as ``data.options``."""
        return get_origin(self.bare_type) is dict

    @property
    def expected(self) -> str:
        """What a valid value is, in words."""
        bare = self.bare_type
        if get_origin(bare) is Literal:
            return "one of " + ", ".join(repr(choice) for choice in get_args(bare))
        words = _KINDS[get_origin(bare) or bare]
        if get_origin(bare) is list:
            words += " of " + _KINDS[get_args(bare)[0]]
        bounds = [meta for meta in get_args(self.type)[1:] if isinstance(meta, Meta)]
        return " ".join([words, *(part for meta in bounds for part in _bounds(meta))])


def _bounds(meta: Meta) -> Iterator[str]:
    limits = [(">", meta.gt), (">=", meta.ge), ("<", meta.lt), ("<=", meta.le)]
    given = [f"{sign} {limit:g}" for sign, limit in limits if limit is not None]
    if given:
        yield " and ".join(given)


def default_of(field: msgspec.structs.FieldInfo) -> Any:
    """Return a field's default; every field of the job description has one."""
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def struct_of(kind: Any) -> type[Struct] | None:
    """Return ``kind`` if it is a configuration table, else None."""
    return kind if isinstance(kind, type) and issubclass(kind, Struct) else None


def walk(table: type[Struct] = JobConfig, prefix: str = "") -> Iterator[Key]:
    """Yield every key below ``table`` in the order of the source."""
    for field in msgspec.structs.fields(table):
        name = prefix + field.encode_name
        if inner := struct_of(field.type):
            yield from walk(inner, name + ".")
        else:
            yield Key(name, field.type, default_of(field))


@functools.cache
def settings() -> types.MappingProxyType[str, Key]:
    """Return all keys by their dotted names."""
    return types.MappingProxyType({key.name: key for key in walk()})


@functools.cache
def tables() -> frozenset[str]:
    """Return the dotted names of all tables."""
    return frozenset(name.rpartition(".")[0][:end] for name in settings() for end in _ends(name.rpartition(".")[0]))


def _ends(name: str) -> Iterator[int]:
    yield from (position for position, letter in enumerate(name) if letter == ".")
    yield len(name)


def normalize(name: str) -> str:
    """Write a key as the structs do: ``train.learning-rate`` is ``train.learning_rate``. Free keys stay as they are."""
    plain = name.replace("-", "_")
    for key in settings().values():
        if key.is_free_table and plain.startswith(key.name + "."):
            return key.name + name[len(key.name) :]
    return plain


def find(name: str) -> Key | None:
    """Return the key called ``name``, or the free table it is inside."""
    if name in settings():
        return settings()[name]
    owners = (key for key in settings().values() if key.is_free_table and name.startswith(key.name + "."))
    return next(owners, None)


def nearest(name: str) -> str:
    """Return the remedy for an unknown key or table: the name that was probably meant."""
    if name in tables():
        inner = [key for key in settings() if key.startswith(name + ".")]
        return f"set one of its keys, such as {inner[0]}"
    table, _, last = name.rpartition(".")
    siblings = [key for key in [*settings(), *sorted(tables())] if key.rpartition(".")[0] == table]
    by_last = {key.rpartition(".")[2]: key for key in [*reversed(settings()), *siblings]}
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.75)
    close = close or difflib.get_close_matches(name, list(settings()), n=1, cutoff=0.85)
    close = close or [by_last[match] for match in difflib.get_close_matches(last, list(by_last), n=1, cutoff=0.75)]
    if close:
        return f"did you mean {close[0]}?"
    if siblings:
        return f"valid here: {', '.join(sorted(key.rpartition('.')[2] for key in siblings))}"
    return f"valid tables: {', '.join(sorted(tables()))}"
