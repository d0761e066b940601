"""What is one line of the evaluation: a figure of the paper, ours beside it, and how to make it again?

Owner: ``nereus compare --paper``. The paper's figures are in ``paper_figures.csv``: every number that the text of the
Nereus paper's evaluation gives (arXiv 2609.34645), one a row. Invariants (tests/sim/test_evaluation.py): every row of
that file is named by one section at most once under the name asked for; a figure that is not there is refused.
"""

from __future__ import annotations

import csv
import functools
import math
from pathlib import Path

import msgspec
from msgspec import Struct

PAPER = Path(__file__).parent / "paper_figures.csv"


class Figure(Struct, frozen=True, kw_only=True):
    """One row; NaN: the paper does not say, or ours is not measured."""

    what: str
    paper: float = math.nan
    ours: float = math.nan
    unit: str = ""
    note: str = ""
    """What ours assumes, or why it is not comparable."""

    @property
    def ratio(self) -> float:
        """Return ours over the paper's."""
        return self.ours / self.paper if self.paper else math.nan


class Section(Struct, frozen=True, kw_only=True):
    """One part of the evaluation."""

    title: str
    figures: tuple[Figure, ...]
    assumes: str = ""
    """In which world the figures are made, and what the reader must know to judge them."""


class PaperFigure(Struct, frozen=True):
    """One row of ``paper_figures.csv``."""

    experiment: str
    setting: str
    system: str
    metric: str
    value: float
    unit: str


@functools.cache
def paper_figures() -> tuple[PaperFigure, ...]:
    """Return all figures of the paper."""
    with PAPER.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return tuple(msgspec.convert(rows, list[PaperFigure], strict=False))


def paper(experiment: str, system: str, metric: str, setting: str = "") -> float:
    """Return the paper's figure; ``setting`` is that column or part of it; ``ValueError`` unless one is meant."""
    alike = [
        one
        for one in paper_figures()
        if (one.experiment, one.system, one.metric) == (experiment, system, metric) and setting in one.setting
    ]
    found = [one.value for one in alike if one.setting == setting] or [one.value for one in alike]
    if len(found) != 1:
        raise ValueError(f"{len(found)} figures of the paper are {experiment}, {system}, {metric}, {setting!r}")
    return found[0]
