"""Do the pins, the package description, the make targets and the README agree?"""

from __future__ import annotations

import configparser
import re
import subprocess
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def pins() -> dict[str, str]:
    lines = (line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def requirements(*extras: str) -> list[Requirement]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    texts = [setup["options"]["install_requires"], *(setup["options.extras_require"][extra] for extra in extras)]
    return [Requirement(line) for text in texts for line in text.splitlines() if line.strip()]


def test_everything_that_is_installed_is_pinned_to_a_release_that_fits() -> None:
    pinned = pins()
    for requirement in requirements("train", "test", "gguf"):
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"{name} has no pin in constraints.txt"
        assert requirement.specifier.contains(pinned[name]), f"{name}=={pinned[name]} does not fit {requirement}"


def test_pins_are_exact_sorted_and_leave_device_libraries_to_torch() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines == sorted(lines, key=lambda line: line.split("==")[0])
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line), line
        assert not line.startswith(("nvidia", "cuda", "triton")), line


def test_make_installs_the_pinned_torch_first() -> None:
    torch = pins()["torch"]
    assert f"torch=={torch}" in (ROOT / "Makefile").read_text()


def test_ci_runs_the_commands_of_the_readme() -> None:
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", readme, re.DOTALL)
    assert "make run\n" in blocks[0] or blocks[0].startswith("make run")
    assert any(block.strip().startswith("make test") for block in blocks)
    assert re.search(r"^make test$", ci, re.MULTILINE)
    assert "set -euo pipefail" in ci


def test_documents_name_only_files_that_exist() -> None:
    for document in ("README.md", "ARCHITECTURE.md", "ASSUMPTIONS.md", "GLOSSARY.md"):
        text = (ROOT / document).read_text()
        named = re.findall(r"`((?:tests|launchers|benchmarks|nereus)/[\w./-]+)`|\]\((\w[\w./-]+)\)", text)
        for name in ("".join(pair) for pair in named):
            assert (ROOT / name).exists(), f"{document} names {name}, which does not exist"


def test_invariants_name_tests_that_exist() -> None:
    for file in sorted((ROOT / "nereus").rglob("*.py")):
        for name in re.findall(r"tests/[\w/]+\.py", file.read_text()):
            assert (ROOT / name).exists(), f"{file.relative_to(ROOT)} names {name}, which does not exist"


def test_make_targets_exist() -> None:
    for target in ("run", "test", "fast", "live", "lint", "bench"):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
