"""Does what the supervisor reports reach the metrics file and the terminal, plan changes included?"""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

from rich.console import Console
from stories import Story

from nereus.bus.messages import StepReport
from nereus.config import JobConfig
from nereus.runtime.display import make_display
from nereus.runtime.folder import RunFolder
from nereus.runtime.metrics import read_metrics
from nereus.runtime.observer import RunObserver
from nereus.runtime.surroundings import TransitionProgress
from nereus.runtime.timeline import summarized
from nereus.sim.loop import run_virtual


def report(step: int) -> StepReport:
    return StepReport(step, step, 1.0, 100)


def test_plan_changes_are_counted_and_timed(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "demo")
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    story = Story().starts("d2t1p1", "d1t1p1", range(3))
    first, second = story.plan, story.next("d1t2p1", "d1t1p1", range(3))

    async def attempt(*, first_step: int) -> None:
        observer = RunObserver(JobConfig(), folder, make_display(console, run="demo", steps=20))
        observer.plan(first)
        observer.step(report(first_step), {"reward/mean": 0.5})
        observer.transition(TransitionProgress(summarized(second)))
        await asyncio.sleep(10.0)  # waiting for the boundary is no part of the change
        for done in range(4):
            observer.transition(TransitionProgress(summarized(second), 3, done, ("policy.training/merge-0",)))
            await asyncio.sleep(0.5)
        observer.plan(second)
        observer.step(report(first_step + 1), {})
        observer.transition(TransitionProgress(summarized(first), 1))
        await asyncio.sleep(0.25)
        observer.plan(second)  # given up
        observer.step(report(first_step + 2), {})
        observer.step(report(first_step + 3), {})
        observer.close()

    run_virtual(attempt(first_step=0))
    run_virtual(attempt(first_step=4))
    rows = read_metrics(folder.metrics)
    assert [row["plan/epoch"] for row in rows] == [0, 1, 1, 1] * 2
    assert [row["plan/transitions"] for row in rows] == [0, 1, 1, 1, 1, 2, 2, 2]
    assert [row["plan/transition_s"] for row in rows] == [0.0, 2.0, 0.25, 0.0] * 2
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "plan 0: train d2t1p1 · generate d1t1p1" in text and "plan 1: train d1t2p1 · generate d1t1p1" in text
    assert "to train d1t2p1 · generate d1t1p1: waiting for the weight-sync point" in text
    assert "step 2/" in text and "plan 1\n" in text


def test_a_step_whose_figures_were_lost_with_the_supervisor_has_a_line(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "demo")
    console = Console(file=io.StringIO(), width=200, force_terminal=False)

    async def attempt(done: int, steps: range) -> None:
        observer = RunObserver(JobConfig(), folder, make_display(console, run="demo", steps=20))
        observer.taken_over(done, done)
        for step in steps:
            observer.step(report(step), {"reward/mean": 0.5})
        observer.close()

    run_virtual(attempt(0, range(3)))
    run_virtual(attempt(4, range(4, 6)))
    run_virtual(attempt(6, range(6, 7)))
    rows = read_metrics(folder.metrics)
    assert [(row["step"], row["version"]) for row in rows] == [(step + 1, step) for step in range(7)]
    assert [int(row["step"]) for row in rows if "reward/mean" not in row] == [4]
