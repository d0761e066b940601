"""Does a person see what happened, literally and on any console?"""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nereus.runtime.display import (
    Display,
    LiveDisplay,
    Page,
    PlainDisplay,
    StepView,
    TransitionView,
    WorkerView,
    duration,
    make_display,
    number,
    sparkline,
    step_line,
    summary_page,
)
from nereus.runtime.summary import Summary

NASTY = "16\n[bold red]x[/]\x1b[2J\x1b]0;owned\x07 [link=http://x]y[/link] [/nope]"

VIEW = StepView(
    step=87,
    steps=200,
    version=87,
    epoch=1,
    reward=0.812,
    response_length=9.3,
    staleness_mean=0.6,
    staleness_max=1,
    tokens_per_s=4312.4,
    grad_norm=0.42,
    step_s=0.71,
    wait_s=0.12,
    prompt="12 + 7 - 3 =",
    completion=NASTY,
    completion_reward=1.0,
)

WORKERS = (
    WorkerView(worker="slot-0", role="policy.generation/0 t1p1", state="generating", version=86, detail="48 live"),
    WorkerView(worker="reward-0", role="reward", state="idle", detail=NASTY),
)

SUMMARY = Summary(
    run="demo-001",
    outcome="all 200 steps are done",
    steps=200,
    wall_s=143.2,
    reward_first=0.31,
    reward_last=0.87,
    window=10,
    tokens=412345,
    tokens_per_s=4312,
    staleness_mean=0.61,
    staleness_max=1,
    lost=1,
    reissued=3,
    changes=3,
    changes_s=7.16,
    moved_bytes=3_198_720,
    given_up=1,
    time_split_s={"forward_backward": 0.48, "wait_for_batch": 0.12},
    step_s=0.6,
)


def shown(renderable: object, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, legacy_windows=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_page_shows_progress_figures_workers_sample_and_events() -> None:
    page = Page("demo-001", 200)
    page.status = "training"
    page.workers = WORKERS
    page.add(VIEW)
    page.happened("slot-1 lost: exit code -9", "warning")
    text = shown(page.render())
    for part in (
        "demo-001",
        "step 87 of 200",
        "training",
        "reward 0.812",
        "length 9.3",
        "staleness 0.60 (max 1)",
        "tokens/s 4,312",
        "waiting 0.12 s",
        "version 87",
        "slot-0",
        "policy.generation/0 t1p1",
        "generating",
        "12 + 7 - 3 =",
        "slot-1 lost: exit code -9",
    ):
        assert part in text


MOVING = TransitionView(
    target="train d3t1p1 · generate d1t1p1", total=7, done=3, running=("policy.training/extend-2", NASTY)
)


def test_the_page_shows_the_plan_and_how_far_a_change_has_come() -> None:
    page = Page("demo-001", 200)
    page.plan = (1, "train d1t2p1 · generate d2t1p1")
    text = shown(page.render())
    assert "plan 1" in text and "train d1t2p1 · generate d2t1p1" in text and "changes to" not in text
    page.moving = TransitionView(target=MOVING.target)
    text = shown(page.render())
    assert "changes to" in text and MOVING.target in text and "waiting for the weight-sync point" in text
    page.moving = MOVING
    text = shown(page.render(), 160)
    assert "moving state: 3 of 7 primitives, running policy.training/extend-2, 16\\n[bold red]x[/]" in text
    assert "\x1b" not in text
    page.moving = TransitionView(target=MOVING.target, total=7, done=7)
    assert "all 7 primitives are done" in shown(page.render())


def test_a_change_is_a_few_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("nereus.runtime.display.time.monotonic", lambda: now)
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    display = make_display(console, run="demo-001", steps=200)
    display.plan(0, "train d2t1p1 · generate d2t1p1")
    for _ in range(3):
        display.transition(TransitionView(target=MOVING.target))
        now += 10.0
    for done in range(8):
        display.transition(TransitionView(target=MOVING.target, total=7, done=done))
        now += 1.5
    display.plan(1, MOVING.target)
    display.transition(TransitionView(target="train d1t1p1"))
    assert isinstance(console.file, io.StringIO)
    said = [line.split("  ", 1)[1] for line in console.file.getvalue().splitlines()]
    assert said == [
        "plan 0: train d2t1p1 · generate d2t1p1",
        f"to {MOVING.target}: waiting for the weight-sync point",
        f"to {MOVING.target}: moving state: 4 of 7 primitives",
        f"plan 1: {MOVING.target}",
        "to train d1t1p1: waiting for the weight-sync point",
    ]


def test_the_page_stands_before_the_first_step() -> None:
    text = shown(Page("demo-001", 200).render())
    assert "step 0 of 200" in text and "no step yet" in text and "nan" not in text


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_the_page_fits_its_console(width: int) -> None:
    page = Page("demo-001", 200)
    page.workers = WORKERS
    page.plan, page.moving = (1, "train d1t2p1 · generate d2t1p1"), MOVING
    page.add(VIEW)
    page.happened("x" * 300, "info")
    assert all(len(line) <= width for line in shown(page.render(), width).splitlines())


def test_foreign_text_is_shown_literally() -> None:
    page = Page("demo-001", 200)
    page.workers = WORKERS
    page.moving = MOVING
    page.add(VIEW)
    page.happened(NASTY, "error")
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None, legacy_windows=False)
    console.print(page.render())
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\x1b" not in text and "\x07" not in text
    assert text.count("[bold red]x[/]") == 4 and text.count("[/nope]") >= 2
    assert "\\x1b[2J" in text


