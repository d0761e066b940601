"""How is a timeline drawn: which unit was on which slot, when plans changed, and what a step took?

Owner: the report. Slots are rows, time goes right, colour is the model-stage; slots of one unit form one block. Below
it, on the same time axis, the seconds of every step and their median under each plan.
Invariants (tests/runtime/test_picture.py): text that does not fit its block or its plan is shortened, then left out,
never drawn over its neighbour; the height stays on one page for any number of slots.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from nereus.core.plan import Emu, ModelStage, SlotId, Stage
from nereus.runtime import canvas
from nereus.runtime.canvas import BLUE, FAINT, GRID, INK, TEXT, bare, fits, grid, time_unit
from nereus.runtime.timeline import Era, Span, Step, Timeline, layouts, stage_name

_RED = "#dc2626"
_COLORS = {
    Stage.TRAINING: (BLUE, "#7c3aed"),
    Stage.GENERATION: ("#0d9488", "#65a30d"),
    Stage.INFERENCE: ("#d97706", "#be185d"),
}
"""For the policy, and for any other model in that stage."""

_WIDTH = 11.2
_LEFT, _RIGHT = 0.68, 0.12
_HEAD = 0.86
"""Inches for the legend and the plans' labels."""
_FOOT = 0.42
_BETWEEN = 0.14
_ROW = 0.30
_ROWS_MOST = 5.5
_STEPS = 1.15
_SMALL = 0.6
"""The rows and the steps of a run without plan changes shrink by this factor."""


def svg(line: Timeline) -> str:
    """Return the timeline as an SVG element; empty if no slot was ever used."""
    return canvas.svg(_size_inches(line), lambda figure: _draw(figure, line))


def png(line: Timeline) -> bytes:
    """Return the timeline as a PNG file; empty if no slot was ever used."""
    return canvas.png(_size_inches(line), lambda figure: _draw(figure, line))


def _size_inches(line: Timeline) -> tuple[float, float]:
    return _WIDTH, _head(line) + _rows(line) + _BETWEEN + _steps(line) + _FOOT


def _draw(figure: Any, line: Timeline) -> bool:
    if not line.spans:
        return False
    width, height = _size_inches(line)
    across = (width - _LEFT - _RIGHT) / width
    low = (_FOOT + _steps(line) + _BETWEEN) / height
    slots = figure.add_axes((_LEFT / width, low, across, _rows(line) / height))
    steps = figure.add_axes((_LEFT / width, _FOOT / height, across, _steps(line) / height), sharex=slots)
    scale, unit = time_unit(line.end_s)
    painter = _Painter(line, slots, steps, scale)
    painter.slots_panel()
    painter.losses()
    painter.steps_panel(unit)
    painter.changes()
    painter.plans()
    _legend(figure, line, 1 - 0.06 / height)
    return True


def _head(line: Timeline) -> float:
    return _HEAD if line.changes else _HEAD - 0.14


def _rows(line: Timeline) -> float:
    return min(_ROW * max(len(line.slots), 1) * (1 if line.changes else _SMALL), _ROWS_MOST)


def _steps(line: Timeline) -> float:
    return _STEPS if line.changes else _STEPS * _SMALL


_Corners = list[tuple[float, float]]


