"""Does a job that changes its plan after every step train the model that a job without any change trains?

Whole runs on real processes, in float64, deterministic and on-policy. ``--seeds N``: N random walks.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from jobs import DETERMINISTIC, Job, leftovers, state, trained

from nereus.core.plan import Replication
from nereus.runtime import journal as record

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = 12
SLOTS = 5
LAYOUTS = ("d1t1p1", "d2t1p1", "d3t1p1", "d1t2p1", "d1t1p2", "d2t2p1", "d2t1p2", "d1t2p2")
COMMON = (*DETERMINISTIC, "--run.steps", str(STEPS), "--cluster.slots", str(SLOTS))
TOLERANCE = 1e-9


def walk(seed: int) -> list[tuple[str, str]]:
    """Return layouts of training and generation for each step; training changes after every one.

    The first uses all slots: a run starts no others. Every other walk starts with a lone trainer.
    """
    rng = random.Random(seed)
    found: list[tuple[str, str]] = []
    for _ in range(STEPS):
        train = rng.choice([layout for layout in LAYOUTS if not found or layout != found[-1][0]])
        if not found and seed % 2 == 0:
            train = LAYOUTS[0]
        most = SLOTS - Replication.parse(train).slots
        found.append((train, f"d{rng.randint(1 if found else most, most)}t1p1"))
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Job:
    """A run without any change."""
    job = Job(tmp_path_factory.mktemp("straight"), cache)
    code, output = job.run(*COMMON, "--rollout.layout", "d1t1p1")
    assert code == 0, output[-3000:]
    return job


def test_a_change_of_plan_after_every_step_changes_nothing_that_is_trained(
    walk_seed: int, straight: Job, job: Job
) -> None:
    (train, rollout), *changes = walk(walk_seed)
    at = "; ".join(f"{step} {' '.join(layouts)}" for step, layouts in enumerate(changes, 1))
    code, output = job.run(*COMMON, "--train.layout", train, "--rollout.layout", rollout, "--adapt.at", at)
    assert code == 0, output[-3000:]
    ended = [entry.record for entry in job.entries() if isinstance(entry.record, record.TransitionEnded)]
    assert [change.reason for change in ended] == [""] * (STEPS - 1)
    assert trained(job) == trained(straight) == list(range(4 * STEPS))
    one, other = (state(run.folder / "checkpoints" / f"step_{STEPS:08}") for run in (straight, job))
    assert {kind for kind, _ in one} == {"parameter", "exp_avg", "exp_avg_sq"}
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert np.abs(value - other[key]).max() <= TOLERANCE * max(1.0, np.abs(value).max()), key
    assert not list(leftovers(job.folder))
