"""Does a job survive what strikes its processes? The first trials of ``chaos.py``; ``make chaos`` runs a hundred."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import Trial, run_trial, table

pytestmark = [pytest.mark.live, pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_is_struck_ends_well_or_says_why_and_goes_on(seed: int, tmp_path: Path, cache: Path) -> None:
    result = run_trial(Trial.draw(seed), tmp_path, cache)
    assert not result.problems, "\n".join(table([result]))
