"""What does a run look like afterwards, on one page that can be sent to somebody?

Owner: the supervisor at the end of a run, or anybody later; reads the run folder only. The page is one HTML file,
without scripts or outside resources; the plots are inline SVG.
Invariants (tests/runtime/test_report.py): text of the model is escaped; a run without any step still gets a page.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from nereus.runtime.display import number, summary_rows
from nereus.runtime.folder import read_status
from nereus.runtime.journal import read_journal, replay
from nereus.runtime.logs import escape
from nereus.runtime.metrics import read_metrics
from nereus.runtime.summary import Summary, column, finite, summarize, time_parts

Rows = Sequence[Mapping[str, float]]

_INK = "#1f2937"
_FAINT = "#9aa3af"
_GRID = "#e8eaee"
_BLUE = "#2563eb"
_PARTS = ("#2563eb", "#f59e0b", "#10b981", "#8b5cf6", "#ef4444", "#64748b", "#0ea5e9", "#84cc16")
_SIZE_INCHES = (5.6, 2.9)


class Sampled(Struct, frozen=True):
    """A completion that was kept as text in rollouts/."""

    step: int
    prompt: str
    completion: str
    reward: float | None = None


def write_report(run: Path) -> Path:
    """Write ``report.html`` into the run folder ``run`` and return its path."""
    status = read_status(run)
    rows = read_metrics(run / "metrics.jsonl")
    journal = run / "journal.jsonl"
    progress = replay(read_journal(journal).entries if journal.exists() else ())
    summary = summarize(
        rows,
        progress,
        run=run.name,
        outcome=status.reason or progress.ended or status.state,
        ok=status.state != "failed",
    )
    path = run / "report.html"
    staged = run / ".report.html.tmp"
    staged.write_text(_page(summary, rows, read_samples(run / "rollouts")), encoding="utf-8")
    staged.replace(path)
    return path


def read_samples(folder: Path) -> list[Sampled]:
    """Return the kept completions in order of steps; lines that are not samples (a torn end) are left out."""
    decoder = msgspec.json.Decoder(Sampled)
    samples: list[Sampled] = []
    for file in sorted(folder.rglob("*.jsonl")):
        for line in file.read_bytes().splitlines():
            try:
                samples.append(decoder.decode(line))
            except msgspec.MsgspecError:
                continue
    return sorted(samples, key=lambda sample: sample.step)


# Plots


def plots(rows: Rows) -> list[tuple[str, str]]:
    """Return (title, SVG) of every plot that has at least one figure to show."""
    drawn: list[tuple[str, str]] = []
    for title, draw in _PLOTS:
        svg = _svg(lambda axes, draw=draw: draw(axes, rows))  # type: ignore[misc]
        if svg:
            drawn.append((title, svg))
    return drawn


def _svg(draw: Callable[[Any], bool]) -> str:
    """Draw on fresh axes and return them as an SVG element; empty if ``draw`` had nothing to show."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nereus", "font.family": "sans-serif"}):
        figure = Figure(figsize=_SIZE_INCHES)
        # Fixed margins: laying out automatically would draw everything three times.
        figure.subplots_adjust(left=0.11, right=0.985, bottom=0.15, top=0.87)
        axes = figure.add_subplot()
        _style(axes)
        if not draw(axes):
            return ""
        file = io.StringIO()
        figure.patch.set_alpha(0)
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def _style(axes: Any) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=8, length=0, pad=4)
    axes.set_xlabel("step", fontsize=8, color=_FAINT, loc="right")
    axes.margins(x=0.01)


def _line(axes: Any, rows: Rows, name: str, *, color: str = _BLUE, label: str = "", width: float = 1.6) -> bool:
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
        loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, fontsize=8, labelcolor=_INK, borderpad=0
    )


def _reward(axes: Any, rows: Rows) -> bool:
    steps, means, spreads = column(rows, "step"), column(rows, "reward/mean"), column(rows, "reward/std")
    if not finite(means):
        return False
    low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
    high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
    if finite(spreads):
        axes.fill_between(steps, low, high, color=_BLUE, alpha=0.10, linewidth=0, label="± std")
    axes.plot(steps, means, color=_BLUE, alpha=0.35, linewidth=1.0, label="mean of the step")
    axes.plot(steps, _smooth(means, 10), color=_BLUE, linewidth=2.2, label="running mean of 10")
    _legend(axes, 3)
    return True


def _length(axes: Any, rows: Rows) -> bool:
    drawn = _line(axes, rows, "response_length/mean", label="mean")
    if _line(axes, rows, "response_length/max", color=_FAINT, label="longest", width=1.0):
        _legend(axes, 2)
    return drawn


def _staleness(axes: Any, rows: Rows) -> bool:
    drawn = _line(axes, rows, "staleness/mean", label="mean")
    if _line(axes, rows, "staleness/max", color=_FAINT, label="max", width=1.0):
        _legend(axes, 2)
    axes.set_ylim(bottom=-0.05)
    return drawn


