"""Do the modules exist that the slots of a job are said to import?"""

from __future__ import annotations

import importlib.util

import pytest

from nereus.actors.slot import LATE, TEXT, modules_for
from nereus.config import JobConfig


def test_a_fork_server_is_told_modules_that_exist() -> None:
    pytest.importorskip("transformers")
    modules = modules_for(JobConfig())
    assert TEXT in modules
    assert set(LATE) < set(modules)
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []
