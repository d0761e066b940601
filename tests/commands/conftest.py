"""Plans that several command tests look at, each made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus.commands.plan import make_report
from nereus.commands.planfile import PlanReport, to_json
from nereus.commands.question import Options

BASE = Options("llama-3.1-8b", "a100-64g", slots=32, algorithm="ppo", lengths="2048")
LARGER = Options("llama-3.1-8b", "a100-64g", slots=64, algorithm="ppo", lengths="2048")


@pytest.fixture(scope="session")
def ppo32() -> PlanReport:
    return make_report(BASE)


@pytest.fixture(scope="session")
def ppo64() -> PlanReport:
    return make_report(LARGER)


@pytest.fixture(scope="session")
def files(ppo32: PlanReport, ppo64: PlanReport, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("plans")
    small, large = folder / "p32.json", folder / "p64.json"
    small.write_bytes(to_json(ppo32))
    large.write_bytes(to_json(ppo64))
    return small, large
