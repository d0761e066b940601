"""Does a run survive whatever fails, without losing or repeating a sample?

    make storms                                  # 100 seeds at 16 slots
    python benchmarks/simulation/storms.py --slots 512 --seeds 30 --mtbf-s 1800 --steps 100

Slots are killed and fall silent at random while the live supervisor runs a job on virtual time; the journal of each run
is checked (``nereus/algo/history.py``): every group trained once, in time, none skipped. A wait that nobody can end is
a ``Deadlock``. Prints one line per seed that went wrong and a JSON object at the end; exits with 1 if any did.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import structlog
from msgspec.structs import replace

from nereus.algo.history import check_history
from nereus.bus.messages import StepReport
from nereus.config import JobConfig
from nereus.configuration.load import load_job
from nereus.core.plan import Plan
from nereus.core.profiles import load_model
from nereus.errors import NereusError
from nereus.runtime.fleet import Worker
from nereus.runtime.journal import plain, read_journal, replay
from nereus.runtime.surroundings import TransitionProgress
from nereus.sim.course import Failures
from nereus.sim.loop import Deadlock, run_virtual
from nereus.sim.simulation import Simulation
from nereus.sim.trace import Trace

JOB = Path(__file__).parents[2] / "launchers" / "simulated" / "grpo_8b.toml"
CALM = Trace("calm", "nothing changes but what fails")
FOREVER_S = 1e8


class Nobody:
    """An observer that only tells the simulation of steps."""

    simulation: Simulation

    def step(self, report: StepReport, metrics: dict[str, float]) -> None:
        self.simulation.stepped(report.step + 1)

    def fleet(self, workers: Iterable[Worker]) -> None: ...

    def note(self, text: str) -> None: ...

    def plan(self, plan: Plan) -> None: ...

    def transition(self, progress: TransitionProgress) -> None: ...


def job(slots: int, steps: int) -> JobConfig:
    """Return the job for so many slots: half of them train as t4p2 or t2p2, half generate as t2."""
    config = load_job([JOB]).config
    train = f"d{slots // 16}t4p2" if slots >= 64 else f"d{slots // 8}t2p2"
    groups = max(16, slots // 2)
    return replace(
        config,
        run=replace(config.run, steps=steps),
        cluster=replace(config.cluster, slots=slots),
        rollout=replace(config.rollout, layout=f"d{slots // 4}t2p1", group_size=4, max_new_tokens=2048),
        train=replace(config.train, layout=train, groups_per_step=groups),
        checkpoint=replace(config.checkpoint, every=10),
    )


def storm(config: JobConfig, seed: int, mtbf_s: float) -> tuple[str, dict[str, Any]]:
    """Run one storm; return what went wrong (empty: nothing), and figures."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal.jsonl"

        async def main() -> None:
            nobody = Nobody()
            simulation = Simulation(
                config,
                load_model(config.model.path),
                CALM,
                journal,
                nobody,
                seed=seed,
                failures=Failures(mtbf_s),
            )
            nobody.simulation = simulation
            try:
                async with asyncio.timeout(FOREVER_S):
                    await simulation.run()
            finally:
                figures.update(virtual_s=simulation.now_s, restores=simulation.restores)

        wrong = ""
        try:
            run_virtual(main())
        except Deadlock as error:
            wrong = f"deadlock: {error}"
        except (NereusError, TimeoutError) as error:
            wrong = f"ended: {error}"
        entries = read_journal(journal).entries
        groups = config.train.groups_per_step
        problems = check_history(plain(entries), staleness=config.async_.staleness, groups_per_step=groups)
        progress = replay(entries)
        figures.update(lost=progress.lost, reissued=progress.reissued, steps=progress.step, changes=progress.changes)
        return (f"history: {problems[0]}" if problems else wrong), figures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mtbf-s", type=float, default=200.0, help="mean seconds between failures of the pool")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    config = job(given.slots, given.steps)
    kinds, total, began = Counter[str](), Counter[str](), time.process_time()
    for seed in range(given.first, given.first + given.seeds):
        wrong, figures = storm(config, seed, given.mtbf_s)
        total.update(figures)
        if wrong:
            kinds[wrong.partition(":")[0]] += 1
            print(f"seed {seed}: {wrong[:300]}", flush=True)
    result = {
        "slots": given.slots,
        "seeds": given.seeds,
        "mtbf_s": given.mtbf_s,
        "wrong": dict(kinds),
        **{name: round(value, 1) for name, value in total.items()},
        "cpu_s": round(time.process_time() - began, 1),
    }
    print(json.dumps(result))
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
