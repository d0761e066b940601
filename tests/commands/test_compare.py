"""``nereus compare``: several policies on one job and trace, as a table, a picture, a page and JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nereus.cli import execute
from nereus.commands.comparison import picture
from nereus.commands.comparison.table import as_text, rows
from nereus.sim.comparison import Band, RunResult, Switch, standings
from nereus.sim.trace import StepSupply, Trace, write_trace

JOB = Path(__file__).parents[2] / "launchers" / "simulated" / "grpo_8b.toml"
SMALL = [
    *("--cluster.slots", "16", "--run.steps", "3", "--train.layout", "d1t2p2", "--rollout.layout", "d2t2p1"),
    *("--train.groups-per-step", "8", "--rollout.group-size", "4", "--rollout.max-new-tokens", "1024"),
]


def _compare(folder: Path, *words: str) -> int:
    return execute(["compare", str(JOB), "--out", str(folder), *SMALL, *words])


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    write_trace(Trace("more", "test", step_supply=(StepSupply(0, 8), StepSupply(1, 16))), folder / "more.json")
    for name in ("one", "two"):
        assert _compare(folder / name, "--trace", str(folder / "more.json"), "--policies", "given,nereus") == 0
    return folder


def _figures(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "comparison.json").read_text())
    return found


@pytest.mark.deep
def test_equal_words_give_equal_figures(compared: Path) -> None:
    one, two = (_figures(compared / name) for name in ("one", "two"))
    assert (one["policies"], one["runs"]) == (two["policies"], two["runs"])
    assert [row["policy"] for row in one["policies"]] == ["given", "nereus"]
    assert one["policies"][0]["relative"] == 1
    for run in one["runs"]:
        assert len(run["latency_s"]) == 3
        assert run["bands"][-1]["end_s"] >= sum(run["latency_s"])


@pytest.mark.deep
def test_the_page_says_what_the_figures_say_and_needs_nothing_from_outside(compared: Path) -> None:
    page = (compared / "one" / "comparison.html").read_text()
    for row in _figures(compared / "one")["policies"]:
        assert f"{row['step_s']:,.2f}" in page
        assert row["source"] in page
    assert not re.search(r"(src|href)=\"(?!#)", page)
    assert not re.search(r"url\((?!#)|@import|<script|<link", page)
    assert (compared / "one" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (compared / "one" / "comparison.svg").read_text().startswith("<svg")


def test_each_run_can_be_explained(compared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["explain", str(compared / "one" / "nereus-0")]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--policies", "nereid"], "no policy is called nereid"),
        (["--policies", "given,given"], "given is named twice"),
        (["--policies", ","], "no policy is named"),
        (["--seeds", "0"], "--seeds"),
        (["--trace", "nothing-of-the-kind"], "there is no trace"),
        (["--trace", "paper-growth"], "comes to 1024 slots, the cluster has 16"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], what: str
) -> None:
    assert _compare(tmp_path / "out", *words) == 2
    said = capsys.readouterr().err
    assert what in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_missing_job_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["compare", "nowhere.toml"]) == 2
    assert "nowhere.toml: no such file" in capsys.readouterr().err


def _result(policy: str, seed: int, *latency_s: float) -> RunResult:
    switch = Switch(step=1, at_s=12.0, seconds=2.0, before="a", after="b", why="better")
    bands = (Band(0.0, 10.0, "a"), Band(12.0, sum(latency_s), "b"))
    return RunResult(policy=policy, seed=seed, latency_s=latency_s, bands=bands, switches=(switch,))


def test_a_column_without_a_figure_is_left_out() -> None:
    table = standings([_result("nereus", 0, 10.0, 12.0), _result("given", 0, 20.0, 24.0)], {})
    head, body = rows(table)
    assert "staleness" not in head
    assert "gap to the oracle" not in head
    assert dict(zip(head, body[1], strict=True))["relative"] == "2.000"
    assert as_text(table).count("\n") == 2


def test_nothing_is_drawn_without_a_step() -> None:
    assert picture.svg([_result("nereus", 0)]) == ""
    assert picture.svg([_result("nereus", 0, 10.0, 12.0)]).startswith("<svg")
