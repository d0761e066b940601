"""Which sections has the evaluation, in which order, and how does it become one document?

Owner of ``docs/evaluation.md``: written by ``nereus compare --paper``, never by hand. Invariants
(tests/sim/test_evaluation.py): every section is named, also one that is not measured; a figure that is not known is a
dash; the command beside each row makes it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from msgspec import Struct

from nereus.errors import ConfigError
from nereus.sim.evaluation import (
    asynchronous,
    coordination,
    determinism,
    doubling,
    drift,
    long_run,
    optimum,
    storms,
    throughput,
)
from nereus.sim.evaluation.figures import Figure, Section


class Measure(Protocol):
    """Makes a section."""

    def __call__(self, *, quick: bool) -> Section: ...


class Measured(Struct, frozen=True):
    """A section and what making it took."""

    key: str
    section: Section
    cpu_s: float
    quick: bool


SECTIONS: dict[str, Measure] = {
    "drift": drift.section,
    "throughput": throughput.section,
    "async": asynchronous.section,
    "optimum": optimum.section,
    "doubling": doubling.section,
    "coordination": coordination.section,
    "long-run": long_run.section,
    "storms": storms.section,
    "determinism": determinism.section,
}


def chosen(only: str) -> tuple[str, ...]:
    """Return the sections that ``only`` names, with commas between; empty: all. ``ConfigError`` names wrong ones."""
    names = tuple(name.strip() for name in only.split(",") if name.strip())
    for name in names:
        if name not in SECTIONS:
            remedy = f"name one of {', '.join(SECTIONS)}"
            raise ConfigError(f"the evaluation has no section {name}", where="--only", remedy=remedy)
    return tuple(key for key in SECTIONS if not names or key in names)


def measured(keys: Sequence[str], *, quick: bool, clock: Callable[[], float]) -> Iterator[Measured]:
    """Yield the sections one after the other; ``clock`` tells processor time."""
    for key in keys:
        began = clock()
        section = SECTIONS[key](quick=quick)
        yield Measured(key, section, clock() - began, quick)


def document(made: Sequence[Measured], *, when: str, machine: str) -> str:
    """Return the evaluation as Markdown."""
    lines = [
        "# Evaluation",
        "",
        "Written by `nereus compare --paper`; not to be edited by hand. The paper is arXiv 2609.34645; its figures are",
        "those that its text gives (`nereus/sim/evaluation/paper_figures.csv`). Ours are simulated unless a row says",
        "otherwise: evidence about decisions and what they cost in a modelled world, not a measurement of any GPU.",
        f"Ratio is ours over the paper's. Made on {when}, on {machine}.",
    ]
    absent = [f"`{key}`" for key in SECTIONS if key not in {one.key for one in made}]
    if absent:
        lines += ["", f"Not measured for this document: {', '.join(absent)} (`nereus compare --paper --only NAME`)."]
    for one in made:
        number_of = [*SECTIONS].index(one.key) + 1
        lines += ["", f"## {number_of} {one.section.title}", "", one.section.assumes, ""]
        lines += [f"Made by `{command(one)}`, in {one.cpu_s:.1f} s of processor time.", ""]
        lines += ["| what | paper | ours | unit | ratio | command | note |", "|---|---:|---:|---|---:|---|---|"]
        lines += [_row(figure, command(one)) for figure in one.section.figures]
    return "\n".join(lines) + "\n"


def command(one: Measured) -> str:
    """Return the words that make a section again."""
    return f"nereus compare --paper --only {one.key}{' --quick' if one.quick else ''}"


def _row(figure: Figure, words: str) -> str:
    cells = (
        figure.what,
        number(figure.paper),
        number(figure.ours),
        figure.unit,
        number(figure.ratio),
        f"`{words}`",
        figure.note,
    )
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def number(value: float) -> str:
    """Return a figure with three significant digits, whole numbers as they are; a dash if it is not known."""
    if not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"
