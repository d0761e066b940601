"""What does a person see on the terminal while a run goes on?

Owner: the supervisor, which hands over plain values (``StepView``, ``WorkerView``, ``Summary``); a display asks nobody
for anything. On a terminal it is a live page; elsewhere (a file, a pipe, a batch job) one plain line per step.
Invariants (tests/runtime/test_display.py): text of a model or a peer is shown literally, with controls escaped and
markup without effect; both displays accept the same calls; a figure that is not known is shown as a dash.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from msgspec import Struct
from rich.align import Align
from rich.bar import Bar
from rich.box import ROUNDED, SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nereus.core.units import format_bytes
from nereus.runtime.logs import escape
from nereus.runtime.summary import Summary, finite

Level = Literal["info", "warning", "error"]

_NAN = math.nan
_BLOCKS = "▁▂▃▄▅▆▇█"
_EVENTS = 6
_PROGRESS_S = 5.0
"""A plan change that takes long says how it goes on this often, where lines are not redrawn."""
_STATE_STYLES = {
    "ready": "green",
    "generating": "green",
    "training": "cyan",
    "serving": "green",
    "waiting": "dim",
    "idle": "dim",
    "starting": "yellow",
    "loading": "yellow",
    "syncing": "magenta",
    "saving": "magenta",
    "draining": "yellow",
    "lost": "bold red",
}
_LEVEL_STYLES: dict[Level, str] = {"info": "", "warning": "yellow", "error": "bold red"}
_SPLIT_STYLES = ("cyan", "green", "magenta", "yellow", "blue", "white")


class StepView(Struct, frozen=True, kw_only=True):
    """One finished step, as it is shown; NaN: not known."""

    step: int
    """Counted from 1."""
    steps: int
    version: int
    epoch: int = 0
    reward: float = _NAN
    reward_std: float = _NAN
    response_length: float = _NAN
    staleness_mean: float = _NAN
    staleness_max: float = _NAN
    tokens_per_s: float = _NAN
    grad_norm: float = _NAN
    step_s: float = _NAN
    wait_s: float = _NAN
    """Part of ``step_s`` in which the trainers waited for samples."""
    prompt: str = ""
    completion: str = ""
    """A sample of this step with its reward, as text."""
    completion_reward: float = _NAN


class WorkerView(Struct, frozen=True, kw_only=True):
    """One worker process, as it is shown."""

    worker: str
    role: str
    """Its elastic model unit, or its service."""
    state: str
    version: int | None = None
    detail: str = ""


class TransitionView(Struct, frozen=True, kw_only=True):
    """A plan change on its way, as it is shown."""

    target: str
    """The layouts to come (``train d1t2p1 · generate d2t1p1``)."""
    total: int = 0
    """Primitives; 0 while the change waits for its boundary."""
    done: int = 0
    running: tuple[str, ...] = ()


class Display(Protocol):
    """What the supervisor calls. No call blocks or raises because of what is shown."""

    def start(self) -> None: ...

    def status(self, text: str) -> None:
        """Say in a few words what the run is doing (``starting workers``, ``training``, ``saving``)."""

    def workers(self, workers: Sequence[WorkerView]) -> None: ...

    def step(self, view: StepView) -> None: ...

    def plan(self, epoch: int, layouts: str) -> None:
        """Show which plan is in force; a plan change that was on its way is over."""

    def transition(self, view: TransitionView) -> None: ...

    def event(self, text: str, level: Level = "info") -> None:
        """Show something that happened: a worker joined, a checkpoint was written, an alarm."""

    def close(self, summary: Summary | None = None, paths: Sequence[tuple[str, str]] = ()) -> None:
        """Take the live page down and print the closing summary; safe to call twice."""


def make_display(console: Console, *, run: str, steps: int) -> Display:
    """Return the live page on a terminal, plain lines elsewhere."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console, run=run, steps=steps)
    return PlainDisplay(console, run=run, steps=steps)


