"""How does asynchronous GRPO stand beside systems with a fixed split, on 64 H200?

Step latency and staleness of Nereus, Laminar-style rollouts, one step off, and fully asynchronous with a bound.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from statistics import mean

from msgspec.structs import replace

from nereus.core.profiles import load_model
from nereus.sim.comparing import run_under
from nereus.sim.comparison import Standing, standings
from nereus.sim.evaluation.figures import Figure, Section, paper
from nereus.sim.evaluation.jobs import base_job, sized
from nereus.sim.policies.named import named
from nereus.sim.trace import load_trace

EQUAL, TIGHT = 4, 1
"""Bounds of staleness: of Laminar the most that its authors saw, and our default."""

POLICIES = {
    EQUAL: ("nereus", "laminar", "fully_async", "clairvoyant"),
    TIGHT: ("nereus", "one_step_off", "fully_async", "clairvoyant"),
}
"""What runs under each bound; Laminar-style rollouts have none, one step off is always one step off."""

UNBOUND = ("laminar", "one_step_off")

TRACES = ("h20-grpo", "h20-dapo", "verl-grpo-shrinking")
SEEDS = 3
STEPS, STEPS_QUICK = 20, 8
TITLE = "Asynchronous GRPO beside Laminar-style and others, 64 H200"

_ASSUMES = (
    "GRPO of 8B, 64 groups of 8, on 64 H200; lengths of public GRPO logs (h20-dapo and verl-grpo-shrinking are held "
    "out: nothing was designed on them). Laminar-style rollouts have no bound of staleness (its authors saw 4 at "
    f"most), so ours stand beside them under a bound of {EQUAL}; and under {TIGHT}, our default, where a step waits "
    "for the longest response of the one before. Nereus begins with the layouts d4t4p2 and d8t4p1 of the job file "
    "and learns speeds for four steps; splits of the other policies are swept for them in advance, as their users "
    "would. The oracle has the same bound."
)


def section(*, quick: bool) -> Section:
    """Return latencies and ages; ``quick`` takes one trace, one seed and fewer steps."""
    figures: list[Figure] = []
    less: dict[int, list[float]] = {bound: [] for bound in POLICIES}
    for trace in TRACES[:1] if quick else TRACES:
        laminar_s = math.nan
        for bound, names in POLICIES.items():
            table = _table(trace, names, bound, STEPS_QUICK if quick else STEPS, 1 if quick else SEEDS)
            figures += [_figure(trace, bound, one, late_s) for one, late_s in table]
            step_s = {one.policy: one.step_s for one, _ in table}
            laminar_s = step_s.get("laminar", laminar_s)
            less[bound].append(100 * (1 - step_s["nereus"] / laminar_s))
    best = [
        Figure(
            what=f"step latency less than laminar's by, at most, staleness bound {bound}",
            paper=paper("algorithms", "nereus vs laminar", "latency_reduction_max"),
            ours=max(percent),
            unit="%",
            note=f"at least {min(percent):.1f} %; negative: more",
        )
        for bound, percent in less.items()
    ]
    short = f" Quick: one trace, one seed, {STEPS_QUICK} steps." if quick else ""
    return Section(title=TITLE, figures=(*best, *figures), assumes=_ASSUMES + short)


def _table(trace: str, names: tuple[str, ...], bound: int, steps: int, seeds: int) -> list[tuple[Standing, float]]:
    """Return how policies stand, and the seconds of a step in the second half of their runs."""
    config = sized(base_job(), profile="h200-64", slots=64, train="d4t4p2", rollout="d8t4p1", steps=steps)
    config = replace(config, async_=replace(config.async_, staleness=bound))
    shape, course = load_model(config.model.path), load_trace(trace)
    with tempfile.TemporaryDirectory() as made:
        results = [
            run_under(config, shape, course, named(name), seed, Path(made) / f"{name}-{seed}")
            for seed in range(seeds)
            for name in names
        ]
    late_s: dict[str, list[float]] = {name: [] for name in names}
    for one in results:
        late_s[one.policy] += one.latency_s[len(one.latency_s) // 2 :]
    return [(one, mean(late_s[one.policy] or [math.nan])) for one in standings(results, {})]


def _figure(trace: str, bound: int, one: Standing, late_s: float) -> Figure:
    ages = f"staleness {one.staleness_mean:.2f}, at most {one.staleness_max:.0f}; {one.transitions:.3g} transitions"
    ages += f"; {one.gap:+.1%} beside the oracle" if math.isfinite(one.gap) else ""
    ages += f"; {late_s:.3g} s in the second half"
    failed = f"; {one.failed} of {one.runs} runs failed" if one.failed else ""
    what = f"step latency, {trace}, {one.policy}" + (f", bound {bound}" if one.policy not in UNBOUND else "")
    return Figure(what=what, ours=one.step_s, unit="s", note=ages + failed)
