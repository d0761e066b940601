"""How do several policies look beside each other: what steps took, who is ahead, and which plan ran when?

Three panels: the latency of every step, plan changes marked; by how much each policy is behind the oracle (or behind
the first policy, where there is none) after every step; and, on an axis of time, a band per policy with its plans, the
same plan in the same colour everywhere. Lines are the mean over all seeds, bands and marks those of the first seed.
Invariants (tests/commands/test_compare.py): nothing is drawn without a step; text that does not fit its band is left
out, and every plan that it names is in the list below the bands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nereus.runtime import canvas
from nereus.runtime.canvas import FAINT, INK, PALETTE, TEXT, bare, fits, grid, time_unit
from nereus.runtime.summary import mean
from nereus.sim.comparison import RunResult, reference

_WIDTH = 11.2
_LEFT, _RIGHT = 1.45, 0.25
_HEAD, _FOOT, _BETWEEN = 0.42, 0.12, 0.62
_LATENCY, _BEHIND, _BAND, _NAME = 2.5, 1.5, 0.36, 0.2
_NAMED, _ABREAST = 24, 2
"""Plans that are listed, at most, and in so many columns."""

_BANDS = ("#93c5fd", "#fcd34d", "#86efac", "#c4b5fd", "#fca5a5", "#cbd5e1", "#7dd3fc", "#bef264", "#f9a8d4", "#fdba74")
"""Light, so that ink can be read on them."""


class _Lane:
    """The runs of one policy."""

    def __init__(self, runs: Sequence[RunResult], color: str) -> None:
        self.runs = runs
        self.shown = runs[0]
        self.name = runs[0].policy
        self.color = color
        steps = max(len(run.latency_s) for run in runs)
        self.latency_s = [mean(run.latency_s[at] for run in runs if at < len(run.latency_s)) for at in range(steps)]
        self.ends_s = [mean(run.ends_s[at] for run in runs if at < len(run.latency_s)) for at in range(steps)]


def svg(results: Sequence[RunResult]) -> str:
    """Return the picture as an SVG element; empty if no step was made."""
    drawing = _Drawing(results)
    return canvas.svg(drawing.size_inches, drawing.draw)


def png(results: Sequence[RunResult]) -> bytes:
    """Return the picture as a PNG file; empty if no step was made."""
    drawing = _Drawing(results)
    return canvas.png(drawing.size_inches, drawing.draw)


class _Drawing:
    def __init__(self, results: Sequence[RunResult]) -> None:
        policies = list(dict.fromkeys(one.policy for one in results if one.latency_s))
        self._lanes = [
            _Lane([one for one in results if one.policy == policy and one.latency_s], PALETTE[index % len(PALETTE)])
            for index, policy in enumerate(policies)
        ]
        self._base = reference(policies) or (policies[0] if policies else "")
        plans = dict.fromkeys(band.layouts for lane in self._lanes for band in lane.shown.bands)
        self._plans = {layouts: index for index, layouts in enumerate(plans)}
        self.size_inches = _WIDTH, sum(height + _BETWEEN for _, height in self._panels()) - _BETWEEN + _HEAD + _FOOT

    def _panels(self) -> Iterator[tuple[Callable[[Any], None], float]]:
        yield self._draw_latency, _LATENCY
        if len(self._lanes) > 1:
            yield self._draw_behind, _BEHIND
        yield self._draw_bands, _BAND * max(1, len(self._lanes))
        yield self._draw_plans, _NAME * math.ceil(min(len(self._plans), _NAMED) / _ABREAST)

    def draw(self, figure: Any) -> bool:
        """Draw all panels, from the top."""
        if not self._lanes:
            return False
        width, height = self.size_inches
        top = height - _HEAD
        for draw, tall in self._panels():
            draw(figure.add_axes((_LEFT / width, (top - tall) / height, 1 - (_LEFT + _RIGHT) / width, tall / height)))
            top -= tall + _BETWEEN
        handles = self._handles()
        figure.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=((_LEFT - 0.05) / width, 1 - 0.06 / height),
            ncols=len(handles),
            frameon=False,
            fontsize=8.5,
            labelcolor=INK,
            borderpad=0,
            handlelength=1.5,
            columnspacing=1.6,
            borderaxespad=0,
        )
        return True

    def _handles(self) -> list[Any]:
        from matplotlib.lines import Line2D

        handles: list[Any] = [Line2D([], [], color=lane.color, linewidth=2.2, label=lane.name) for lane in self._lanes]
        if any(lane.shown.switches for lane in self._lanes):
            mark = Line2D([], [], linestyle="", marker="D", markersize=5.5, color=INK, label="plan changes")
            handles.append(mark)
        return handles

    def _draw_latency(self, axes: Any) -> None:
        self._by_steps(axes, "seconds per step")
        for lane in self._lanes:
            steps = range(1, len(lane.latency_s) + 1)
            if len(lane.runs) > 1:
                apart = [
                    [run.latency_s[at] for run in lane.runs if at < len(run.latency_s)] for at in range(len(steps))
                ]
                low, high = [min(ones) for ones in apart], [max(ones) for ones in apart]
                axes.fill_between(steps, low, high, color=lane.color, alpha=0.12, linewidth=0)
            axes.plot(steps, lane.latency_s, color=lane.color, linewidth=1.7)
            at = [switch.step for switch in lane.shown.switches if switch.ok and switch.step < len(lane.latency_s)]
            look = {"color": lane.color, "edgecolors": "white", "linewidths": 0.7, "zorder": 5}
            axes.scatter([step + 1 for step in at], [lane.latency_s[step] for step in at], marker="D", s=34, **look)
        axes.set_ylim(0, _top([seconds for lane in self._lanes for seconds in lane.latency_s]))

    def _draw_behind(self, axes: Any) -> None:
        base = next(lane for lane in self._lanes if lane.name == self._base)
        apart = {
            lane.name: [own - other for own, other in zip(lane.ends_s, base.ends_s, strict=False)]
            for lane in self._lanes
        }
        scale, unit = time_unit(max(abs(value) for values in apart.values() for value in values))
        self._by_steps(axes, f"{unit} behind\n{self._base}")
        for lane in self._lanes:
            values = [seconds / scale for seconds in apart[lane.name]]
            axes.plot(range(1, len(values) + 1), values, color=lane.color, linewidth=1.7)

    def _by_steps(self, axes: Any, label: str) -> None:
        bare(axes, 8)
        grid(axes)
        most = max(len(lane.latency_s) for lane in self._lanes)
        axes.set_xlim(0.5 if most < 100 else 1, most + (0.5 if most < 100 else 0))
        axes.locator_params(axis="y", nbins=5)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel(label, fontsize=8.5, color=INK)
        axes.set_xlabel("step", fontsize=8.5, color=INK, loc="right", labelpad=1)

    def _draw_bands(self, axes: Any) -> None:
        bare(axes, 8)
        end_s = max(band.end_s for lane in self._lanes for band in lane.shown.bands)
        scale, unit = time_unit(end_s)
        axes.set_xlim(0, end_s / scale)
        axes.set_ylim(len(self._lanes) - 0.5, -0.5)
        axes.set_yticks(range(len(self._lanes)), [lane.name for lane in self._lanes])
        for tick, lane in zip(axes.get_yticklabels(), self._lanes, strict=True):
            tick.set_color(lane.color)
        axes.set_xlabel(
            f"{unit} since the first step began; which plan was in force", fontsize=8.5, color=INK, loc="right"
        )
        per_inch = end_s / (_WIDTH - _LEFT - _RIGHT)
        for row, lane in enumerate(self._lanes):
            for band in lane.shown.bands:
                self._band(axes, row, band.begin_s / scale, band.end_s / scale, band.layouts)
                room = (band.end_s - band.begin_s) / per_inch
                for text in _names(band.layouts, self._plans[band.layouts]):
                    if fits(text, room):
                        middle = (band.begin_s + band.end_s) / 2 / scale
                        axes.text(middle, row, text, ha="center", va="center", fontsize=TEXT, color=INK)
                        break
            for switch in lane.shown.switches:
                begin = max(0.0, switch.at_s - switch.seconds) / scale
                axes.plot([begin, begin], [row - 0.42, row + 0.42], color=INK, linewidth=1.2)

    def _band(self, axes: Any, row: int, begin: float, end: float, layouts: str) -> None:
        color = _BANDS[self._plans[layouts] % len(_BANDS)]
        axes.barh(row, end - begin, left=begin, height=0.78, color=color, linewidth=0)

    def _draw_plans(self, axes: Any) -> None:
        """List the plans: its number, its colour, what it is."""
        axes.set_axis_off()
        rows = math.ceil(min(len(self._plans), _NAMED) / _ABREAST)
        axes.set_xlim(0, _ABREAST)
        axes.set_ylim(rows - 0.5, -0.5)
        for layouts, index in list(self._plans.items())[:_NAMED]:
            column, row = divmod(index, rows)
            axes.barh(row, 0.03, left=column, height=0.72, color=_BANDS[index % len(_BANDS)], linewidth=0)
            axes.text(column + 0.015, row, str(index + 1), ha="center", va="center", fontsize=TEXT, color=INK)
            axes.text(column + 0.04, row, layouts, va="center", fontsize=TEXT, color=INK)
        if len(self._plans) > _NAMED:
            more = f"and {len(self._plans) - _NAMED} more"
            axes.text(_ABREAST, rows - 1, more, ha="right", va="center", fontsize=TEXT, color=FAINT)


def _names(layouts: str, index: int) -> Iterator[str]:
    """Yield what to write on a band, the longest first."""
    yield f"{index + 1}  {layouts}"
    yield str(index + 1)


def _top(values: Sequence[float]) -> float:
    """Return an upper limit that single slow steps do not stretch."""
    ordered = sorted(values)
    usual = ordered[int(0.97 * (len(ordered) - 1))]
    return min(ordered[-1], 1.6 * usual) * 1.08 or 1.0