class PlainDisplay:
    """One line per step and per event."""

    def __init__(self, console: Console, *, run: str, steps: int) -> None:
        self._console = console
        self._run = run
        self._steps = steps
        self._status = ""
        self._moving: TransitionView | None = None
        self._moving_told = 0.0
        self._closed = False

    def start(self) -> None:
        self._line(f"run {self._run}: {self._steps} steps")

    def status(self, text: str) -> None:
        if text != self._status:
            self._status = text
            self._line(text)

    def workers(self, workers: Sequence[WorkerView]) -> None:
        """Not shown: joining and leaving are events."""

    def step(self, view: StepView) -> None:
        self._line(step_line(view))

    def plan(self, epoch: int, layouts: str) -> None:
        self._moving = None
        self._line(f"plan {epoch}: {layouts}")

    def transition(self, view: TransitionView) -> None:
        """Say when a change begins to wait, and how it goes on where it takes long; its begin and end are events."""
        before, self._moving = self._moving, view
        if before is None or before.total != view.total:
            self._moving_told = time.monotonic() if view.total else -math.inf
        if time.monotonic() - self._moving_told > _PROGRESS_S:
            self._moving_told = time.monotonic() if view.total else math.inf
            self._line(f"to {view.target}: {transition_line(view)}")

    def event(self, text: str, level: Level = "info") -> None:
        self._line(text if level == "info" else f"{level.upper()}: {text}")

    def close(self, summary: Summary | None = None, paths: Sequence[tuple[str, str]] = ()) -> None:
        if not self._closed and summary is not None:
            self._console.print(summary_page(summary, paths))
        self._closed = True

    def _line(self, text: str) -> None:
        clock = time.strftime("%H:%M:%S")
        self._console.print(Text(f"{clock}  {escape(text)}"), soft_wrap=True)


class LiveDisplay:
    """A page that is redrawn in place: progress, figures, workers, a sample, the last events."""

    def __init__(self, console: Console, *, run: str, steps: int) -> None:
        self._console = console
        self._page = Page(run, steps)
        self._live = Live(
            console=console, get_renderable=self._page.render, refresh_per_second=4, transient=True, screen=False
        )
        self._closed = False

    def start(self) -> None:
        self._live.start()

    def status(self, text: str) -> None:
        self._page.status = text

    def workers(self, workers: Sequence[WorkerView]) -> None:
        self._page.workers = tuple(workers)

    def step(self, view: StepView) -> None:
        self._page.add(view)

    def plan(self, epoch: int, layouts: str) -> None:
        self._page.plan = (epoch, layouts)
        self._page.moving = None

    def transition(self, view: TransitionView) -> None:
        self._page.moving = view

    def event(self, text: str, level: Level = "info") -> None:
        self._page.happened(text, level)

    def close(self, summary: Summary | None = None, paths: Sequence[tuple[str, str]] = ()) -> None:
        if self._closed:
            return
        self._closed = True
        self._live.stop()
        if summary is not None:
            self._console.print(summary_page(summary, paths))


