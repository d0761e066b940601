"""What does a source file say that the house rules are about?"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

UNSAFE_MODULES = {
    "_pickle",
    "cloudpickle",
    "cPickle",
    "dill",
    "joblib",
    "marshal",
    "multiprocessing",
    "pickle",
    "shelve",
}
"""They turn bytes into objects by running code that the bytes choose (multiprocessing pickles its arguments)."""

UNSAFE_BUILTINS = {"eval", "exec", "__import__"}

UNSAFE_METHODS = {
    "recv_pyobj",
    "send_pyobj",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
"""Sockets and collectives that pickle what they carry."""

UNSAFE_CALLS = {("torch", "load"), ("torch", "save"), ("yaml", "load"), ("np", "save"), ("os", "system")}

ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv"}


@dataclass(frozen=True)
class Facts:
    """Of one file; what stands at a line is a pair (line, what)."""

    first_line: str
    """Of the docstring."""
    unsafe: list[tuple[int, str]]
    environment: list[tuple[int, str]]
    imported: frozenset[str]


@functools.cache
def facts(file: Path) -> Facts:
    """Read one file; its tree, which is large, is not kept."""
    with _no_collections():
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
        nodes = named(tree)
        first_line = (ast.get_docstring(tree) or "").split("\n")[0]
        return Facts(first_line, list(unsafe(nodes)), list(environment(nodes)), frozenset(imported(nodes)))


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Spare the garbage collector the look at trees that are all alive: it takes most of the time otherwise."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def named(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes that name something that can be bad."""
    kinds = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Name, ast.keyword)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the top-level name of every absolute import, also of lazy ones."""
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from (name.name.split(".")[0] for name in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.split(".")[0]


def unsafe(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, what) for everything that would run code found in data, or a shell."""
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, name.name) for name in names if name.name.split(".")[0] in UNSAFE_MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                if module.split(".")[0] in UNSAFE_MODULES or module.startswith("torch.multiprocessing"):
                    yield node.lineno, module
                yield from (
                    (node.lineno, f"{module}.{name.name}")
                    for name in names
                    if (module, name.name) in UNSAFE_CALLS or name.name in UNSAFE_METHODS | {"multiprocessing"}
                )
            case ast.Attribute(attr=attr) if attr in UNSAFE_METHODS:
                yield node.lineno, attr
            case ast.Attribute(value=ast.Name(id=owner), attr=attr) if (owner, attr) in UNSAFE_CALLS:
                yield node.lineno, f"{owner}.{attr}"
            case ast.Name(id=name) if name in UNSAFE_BUILTINS:
                yield node.lineno, name
            case ast.keyword(arg="allow_pickle" | "shell", value=ast.Constant(value=True)):
                yield node.value.lineno, f"{node.arg}=True"


def environment(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, what) wherever the process environment is read."""
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=attr) if attr in ENVIRONMENT:
                yield node.lineno, f"os.{attr}"
            case ast.ImportFrom(module="os", names=names):
                yield from ((node.lineno, f"os.{name.name}") for name in names if name.name in ENVIRONMENT)
