"""How do the figures of a comparison look as text and as HTML?

One list of columns for both, so that they cannot disagree. Invariant (tests/commands/test_compare.py): a column without
any figure is left out; what is not known is a dash.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from nereus.commands.render import columns
from nereus.runtime.display import number
from nereus.runtime.page import text
from nereus.sim.comparison import Standing

_COLUMNS: tuple[tuple[str, Callable[[Standing], float], Callable[[float], str]], ...] = (
    ("s per step", lambda one: one.step_s, lambda value: number(value, 2)),
    ("spread, s", lambda one: one.step_spread_s, lambda value: number(value, 2)),
    ("relative", lambda one: one.relative, lambda value: number(value, 3)),
    ("gap to the oracle", lambda one: one.gap, lambda value: f"{value:+.1%}"),
    ("transitions", lambda one: one.transitions, lambda value: f"{value:.3g}"),
    ("s in them", lambda one: one.transition_s, lambda value: number(value, 1)),
    ("staleness", lambda one: one.staleness_mean, lambda value: number(value, 2)),
    ("at most", lambda one: one.staleness_max, lambda value: number(value, 0)),
    ("restores", lambda one: one.restores, lambda value: f"{value:.3g}"),
    ("failed", lambda one: float(one.failed) if one.failed else math.nan, lambda value: f"{value:.0f}"),
)


def rows(standings: Sequence[Standing]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and one row per policy."""
    kept = [
        (name, figure, form)
        for name, figure, form in _COLUMNS
        if any(math.isfinite(figure(standing)) for standing in standings)
    ]
    body = [
        (
            standing.policy,
            *(form(value) if math.isfinite(value := figure(standing)) else "–" for _, figure, form in kept),
        )
        for standing in standings
    ]
    return ("policy", *(name for name, _, _ in kept)), body


def as_text(standings: Sequence[Standing]) -> str:
    """Return the table as lines."""
    head, body = rows(standings)
    return "\n".join(columns(head, body))


def as_html(head: Sequence[str], body: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """Return a table, its first ``words`` columns as text and the rest as figures."""
    kinds = ["" if index < words else "num" for index in range(len(head))]
    top = "".join(f'<th class="{kind}">{text(cell)}</th>' for kind, cell in zip(kinds, head, strict=True))
    lines = (
        "<tr>"
        + "".join(f'<td class="{kind}">{text(cell)}</td>' for kind, cell in zip(kinds, row, strict=True))
        + "</tr>"
        for row in body
    )
    return f"<table><tr>{top}</tr>{''.join(lines)}</table>"
