"""How much faster is synchronous PPO under Nereus than under fixed placements of OpenRLHF and verl?

One steady workload on growing pools of the three clusters; strong scaling; ReMax and GRPO. Invariants
(tests/sim/test_throughput.py): a run that fits nowhere or fails is a row that says why; a figure of the paper stands
only beside runs between the same pools.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from nereus.core.profiles import load_cluster, load_model
from nereus.core.workflow import Algorithm
from nereus.errors import NereusError
from nereus.sim.evaluation.figures import Figure, Section, paper
from nereus.sim.job import SynchronousJob
from nereus.sim.policies.named import named_synchronous
from nereus.sim.synchronous import run_synchronous
from nereus.sim.trace import StepLengths, Trace

MI250X, A100, H200 = "mi250x-1024", "a100-64g-256", "h200-64"
NEREUS, OPENRLHF, VERL = "nereus", "openrlhf_style", "verl_style"
POOLS = {
    MI250X: (32, 64, 128, 256, 512, 1024),
    A100: (8, 16, 32, 64, 128, 256),
    H200: (8, 16, 32, 64),
}
POOLS_QUICK = {MI250X: (32, 256), A100: (8, 32, 64), H200: (8, 32, 64)}
BASE = "llama-3.1-8b"
LARGER = ("qwen3-14b", "qwen3-32b", "llama-3.1-70b")
STEPS, STEPS_QUICK = 10, 3
SEEDS = 2
SAMPLES = 1024
"""Of one step, ours: 1,024 prompts, or 128 of 8 responses under GRPO."""
NOT_RUN = "not run: the paper has no verl on this cluster"

STEADY = Trace("steady", "arXiv 2609.34645: lengths of the first step of its drift trace", (StepLengths(1147.5, 1339),))

_ASSUMES = (
    f"{SAMPLES:,} trained samples a step and responses of 1,147.5 tokens in the mean (p95 1,339) in every step; the "
    "paper's batch and lengths here are not known, so ours are one choice and do not grow with the pool. All "
    "policies run the same simulated stages, links and noise, so differences between frameworks' kernels and "
    "engines, which are part of the paper's ratios, are in none of ours: only placement, parallel degrees, "
    "recomputation and ZeRO-3 differ. verl-style: all model-stages over all slots in turns, one layout for both "
    "trainers and one for scorers. OpenRLHF-style: engines, actor with reference, critic with reward apart, "
    "trainers of one slot with ZeRO-3, slots dealt in eighths. Both baselines try all their placements on the first "
    "step in the simulated truth, which favours them; Nereus asks its planner, which has priors only and begins to "
    "learn from measured steps after the fourth. Where Nereus is slower: its plans never let members of one phase "
    "take turns on the same slots, as verl does, which costs it some of inference; and its replicas share nothing, "
    "while ZeRO-3 pays neither pipeline bubbles nor all-reduces of tensor ranks and, in this world, hides most of its "
    "gathers behind computing: on pools of 256 and more OpenRLHF-style training is mostly shorter. Ratios are of "
    "mean seconds of a step, changes of the plan included."
)


class Ran(Struct, frozen=True):
    """How the runs of one policy on one pool went."""

    step_s: float = math.nan
    phases_s: dict[str, float] = {}
    """Mean over steps."""
    failure: str = ""


class Case(Struct, frozen=True):
    """One job on one pool."""

    cluster: str
    slots: int
    algorithm: Algorithm = Algorithm.PPO
    model: str = BASE

    def __str__(self) -> str:
        return f"{self.algorithm.name} {self.model}, {self.slots} slots of {self.cluster}"


Runs = dict[tuple[Case, str], Ran]
"""By case and policy."""


def job_of(case: Case, steps: int) -> SynchronousJob:
    """Return the job: as many samples whatever the algorithm."""
    group_size = 8 if case.algorithm is Algorithm.GRPO else 1
    return SynchronousJob(
        cluster=load_cluster(case.cluster, case.slots),
        model=load_model(case.model),
        algorithm=case.algorithm,
        steps=steps,
        prompts=SAMPLES // group_size,
        group_size=group_size,
    )


def measure(case: Case, policy: str, steps: int, seeds: int) -> Ran:
    """Run one policy; what does not fit or does not end says so."""
    taken: list[tuple[float, Mapping[str, float]]] = []
    try:
        for seed in range(seeds):
            run = run_synchronous(job_of(case, steps), STEADY, named_synchronous(policy), seed=seed)
            taken += [(one.seconds, one.phases_s) for one in run.steps]
    except NereusError as error:
        return Ran(failure=str(error))
    phases_s = {name: statistics.fmean(phases[name] for _, phases in taken) for name in taken[0][1]}
    return Ran(statistics.fmean(seconds for seconds, _ in taken), phases_s)


def section(*, quick: bool) -> Section:
    """Return ratios, scaling and algorithms; larger models on the largest pools alone.

    ``quick`` takes few pools, one seed, few steps and 8B alone.
    """
    pools, steps, seeds = (POOLS_QUICK, STEPS_QUICK, 1) if quick else (POOLS, STEPS, SEEDS)
    base = [Case(cluster, slots) for cluster in pools for slots in pools[cluster]]
    larger = [Case(cluster, max(pools[cluster]), model=model) for model in LARGER for cluster in pools if not quick]
    others = [Case(H200, slots, algorithm) for algorithm in (Algorithm.REMAX, Algorithm.GRPO) for slots in pools[H200]]
    runs: Runs = {
        (case, name): measure(case, name, steps, seeds) if name in _policies(case) else Ran(failure=NOT_RUN)
        for case in base + larger
        for name in (NEREUS, OPENRLHF, VERL)
    }
    runs |= {(case, name): measure(case, name, steps, seeds) for case in others for name in (NEREUS, VERL)}
    figures = [*_summary(runs, base), *_largest(runs, pools), *_scaling(runs, pools), *_phases(runs, pools)]
    figures += (*_algorithms(runs, others), *_cases(runs))
    short = f" Quick: few pools, {STEPS_QUICK} steps, one seed, 8B alone; Nereus has its priors alone."
    return Section(
        title="Throughput of PPO beside OpenRLHF-style and verl-style plans",
        figures=tuple(figures),
        assumes=_ASSUMES + (short if quick else ""),
    )


def _policies(case: Case) -> tuple[str, ...]:
    """Return who runs ``case``."""
    return (NEREUS, OPENRLHF) if case.cluster == MI250X else (NEREUS, OPENRLHF, VERL)


def _ratio(runs: Runs, case: Case, other: str) -> float:
    """Return the throughput of Nereus over the other's; not known where one of them has failed."""
    return runs[case, other].step_s / runs[case, NEREUS].step_s