class Page:
    """The values of the live page. Each attribute is replaced as a whole: the drawing thread only reads."""

    def __init__(self, run: str, steps: int) -> None:
        self.run = run
        self.steps = steps
        self.status = "starting"
        self.plan: tuple[int, str] | None = None
        self.moving: TransitionView | None = None
        self.workers: tuple[WorkerView, ...] = ()
        self.last: StepView | None = None
        self.rewards: tuple[float, ...] = ()
        self.durations_s: tuple[float, ...] = ()
        self.events: tuple[tuple[str, str, Level], ...] = ()
        self._began = time.monotonic()

    def add(self, view: StepView) -> None:
        self.last = view
        self.rewards = (*self.rewards, view.reward)
        self.durations_s = (*self.durations_s, view.step_s)[-20:]

    def happened(self, text: str, level: Level) -> None:
        self.events = (*self.events, (time.strftime("%H:%M:%S"), escape(text), level))[-_EVENTS:]

    def render(self) -> RenderableType:
        """Return the page as it stands now."""
        parts: list[RenderableType] = [self._header()]
        if self.plan is not None or self.moving is not None:
            parts.append(self._plans())
        parts.append(self._figures())
        if self.workers:
            parts.append(worker_table(self.workers))
        if self.last and self.last.completion:
            parts.append(_sample(self.last))
        if self.events:
            parts.append(self._events())
        title = Text.assemble((" Nereus ", "bold"), (escape(self.run) + " ", "cyan"))
        return Panel(Group(*parts), title=title, title_align="left", box=ROUNDED, border_style="blue", padding=(0, 1))

    def _header(self) -> RenderableType:
        done = self.last.step if self.last else 0
        elapsed = time.monotonic() - self._began
        recent = finite(self.durations_s)
        left = (self.steps - done) * sum(recent) / len(recent) if recent else _NAN
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(width=24, no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(justify="right", no_wrap=True)
        row.add_row(
            Text.assemble("step ", (f"{done}", "bold"), f" of {self.steps}  ", (escape(self.status), "dim")),
            ProgressBar(total=max(self.steps, 1), completed=done, complete_style="cyan", finished_style="green"),
            Text(f"{duration(elapsed)} so far, {duration(left)} to go", style="dim"),
        )
        return row

    def _plans(self) -> RenderableType:
        """Return the plan in force and, while one is on its way, what it will be and how far it has come."""
        rows = Table.grid(padding=(0, 2), expand=True)
        rows.add_column(width=24, no_wrap=True, overflow="ellipsis")
        rows.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        if self.plan is not None:
            epoch, layouts = self.plan
            rows.add_row(Text.assemble("plan ", (str(epoch), "bold")), Text(escape(layouts), style="cyan"))
        moving = self.moving
        if moving is not None:
            rows.add_row(Text("changes to", style="magenta"), Text(escape(moving.target), style="magenta"))
            gauge: RenderableType = Text("")
            if moving.total:
                gauge = ProgressBar(
                    total=moving.total, completed=moving.done, width=24, complete_style="magenta", style="grey37"
                )
            rows.add_row(gauge, Text(escape(transition_line(moving)), style="dim"))
        return rows

    def _figures(self) -> RenderableType:
        view = self.last or StepView(step=0, steps=self.steps, version=0)
        grid = Table.grid(padding=(0, 3))
        for _ in range(4):
            grid.add_column(no_wrap=True)
        grid.add_row(
            _figure("reward", number(view.reward), "bold green"),
            _figure("length", number(view.response_length, 1)),
            _figure("staleness", f"{number(view.staleness_mean, 2)} (max {number(view.staleness_max, 0)})"),
            _figure("tokens/s", number(view.tokens_per_s, 0)),
        )
        grid.add_row(
            _figure("step", f"{number(view.step_s, 2)} s"),
            _figure("waiting", f"{number(view.wait_s, 2)} s"),
            _figure("grad norm", number(view.grad_norm, 3)),
            _figure("version", str(view.version)),
        )
        curve = Text.assemble(
            ("reward ", "dim"), (sparkline(self.rewards, 50), "green"), ("  " + _span(self.rewards), "dim")
        )
        return Group(Text(""), grid, Text(""), curve)

    def _events(self) -> RenderableType:
        lines = [
            Text.assemble((clock + "  ", "dim"), (text, _LEVEL_STYLES[level]), overflow="ellipsis", no_wrap=True)
            for clock, text, level in self.events
        ]
        return Group(Text(""), *lines)


def worker_table(workers: Iterable[WorkerView]) -> RenderableType:
    """Return one row per worker process."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, expand=True, header_style="dim")
    table.add_column("worker", no_wrap=True)
    table.add_column("role", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("version", justify="right", no_wrap=True)
    table.add_column("", ratio=1, no_wrap=True, overflow="ellipsis")
    for worker in workers:
        table.add_row(
            Text(escape(worker.worker)),
            Text(escape(worker.role)),
            Text(escape(worker.state), style=_STATE_STYLES.get(worker.state, "")),
            Text("–" if worker.version is None else str(worker.version)),
            Text(escape(worker.detail), style="dim"),
        )
    return table


def step_line(view: StepView) -> str:
    """Return the figures of one step on one line, for logs and pipes."""
    return (
        f"step {view.step}/{view.steps}  reward {number(view.reward)}  length {number(view.response_length, 1)}  "
        f"staleness {number(view.staleness_mean, 2)} (max {number(view.staleness_max, 0)})  "
        f"grad {number(view.grad_norm, 3)}  {number(view.tokens_per_s, 0)} tok/s  "
        f"{number(view.step_s, 2)} s (waited {number(view.wait_s, 2)})  v{view.version}  plan {view.epoch}"
    )


def transition_line(view: TransitionView) -> str:
    """Return what a plan change does now, in a few words."""
    if not view.total:
        return "waiting for the weight-sync point"
    if view.done >= view.total:
        return f"all {view.total} primitives are done, the new plan is put in force"
    running = f", running {', '.join(view.running)}" if view.running else ""
    return f"moving state: {view.done} of {view.total} primitives{running}"


def summary_page(summary: Summary, paths: Sequence[tuple[str, str]] = ()) -> RenderableType:
    """Return the closing summary: what was reached, what it cost, where the time went, where the files are."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, value in summary_rows(summary):
        grid.add_row(name, Text(value))
    parts: list[RenderableType] = [grid]
    if summary.time_split_s:
        parts += [Text("\nwhere a step's time went", style="dim"), _split(summary)]
    if paths:
        files = Table.grid(padding=(0, 2))
        files.add_column(style="dim", no_wrap=True)
        files.add_column(overflow="fold")
        for name, path in paths:
            files.add_row(escape(name), Text(escape(path)))
        parts += [Text(""), files]
    style = "green" if summary.ok else "red"
    title = Text.assemble((f" {escape(summary.run)} ", "bold"), (escape(summary.outcome) + " ", style))
    return Panel(Group(*parts), title=title, title_align="left", box=ROUNDED, border_style=style, padding=(0, 1))


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the closing figures as (name, text), the same on the terminal and in the report."""
    rows = [
        (
            "reward",
            f"{number(summary.reward_first)} → {number(summary.reward_last)}"
            f"  (mean of the first and last {summary.window} steps, {_signed(summary)})",
        ),
        ("response length", f"{number(summary.response_first, 1)} → {number(summary.response_last, 1)} tokens"),
        ("steps", f"{summary.steps} in {duration(summary.wall_s)}, {number(summary.step_s, 2)} s each"),
        ("tokens", f"{summary.tokens:,.0f} trained on, {number(summary.tokens_per_s, 0)} per second"),
        ("staleness", f"mean {number(summary.staleness_mean, 2)}, max {number(summary.staleness_max, 0)} versions"),
        ("workers lost", f"{summary.lost}" + (f", {summary.reissued} groups issued again" if summary.reissued else "")),
    ]
    if summary.changes or summary.given_up:
        rows.append(("plan changes", _plan_changes(summary)))
    if summary.attempts > 1:
        rows.append(("attempts", str(summary.attempts)))
    return rows


def _plan_changes(summary: Summary) -> str:
    share = f" ({summary.changes_s / summary.wall_s:.1%} of the time)" if summary.wall_s > 0 else ""
    given_up = f"; {summary.given_up} more given up" if summary.given_up else ""
    moved = format_bytes(summary.moved_bytes)
    return f"{summary.changes} in {duration(summary.changes_s)}{share}, {moved} of state moved{given_up}"


def _signed(summary: Summary) -> str:
    gain = summary.reward_last - summary.reward_first
    return f"{gain:+.3f}" if math.isfinite(gain) else "–"


def _split(summary: Summary) -> RenderableType:
    total = math.fsum(summary.time_split_s.values())
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(width=30)
    for index, (part, seconds) in enumerate(summary.time_split_s.items()):
        bar = Bar(total, 0, seconds, color=_SPLIT_STYLES[index % len(_SPLIT_STYLES)])
        table.add_row(escape(part.replace("_", " ")), f"{seconds:.3f} s", f"{seconds / total:.0%}", bar)
    return table


def _figure(name: str, value: str, style: str = "bold") -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, style))


def _sample(view: StepView) -> RenderableType:
    line = Text.assemble(
        ("sample ", "dim"),
        (escape(view.prompt), ""),
        (" → ", "dim"),
        (escape(view.completion), "cyan"),
        (f"  reward {number(view.completion_reward, 2)}", "dim"),
        overflow="ellipsis",
        no_wrap=True,
    )
    return Align.left(line)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the values as block characters, at most ``width``; each stands for the mean of equally many values."""
    kept = finite(values)
    if not kept:
        return ""
    size = max(1, math.ceil(len(kept) / width))
    means = [sum(kept[i : i + size]) / len(kept[i : i + size]) for i in range(0, len(kept), size)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in means)


def _span(values: Sequence[float]) -> str:
    kept = finite(values)
    return f"{min(kept):.3f} … {max(kept):.3f}" if kept else "no step yet"


def number(value: float, digits: int = 3) -> str:
    """Return a figure with thousands marked; a dash if it is not known."""
    return f"{value:,.{digits}f}" if math.isfinite(value) else "–"


def duration(seconds: float) -> str:
    """Return ``3 h 02 min``, ``4 min 05 s`` or ``12.3 s``; a dash if it is not known."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
