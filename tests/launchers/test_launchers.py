"""The job files and reward functions that are shipped: each job loads, and names files that are there."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from nereus.config import JobConfig
from nereus.core.plan import Replication

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "launchers").glob("*.toml"))
RECIPES = sorted((ROOT / "launchers" / "recipes").glob("*.toml"))

Reward = Callable[..., list[float]]


def reward(name: str, file: str = "launchers/rewards/arithmetic.py") -> Reward:
    spec = importlib.util.spec_from_file_location(Path(file).stem, ROOT / file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Reward = getattr(module, name)
    return function


def test_there_are_jobs() -> None:
    assert {"adaptive_quickstart.toml", "grpo_quickstart.toml", "grpo_smollm2.toml"} <= {path.name for path in JOBS}


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_job_loads_and_its_parts_exist(path: Path) -> None:
    job = msgspec.toml.decode(path.read_bytes(), type=JobConfig)
    needed = Replication.parse(job.rollout.layout).slots + Replication.parse(job.train.layout).slots
    assert needed <= job.cluster.slots
    assert bool(job.model.path) != bool(job.model.recipe)
    if job.model.recipe:
        assert (ROOT / job.model.recipe).is_file()
    file, _, function = job.reward.function.partition(":")
    assert file.endswith(".py")
    assert callable(reward(function, file))
    if not job.data.source.startswith("reasoning_gym:"):
        assert (ROOT / job.data.source).is_file()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_does_not_train_on_the_rows_of_its_job(path: Path) -> None:
    """A reasoning-gym row is a function of seed + row number, so the ranges must not meet; files must differ."""
    phase = tomllib.loads(path.read_text())["supervised"]
    if not phase["source"].startswith("reasoning_gym:"):
        assert (ROOT / phase["source"]).is_file()
        jobs = [msgspec.toml.decode(job.read_bytes(), type=JobConfig) for job in JOBS]
        assert phase["source"] not in {job.data.source for job in jobs}
        return
    first = phase["seed"]
    last = first + phase["rows"] + phase.get("held_out_rows", 256)
    for job_path in JOBS:
        job = msgspec.toml.decode(job_path.read_bytes(), type=JobConfig)
        if job.model.recipe and Path(job.model.recipe).name == path.name:
            assert job.data.seed + job.data.rows < first or job.data.seed > last
            assert job.data.source == phase["source"]


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("15 12", 1.0),
        ("12", 1.0),
        ("12 15", 0.05 + 0.1 / 4),
        ("15 13", 0.05 + 0.1 / 2),
        ("-12", 0.05 + 0.1 / 25),
        ("", 0.0),
        (" - ", 0.0),
        ("9" * 400, 0.05),
    ],
)
def test_the_last_number_counts(completion: str, score: float) -> None:
    assert reward("last_number")([completion], ["12"], prompts=[""]) == pytest.approx([score])


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("12", 1.0),
        ("12.", 1.0),
        (" 12\n", 1.0),
        ("12.0", 1.0),
        ("The answer is 12.", 0.5),
        ("7 + 5 = 12", 0.5),
        ("13", 0.1),
        ("I say 13", 0.05),
        ("1,012", 0.05 + 0.1 / 1001),
        ("twelve", 0.0),
        ("", 0.0),
    ],
)
def test_the_only_number_counts_and_bare_counts_double(completion: str, score: float) -> None:
    assert reward("only_number")([completion], ["12"]) == pytest.approx([score])
