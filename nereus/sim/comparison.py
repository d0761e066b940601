"""How did one simulated run go, step by step, and how do several policies stand beside each other?

Owner: comparisons and the evaluation. Pure: journals and summaries in, values out. Time 0 is when the first step could
begin, so what starting processes took counts for nobody. A step's latency reaches from the end of the step before to
its own: waits, plan changes, and what a run that went back to a checkpoint had to do again are all in it.
Invariants (tests/sim/test_comparison.py): the latencies of a run add up to the end of its last step; a policy that
stands first is 1 beside itself; only an oracle has others' gaps measured against it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence

from msgspec import Struct

from nereus.runtime import journal as record
from nereus.runtime.journal import Entry
from nereus.runtime.summary import mean
from nereus.runtime.timeline import summarized, timeline

ORACLES = ("oracle", "clairvoyant")
"""Policies that know the future: what they reach is what others fall short of."""


class Band(Struct, frozen=True):
    """A plan in force."""

    begin_s: float
    end_s: float
    layouts: str


class Switch(Struct, frozen=True, kw_only=True):
    """A plan change, in force or given up."""

    step: int
    """So many steps were done when it began."""
    at_s: float
    """When it ended."""
    seconds: float
    before: str
    after: str
    why: str
    ok: bool = True


class RunResult(Struct, frozen=True, kw_only=True):
    """One job under one policy with one seed."""

    policy: str
    seed: int
    latency_s: tuple[float, ...]
    """Of every step."""
    bands: tuple[Band, ...] = ()
    switches: tuple[Switch, ...] = ()
    staleness_mean: float = math.nan
    staleness_max: float = math.nan
    restores: int = 0
    """How often it went back to a checkpoint."""
    lost: int = 0
    """Workers that were lost."""
    folder: str = ""
    """What it left behind, for ``nereus explain`` and ``nereus report``."""
    failure: str = ""
    """Why it did not reach its end."""

    @property
    def ends_s(self) -> list[float]:
        """When each step ended."""
        ends, total = list[float](), 0.0
        for seconds in self.latency_s:
            total += seconds
            ends.append(total)
        return ends

    @property
    def transition_s(self) -> float:
        """Seconds in plan changes, those given up included."""
        return math.fsum(switch.seconds for switch in self.switches)


class Standing(Struct, frozen=True, kw_only=True):
    """One policy over all seeds: one line of the table. NaN: not known."""

    policy: str
    source: str
    runs: int
    step_s: float
    """Mean latency of a step: of each run, then over the runs."""
    step_spread_s: float
    """Standard deviation of the runs' means; NaN for a single run."""
    relative: float
    """Over the first policy's."""
    transitions: float
    """That came into force, per run."""
    transition_s: float
    """In all of them, per run."""
    staleness_mean: float
    staleness_max: float
    restores: float
    gap: float
    """Over the oracle's mean latency, less 1."""
    failed: int
    """Runs that did not reach their end; their figures are of the steps that they made."""


def result_of(
    entries: Sequence[Entry],
    *,
    policy: str,
    seed: int,
    staleness_mean: float = math.nan,
    staleness_max: float = math.nan,
    restores: int = 0,
    lost: int = 0,
    folder: str = "",
    failure: str = "",
) -> RunResult:
    """Return the result of the run whose journal holds ``entries``."""
    began = next((entry.t for entry in entries if isinstance(entry.record, record.VersionReady)), 0.0)
    ends = {entry.record.step: entry.t for entry in entries if isinstance(entry.record, record.Trained)}
    times = [began, *(ends[step] for step in sorted(ends))]
    line = timeline(entries)
    return RunResult(
        policy=policy,
        seed=seed,
        latency_s=tuple(after - before for before, after in itertools.pairwise(times)),
        bands=tuple(
            Band(max(0.0, era.begin_s - began), era.end_s - began, summarized(era.plan))
            for era in line.eras
            if era.end_s > began
        ),
        switches=tuple(
            Switch(
                step=change.step,
                at_s=change.end_s - began,
                seconds=change.seconds,
                before=summarized(change.before),
                after=summarized(change.after),
                why=change.why if change.ok else change.reason,
                ok=change.ok,
            )
            for change in line.changes
        ),
        staleness_mean=staleness_mean,
        staleness_max=staleness_max,
        restores=restores,
        lost=lost,
        folder=folder,
        failure=failure,
    )


def standings(results: Sequence[RunResult], sources: dict[str, str]) -> tuple[Standing, ...]:
    """Return one line per policy, in the order in which they first come; ``sources`` says where each is published."""
    by_policy: dict[str, list[RunResult]] = {}
    for one in results:
        by_policy.setdefault(one.policy, []).append(one)
    step_s = {policy: mean(map(mean_latency_s, own)) for policy, own in by_policy.items()}
    first = next(iter(step_s.values()), math.nan)
    oracle = reference(by_policy)
    return tuple(
        Standing(
            policy=policy,
            source=sources.get(policy, ""),
            runs=len(own),
            step_s=step_s[policy],
            step_spread_s=statistics.stdev(map(mean_latency_s, own)) if len(own) > 1 else math.nan,
            relative=step_s[policy] / first,
            transitions=mean(sum(switch.ok for switch in one.switches) for one in own),
            transition_s=mean(one.transition_s for one in own),
            staleness_mean=mean(one.staleness_mean for one in own),
            staleness_max=max((one.staleness_max for one in own), default=math.nan),
            restores=mean(one.restores for one in own),
            gap=step_s[policy] / step_s[oracle] - 1 if oracle else math.nan,
            failed=sum(bool(one.failure) for one in own),
        )
        for policy, own in by_policy.items()
    )


def mean_latency_s(one: RunResult) -> float:
    """Return what a step took in the mean."""
    return mean(one.latency_s)


def reference(policies: Iterable[str]) -> str:
    """Return the oracle among ``policies``; empty if there is none."""
    return next((policy for policy in policies if policy in ORACLES), "")
