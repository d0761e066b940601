"""``nereus simulate``: a job on simulated slots leaves a run folder that every other command reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nereus.cli import execute
from nereus.sim.trace import Failure, Supply, Trace, write_trace

JOB = Path(__file__).parents[2] / "launchers" / "simulated" / "grpo_8b.toml"
SMALL = [
    *("--cluster.slots", "16", "--run.steps", "4", "--train.layout", "d2t2p2", "--rollout.layout", "d4t2p1"),
    *("--train.groups-per-step", "8", "--rollout.group-size", "4"),
]


def _simulate(folder: Path, *words: str) -> int:
    return execute(["simulate", str(JOB), "--run-dir", str(folder), "--json", *SMALL, *words])


def test_a_run_is_simulated_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    write_trace(Trace("loss", "test", failures=(Failure(60.0, 9, "kill"),)), tmp_path / "loss.json")
    assert _simulate(folder, "--trace", str(tmp_path / "loss.json"), "--seed", "3") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["policy"], told["trace"], told["seed"], told["summary"]["steps"]) == ("nereus", "loss", 3, 4)
    assert told["summary"]["lost"] == 1
    assert execute(["explain", str(folder)]) == 0
    assert "slot-9" in capsys.readouterr().out
    assert execute(["replay", str(folder)]) == 0
    assert "all are reproduced" in capsys.readouterr().out
    assert execute(["status", str(folder)]) == 0
    assert "finished" in capsys.readouterr().out


def test_equal_words_leave_equal_journals_and_metrics(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        assert _simulate(tmp_path / name / "run", "--seed", "5") == 0
    for file in ("journal.jsonl", "metrics.jsonl"):
        one, two = ((tmp_path / name / "run" / file).read_bytes() for name in ("one", "two"))
        assert one == two


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--trace", "nothing-of-the-kind"], "there is no trace"),
        (["--cluster.profile", ""], "cluster.profile"),
        (["--trace", "MORE"], "cluster has 16"),
        (["--model.path", "llama-9.9-1b"], "there is no model profile"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], what: str
) -> None:
    write_trace(Trace("more", "test", supply=(Supply(0.0, 64),)), tmp_path / "more.json")
    words = [str(tmp_path / "more.json") if word == "MORE" else word for word in words]
    assert _simulate(tmp_path / "run", *words) == 2
    assert what in capsys.readouterr().err
