"""Is generation's time that of a step-by-step run over the length distribution?"""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest

from nereus.control.cost import Recompute, Setups
from nereus.control.efficiency import Efficiencies
from nereus.control.generation import decode_steps, generation_work, peak_context, remaining
from nereus.core.plan import Layout
from nereus.core.profiles import load_cluster, load_model
from nereus.core.workload import Lengths, Workload

SHAPE = load_model("llama-3.1-8b")
CLUSTER = load_cluster("a100-64g", 8)

ONE = Layout()

DISTRIBUTIONS = {
    "equal": Lengths.fixed(100),
    "long tail": Lengths.log_normal(400, 1200, 4096),
    "two kinds": Lengths.weighted([(100, 0.9), (1000, 0.1)]),
    "flat": Lengths.weighted([(tokens, 1.0) for tokens in range(10, 200)]),
}


def simulated(lengths: Lengths, sequences: int, live: int, runs: int = 60) -> float:
    """Refill slots as sequences end; return the mean step at which the last one ends."""
    random = np.random.default_rng(7)
    ends = []
    for _ in range(runs):
        drawn = random.choice(lengths.tokens, size=sequences, p=lengths.shares).tolist()
        slots = drawn[:live]
        heapq.heapify(slots)
        for tokens in drawn[live:]:
            heapq.heappush(slots, heapq.heappop(slots) + tokens)
        ends.append(max(slots))
    return float(np.mean(ends))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize(("sequences", "live"), [(64, 64), (64, 16), (256, 32), (8, 1)])
def test_steps_are_those_of_a_simulation(name: str, sequences: int, live: int) -> None:
    lengths = DISTRIBUTIONS[name]
    steps = decode_steps(lengths, np.array([float(sequences)]), np.array([float(live)]))
    assert steps[0] == pytest.approx(simulated(lengths, sequences, live), rel=0.08)


def test_what_remains_has_the_mean_of_renewal_theory() -> None:
    for lengths in DISTRIBUTIONS.values():
        expected = lengths.mean_square / (2 * lengths.mean)
        assert remaining(lengths).mean == pytest.approx(expected, rel=0.03, abs=1)


def seconds(responses: Lengths, live: int, *, layout: Layout = ONE, dp: int = 1) -> float:
    workload = Workload(Lengths.fixed(256), responses, groups=64)
    setups = Setups.grid([(layout, dp, live, Recompute.NONE)])
    work = generation_work(SHAPE, CLUSTER, setups, workload, np.array([float(live)]))
    return float(work.seconds(Efficiencies.prior())[0])


def test_a_longer_tail_of_equal_mean_costs_more() -> None:
    tail = Lengths.weighted([(512, 0.95), (512 * 11, 0.05)])
    assert seconds(tail, 64) > 2 * seconds(Lengths.fixed(round(tail.mean)), 64)


def test_a_smaller_cache_never_helps() -> None:
    times = [seconds(DISTRIBUTIONS["long tail"], live) for live in (64, 32, 16, 8, 4)]
    assert times == sorted(times)


def test_more_replicas_or_tensor_parallelism_help() -> None:
    lengths = DISTRIBUTIONS["long tail"]
    base = seconds(lengths, 64)
    assert seconds(lengths, 64, dp=4) < base and seconds(lengths, 64, layout=Layout(4, 1)) < base


def test_the_cache_must_hold_the_fullest_moment() -> None:
    equal = Workload(Lengths.fixed(100), Lengths.fixed(50), groups=4)
    assert peak_context(equal) == 150
    tail = Workload(Lengths.fixed(100), Lengths.weighted([(50, 0.9), (5000, 0.1)]), groups=4)
    assert 150 <= peak_context(tail) < 5100


def test_running_ahead_hides_the_tail_but_no_work() -> None:
    tail = Lengths.log_normal(400, 1200, 4096)
    setups = Setups.grid([(ONE, dp, 1, Recompute.NONE) for dp in (1, 2, 4, 8)])
    seconds = []
    for lead in (1, 2, 4, 16, 64):
        load = Workload(Lengths.fixed(100), tail, 64, 8, lead=lead)
        work = generation_work(SHAPE, CLUSTER, setups, load, np.full(4, 256.0))
        seconds.append(work.seconds(Efficiencies.prior()))
    for fewer, more in itertools.pairwise(seconds):
        assert np.all(more <= fewer * (1 + 1e-9))
    assert seconds[1][3] < 0.7 * seconds[0][3]
    full = 64 * 8 * tail.mean / 256
    assert np.all(seconds[-1] > full / np.array([1, 2, 4, 8]) * SHAPE.parameters * 2.0 / CLUSTER.device.bytes_per_s)
