"""What does adaptation cost in a run of 1,000 steps that grows to 1,024 slots?"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace

from nereus.core.profiles import load_model
from nereus.runtime.schedule import Planning
from nereus.runtime.searching import Answered, Asked, Searcher
from nereus.sim.comparing import run_under
from nereus.sim.comparison import RunResult
from nereus.sim.evaluation.figures import Figure, Section, paper
from nereus.sim.evaluation.jobs import base_job, sized
from nereus.sim.policy import Circumstances, Nereus
from nereus.sim.trace import StepSupply, Trace, load_trace

STEPS = 1000
SHORTENED = 20
"""A quick run goes through the same course in so many times fewer steps."""

_ASSUMES = (
    "Trace paper-growth: 500 to 8,000 generated tokens, 32 to 1,024 MI250X in five doublings. Ours is asynchronous "
    "GRPO (64 groups of 8) under the live supervisor; the paper's run is synchronous PPO, so totals are not "
    "comparable, shares are. Decision seconds and memory are real, of this machine, beside other work."
)


class Stopwatch:
    """Passes questions on and takes the processor time of every answer."""

    def __init__(self, inner: Searcher, took_s: list[float]) -> None:
        self._inner = inner
        self._took_s = took_s

    async def prepare(self) -> None:
        await self._inner.prepare()

    async def search(self, asked: Asked) -> Answered:
        began = time.process_time()
        answered = await self._inner.search(asked)
        self._took_s.append(time.process_time() - began)
        return answered

    async def close(self) -> None:
        await self._inner.close()


class Timed(Nereus, frozen=True):
    """Nereus, with a stopwatch on its searches."""

    took_s: list[float] = []

    def planning(self, now: Circumstances) -> Planning:
        return super().planning(replace(now, searcher=Stopwatch(now.searcher, self.took_s)))


def shortened(trace: Trace, times: int) -> Trace:
    """Return the same course in ``times`` times fewer steps."""
    supply = tuple(StepSupply(one.at_step // times, one.slots) for one in trace.step_supply)
    return replace(trace, steps=trace.steps[::times], step_supply=supply)


def enlarged(trace: Trace, times: int) -> Trace:
    """Return the same course with ``times`` times as many slots."""
    return replace(trace, step_supply=tuple(StepSupply(one.at_step, one.slots * times) for one in trace.step_supply))


def _grown(times: int, larger: int) -> tuple[RunResult, list[float], float]:
    """Return a run of ``1 / times`` of the steps on ``larger`` times the slots, and what decisions and all of it took.

    It begins with so many times the replicas, too.
    """
    config = sized(
        base_job(),
        profile="mi250x-1024",
        slots=1024 * larger,
        train=f"d{2 * larger}t4p2",
        rollout=f"d{4 * larger}t4p1",
        steps=STEPS // times,
        longest=8192,
    )
    trace = enlarged(shortened(load_trace("paper-growth"), times), larger)
    policy, began = Timed(took_s=[]), time.process_time()
    with tempfile.TemporaryDirectory() as made:
        result = run_under(config, load_model(config.model.path), trace, policy, 0, Path(made) / "run")
    return result, policy.took_s or [0.0], time.process_time() - began


def _simulating(slots: int, result: RunResult, took_s: list[float], cpu_s: float) -> Figure:
    ended = f"{len(result.latency_s)} steps; {result.failure or 'ended well'}; longest decision {max(took_s):.2f} s"
    return Figure(what=f"simulating it, up to {slots:,} slots, processor time", ours=cpu_s, unit="s", note=ended)


def section(*, quick: bool) -> Section:
    """Return shares and overheads; ``quick`` goes through the same growth in fewer steps."""
    times = SHORTENED if quick else 1
    result, took, cpu_s = _grown(times, 1)
    total_s = sum(result.latency_s)
    changes = [switch for switch in result.switches if switch.ok]
    in_them = result.transition_s
    theirs_total, theirs_in = (paper("long_run", "nereus", name) for name in ("run_total", "transition_total"))
    figures: tuple[Figure, ...] = (
        Figure(
            what="transitions",
            paper=paper("long_run", "nereus", "transitions"),
            ours=len(changes),
            unit="count",
            note=f"{len(result.switches) - len(changes)} more were given up; {result.restores} restores",
        ),
        Figure(what="seconds in transitions", paper=theirs_in, ours=in_them, unit="s"),
        Figure(
            what="seconds of the run", paper=theirs_total, ours=total_s, unit="s", note="another algorithm: see above"
        ),
        Figure(
            what="share of time in transitions",
            paper=100 * theirs_in / theirs_total,
            ours=100 * in_them / total_s,
            unit="%",
        ),
        Figure(
            what="longest transition",
            paper=paper("long_run", "nereus", "transition_largest"),
            ours=max((switch.seconds for switch in changes), default=0.0),
            unit="s",
        ),
        Figure(
            what="longest decision (search), processor time",
            paper=paper("decision", "nereus", "time", "1024"),
            ours=max(took),
            unit="s",
            note=f"{len(took)} searches, {sum(took):.1f} s together, in Python",
        ),
        Figure(
            what="memory of the process, at most",
            ours=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            unit="MiB",
            note="supervisor and the whole simulated world together",
        ),
        _simulating(1024, result, took, cpu_s),
    )
    if not quick:
        figures += (_simulating(4096, *_grown(times, 4)),)
    short = (
        f" Quick: the same growth in {STEPS // times} steps, so growth comes {times} times as often." if quick else ""
    )
    return Section(title="A run of 1,000 steps that grows to 1,024 slots", figures=figures, assumes=_ASSUMES + short)
