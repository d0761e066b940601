"""How do policies stand under drift: lengths that grow and slots that come and go, in synchronous PPO on A100?

The paper's three drift traces. The first was seen while Nereus was designed, the second and third were held out until
the first whole run of this section.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from nereus.core.profiles import load_cluster, load_model
from nereus.runtime.summary import mean
from nereus.sim.comparing import run_synchronous_under
from nereus.sim.comparison import ORACLES, RunResult, mean_latency_s, reference
from nereus.sim.evaluation.figures import Figure, Section, paper
from nereus.sim.job import SynchronousJob
from nereus.sim.policies.named import SYNCHRONOUS, named_synchronous
from nereus.sim.trace import load_trace

TRACES = ("paper-drift-1", "paper-drift-2", "paper-drift-3")
SEEDS = 5
GAMMAS = (0.0, 0.25, 0.5, 0.75, 1.0)
PUBLISHED = {
    "nereus": "nereus",
    "every_k": "every_3_steps",
    "dynarl": "dynarl_admission",
    "fixed_dp": "static_tp_pp_with_dp_scaling",
}
"""Our names of policies, and the paper's."""

_ASSUMES = (
    "PPO of 8B (four models of that size), 1,024 prompts a step, 25 steps, 8 to 32 A100; the course of lengths and "
    "slots between the ends that the paper gives is ours, as are speeds: compare policies with each other rather than "
    "seconds with the paper's. A step's latency holds all plan changes and waits. The oracle (clairvoyant) knows the "
    "trace and the world's speeds, not the noise, and follows the cheapest course through plans that its search has "
    "nominated: a run may still be faster, and its gap is negative then. The second and third trace were held out; the "
    "third showed that a slot near its memory limit sent the job back to a checkpoint, which was mended."
)

Runs = dict[tuple[str, str], list[RunResult]]
"""By policy and trace."""


def drift_job() -> SynchronousJob:
    """Return the job of all drift runs, that of ``launchers/simulated/ppo_8b.toml``."""
    return SynchronousJob(cluster=load_cluster("a100-64g-256", 32), model=load_model("llama-3.1-8b"))


def section(*, quick: bool) -> Section:
    """Return latencies, transitions and gaps; ``quick`` runs the first trace with one seed, and no sweep of gamma."""
    traces, seeds = (TRACES[:1], 1) if quick else (TRACES, SEEDS)
    policies = [name for name in (*PUBLISHED, *ORACLES) if name in SYNCHRONOUS]
    runs = {(name, trace): _runs(name, trace, seeds) for trace in traces for name in policies}
    figures = [*_first_trace(runs), *_transitions(runs), *_gaps(runs, policies)]
    figures += _all_traces(runs, traces)
    figures += () if quick else _sweep()
    short = " Quick: the first trace, one seed, no sweep of gamma." if quick else ""
    return Section(title="Drift: synchronous PPO on 8 to 32 A100", figures=tuple(figures), assumes=_ASSUMES + short)


def _runs(name: str, trace: str, seeds: int, gamma: float | None = None) -> list[RunResult]:
    job = drift_job() if gamma is None else replace(drift_job(), gamma=gamma)
    course, policy = load_trace(trace), named_synchronous(name)  # an oracle looks ahead once for all seeds
    with tempfile.TemporaryDirectory() as made:
        return [run_synchronous_under(job, course, policy, seed, Path(made) / str(seed)) for seed in range(seeds)]


def _step_s(runs: Sequence[RunResult]) -> float:
    return mean(map(mean_latency_s, runs))


def _told(runs: Sequence[RunResult]) -> str:
    changes = mean(sum(switch.ok for switch in one.switches) for one in runs)
    failed = sum(bool(one.failure) for one in runs)
    said = f"{changes:.3g} transitions, {mean(one.transition_s for one in runs):.1f} s in them"
    return said + (f"; {failed} of {len(runs)} runs failed: their steps until then" if failed else "")


def _first_trace(runs: Runs) -> Iterator[Figure]:
    for name, theirs in PUBLISHED.items():
        own = runs.get((name, TRACES[0]))
        published = name != "every_k"
        yield Figure(
            what=f"step latency, {TRACES[0]}, {name}",
            paper=paper("drift_trace1", theirs, "step_latency_mean") if published else math.nan,
            ours=_step_s(own) if own else math.nan,
            unit="s",
            note=_told(own) if own else "not yet measured",
        )


def _transitions(runs: Runs) -> Iterator[Figure]:
    own = runs["nereus", TRACES[0]]
    yield Figure(
        what=f"transitions, {TRACES[0]}, nereus",
        paper=paper("drift_trace1", "nereus", "transitions", "same"),
        ours=mean(sum(switch.ok for switch in one.switches) for one in own),
        unit="count",
    )
    ours = [one for (name, _), made in runs.items() if name == "nereus" for one in made]
    seconds = [switch.seconds for one in ours for switch in one.switches if switch.ok]
    for which, end, pick in (("shortest", "min", min), ("longest", "max", max)):
        yield Figure(
            what=f"{which} transition, nereus",
            paper=paper("drift_3traces", "nereus", f"transition_{end}"),
            ours=pick(seconds) if seconds else math.nan,
            unit="s",
        )


def _gaps(runs: Runs, policies: Sequence[str]) -> Iterator[Figure]:
    oracle = reference(policies)
    if not oracle:
        yield Figure(what="gap of nereus to the oracle", unit="%", note="not yet measured")
        return
    for (name, trace), own in runs.items():
        if name != oracle:
            gap = 100 * (_step_s(own) / _step_s(runs[oracle, trace]) - 1)
            yield Figure(what=f"gap to the oracle, {trace}, {name}", ours=gap, unit="%")


def _all_traces(runs: Runs, traces: Sequence[str]) -> Iterator[Figure]:
    for name in ("nereus", "every_k", "dynarl"):
        means = [_step_s(runs[name, trace]) for trace in traces if (name, trace) in runs]
        whole = len(means) == len(TRACES)
        for metric, what, ours in (
            ("step_latency_mean", "mean", mean(means)),
            ("step_latency_std_across_traces", "spread over traces", statistics.pstdev(means) if means else 0.0),
        ):
            yield Figure(
                what=f"step latency of three traces, {what}, {name}",
                paper=paper("drift_3traces", PUBLISHED[name], metric),
                ours=ours if whole else math.nan,
                unit="s",
                note="" if whole else "not yet measured",
            )


def _sweep() -> Iterator[Figure]:
    for gamma in GAMMAS:
        own = _runs("nereus", TRACES[0], SEEDS, gamma)
        yield Figure(
            what=f"step latency, {TRACES[0]}, nereus with gamma {gamma:g}", ours=_step_s(own), unit="s", note=_told(own)
        )
