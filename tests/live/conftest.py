"""Fixtures of the live tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from jobs import Job


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model cache that all live tests of a session share."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def job(tmp_path: Path, cache: Path) -> Job:
    return Job(tmp_path, cache)
