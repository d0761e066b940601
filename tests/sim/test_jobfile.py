"""Files that describe synchronous jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus.core.workflow import Algorithm
from nereus.errors import ConfigError
from nereus.sim.jobfile import synchronous_job

LAUNCHERS = Path(__file__).parents[2] / "launchers" / "simulated"


def test_the_launcher_is_a_synchronous_job_and_others_are_none() -> None:
    job = synchronous_job([LAUNCHERS / "ppo_8b.toml"])
    assert job is not None
    assert (job.algorithm, job.cluster.size, job.steps) == (Algorithm.PPO, 32, 25)
    assert synchronous_job([LAUNCHERS / "grpo_8b.toml"]) is None
    assert synchronous_job([Path("nowhere.toml")]) is None


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("slotz = 3", "slotz"),
        ("steps = 0", "steps"),
        ('algorithm = "dpo"', "dpo"),
        ('model = "llama-9.9-1b"', "llama-9.9-1b"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(tmp_path: Path, line: str, what: str) -> None:
    lines = {"model": 'model = "llama-3.1-8b"', "cluster": 'cluster = "a100-64g-256"', "slots": "slots = 8"}
    lines[line.partition(" ")[0]] = line
    path = tmp_path / "job.toml"
    path.write_text("[synchronous]\n" + "\n".join(lines.values()))
    with pytest.raises(ConfigError, match=what):
        synchronous_job([path])
