"""Does every source file keep the house rules that a linter does not know?"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nereus"
SOURCES = sorted(PACKAGE.rglob("*.py"))

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

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}


@functools.cache
def named(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes that name something that can be bad, found once for all rules."""
    kinds = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Name, ast.keyword)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def unsafe(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, what) for everything that would run code found in data, or a shell."""
    for node in named(tree):
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


def environment(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, what) wherever the process environment is read."""
    for node in named(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=attr) if attr in ENVIRONMENT:
                yield node.lineno, f"os.{attr}"
            case ast.ImportFrom(module="os", names=names):
                yield from ((node.lineno, f"os.{name.name}") for name in names if name.name in ENVIRONMENT)


@functools.cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def complaints(file: Path, found: Iterator[tuple[int, str]]) -> list[str]:
    return [f"{file.relative_to(ROOT)}:{line} uses {what}" for line, what in found]


def test_no_code_is_ever_run_from_data() -> None:
    found = [line for file in SOURCES for line in complaints(file, unsafe(parse(file)))]
    assert not found, "\n".join(found)


def test_only_the_configuration_reads_the_environment() -> None:
    allowed = {PACKAGE / "config.py", *(PACKAGE / "configuration").rglob("*.py")}
    found = [line for file in SOURCES if file not in allowed for line in complaints(file, environment(parse(file)))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.shared_memory",
        "from torch import multiprocessing",
        "x = eval('1')",
        "f = exec",
        "torch.load('x')",
        "from torch import load",
        "socket.recv_pyobj()",
        "dist.all_gather_object(a, b)",
        "np.load(f, allow_pickle=True)",
        "subprocess.run('ls', shell=True)",
    ],
)
def test_the_rule_against_code_in_data_sees(code: str) -> None:
    assert list(unsafe(ast.parse(code)))


@pytest.mark.parametrize(
    "code", ["model.eval()", "re.compile('x')", "json.load(f)", "safetensors.torch.load_file(f)", "np.load(f)"]
)
def test_the_rule_against_code_in_data_lets_pass(code: str) -> None:
    assert not list(unsafe(ast.parse(code)))


@pytest.mark.parametrize("code", ["os.environ['X']", "from os import getenv", "x = {**os.environ}"])
def test_the_rule_on_the_environment_sees(code: str) -> None:
    assert list(environment(ast.parse(code)))


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_module_says_which_question_it_answers(file: Path) -> None:
    if file.name == "__init__.py":
        assert file.read_bytes() == b"", "packages hold no code: import from the module that owns the name"
        return
    first = (ast.get_docstring(parse(file)) or "").split("\n")[0]
    assert "?" in first, f"the docstring of {file.relative_to(ROOT)} must begin with the question it answers: {first!r}"


def test_no_module_has_a_name_that_says_nothing() -> None:
    found = [file for file in PACKAGE.rglob("*") if file.stem.lower() in FORBIDDEN_NAMES]
    assert not found, found


def test_annotations_are_never_evaluated_at_import() -> None:
    for file in SOURCES:
        tree = parse(file)
        annotated = any(
            isinstance(node, ast.AnnAssign | ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(tree)
        )
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
        assert imports or not annotated, f"{file.relative_to(ROOT)} lacks the annotations import"


# Written in pieces so that this file does not match itself.
PRIVATE = re.compile(
    "|".join(
        (
            r"(?<![\w.])/work/" + r"(main|shared)",
            r"/(home|Users)/" + r"(?!me/|user/)[a-z]\w+/",
            r"(?<!\w)/root/" + r"\w",
            "pypi" + r"\.org",
            "python" + r"hosted\.org",
            "download" + r"\.pytorch\.org",
            "file:///" + "opt",
            r"-{5}BEGIN [A-Z ]*PRIVATE " + "KEY",
        )
    )
)


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=60)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.decode().split("\0") if name]


def test_no_file_names_a_machine_a_registry_or_a_secret() -> None:
    found: list[str] = []
    for file in tracked():
        if file.is_file() and file.stat().st_size < 1 << 20:
            for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
                if match := PRIVATE.search(line):
                    found.append(f"{file.relative_to(ROOT)}:{number} holds {match[0]!r}")
    assert not found, "\n".join(found)


def test_test_files_have_distinct_names() -> None:
    names: dict[str, Path] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        assert file.name not in names, f"{file} and {names[file.name]} have the same name"
        names[file.name] = file
