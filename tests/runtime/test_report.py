"""Do the report and the summary tell what the files of a run say?"""

from __future__ import annotations

import html.parser
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from stories import Story

from nereus.bus.messages import GroupRef
from nereus.runtime.curves import plots
from nereus.runtime.folder import RunFolder, State
from nereus.runtime.journal import Compared, Journal, Progress, Reissued, RunStarted, Trained, WorkerGone
from nereus.runtime.metrics import MetricsWriter
from nereus.runtime.report import read_samples, write_report
from nereus.runtime.summary import summarize, time_parts, time_split

NASTY = "<script>alert(1)</script>\n\x1b[2J & \u202e"


def row(step: int, **extra: float) -> dict[str, float]:
    return {
        "step": step,
        "wall_s": 2.0 * step,
        "reward/mean": step / 100,
        "reward/std": 0.1,
        "response_length/mean": 20.0 - step / 10,
        "staleness/mean": 0.5,
        "staleness/max": float(step % 2),
        "timing_s/step": 2.0,
        "timing_s/wait_for_batch": 0.5,
        "timing_s/train": 1.5,
        "timing_s/forward_backward": 1.0,
        "timing_s/generate": 9.0,
        "perf/tokens": 1000.0,
        "perf/tokens_per_s": 500.0,
        "optim/grad_norm": 0.4,
        **extra,
    }


def make_run(
    root: Path, rows: Sequence[dict[str, float]], state: State = "finished", reason: str = "done"
) -> RunFolder:
    folder = RunFolder.create(root, "demo")
    writer = MetricsWriter(folder.metrics)
    journal = Journal(folder.journal)
    journal.append(RunStarted(run=folder.name, attempt=1, config="c", data="d", seed=0, wall=0.0))
    for figures in rows:
        step = int(figures["step"])
        journal.append(Trained(step=step - 1, version=step - 1, groups=(GroupRef(step, 0),), samples=8))
        writer.write(step, step, figures["wall_s"], {k: v for k, v in figures.items() if k not in ("step", "wall_s")})
    journal.append(
        WorkerGone(worker="slot-0", incarnation="a", why="exit code -9"),
        Reissued(group=1, attempt=1, reason="slot-0 lost"),
    )
    journal.close()
    writer.close()
    folder.write_status(state, step=len(rows), reason=reason)
    return folder


class Tags(html.parser.HTMLParser):
    """Collects tags, attributes and text, and checks that tags are closed in order."""

    VOID = frozenset(("meta", "br", "img", "path", "use", "rect", "stop"))

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(path: Path) -> Tags:
    tags = Tags()
    tags.feed(path.read_text(encoding="utf-8"))
    tags.close()
    assert not tags.open
    return tags


