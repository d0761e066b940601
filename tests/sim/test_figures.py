"""What a journal tells of staleness, tails and time."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated import job, simulate

from nereus.runtime.journal import read_journal
from nereus.sim.figures import figures
from nereus.sim.simulation import Failures

pytestmark = pytest.mark.deep


@pytest.mark.parametrize("failures", [Failures(), Failures(mtbf_s=150.0)])
def test_every_trained_group_is_counted_and_time_adds_up(tmp_path: Path, failures: Failures) -> None:
    outcome, watched = simulate(job(steps=12), tmp_path, failures=failures, seed=1)
    assert outcome.finished
    found = figures(read_journal(tmp_path / "journal.jsonl").entries)
    assert sum(found.staleness) == 12 * 16
    assert len(found.staleness) <= 2
    assert 0 <= found.staleness_mean <= 1
    assert found.trained_s + found.waited_s <= found.seconds + 1e-6
    assert found.step_s * 12 == pytest.approx(found.seconds)
    assert found.tail_s > 0
    if not failures.mtbf_s:
        assert found.seconds == pytest.approx(sum(watched.seconds))
        assert found.lost_s < 1.0


def test_an_empty_journal_tells_nothing() -> None:
    found = figures([])
    assert (found.staleness, found.seconds, found.changes) == ((), 0.0, 0)
