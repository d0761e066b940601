"""What an operator sees who asks for the impossible: one line, exit code 2, before any model is built."""

from __future__ import annotations

import socket

import pytest
from jobs import Job

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]


def _refused(job: Job, *words: str) -> str:
    code, output = job.run(*words, timeout_s=120)
    lines = [line for line in output.splitlines() if line.startswith("nereus: ")]
    complaints = [line for line in lines if not line.startswith(("nereus: note: ", "nereus: changed "))]
    assert code == 2, output
    assert len(complaints) == 1, output
    assert "making the model" not in output
    return complaints[0]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--train.learning_rat", "1"), "train.learning_rate"),
        (("--train.learning_rate", "fast"), "train.learning_rate"),
        (("--train.layout", "d1t4p1", "--cluster.slots", "8"), "4"),
        (("--data.source", "/nowhere/rows.jsonl"), "/nowhere/rows.jsonl"),
        (("--reward.function", "/nowhere/reward.py:score"), "/nowhere/reward.py"),
        (("--model.recipe", "/nowhere/recipe.toml"), "/nowhere/recipe.toml"),
    ],
)
def test_a_wrong_job_is_refused_in_one_line(job: Job, words: tuple[str, ...], what: str) -> None:
    assert what in _refused(job, *words)


def test_a_port_that_is_taken_is_named(job: Job) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        complaint = _refused(job, "--bus.port", str(port))
    assert str(port) in complaint and "bus.port" in complaint


def test_a_secret_that_others_can_read_is_refused(job: Job) -> None:
    code, output = job.run("--run.steps", "1", "--checkpoint.every", "1")
    assert code == 0, output
    key = job.folder / "keys" / "supervisor.key"
    key.chmod(0o644)
    complaint = _refused(job, "--run.steps", "2", "--resume")
    assert "supervisor.key" in complaint and "600" in complaint
