"""The paper's figures, and ours beside them."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from nereus.cli import execute
from nereus.configuration.load import load_job
from nereus.sim.evaluation.drift import drift_job
from nereus.sim.evaluation.figures import PAPER, Figure, Section, paper, paper_figures
from nereus.sim.evaluation.jobs import base_job
from nereus.sim.evaluation.long_run import enlarged, shortened
from nereus.sim.evaluation.sections import SECTIONS, Measured, document
from nereus.sim.jobfile import synchronous_job
from nereus.sim.storm import storm, storm_job
from nereus.sim.trace import load_trace

pytestmark = pytest.mark.deep

JOB = Path(__file__).parents[2] / "launchers" / "simulated" / "grpo_8b.toml"


def test_a_figure_of_the_paper_is_found_once_or_refused() -> None:
    assert paper("doubling", "nereus", "time", " 4->8") == 2.45
    assert len(paper_figures()) == sum(1 for _ in csv.DictReader(PAPER.read_text().splitlines()))
    with pytest.raises(ValueError, match="4 figures"):
        paper("doubling", "nereus", "time")
    with pytest.raises(ValueError, match="0 figures"):
        paper("doubling", "nereid", "time")


def test_the_job_of_the_evaluation_is_the_launcher_s() -> None:
    ours, theirs = base_job(), load_job([JOB]).config
    for part in ("cluster", "rollout", "train", "async_", "adapt"):
        assert getattr(ours, part) == getattr(theirs, part), part
    assert (ours.model.path, ours.model.dtype) == (Path(theirs.model.path).name, theirs.model.dtype)


def test_a_cheap_section_becomes_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "docs" / "evaluation.md"
    assert execute(["compare", "--paper", "--quick", "--only", "coordination,doubling", "--out", str(place)]) == 0
    text = place.read_text()
    assert text.index("## 5 Doubling") < text.index("## 6 Coordination")
    row = next(line for line in text.splitlines() if line.startswith("| tenplex, 8 to 16 slots"))
    assert row.split(" | ")[1:5] == ["51.7", "51.7", "s", "1"]
    assert "`nereus compare --paper --only doubling --quick`" in row
    assert "Not measured for this document: `drift`, `throughput`, " in text
    capsys.readouterr()
    assert execute(["compare", "--paper", "--only", "doubling"]) == 0
    assert capsys.readouterr().out.count("\n| ") > 20


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--paper", "--only", "dribbling"], "no section dribbling"),
        (["--paper", str(JOB)], "takes no job"),
        ([str(JOB), "--quick"], "belong to --paper"),
    ],
)
def test_wrong_words_are_refused_in_one_line(words: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["compare", *words]) == 2
    said = capsys.readouterr().err
    assert what in said
    assert said.count("\n") == 1


def test_what_is_not_known_is_a_dash_and_bars_do_not_break_the_table() -> None:
    section = Section(title="A title", figures=(Figure(what="a | b", ours=1.5, unit="s"),))
    text = document([Measured("drift", section, 0.0, True)], when="today", machine="this one")
    assert "| a / b | – | 1.5 | s | – | `nereus compare --paper --only drift --quick` |  |" in text
    assert math.isnan(section.figures[0].ratio)
    assert set(SECTIONS) >= {"drift", "throughput", "async", "optimum", "storms"}


def test_the_drift_job_is_the_launcher_s() -> None:
    assert drift_job() == synchronous_job([JOB.with_name("ppo_8b.toml")])


def test_a_shortened_trace_goes_the_same_way() -> None:
    trace = load_trace("paper-growth")
    short = shortened(trace, 20)
    assert len(short.steps) == 50
    assert [one.slots for one in short.step_supply] == [32, 64, 128, 256, 512, 1024]
    assert short.lengths_at(0) == trace.lengths_at(0)
    large = enlarged(short, 4)
    assert [one.slots for one in large.step_supply] == [128, 256, 512, 1024, 2048, 4096]
    assert (large.steps, large.step_supply[3].at_step) == (short.steps, short.step_supply[3].at_step)


def test_equal_storms_go_equally_and_can_be_ended_early() -> None:
    config = storm_job(16, 4)
    one = storm(config, 1, 100.0)
    assert one == storm(config, 1, 100.0)
    assert (one.wrong, one.steps) == ("", 4)
    early = storm(config, 1, 100.0, until_s=one.virtual_s / 2)
    assert early.wrong == ""
    assert early.steps < 4
    assert early.virtual_s == pytest.approx(one.virtual_s / 2)


@pytest.mark.deep
def test_groups_that_a_former_leader_was_still_finishing_are_done_again() -> None:
    """In this storm two units become one, and what the second one's leader had left is lost with the new unit."""
    struck = storm(storm_job(32, 8), 85, 200.0)
    assert (struck.wrong, struck.steps) == ("", 8)
