"""How do the figures of metrics.jsonl look as curves over the steps?

Owner: the report. Invariants (tests/runtime/test_report.py): a plot without any figure is left out; steps without a
figure leave gaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nereus.runtime.canvas import BLUE, FAINT, INK, PALETTE, bare, grid, svg
from nereus.runtime.summary import column, finite, time_parts

Rows = Sequence[Mapping[str, float]]

_SIZE_INCHES = (5.6, 2.9)


def plots(rows: Rows) -> list[tuple[str, str]]:
    """Return (title, SVG) of every plot that has at least one figure to show."""
    drawn: list[tuple[str, str]] = []
    for title, draw in _PLOTS:
        element = _svg(lambda axes, draw=draw: draw(axes, rows))  # type: ignore[misc]
        if element:
            drawn.append((title, element))
    return drawn


def _svg(draw: Callable[[Any], bool]) -> str:
    def draw_all(figure: Any) -> bool:
        # Fixed margins: laying out automatically would draw everything three times.
        figure.subplots_adjust(left=0.11, right=0.985, bottom=0.15, top=0.87)
        axes = figure.add_subplot()
        _style(axes)
        return draw(axes)

    return svg(_SIZE_INCHES, draw_all)


def _style(axes: Any) -> None:
    bare(axes, 8)
    grid(axes)
    axes.set_xlabel("step", fontsize=8, color=FAINT, loc="right")
    axes.margins(x=0.01)


def _line(axes: Any, rows: Rows, name: str, *, color: str = BLUE, label: str = "", width: float = 1.6) -> bool:
    values = column(rows, name)
    if not finite(values):
        return False
    axes.plot(column(rows, "step"), values, color=color, linewidth=width, label=label or name)
    if len(rows) == 1:
        axes.plot(column(rows, "step"), values, "o", color=color)
    return True


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the running mean of the finite values among the last ``window``."""
    means: list[float] = []
    for end in range(1, len(values) + 1):
        kept = finite(values[max(0, end - window) : end])
        means.append(math.fsum(kept) / len(kept) if kept else math.nan)
    return means


def _legend(axes: Any, columns: int) -> None:
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, fontsize=8, labelcolor=INK, borderpad=0
    )


def _reward(axes: Any, rows: Rows) -> bool:
    steps, means, spreads = column(rows, "step"), column(rows, "reward/mean"), column(rows, "reward/std")
    if not finite(means):
        return False
    low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
    high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
    if finite(spreads):
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.10, linewidth=0, label="± std")
    axes.plot(steps, means, color=BLUE, alpha=0.35, linewidth=1.0, label="mean of the step")
    axes.plot(steps, _smooth(means, 10), color=BLUE, linewidth=2.2, label="running mean of 10")
    _legend(axes, 3)
    return True


def _length(axes: Any, rows: Rows) -> bool:
    drawn = _line(axes, rows, "response_length/mean", label="mean")
    if _line(axes, rows, "response_length/max", color=FAINT, label="longest", width=1.0):
        _legend(axes, 2)
    return drawn


def _staleness(axes: Any, rows: Rows) -> bool:
    drawn = _line(axes, rows, "staleness/mean", label="mean")
    if _line(axes, rows, "staleness/max", color=FAINT, label="max", width=1.0):
        _legend(axes, 2)
    axes.set_ylim(bottom=-0.05)
    return drawn


def _time(axes: Any, rows: Rows) -> bool:
    parts = dict(sorted(time_parts(rows).items(), key=lambda item: -math.fsum(item[1])))
    if not parts or len(rows) < 2:
        return False
    window = max(1, len(rows) // 40)
    stacked = [[value if math.isfinite(value) else 0.0 for value in _smooth(part, window)] for part in parts.values()]
    colors = [PALETTE[index % len(PALETTE)] for index in range(len(parts))]
    labels = [part.replace("_", " ") for part in parts]
    axes.stackplot(column(rows, "step"), *stacked, labels=labels, colors=colors, alpha=0.85, linewidth=0)
    axes.set_ylim(0, _robust_top([math.fsum(values) for values in zip(*stacked, strict=True)]))
    axes.set_ylabel("seconds", fontsize=8, color=FAINT)
    _legend(axes, 3)
    return True


def _robust_top(values: Sequence[float]) -> float:
    """Return an upper limit that one slow step (the first, say) does not stretch."""
    ordered = sorted(values)
    usual = ordered[int(0.95 * (len(ordered) - 1))]
    return min(ordered[-1], 1.6 * usual) * 1.05 or 1.0


def _throughput(axes: Any, rows: Rows) -> bool:
    drawn = _line(axes, rows, "perf/tokens_per_s")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _position: f"{value:,.0f}")
    return drawn


def _grad_norm(axes: Any, rows: Rows) -> bool:
    drawn = _line(axes, rows, "optim/grad_norm")
    axes.set_ylim(bottom=0)
    return drawn


def _entropy(axes: Any, rows: Rows) -> bool:
    return _line(axes, rows, "policy/entropy")


def _mismatch(axes: Any, rows: Rows) -> bool:
    return _line(axes, rows, "mismatch/kl")


_PLOTS: tuple[tuple[str, Callable[[Any, Rows], bool]], ...] = (
    ("Reward", _reward),
    ("Response length, tokens", _length),
    ("Staleness of the trained samples, versions", _staleness),
    ("Where the time of a step went", _time),
    ("Tokens per second", _throughput),
    ("Gradient norm", _grad_norm),
    ("Entropy of the policy, nats per token", _entropy),
    ("Sampler and trainer disagree by, KL", _mismatch),
)
