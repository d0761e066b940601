"""Results of runs, and how policies stand beside each other."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from simulated import job, simulate

from nereus.runtime.journal import read_journal
from nereus.sim.comparison import RunResult, result_of, standings
from nereus.sim.trace import Failure, Trace


def _made(policy: str, seed: int, *latency_s: float) -> RunResult:
    return RunResult(policy=policy, seed=seed, latency_s=latency_s)


def test_latencies_add_up_to_the_end_of_the_last_step_also_of_a_run_that_went_back(tmp_path: Path) -> None:
    trace = Trace("loss", "test", failures=(Failure(300.0, 0, "kill"), Failure(300.0, 4, "kill")))
    simulate(job(steps=8), tmp_path, trace=trace)
    entries = read_journal(tmp_path / "journal.jsonl").entries
    made = result_of(entries, policy="nereus", seed=0)
    assert len(made.latency_s) == 8
    assert min(made.latency_s) > 0
    assert made.ends_s[-1] == pytest.approx(sum(made.latency_s))
    last = max(entry.t for entry in entries if type(entry.record).__name__ == "Trained")
    began = next(entry.t for entry in entries if type(entry.record).__name__ == "VersionReady")
    assert made.ends_s[-1] == pytest.approx(last - began)
    assert made.bands[0].begin_s == 0.0


def test_policies_are_measured_against_the_first_and_the_oracle() -> None:
    results = [
        *(_made("nereus", 0, 10.0, 12.0), _made("nereus", 1, 12.0, 14.0)),
        *(_made("fixed", 0, 24.0), _made("oracle", 0, 10.0, 10.0)),
    ]
    nereus, fixed, oracle = standings(results, {"nereus": "this project"})
    assert (nereus.relative, fixed.relative, oracle.gap) == (1.0, 2.0, 0.0)
    assert nereus.gap == pytest.approx(0.2)
    assert nereus.step_spread_s == pytest.approx(math.sqrt(2))
    assert math.isnan(fixed.step_spread_s)
    assert (nereus.source, fixed.source) == ("this project", "")


def test_without_an_oracle_no_gap_is_told() -> None:
    assert all(math.isnan(one.gap) for one in standings([_made("nereus", 0, 1.0), _made("given", 0, 2.0)], {}))
