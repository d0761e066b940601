"""Which of a test's many cases run at every save? The fast tier takes some, spread evenly; the deep tier all others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def spread(cases: Sequence[object], fast: int) -> list[object]:
    """Return all ``cases`` as parameters, of which ``fast``, the first among them, belong to the fast tier."""
    chosen = {index * len(cases) // fast for index in range(fast)}
    return [case if index in chosen else pytest.param(case, marks=pytest.mark.deep) for index, case in enumerate(cases)]
