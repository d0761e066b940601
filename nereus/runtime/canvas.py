"""How does a drawing become an SVG element or a PNG file, and what do all drawings have in common?

Owner: the report. matplotlib is imported only when something is drawn; the same drawing gives the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Literal

INK = "#1f2937"
FAINT = "#9aa3af"
GRID = "#e8eaee"
BLUE = "#2563eb"
PALETTE = (BLUE, "#f59e0b", "#10b981", "#8b5cf6", "#ef4444", "#64748b", "#0ea5e9", "#84cc16")
"""Colours of things that stand side by side."""

TEXT = 7.5
"""Points of text inside a drawing."""
_EM = 0.60 / 72
"""Inches per point of size that an average character takes, generously."""

_DOTS_PER_INCH = 160
_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "nereus", "font.family": "sans-serif", "hatch.linewidth": 0.5}

Drawing = Callable[[Any], bool]
"""Draws on an empty figure; returns False if there is nothing to show."""


def svg(size_inches: tuple[float, float], draw: Drawing) -> str:
    """Return what ``draw`` draws as an SVG element, empty if it had nothing to show; ``ImportError`` of matplotlib."""
    text = _printed(size_inches, draw, "svg").decode()
    return text[text.index("<svg") :] if text else ""


def png(size_inches: tuple[float, float], draw: Drawing) -> bytes:
    """Return what ``draw`` draws as a PNG file, empty if it had nothing to show; ``ImportError`` of matplotlib."""
    return _printed(size_inches, draw, "png")


def bare(axes: Any, text_size: float) -> None:
    """Take away what surrounds the axes, except the line at the bottom."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=text_size, length=0, pad=4)


def grid(axes: Any) -> None:
    """Draw faint lines across, behind all else."""
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def fits(text: str, inches: float) -> bool:
    """Return whether ``text`` of size ``TEXT`` needs less than ``inches``."""
    return len(text) * TEXT * _EM < inches


def time_unit(seconds: float) -> tuple[float, str]:
    """Return in which unit an axis of so many seconds is written: its seconds, and its name."""
    if seconds < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")


def _printed(size_inches: tuple[float, float], draw: Drawing, form: Literal["svg", "png"]) -> bytes:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=size_inches)
        if not draw(figure):
            return b""
        file = io.BytesIO()
        if form == "svg":
            figure.patch.set_alpha(0)
            FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})
        else:
            figure.set_dpi(_DOTS_PER_INCH)
            FigureCanvasAgg(figure).print_png(file)
    return file.getvalue()