def _summary(runs: Runs, base: Sequence[Case]) -> Iterator[Figure]:
    ends: tuple[tuple[str, Callable[[Sequence[float]], float]], ...] = (
        ("min", min),
        ("median", statistics.median),
        ("max", max),
    )
    for other, theirs in ((OPENRLHF, "openrlhf"), (VERL, "verl")):
        asked = [case for case in base if other in _policies(case)]
        known = {case: ratio for case in asked if math.isfinite(ratio := _ratio(runs, case, other))}
        for name, of in ends:
            ours = of(list(known.values())) if known else math.nan
            at = [case for case in known if name != "median" and known[case] == ours]
            where = f", {at[0].slots} slots of {at[0].cluster}" if at else ""
            yield Figure(
                what=f"throughput of PPO 8B, nereus over {other}, {name}",
                paper=paper("ppo_8b_throughput", f"nereus/{theirs}", f"ratio_{name}"),
                ours=ours,
                unit="x",
                note=f"{len(known)} of {len(asked)} pools{where}",
            )


def _largest(runs: Runs, pools: Mapping[str, Sequence[int]]) -> Iterator[Figure]:
    """Yield the ratio on the largest pool of all, where it is among those that ran."""
    case = Case(MI250X, 1024)
    if case.slots in pools[MI250X]:
        yield Figure(
            what=f"throughput of PPO 8B, nereus over {OPENRLHF}, 1,024 slots of {MI250X}",
            paper=paper("ppo_8b_throughput", "nereus/openrlhf", "ratio"),
            ours=_ratio(runs, case, OPENRLHF),
            unit="x",
            note=runs[case, NEREUS].failure or runs[case, OPENRLHF].failure,
        )


