"""Does every source file keep the house rules that a linter does not know?"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.contract.facts import environment, facts, named, unsafe

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nereus"
SOURCES = sorted(PACKAGE.rglob("*.py"))

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}


def complaints(file: Path, found: Iterable[tuple[int, str]]) -> list[str]:
    return [f"{file.relative_to(ROOT)}:{line} uses {what}" for line, what in found]


def test_no_code_is_ever_run_from_data() -> None:
    found = [line for file in SOURCES for line in complaints(file, facts(file).unsafe)]
    assert not found, "\n".join(found)


def test_only_the_configuration_reads_the_environment() -> None:
    allowed = {PACKAGE / "config.py", *(PACKAGE / "configuration").rglob("*.py")}
    found = [line for file in SOURCES if file not in allowed for line in complaints(file, facts(file).environment)]
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
    assert list(unsafe(named(ast.parse(code))))


@pytest.mark.parametrize(
    "code", ["model.eval()", "re.compile('x')", "json.load(f)", "safetensors.torch.load_file(f)", "np.load(f)"]
)
def test_the_rule_against_code_in_data_lets_pass(code: str) -> None:
    assert not list(unsafe(named(ast.parse(code))))


@pytest.mark.parametrize("code", ["os.environ['X']", "from os import getenv", "x = {**os.environ}"])
def test_the_rule_on_the_environment_sees(code: str) -> None:
    assert list(environment(named(ast.parse(code))))


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_module_says_which_question_it_answers(file: Path) -> None:
    if file.name == "__init__.py":
        assert file.read_bytes() == b"", "packages hold no code: import from the module that owns the name"
        return
    first = facts(file).first_line
    assert "?" in first, f"the docstring of {file.relative_to(ROOT)} must begin with the question it answers: {first!r}"


def test_no_module_has_a_name_that_says_nothing() -> None:
    found = [file for file in PACKAGE.rglob("*") if file.stem.lower() in FORBIDDEN_NAMES]
    assert not found, found


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