class _Painter:
    """The two panels of one timeline."""

    def __init__(self, line: Timeline, slots: Any, steps: Any, scale: float) -> None:
        self._line = line
        self._slots = slots
        self._steps = steps
        self._scale = scale
        self._row = {slot: row for row, slot in enumerate(line.slots)}
        self._per_inch = max(line.end_s, 1e-9) / (_WIDTH - _LEFT - _RIGHT)
        """Seconds."""

    def slots_panel(self) -> None:
        """Draw the units on their slots, and the losses."""
        from matplotlib.collections import PolyCollection

        axes, count = self._slots, len(self._line.slots)
        bare(axes, TEXT)
        axes.set_xlim(0, max(self._line.end_s, 1e-9) / self._scale)
        axes.set_ylim(count - 0.5, -0.5)
        every = 1 + (count - 1) // 24
        shown = [slot for slot in self._line.slots if self._row[slot] % every == 0]
        axes.set_yticks([self._row[slot] for slot in shown], [f"slot {slot}" for slot in shown])
        axes.tick_params(labelbottom=False)
        axes.hlines(range(count), 0, 1, transform=axes.get_yaxis_transform(), color=GRID, linewidth=0.8, zorder=0)
        inches = _rows(self._line) / max(count, 1)
        areas = defaultdict[tuple[float, ...] | str, list[_Corners]](list)
        for spans in _blocks(self._line.spans, self._row):
            color = _color(spans[0].emu.model_stage)
            areas[color if spans[0].state != "starting" else _pale(color)].append(self._block(spans, inches))
        for color_, corners in areas.items():
            axes.add_collection(PolyCollection(corners, facecolors=[color_], linewidths=0, zorder=2), autolim=False)

    def losses(self) -> None:
        """Mark the workers that were lost, those without a slot under the rows by name."""
        count, under = len(self._line.slots), dict[str, float]()
        at, rows = list[float](), list[int]()
        for loss in self._line.losses:
            if loss.slot in self._row:
                at.append(loss.at_s / self._scale)
                rows.append(self._row[loss.slot])
            else:
                under[loss.worker] = loss.at_s / self._scale
        look = {"marker": "X", "color": _RED, "edgecolors": "white", "linewidths": 0.9, "clip_on": False, "zorder": 6}
        self._slots.scatter([*at, *under.values()], [*rows, *[count - 0.5] * len(under)], s=64, **look)
        for worker, at_s in under.items():
            self._slots.annotate(
                worker,
                (at_s, count - 0.5),
                (6, -3),
                textcoords="offset points",
                va="top",
                fontsize=TEXT,
                color=_RED,
                annotation_clip=False,
            )

    def _block(self, spans: Sequence[Span], row_inches: float) -> _Corners:
        """Return the area of a unit's adjacent slots, with its name on it if that fits."""
        first, working = spans[0], spans[0].state != "starting"
        gap = min(0.06, 0.02 / row_inches) if row_inches > 0.06 else 0.0
        top = self._row[first.slot] - 0.5 + gap
        bottom = self._row[spans[-1].slot] + 0.5 - gap
        begin, end = first.begin_s / self._scale, first.end_s / self._scale
        area = _area(begin, end, top, bottom)
        if row_inches * len(spans) < 0.13 or first.state == "moving":
            return area
        room = (first.end_s - first.begin_s) / self._per_inch
        for text in _names(first.emu, starting=not working):
            if fits(text, room):
                ink = "white" if working else _color(first.emu.model_stage)
                middle = ((begin + end) / 2, (top + bottom) / 2)
                self._slots.text(*middle, text, ha="center", va="center", fontsize=TEXT, color=ink, zorder=5)
                break
        return area

    def changes(self) -> None:
        """Mark each change over both panels, and the slots that it touched."""
        from matplotlib.collections import PolyCollection

        for change in self._line.changes:
            begin, end = change.begin_s / self._scale, change.end_s / self._scale
            color = INK if change.ok else _RED
            for axes in (self._slots, self._steps):
                axes.axvspan(begin, end, color=color, alpha=0.10, linewidth=0, zorder=1)
                axes.axvline(end, color=color, linewidth=0.9, linestyle="-" if change.ok else ":", zorder=1.5)
            rows = sorted(self._row[slot] for slot in change.touched & self._row.keys())
            areas = [_area(begin, end, run[0] - 0.5, run[-1] + 0.5) for run in _runs(rows)]
            hatched = PolyCollection(
                areas, facecolors=[(1, 1, 1, 0.7)], edgecolors=[color], hatch="//////", linewidths=0, zorder=3
            )
            self._slots.add_collection(hatched, autolim=False)
        for number, at_s in enumerate(self._line.attempts[1:], start=2):
            for axes in (self._slots, self._steps):
                axes.axvline(at_s / self._scale, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=4)
            self._steps.annotate(
                f" attempt {number}",
                (at_s / self._scale, 1),
                xycoords=("data", "axes fraction"),
                va="top",
                fontsize=TEXT,
                color=INK,
            )

    def plans(self) -> None:
        """Write over each era which plan was in force, as far as there is room."""
        for era, before in zip(self._line.eras, (None, *self._line.eras), strict=False):
            room = (era.end_s - era.begin_s) / self._per_inch
            middle = (era.begin_s + era.end_s) / 2 / self._scale
            for lines in _labels(era, before):
                if all(fits(text, room) for text, _ in lines):
                    break
            else:
                continue
            for index, (text, color) in enumerate(reversed(lines)):
                self._slots.annotate(
                    text,
                    (middle, 1),
                    (0, 4 + index * (TEXT + 2.5)),
                    xycoords=("data", "axes fraction"),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=TEXT,
                    color=color,
                    annotation_clip=False,
                )

    def steps_panel(self, unit: str) -> None:
        """Draw what every step took, and the median under each plan."""
        axes, steps = self._steps, self._line.steps
        bare(axes, TEXT)
        grid(axes)
        axes.set_ylabel("s per step", fontsize=TEXT, color=FAINT)
        axes.set_xlabel(f"{unit} since the run began", fontsize=TEXT, color=FAINT, loc="right", labelpad=2)
        if not steps:
            axes.set_yticks([])
            return
        axes.locator_params(axis="y", nbins=4)
        for _, own in itertools.groupby(steps, key=lambda step: (step.attempt, step.epoch)):
            line = list(own)
            at = [step.end_s / self._scale for step in line]
            dots = {"marker": "o", "markersize": 2.2} if len(steps) <= 150 else {}
            axes.plot(at, [step.seconds for step in line], color=FAINT, linewidth=0.9, zorder=2, **dots)
        axes.set_ylim(0, _top(steps))
        for era in self._line.eras:
            self._median(era)

    def _median(self, era: Era) -> None:
        own = [step for step in self._line.steps if (step.attempt, step.epoch) == (era.attempt, era.plan.epoch)]
        if not own:
            return
        middle = median(step.seconds for step in own)
        begin, end = max(own[0].end_s - own[0].seconds, era.begin_s), own[-1].end_s
        self._steps.plot([begin / self._scale, end / self._scale], [middle, middle], color=INK, linewidth=1.8, zorder=3)
        for text in (f"median {middle:.3g} s", f"{middle:.3g} s", f"{middle:.2g}"):
            if fits(text, (end - begin) / self._per_inch):
                at = ((begin + end) / 2 / self._scale, 1)
                self._steps.annotate(
                    text,
                    at,
                    xycoords=("data", "axes fraction"),
                    ha="center",
                    va="top",
                    fontsize=TEXT,
                    color=INK,
                    bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.8, "linewidth": 0},
                    zorder=5,
                )
                break


