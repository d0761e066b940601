"""Is the plan that the planner chooses the fastest one, in the simulated truth?

Settings as in the paper's test of plan quality: mean lengths of 1K, 2K and 4K on 8 to 256 slots. ``sim/optimum.py``
says which plans are executed.
"""

from __future__ import annotations

import math

from nereus.core.plan import ModelStage, Plan
from nereus.core.profiles import load_cluster, load_model
from nereus.sim.evaluation.figures import Figure, Section, paper
from nereus.sim.job import SynchronousJob
from nereus.sim.optimum import MOST, Comparison, compared
from nereus.sim.trace import StepLengths, Trace

MEANS = (1024, 2048, 4096)
SIZES = (8, 16, 32, 64, 128, 256)
QUICK_SIZES = (8, 32)
SPREAD = 1.15
"""Ours: p95 of lengths over their mean, between the 1.17 and the 1.09 at the ends of the paper's first trace."""

EXACT = 0.001
"""A choice so close to the best that was executed counts as exact."""

TOLD = 2
"""So many model-stages are named in a note."""

_ASSUMES = (
    "PPO of 8B (four models of that size), 1,024 prompts a step, A100; log-normal response lengths, p95 1.15 times the "
    "mean. The planner learns from 4 noisy steps under its own first plan and chooses once; then one step without "
    "noise is executed under its choice and every candidate. Candidates: the planner's choice and its "
    f"{MOST} fastest runners-up, and what the same search finds, with {MOST} runners-up, when each way to run a "
    "model-stage has its seconds in the simulated truth in the place of the planner's. So the best is over the "
    "planner's whole space as far as model-stages do not slow each other, not over all plans executed one by one; "
    "plans that the planner deems too large for memory are in no list. All are placed on slots by the planner's own "
    "rule. The paper executed 480 plans in 18 settings."
)


def optimum_job(slots: int) -> SynchronousJob:
    """Return the job of one setting, that of the drift section on another number of slots."""
    return SynchronousJob(cluster=load_cluster("a100-64g-256", slots), model=load_model("llama-3.1-8b"))


def steady(mean_tokens: int) -> Trace:
    """Return a trace in which nothing changes."""
    return Trace(f"mean-{mean_tokens}", "constant", steps=(StepLengths(mean_tokens, SPREAD * mean_tokens),))


def section(*, quick: bool) -> Section:
    """Return shares and gaps, and a row for each setting; ``quick`` has 6 of the 18 settings."""
    sizes = QUICK_SIZES if quick else SIZES
    made = {(mean, slots): compared(optimum_job(slots), steady(mean)) for mean in MEANS for slots in sizes}
    gaps = sorted(100 * one.gap for one in made.values())
    executed = sum(one.executed for one in made.values())
    exact = 100 * sum(one.gap <= EXACT for one in made.values()) / len(made)
    note = f"{len(made)} settings, {executed} plans executed"
    figures = [
        Figure(what="choice is the best executed", paper=_paper("exact"), ours=exact, unit="%", note=note),
        Figure(what="gap to the best executed, p95", paper=_paper("gap_p95"), ours=_p95(gaps), unit="%"),
        Figure(
            what="gap to the best executed, worst",
            paper=_paper("gap_max_bound"),
            ours=gaps[-1],
            unit="%",
            note="the paper's is a bound",
        ),
        *(_row(mean, slots, one) for (mean, slots), one in made.items()),
    ]
    short = f" Quick: {len(made)} of 18 settings." if quick else ""
    return Section(
        title="The chosen plan beside the best of all, executed", figures=tuple(figures), assumes=_ASSUMES + short
    )


def _paper(metric: str) -> float:
    return paper("plan_quality", "nereus", metric)


def _p95(gaps: list[float]) -> float:
    """Return the least value that 95 % of the sorted ``gaps`` do not exceed."""
    return gaps[math.ceil(0.95 * len(gaps)) - 1]


def _row(mean: int, slots: int, one: Comparison) -> Figure:
    return Figure(
        what=f"gap to the best executed, mean {mean} on {slots} slots", ours=100 * one.gap, unit="%", note=told(one)
    )


def told(one: Comparison) -> str:
    """Say how many plans were executed and in which model-stages the planner was led astray most."""
    said = f"{one.chosen.seconds:.4g} s, best of {one.executed} {one.best.seconds:.4g} s"
    if one.gap <= EXACT:
        return said
    misled = sorted(
        (stage for stage in one.chosen.stages if _misled_s(one, stage) > 0), key=lambda stage: -_misled_s(one, stage)
    )
    if not misled:
        return f"{said}; no model-stage is mispredicted in its favour"
    return "; ".join((said, *(_difference(one, stage) for stage in misled[:TOLD])))


def _misled_s(one: Comparison, stage: ModelStage) -> float:
    """Return by how many seconds predictions favoured the choice over the best more than measurements do."""
    chosen, best = one.chosen.stages[stage], one.best.stages[stage]
    misled = (best[0] - chosen[0]) - (best[1] - chosen[1])
    return 0.0 if math.isnan(misled) else misled


def _difference(one: Comparison, stage: ModelStage) -> str:
    chosen, best = one.chosen.stages[stage], one.best.stages[stage]
    return (
        f"{stage} {_way(one.chosen.plan, stage)} predicted {chosen[0]:.4g} s, took {chosen[1]:.4g} s; "
        f"in the best {_way(one.best.plan, stage)} {best[0]:.4g} s, {best[1]:.4g} s"
    )


def _way(plan: Plan, stage: ModelStage) -> str:
    return f"{plan.replication(stage)}{' recomputed' if stage in plan.recomputed else ''}"
