"""Does a plan change of the trainers leave rollouts alone that it does not touch?"""

from __future__ import annotations

import pytest
from jobs import Job

from nereus.algo.history import check_history
from nereus.algo.interruption import interruptions

pytestmark = pytest.mark.live

SLOW_GENERATION = ("--rollout.max_new_tokens", "40", "--emulate.memory_gb_s", "0.006", "--async.staleness", "2")
"""Groups take longer than steps, so that every boundary finds some in flight."""


def test_rollouts_that_a_change_does_not_touch_lose_nothing(job: Job) -> None:
    at = "2 d2t1p1 d2t1p1; 3 d1t1p2 d2t1p1; 4 d1t2p1 d2t1p1; 5 d1t2p1 d1t1p1"
    code, output = job.run(*SLOW_GENERATION, "--train.layout", "d1t2p1", "--run.steps", "7", "--adapt.at", at)
    assert code == 0, output
    changes = interruptions(job.history())
    assert [change.epoch for change in changes] == [1, 2, 3, 4]
    assert not [change for change in changes if change.lost or change.open]
    assert sum(len(change.kept) for change in changes[:3]) >= 3, "the boundaries found nobody at work"
    assert not any(change.reissued or change.finished for change in changes[:3]), "only the last one touches a rollout"
    assert not check_history(job.history(), staleness=2)