def _color(model_stage: ModelStage) -> str:
    return _COLORS[model_stage.stage][model_stage.model != "policy"]


def _pale(color: str) -> tuple[float, ...]:
    """Return ``color`` mixed with much white."""
    channels = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    return tuple(1 - 0.2 * (1 - channel) for channel in channels)


def _blocks(spans: Sequence[Span], row: dict[SlotId, int]) -> Iterator[list[Span]]:
    """Yield the spans that one unit has side by side at one time, top row first."""
    together = defaultdict[object, list[Span]](list)
    for span in spans:
        together[span.emu.id, span.emu.layout, span.state, span.begin_s, span.end_s].append(span)
    for own in together.values():
        at = {row[span.slot]: span for span in own}
        for run in _runs(sorted(at)):
            yield [at[index] for index in run]


def _runs(rows: Sequence[int]) -> Iterator[list[int]]:
    """Cut ascending numbers where one is missing."""
    for _, run in itertools.groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0]):
        yield [row for _, row in run]


def _area(begin: float, end: float, top: float, bottom: float) -> _Corners:
    return [(begin, top), (end, top), (end, bottom), (begin, bottom)]


def _names(emu: Emu, *, starting: bool) -> Iterator[str]:
    """Yield what to write on a unit, the longest first."""
    name = f"{stage_name(emu.model_stage)}/{emu.ordinal}"
    yield f"{name} is starting" if starting else f"{name}  {emu.layout}"
    yield name
    if not starting:
        yield str(emu.layout)


def _labels(era: Era, before: Era | None) -> Iterator[list[tuple[str, str]]]:
    """Yield the lines to write over an era, the longest first: what is new in ink, the rest faint."""
    known = layouts(before.plan) if before else {}
    title = f"plan {era.plan.epoch}"
    now = layouts(era.plan)
    lines = [
        (f"{stage_name(stage)} {layout}", _color(stage) if known.get(stage) != layout else FAINT)
        for stage, layout in now.items()
    ]
    yield [(title, INK), *lines]
    yield [(title, INK), *((text.replace("generate", "gen"), color) for text, color in lines)]
    yield [(title, INK)]
    yield [(str(era.plan.epoch), INK)]


def _top(steps: Sequence[Step]) -> float:
    """Return an upper limit that a few slow steps do not stretch."""
    ordered = sorted(step.seconds for step in steps)
    usual = ordered[int(0.95 * (len(ordered) - 1))]
    return min(ordered[-1], 1.6 * usual) * 1.3 or 1.0


def _legend(figure: Any, line: Timeline, top: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    stages = sorted({span.emu.model_stage for span in line.spans}, key=lambda stage: (-stage.stage, stage.model))
    handles: list[Any] = [Patch(facecolor=_color(stage), label=stage_name(stage)) for stage in stages]
    if any(span.state == "starting" for span in line.spans):
        handles.append(Patch(facecolor=FAINT, alpha=0.35, label="starting"))
    if any(change.ok for change in line.changes):
        handles.append(Patch(facecolor="white", edgecolor=INK, hatch="//////", linewidth=0, label="plan changes"))
    if not all(change.ok for change in line.changes):
        handles.append(Patch(facecolor="white", edgecolor=_RED, hatch="//////", linewidth=0, label="change given up"))
    if line.losses:
        handles.append(Line2D([], [], color=_RED, marker="X", linestyle="", label="worker lost"))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=((_LEFT - 0.02) / _WIDTH, top),
        ncols=len(handles),
        frameon=False,
        fontsize=8,
        labelcolor=INK,
        borderpad=0,
        handlelength=1.3,
        handleheight=0.9,
        columnspacing=1.6,
        borderaxespad=0,
    )
