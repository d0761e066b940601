"""Fixed layouts are those that are fastest under the world's truth."""

from __future__ import annotations

import pytest
from simulated import QUIET, SHAPE, job

from nereus.bus.messages import GroupSpec
from nereus.core.plan import Layout, Replication
from nereus.runtime.pool import cluster_of
from nereus.sim.engine import Drawn
from nereus.sim.noise import Noise
from nereus.sim.policies.sweep import batch_s, flow, groups_of, swept, training_s, with_layouts
from nereus.sim.policies.trial import tried
from nereus.sim.policy import Known
from nereus.sim.serving import Serving
from nereus.sim.truth import Truth

CONFIG = job()


def _known() -> Known:
    cluster = cluster_of(CONFIG)

    def draw(group: int) -> Drawn:
        lengths = tuple(200 + 137 * (group + index) % 900 for index in range(CONFIG.rollout.group_size))
        return Drawn(GroupSpec(group, 0, group, b"", b""), 250, lengths)

    return Known(SHAPE, cluster, Truth(SHAPE, cluster, Noise(0, scale=0.0), QUIET), QUIET, draw)


def test_what_is_chosen_fits_and_no_other_number_of_its_units_is_faster() -> None:
    known = _known()
    groups = groups_of(CONFIG, known)

    def step_s(rollout: Replication, train_s: float) -> float:
        return flow(CONFIG, known, rollout, groups, 2 * len(groups)).paced_s(train_s, 1)

    pairs = swept(CONFIG, 16, known, step_s, most=3)
    assert [pair.step_s for pair in pairs] == sorted(pair.step_s for pair in pairs)
    best = pairs[0]
    assert best.train.slots + best.rollout.slots <= 16
    for dp in range(1, 16 // best.train.layout.slots):
        train = Replication(dp, best.train.layout)
        rollout = Replication((16 - train.slots) // best.rollout.layout.slots, best.rollout.layout)
        if rollout.dp:
            seconds = step_s(rollout, training_s(CONFIG, known, train, groups))
            assert seconds >= best.step_s - 1e-9


def test_nothing_that_does_not_fit_into_memory_is_trained() -> None:
    known = _known()
    assert training_s(CONFIG, known, Replication(4, Layout()), groups_of(CONFIG, known)) == float("inf")
    with pytest.raises(ValueError, match="no layouts"):
        swept(CONFIG, 2, known, lambda rollout, train_s: train_s)


def test_more_units_finish_a_batch_sooner() -> None:
    known = _known()
    groups = groups_of(CONFIG, known)
    one, four = (batch_s(CONFIG, known, Replication(dp, Layout(2)), groups) for dp in (1, 4))
    assert four < one


def test_equal_jobs_give_equal_trials_and_leave_nothing_behind() -> None:
    known = _known()
    pair = swept(CONFIG, 16, known, lambda rollout, train_s: train_s)[0]
    trials = [tried(with_layouts(CONFIG, pair), 16, known, Serving()) for _ in range(2)]
    assert trials[0] == trials[1]
    assert trials[0] is not None and trials[0].step_s > 0
