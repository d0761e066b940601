"""What do all tests share? Reproducible property tests, one thread per process, no network."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

# Nothing that an import makes is garbage, and looking for some takes a third of the time that the collection takes.
gc.disable()

# Set before numpy or torch is loaded: test processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Derandomized: equal code gives equal examples, so a failure on one machine is a failure on every machine. The deadline
# is off because the machines are shared.
settings.register_profile(
    "nereus", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("nereus")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=1, help="how many random walks of plans are tried (tests/live)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "walk_seed" in metafunc.fixturenames:
        metafunc.parametrize("walk_seed", range(metafunc.config.getoption("--seeds")))


def pytest_collection_finish() -> None:
    """Take what is imported out of the garbage collector's sight, which would go through it again in every test."""
    gc.collect()
    gc.freeze()
    gc.enable()