@pytest.mark.deep
def test_the_report_is_one_well_formed_page_without_scripts_or_outside_resources(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = make_run(tmp_path, [row(step) for step in range(1, 41)])
    path = write_report(folder.path)
    assert path == folder.report
    page = parsed(path)
    assert page.tags.count("svg") == 6
    assert "script" not in page.tags and "img" not in page.tags
    assert all(link.startswith("#") for link in page.links)
    for part in ("demo-001", "done", "Reward", "Where the time of a step went", "0.055 → 0.355", "40 in 1 min 20 s"):
        assert part in page.text


def test_completions_before_and_after_are_shown_literally(tmp_path: Path) -> None:
    folder = make_run(tmp_path, [])
    for step in (1, 3, 4):
        sample = {"step": step, "prompt": "1+1=", "completion": f"{NASTY} of {step}", "reward": None, "group": 7}
        (folder.rollouts / f"step_{step}.jsonl").write_text(json.dumps(sample) + "\n" + '{"step": 4, "pro')
    page = parsed(write_report(folder.path))
    assert "script" not in page.tags
    assert "<script>alert(1)</script>" in page.text
    assert "of 1" in page.text and "of 4" in page.text and "of 3" not in page.text
    assert "\x1b" not in page.text and "\u202e" not in page.text


def test_samples_are_found_in_folders_too_and_sorted_by_step(tmp_path: Path) -> None:
    (tmp_path / "step_10").mkdir()
    for name, step in (("step_10/a.jsonl", 10), ("step_2.jsonl", 2)):
        (tmp_path / name).write_text(json.dumps({"step": step, "prompt": "p", "completion": "c"}) + "\n")
    assert [sample.step for sample in read_samples(tmp_path)] == [2, 10]


@pytest.mark.deep
def test_plan_changes_are_drawn_and_listed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    story = Story().starts("d2t1p1", "d1t1p1", range(3)).trains(1.0, 1.0, 1.0)
    story.changes("d1t2p1", "d1t1p1", range(3), 2.5, why="responses grew <b>").trains(0.5, 0.5, 0.5)
    story.after(0, Compared(epoch=1, what="transition", predicted_s=2.25, measured_s=2.5))
    story.after(0, Compared(epoch=1, what="step", predicted_s=0.75, measured_s=0.5))
    story.changes("d1t1p1", "d1t1p1", range(3), 1.25, failure="slot-1 refused")
    folder = make_run(tmp_path, [])
    folder.journal.unlink()
    journal = Journal(folder.journal, clock=iter([0.0, *(entry.t for entry in story.entries)]).__next__)
    for entry in story.entries:
        journal.append(entry.record)
    journal.close()
    page = parsed(write_report(folder.path))
    assert page.tags.count("svg") == 1 and (folder.path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    for part in (
        "Slots over time", "Plan changes", "train d2t1p1 · generate d1t1p1train d1t2p1 · generate d1t1p1",
        "responses grew <b>", "3.0 MB", "2.50 spredicted 2.25 s", "1.00 → 0.50 spredicted 0.75 s",
        "given up: slot-1 refused", "1 destroy1 extend1 split",
        "1 in 3.8 s",
    ):  # fmt: skip
        assert part in page.text, part


def test_a_run_without_any_step_still_gets_a_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path, [], "failed", "slot-2 is lost: exit code 1")
    page = parsed(write_report(folder.path))
    assert "No step was finished." in page.text and "slot-2 is lost: exit code 1" in page.text
    assert "nan" not in page.text


@pytest.mark.deep
def test_a_single_step_is_drawn_without_a_warning() -> None:
    pytest.importorskip("matplotlib")
    assert "Reward" in [title for title, _ in plots([row(1)])]


@pytest.mark.deep
def test_skipped_steps_leave_gaps_not_errors() -> None:
    pytest.importorskip("matplotlib")
    rows = [row(1), row(2, **{"optim/grad_norm": math.nan, "reward/mean": math.nan}), row(3)]
    titles = [title for title, _ in plots(rows)]
    assert "Gradient norm" in titles and "Reward" in titles
    assert "Entropy of the policy, nats per token" not in titles


def test_without_matplotlib_the_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = parsed(write_report(make_run(tmp_path, [row(1)]).path))
    assert "No curves: matplotlib is not installed" in page.text and "svg" not in page.tags


def test_writing_again_replaces_the_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path, [])
    first = write_report(folder.path).read_text()
    assert write_report(folder.path).read_text() == first
    assert not list(folder.path.glob(".report*"))


def test_the_summary_compares_first_and_last_steps() -> None:
    rows = [row(step) for step in range(1, 101)]
    progress = Progress(step=100, attempt=2, lost=3, reissued=5)
    summary = summarize(rows, progress, run="demo-001", outcome="done")
    assert (summary.steps, summary.window, summary.attempts, summary.lost, summary.reissued) == (100, 10, 2, 3, 5)
    assert summary.reward_first == pytest.approx(0.055)
    assert summary.reward_last == pytest.approx(0.955)
    assert summary.tokens == 100_000 and summary.tokens_per_s == 500
    assert summary.wall_s == 200.0
    assert (summary.staleness_mean, summary.staleness_max) == (0.5, 1.0)


def test_first_and_last_steps_never_overlap_in_a_short_run() -> None:
    rows = [row(step) for step in range(1, 6)]
    summary = summarize(rows, Progress(), run="r", outcome="o")
    assert summary.window == 2
    assert summary.reward_first == pytest.approx(0.015) and summary.reward_last == pytest.approx(0.045)


def test_parts_of_a_step_add_up_and_what_runs_beside_is_left_out() -> None:
    rows = [row(step) for step in range(1, 4)]
    split = time_split(rows)
    assert split == pytest.approx({"forward_backward": 1.0, "wait_for_batch": 0.5, "train": 0.5})
    assert list(split) == ["forward_backward", "train", "wait_for_batch"] or split["train"] == split["wait_for_batch"]
    for values in zip(*time_parts(rows).values(), strict=True):
        assert math.fsum(values) == pytest.approx(2.0)


def test_a_plan_change_is_no_wait_for_samples() -> None:
    rows = [{"step": 1.0, "timing_s/step": 3.0, "timing_s/wait_for_batch": 2.0, "plan/transition_s": 1.5}]
    assert time_split(rows) == {"plan_change": 1.5, "other": 1.0, "wait_for_batch": 0.5}


def test_time_that_no_part_explains_is_other() -> None:
    rows = [{"step": 1.0, "timing_s/step": 3.0, "timing_s/wait_for_batch": 1.0}]
    assert time_split(rows) == {"other": 2.0, "wait_for_batch": 1.0}
    assert time_split([]) == {}
