"""Who knows the trace loses to nobody in its own terms."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from simulated import SHAPE, job, problems, simulate

from nereus.bus.messages import GroupSpec
from nereus.config import JobConfig
from nereus.runtime.pool import cluster_of
from nereus.sim.engine import Drawn
from nereus.sim.noise import Noise
from nereus.sim.policies.clairvoyant import Clairvoyant, _Prices, course
from nereus.sim.policy import Given, Known
from nereus.sim.trace import StepLengths, StepSupply, Trace
from nereus.sim.truth import Truth

pytestmark = pytest.mark.deep

TURNING = Trace(
    "turning",
    "test",
    steps=tuple(StepLengths(200, 300) for _ in range(6)) + tuple(StepLengths(1500, 1900) for _ in range(6)),
    step_supply=(StepSupply(0, 16), StepSupply(6, 8)),
)


def _known(config: JobConfig, trace: Trace) -> Known:
    cluster = cluster_of(config)

    def draw(group: int) -> Drawn:
        lengths = trace.lengths_at(group // config.train.groups_per_step)
        assert lengths is not None
        drawn = lengths.sample((0, group), config.rollout.group_size, config.rollout.max_new_tokens)
        return Drawn(GroupSpec(group, 0, group, b"", b""), 250, drawn)

    return Known(SHAPE, cluster, Truth(SHAPE, cluster, Noise(0, scale=0.0), trace), trace, draw)


def test_no_single_plan_and_no_change_less_is_cheaper_than_the_course() -> None:
    config = job(steps=12)
    known = _known(config, TURNING)
    found = course(config, known)
    prices = _Prices(config, known)

    def total(choices: list[tuple[object, object]]) -> float:
        steps = sum(prices.expected_s(one, step) for step, one in enumerate(choices))  # type: ignore[arg-type]
        return steps + sum(prices.change_s(*pair) for pair in itertools.pairwise(choices))  # type: ignore[arg-type]

    assert len(found.choices) == 12
    assert all(sum(one.slots for one in choice) <= prices.slots(step) for step, choice in enumerate(found.choices))
    assert abs(total(list(found.choices)) - found.seconds) < 1e-6
    late = found.choices[-1]
    assert found.seconds <= total([late] * 12) + 1e-9
    assert found.bound_s <= found.seconds
    assert found.changes()


def test_the_course_is_followed_and_its_bound_is_below_what_is_reached(tmp_path: Path) -> None:
    steady = Trace("steady", "test", steps=(StepLengths(400, 600),))
    seconds = {}
    for policy in (Clairvoyant(), Given()):
        folder = tmp_path / policy.name
        folder.mkdir()
        outcome, watched = simulate(job(steps=8), folder, trace=steady, policy=policy)
        assert outcome.finished
        assert problems(folder, job()) == []
        seconds[policy.name] = sum(watched.seconds)
    assert course(job(steps=8), _known(job(), steady)).bound_s < min(seconds.values())
    assert seconds["clairvoyant"] < seconds["given"]
