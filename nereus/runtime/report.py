"""What does a run look like afterwards, on one page that can be sent to somebody?

Owner: the supervisor at the end of a run, or anybody later; reads the run folder only. The page is one HTML file,
without scripts or outside resources; the plots are inline SVG. The timeline is also left beside it as a PNG.
Invariants (tests/runtime/test_report.py): text of the model is escaped; a run without any step still gets a page.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from nereus.core.units import format_bytes
from nereus.runtime import picture
from nereus.runtime.curves import Rows, plots
from nereus.runtime.display import number, summary_rows
from nereus.runtime.folder import read_status, write_whole
from nereus.runtime.journal import read_journal, replay
from nereus.runtime.metrics import read_metrics
from nereus.runtime.page import document, text
from nereus.runtime.summary import Summary, summarize
from nereus.runtime.timeline import Change, Timeline, summarized, timeline

TIMELINE = "timeline.png"


class Sampled(Struct, frozen=True):
    """A completion that was kept as text in rollouts/."""

    step: int
    prompt: str
    completion: str
    reward: float | None = None


def write_report(run: Path) -> Path:
    """Write ``report.html`` and ``timeline.png`` into the run folder ``run``; return the page's path."""
    status = read_status(run)
    rows = read_metrics(run / "metrics.jsonl")
    journal = run / "journal.jsonl"
    entries = read_journal(journal).entries if journal.exists() else ()
    progress, line = replay(entries), timeline(entries)
    summary = summarize(
        rows,
        progress,
        run=run.name,
        outcome=status.reason or progress.ended or status.state,
        ok=status.state != "failed",
    )
    page = _page(summary, rows, line, read_samples(run / "rollouts"))
    with contextlib.suppress(ImportError):  # of matplotlib: the page says so
        if png := picture.png(line):
            write_whole(run / TIMELINE, png)
    write_whole(run / "report.html", page.encode())
    return run / "report.html"


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


# The page


def _page(summary: Summary, rows: Rows, line: Timeline, samples: Sequence[Sampled]) -> str:
    body = [
        f"<h1>{text(summary.run)}</h1>",
        f'<p class="outcome{"" if summary.ok else " failed"}">{text(summary.outcome)}</p>',
        _cards(summary),
    ]
    try:
        drawn, timeline_svg = plots(rows), picture.svg(line)
        absent = "No step was finished."
    except ImportError as error:  # a report without curves is better than none
        drawn, timeline_svg = [], ""
        absent = f"No curves: {error.name or 'matplotlib'} is not installed; install the extra nereus[train]."
    if timeline_svg:
        body += ["<h2>Slots over time</h2>", f"<figure>{timeline_svg}</figure>"]
    if line.changes:
        body += ["<h2>Plan changes</h2>", _changes(line.changes)]
    if drawn:
        figures = "".join(f"<figure><figcaption>{text(title)}</figcaption>{svg}</figure>" for title, svg in drawn)
        body += ["<h2>Curves</h2>", f'<div class="plots">{figures}</div>']
    else:
        body.append(f"<p>{text(absent)}</p>")
    body += ["<h2>Figures</h2>", _figures(summary)]
    if samples:
        body += ["<h2>Completions before and after</h2>", _samples(samples)]
    return document(summary.run, body)


def _cards(summary: Summary) -> str:
    cards = (
        (f"{number(summary.reward_first, 2)} → {number(summary.reward_last, 2)}", "reward, first and last steps"),
        (f"{summary.steps:,}", f"steps, {number(summary.step_s, 2)} s each"),
        (number(summary.tokens_per_s, 0), "tokens per second"),
        (f"{number(summary.staleness_mean, 2)} / {number(summary.staleness_max, 0)}", "staleness, mean and max"),
    )
    inner = "".join(f'<div class="card"><b>{text(value)}</b><span>{text(name)}</span></div>' for value, name in cards)
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
        + "".join(f"<tr><th>{text(name)}</th><td>{text(value)}</td></tr>" for name, value in rows)
        + "</table>"
    )


def _changes(changes: Sequence[Change]) -> str:
    head = (
        '<tr><th class="num">plan</th><th class="num">after step</th><th>from → to</th><th>why</th>'
        '<th class="num">primitives</th><th class="num">moved</th><th class="num">took</th>'
        '<th class="num">a step, before → after</th></tr>'
    )
    return f"<table>{head}{''.join(map(_change, changes))}</table>"


def _change(change: Change) -> str:
    outcome = "" if change.ok else f'<br><span class="failed">given up: {text(change.reason)}</span>'
    kinds = Counter(name.rpartition("/")[2].rpartition("-")[0] for name in change.primitives)
    took = f"{number(change.seconds, 2)} s{_predicted(change.predicted_s)}"
    step = (
        f"{number(change.step_before_s, 2)} → {number(change.step_after_s, 2)} s{_predicted(change.step_predicted_s)}"
    )
    cells = (
        ("num", str(change.after.epoch)),
        ("num", str(change.step)),
        ("", f"{text(summarized(change.before))}<br>{text(summarized(change.after))}{outcome}"),
        ("", text(change.why)),
        ("num", "<br>".join(f"{count} {text(kind)}" for kind, count in sorted(kinds.items())) or "–"),
        ("num", format_bytes(change.moved_bytes)),
        ("num", took),
        ("num", step),
    )
    return "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in cells) + "</tr>"


def _predicted(seconds: float) -> str:
    return f'<br><span class="said">predicted {seconds:.2f} s</span>' if math.isfinite(seconds) else ""


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


def _lines(words: str, limit: int = 2000) -> str:
    """Escape a text but keep its line breaks; a very long one is cut, which is said."""
    cut = words if len(words) <= limit else words[:limit] + f" … ({len(words) - limit:,} characters more)"
    return "\n".join(text(line) for line in cut.split("\n"))
