"""How does a comparison look on one page that can be sent to somebody?

One HTML file with the table, the picture and every plan change. Invariant (tests/commands/test_compare.py): it needs
nothing from outside.
"""

from __future__ import annotations

from collections.abc import Sequence

from nereus.commands.comparison import picture, table
from nereus.core.units import format_seconds
from nereus.runtime.page import document, text
from nereus.sim.comparison import RunResult, Standing

_NOTE = (
    "Simulated: supervisor, controller and transitions are those of a live run; slots, links and engines take the time "
    "of a model of them. A step reaches from the end of the one before to its own, with all that it waited for; what "
    "starting processes took counts for nobody."
)


def page(title: str, about: str, results: Sequence[RunResult], standings: Sequence[Standing]) -> str:
    """Return the page; without matplotlib the picture is left out, which is said."""
    body = [f"<h1>{text(title)}</h1>", f'<p class="outcome">{text(about)}</p>', table.as_html(*table.rows(standings))]
    try:
        drawn = picture.svg(results)
        absent = "No step was made."
    except ImportError as error:
        drawn, absent = "", f"No picture: {error.name or 'matplotlib'} is not installed; install nereus[train]."
    body.append(f"<h2>Step by step</h2><figure>{drawn}</figure>" if drawn else f"<p>{text(absent)}</p>")
    for one in results:
        if one.failure:
            said = f"{one.policy}, seed {one.seed}, ended after {len(one.latency_s)} steps: {one.failure}"
            body.append(f'<p class="outcome failed">{text(said)}</p>')
    if any(one.switches for one in results):
        body += ["<h2>Plan changes</h2>", _changes(results)]
    body += [
        "<h2>Policies</h2>",
        table.as_html(("policy", "its rules"), [(s.policy, s.source) for s in standings], words=2),
    ]
    body.append(f'<p class="said">{text(_NOTE)}</p>')
    return document(title, body)


def _changes(results: Sequence[RunResult]) -> str:
    head = ("policy", "from", "to", "why", "seed", "after step", "at", "took")
    rows = [
        (
            one.policy,
            switch.before,
            switch.after,
            switch.why if switch.ok else f"given up: {switch.why}",
            str(one.seed),
            str(switch.step),
            format_seconds(switch.at_s),
            format_seconds(switch.seconds),
        )
        for one in results
        for switch in one.switches
    ]
    return table.as_html(head, rows, words=4)