def _time(axes: Any, rows: Rows) -> bool:
    parts = dict(sorted(time_parts(rows).items(), key=lambda item: -math.fsum(item[1])))
    if not parts or len(rows) < 2:
        return False
    window = max(1, len(rows) // 40)
    stacked = [[value if math.isfinite(value) else 0.0 for value in _smooth(part, window)] for part in parts.values()]
    colors = [_PARTS[index % len(_PARTS)] for index in range(len(parts))]
    labels = [part.replace("_", " ") for part in parts]
    axes.stackplot(column(rows, "step"), *stacked, labels=labels, colors=colors, alpha=0.85, linewidth=0)
    axes.set_ylim(0, _robust_top([math.fsum(values) for values in zip(*stacked, strict=True)]))
    axes.set_ylabel("seconds", fontsize=8, color=_FAINT)
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


# The page

_CSS = """
:root{color-scheme:light}
body{font:15px/1.5 system-ui,"Segoe UI","DejaVu Sans",sans-serif;color:#1f2937;background:#f6f7f9;margin:0}
main{max-width:1160px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:26px;margin:0}h2{font-size:17px;margin:36px 0 12px}
.outcome{margin:2px 0 24px;color:#047857}.failed{color:#b91c1c}
.cards{display:grid;grid-template-columns:repeat(4,1fr);gap:14px}
.card,figure,table{background:#fff;border:1px solid #e5e7eb;border-radius:10px}
.card{padding:12px 16px}.card b{display:block;font-size:23px;font-weight:600}.card span{color:#6b7280;font-size:13px}
.plots{display:grid;grid-template-columns:repeat(2,1fr);gap:14px}
@media(max-width:800px){.cards,.plots{grid-template-columns:1fr}}
figure{margin:0;padding:12px 14px 8px}figcaption{font-weight:600;font-size:14px;margin-bottom:6px}
figure svg{width:100%;height:auto;display:block}
table{border-collapse:separate;border-spacing:0;width:100%;overflow:hidden}
td,th{padding:8px 14px;text-align:left;vertical-align:top;border-top:1px solid #eef0f3}
tr:first-child td,tr:first-child th{border-top:0}th{font-weight:500;color:#6b7280;font-size:13px;white-space:nowrap}
td.text{font:13px/1.45 ui-monospace,"DejaVu Sans Mono",monospace;white-space:pre-wrap;word-break:break-word}
td.num,th.num{text-align:right;white-space:nowrap}
"""


def _page(summary: Summary, rows: Rows, samples: Sequence[Sampled]) -> str:
    body = [
        f"<h1>{_text(summary.run)}</h1>",
        f'<p class="outcome{"" if summary.ok else " failed"}">{_text(summary.outcome)}</p>',
        _cards(summary),
    ]
    try:
        drawn = plots(rows)
        absent = "No step was finished."
    except ImportError as error:  # a report without curves is better than none
        drawn = []
        absent = f"No curves: {error.name or 'matplotlib'} is not installed; install the extra nereus[train]."
    if drawn:
        figures = "".join(f"<figure><figcaption>{_text(title)}</figcaption>{svg}</figure>" for title, svg in drawn)
        body += ["<h2>Curves</h2>", f'<div class="plots">{figures}</div>']
    else:
        body.append(f"<p>{_text(absent)}</p>")
    body += ["<h2>Figures</h2>", _figures(summary)]
    if samples:
        body += ["<h2>Completions before and after</h2>", _samples(samples)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_text(summary.run)}</title><style>{_CSS}</style></head>\n<body><main>"
        + "\n".join(body)
        + "</main></body></html>\n"
    )


def _cards(summary: Summary) -> str:
    cards = (
        (f"{number(summary.reward_first, 2)} → {number(summary.reward_last, 2)}", "reward, first and last steps"),
        (f"{summary.steps:,}", f"steps, {number(summary.step_s, 2)} s each"),
        (number(summary.tokens_per_s, 0), "tokens per second"),
        (f"{number(summary.staleness_mean, 2)} / {number(summary.staleness_max, 0)}", "staleness, mean and max"),
    )
    inner = "".join(f'<div class="card"><b>{_text(value)}</b><span>{_text(name)}</span></div>' for value, name in cards)
    return f'<div class="cards">{inner}</div>'


def _figures(summary: Summary) -> str:
    rows = [(name, value) for name, value in summary_rows(summary)]
    total = math.fsum(summary.time_split_s.values())
    rows += [
        (f"time: {part.replace('_', ' ')}", f"{seconds:.3f} s per step, {seconds / total:.0%}")
        for part, seconds in summary.time_split_s.items()
    ]
    return (
        "<table>"
        + "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows)
        + "</table>"
    )


def _samples(samples: Sequence[Sampled], each: int = 5) -> str:
    first = [sample for sample in samples if sample.step == samples[0].step][:each]
    last = [sample for sample in samples if sample.step == samples[-1].step][:each]
    chosen = first if samples[0].step == samples[-1].step else first + last
    rows = "".join(
        f'<tr><td class="num">{sample.step}</td><td class="text">{_lines(sample.prompt)}</td>'
        f'<td class="text">{_lines(sample.completion)}</td>'
        f'<td class="num">{number(math.nan if sample.reward is None else sample.reward, 2)}</td></tr>'
        for sample in chosen
    )
    head = '<tr><th class="num">step</th><th>prompt</th><th>completion</th><th class="num">reward</th></tr>'
    return f"<table>{head}{rows}</table>"


def _text(text: str) -> str:
    return html.escape(escape(text))


def _lines(text: str, limit: int = 2000) -> str:
    """Escape a text but keep its line breaks; a very long one is cut, which is said."""
    cut = text if len(text) <= limit else text[:limit] + f" … ({len(text) - limit:,} characters more)"
    return "\n".join(_text(line) for line in cut.split("\n"))
