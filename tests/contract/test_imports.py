"""Does each layer load only what it may?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.facts import facts

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nereus"

PURE = ("core", "transition", "algo", "control")
IMPURE_MODULES = {
    "asyncio",
    "datetime",
    "logging",
    "multiprocessing",
    "os",
    "random",
    "secrets",
    "socket",
    "structlog",
    "subprocess",
    "threading",
    "time",
    "torch",
    "transformers",
    "zmq",
}
DEVICE = ("torch", "transformers", "vllm", "tensorflow")


def modules(*parts: str) -> list[str]:
    """Return the names of all modules below the given parts of the package."""
    found: list[str] = []
    for part in parts:
        path = PACKAGE / part
        files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")] if part else []
        for file in files:
            if file.exists():
                name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
                found.append(name.removesuffix(".__init__"))
    return sorted(found)


def assert_not_loaded(loading: list[str], forbidden: tuple[str, ...]) -> None:
    """Import the modules in a fresh interpreter and look at what came along."""
    code = (
        "import importlib, sys\n"
        f"for name in {loading!r}: importlib.import_module(name)\n"
        f"print(sorted(set(sys.modules) & set({forbidden!r})))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", f"importing {loading} also loads {done.stdout.strip()}"


def test_values_and_decisions_load_no_device_and_no_socket_library() -> None:
    loading = modules("core", "transition", "algo", "control", "bus/messages", "bus/endpoint", "errors")
    assert "nereus.core.plan" in loading and "nereus.bus.messages" in loading
    assert_not_loaded(loading, (*DEVICE, "zmq", "asyncio", "socket", "structlog", "rich"))


def test_configuration_loads_no_device_and_no_socket_library() -> None:
    assert_not_loaded(["nereus.config", *modules("configuration")], (*DEVICE, "zmq"))


def test_runtime_actors_and_command_line_load_no_device_library() -> None:
    loading = [*modules("runtime", "actors", "sim", "bus", "cli"), "nereus.backends.api"]
    assert_not_loaded(loading, (*DEVICE, "matplotlib", "tensorboard"))


@pytest.mark.parametrize("layer", PURE)
def test_pure_layers_name_no_impure_module_even_lazily(layer: str) -> None:
    for file in sorted((PACKAGE / layer).rglob("*.py")):
        found = facts(file).imported & IMPURE_MODULES
        assert not found, f"{file.relative_to(ROOT)} imports {sorted(found)}"


def test_device_libraries_are_named_in_backends_only() -> None:
    for file in sorted(PACKAGE.rglob("*.py")):
        if "backends" not in file.parts:
            found = facts(file).imported & set(DEVICE)
            assert not found, f"{file.relative_to(ROOT)} imports {sorted(found)}"


@pytest.mark.deep
def test_import_contracts_hold() -> None:
    pytest.importorskip("importlinter")
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