def test_only_the_last_events_are_kept() -> None:
    page = Page("demo-001", 10)
    for index in range(50):
        page.happened(f"event {index:02d}", "info")
    text = shown(page.render())
    assert "event 49" in text and "event 44" in text and "event 43" not in text


def run_through(display: Display) -> None:
    display.start()
    display.status("starting workers")
    display.status("starting workers")
    display.workers(WORKERS)
    display.plan(0, "train d2t1p1 · generate d2t1p1")
    display.transition(MOVING)
    display.step(VIEW)
    display.event(NASTY, "warning")
    display.close(SUMMARY, [("report", "runs/demo-001/report.html")])
    display.close(SUMMARY)


def test_plain_lines_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    display = make_display(console, run="demo-001", steps=200)
    assert isinstance(display, PlainDisplay)
    run_through(display)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0].endswith("run demo-001: 200 steps")
    assert sum("starting workers" in line for line in lines) == 1
    # Not wrapped at 80 columns: one step is one line.
    assert sum("step 87/200  reward 0.812" in line and "v87" in line for line in lines) == 1
    assert any("WARNING: 16\\n[bold red]x[/]" in line for line in lines)
    assert text.count("all 200 steps are done") == 1
    assert "runs/demo-001/report.html" in text


def test_a_live_page_on_a_terminal_leaves_the_summary_behind() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, legacy_windows=False)
    display = make_display(console, run="demo-001", steps=200)
    assert isinstance(display, LiveDisplay)
    run_through(display)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor must be visible again"
    assert "all 200 steps are done" in text[text.rindex("\x1b[?25h") :]


def test_closing_without_a_start_is_harmless() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    make_display(console, run="demo-001", steps=1).close()


def test_the_summary_says_what_was_reached_and_where_the_time_went() -> None:
    text = shown(summary_page(SUMMARY, [("folder", "runs/demo-001")]))
    for part in ("0.310 → 0.870", "+0.560", "200 in 2 min 23 s", "412,345", "max 1", "1, 3 groups", "80%", "20%"):
        assert part in text
    assert "3 in 7.2 s (5.0% of the time), 3.2 MB of state moved; 1 more given up" in text


def test_the_summary_of_nothing_has_dashes() -> None:
    text = shown(summary_page(Summary(run="demo-001", outcome="no worker came up", ok=False)))
    assert "no worker came up" in text and "nan" not in text and "–" in text


def test_a_step_without_figures_has_dashes() -> None:
    line = step_line(StepView(step=1, steps=2, version=0))
    assert line.startswith("step 1/2  reward –") and "nan" not in line


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True)), st.integers(1, 80))
def test_a_sparkline_fits_and_takes_any_values(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) <= width
    assert bool(line) == any(map(math.isfinite, values))


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5, 5], 8) == "▁▁▁"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"


@pytest.mark.parametrize(
    ("format_", "value", "text"),
    [
        (duration, 12.34, "12.3 s"),
        (duration, 245.0, "4 min 05 s"),
        (duration, 59.99, "1 min 00 s"),
        (duration, 10920.0, "3 h 02 min"),
        (duration, math.nan, "–"),
        (number, 1234.5678, "1,234.568"),
        (number, math.inf, "–"),
    ],
)
def test_figures_are_written_for_people(format_: Callable[[float], str], value: float, text: str) -> None:
    assert format_(value) == text