def _scaling(runs: Runs, pools: Mapping[str, Sequence[int]]) -> Iterator[Figure]:
    for cluster, setting, published, names in (
        (MI250X, "cluster1", (32, 1024), (NEREUS, OPENRLHF)),
        (A100, "cluster2", (32, 256), (NEREUS, VERL)),
    ):
        ends = (min(slots for slots in pools[cluster] if slots >= published[0]), max(pools[cluster]))
        for name in names:
            theirs = paper("strong_scaling", name.removesuffix("_style"), "latency_ratio", setting)
            first, last = (runs[Case(cluster, slots), name] for slots in ends)
            note = first.failure or last.failure
            if ends != published:
                note = note or f"the paper: {theirs:g} from {published[0]} to {published[1]:,} slots, not comparable"
            yield Figure(
                what=f"step latency of {ends[0]} slots over that of {ends[1]:,}, {cluster}, {name}",
                paper=theirs if ends == published else math.nan,
                ours=first.step_s / last.step_s,
                unit="x",
                note=note,
            )


def _phases(runs: Runs, pools: Mapping[str, Sequence[int]]) -> Iterator[Figure]:
    for phase in ("generation", "inference", "training"):
        less = {
            slots: 100 * (1 - own.phases_s[phase] / other.phases_s[phase])
            for slots in pools[A100]
            if (own := runs[Case(A100, slots), NEREUS]).phases_s and (other := runs[Case(A100, slots), VERL]).phases_s
        }
        yield Figure(
            what=f"{phase} of PPO 8B shorter than {VERL}'s by, at most, {A100}",
            paper=paper("stage_latency", f"nereus vs verl {phase}", "reduction_max"),
            ours=max(less.values(), default=math.nan),
            unit="%",
            note=_by_slots(less),
        )


def _algorithms(runs: Runs, others: Sequence[Case]) -> Iterator[Figure]:
    for algorithm, setting in ((Algorithm.REMAX, "ReMax"), (Algorithm.GRPO, "GRPO")):
        cases = [case for case in others if case.algorithm is algorithm]
        ratios = {case.slots: _ratio(runs, case, VERL) for case in cases}
        less = {slots: 100 * (1 - 1 / ratio) for slots, ratio in ratios.items() if math.isfinite(ratio)}
        yield Figure(
            what=f"step latency of {setting} 8B less than {VERL}'s by, at most, {H200}",
            paper=paper("algorithms", "nereus vs verl", "latency_reduction_max", setting),
            ours=max(less.values(), default=math.nan),
            unit="%",
            note=_by_slots(less),
        )


def _by_slots(less: Mapping[int, float]) -> str:
    told = ", ".join(f"{slots}: {one:.1f} %" for slots, one in less.items())
    return f"by slots {told}; negative: longer" if told else "no pool has both"


def _cases(runs: Runs) -> Iterator[Figure]:
    """Yield a row for every run, also one that failed."""
    for (case, name), one in runs.items():
        told = ", ".join(f"{phase.replace('_', ' ')} {seconds:.3g}" for phase, seconds in one.phases_s.items())
        if name != NEREUS and math.isfinite(ratio := _ratio(runs, case, name)):
            told += f"; nereus has {ratio:.3g} times the throughput"
        yield Figure(what=f"step latency, {case}, {name}", ours=one.step_s, unit="s", note=one.failure or told)
