"""Do emulated seconds follow the work, and do paced phases last as long as was asked for?"""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.backends.emulation import GenerationCosts, Pacer, Speeds, TrainingCosts, merged
from nereus.config import EmulateConfig
from nereus.control.cost import Passes, Recompute, Setups, pass_work
from nereus.control.efficiency import COLUMN, OperationClass
from nereus.core.cluster import Cluster, Device, Link, Node
from nereus.core.plan import Layout
from nereus.core.shape import ModelShape

SHAPE = ModelShape(4, 64, 8, 4, 8, 128, 256, 512)
SPEEDS = Speeds.of(EmulateConfig(gflops=2.0, memory_gb_s=3.0, link_gb_s=0.5, link_latency_us=100.0))
assert SPEEDS is not None
CLUSTER = Cluster(
    "emulated",
    Device("slot", 1e9, 2e9, 3e9),
    (Node("host", tuple(range(8))),),
    Link(100e-6, 0.5e9),
    Link(100e-6, 0.5e9),
)
GEMM, ATTENTION, VOCABULARY = OperationClass.GEMM, OperationClass.ATTENTION, OperationClass.VOCABULARY


def costs(tp: int = 1, pp: int = 1, pp_rank: int = 0, speeds: Speeds = SPEEDS) -> TrainingCosts:
    return TrainingCosts(speeds, SHAPE, Layout(tp, pp), pp_rank, 4)


def step(slot: TrainingCosts, rows: int, width: int, positions: int, recompute: bool = False) -> dict[str, float]:
    return dict(
        merged(slot.forward(rows, width), slot.head(positions), slot.backward(rows, width, positions, recompute))
    )


def test_no_speed_is_set_by_default() -> None:
    assert Speeds.of(EmulateConfig()) is None
    assert Speeds.of(EmulateConfig(memory_mb=100)) is None


@pytest.mark.parametrize("field", ["gflops", "memory_gb_s", "link_gb_s", "link_latency_us"])
def test_what_is_not_set_costs_nothing(field: str) -> None:
    speeds = Speeds.of(EmulateConfig(**{field: 1.0}))
    assert speeds is not None
    slot = costs(2, 2, 0, speeds)
    everything = merged(step(slot, 2, 16, 20), slot.gradients(1 << 20, 2), speeds.update(1 << 20, 4, 0))
    paid = {kind for kind, seconds in everything.items() if seconds}
    assert (
        paid
        == {
            "gflops": {GEMM, ATTENTION, VOCABULARY},
            "memory_gb_s": {OperationClass.OPTIMIZER},
            "link_gb_s": {
                OperationClass.ALLREDUCE_IN_NODE,
                OperationClass.P2P_IN_NODE,
                OperationClass.GRADIENTS_IN_NODE,
            },
            "link_latency_us": {OperationClass.LATENCY},
        }[field]
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_arithmetic_is_that_of_the_planner(tp: int, pp: int, recompute: bool) -> None:
    """Every token predicts another, one micro-batch, no bubbles: the planner's seconds at efficiency 1."""
    rows, width = 3, 40
    setups = Setups.grid([(Layout(tp, pp), 1, rows, Recompute.FULL if recompute else Recompute.NONE)])
    work = pass_work(SHAPE, CLUSTER, setups, Passes(rows, rows * width, rows * width**2))
    slots = [costs(tp, pp, rank) for rank in range(pp)]
    emulated = merged(*(step(slot, rows, width, rows * width * slot.is_last, recompute) for slot in slots))
    for kind in (GEMM, ATTENTION, VOCABULARY):
        # The planner counts the bubble: with one micro-batch the ranks run one after the other.
        assert emulated[kind] == pytest.approx(work.unit_s[0, COLUMN[kind]])
    replicas = Setups.grid([(Layout(tp, pp), 2, rows, Recompute.NONE)])
    update = pass_work(SHAPE, CLUSTER, replicas, Passes(2 * rows, 2 * rows * width, 2 * rows * width**2))
    elements = SHAPE.layers / pp * SHAPE.active_matrix_parameters / tp + SHAPE.embedding_parameters / tp
    gradients = slots[0].gradients(round(elements) * 4, 2)[OperationClass.GRADIENTS_IN_NODE]
    assert gradients == pytest.approx(update.unit_s[0, COLUMN[OperationClass.GRADIENTS_IN_NODE]])
    optimizer = SPEEDS.update(round(elements), 4, 2)[OperationClass.OPTIMIZER]
    assert optimizer == pytest.approx(update.unit_s[0, COLUMN[OperationClass.OPTIMIZER]])


def test_collectives_are_paid_where_they_are_made() -> None:
    one, cut = step(costs(), 2, 16, 20), step(costs(2), 2, 16, 20)
    assert OperationClass.ALLREDUCE_IN_NODE not in one and OperationClass.LATENCY not in one
    hidden, layers = 2 * 16 * SHAPE.hidden * 4, SHAPE.layers
    on_wire = hidden * (1 + (2 + 2) * layers) + 20 * SHAPE.hidden * 4 + 4 * 20 * 4
    assert cut[OperationClass.ALLREDUCE_IN_NODE] == pytest.approx(on_wire / 0.5e9)
    assert cut[OperationClass.LATENCY] == pytest.approx((1 + 4 * layers + 1 + 2) * 100e-6)
    first, last = step(costs(1, 2, 0), 2, 16, 0), step(costs(1, 2, 1), 2, 16, 20)
    assert first[OperationClass.P2P_IN_NODE] == last[OperationClass.P2P_IN_NODE] == pytest.approx(hidden / 0.5e9)


def test_tensor_ranks_send_their_parts_and_gather_what_they_took() -> None:
    whole, cut = costs(1, 2, 0).forward(2, 16), costs(2, 2, 0).forward(2, 16)
    assert cut[OperationClass.P2P_IN_NODE] == pytest.approx(whole[OperationClass.P2P_IN_NODE] / 2)
    hidden = 2 * 16 * SHAPE.hidden * 4
    taking, giving = costs(2, 2, 1).forward(2, 16), costs(2, 2, 0).forward(2, 16)
    looked_up = hidden / 0.5e9  # an all-reduce over two slots, of the first rank's embeddings
    gathered = hidden / 2 / 0.5e9
    kind = OperationClass.ALLREDUCE_IN_NODE
    assert taking[kind] - gathered == pytest.approx(giving[kind] - looked_up)


def test_a_vocabulary_that_does_not_divide_is_paid_whole() -> None:
    odd = TrainingCosts(SPEEDS, ModelShape(4, 64, 8, 4, 8, 128, 257, 512), Layout(2, 1), 0, 4)
    whole = TrainingCosts(SPEEDS, ModelShape(4, 64, 8, 4, 8, 128, 257, 512), Layout(1, 1), 0, 4)
    assert odd.head(10)[VOCABULARY] == whole.head(10)[VOCABULARY]
    assert costs(2).head(10)[VOCABULARY] == costs().head(10)[VOCABULARY] / 2


def test_decoding_reads_weights_and_cache_or_computes() -> None:
    slow_memory = Speeds.of(EmulateConfig(gflops=1e6, memory_gb_s=1.0))
    slow_arithmetic = Speeds.of(EmulateConfig(gflops=1.0, memory_gb_s=1e6))
    assert slow_memory is not None and slow_arithmetic is not None
    weights = SHAPE.layers * SHAPE.active_matrix_parameters + SHAPE.embedding_parameters
    per_token = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim
    reading = GenerationCosts(slow_memory, SHAPE, 4)
    assert reading.decode(8, 0) == reading.decode(1, 0) == pytest.approx(weights * 4 / 1e9)
    assert reading.decode(8, 1000) - reading.decode(8, 0) == pytest.approx(1000 * per_token * 4 / 1e9)
    computing = GenerationCosts(slow_arithmetic, SHAPE, 4)
    assert computing.decode(8, 0) == pytest.approx(8 * computing.decode(1, 0)) == pytest.approx(16 * weights / 1e9)
    scores = 4 * 1000 * SHAPE.heads * SHAPE.head_dim * SHAPE.layers
    assert computing.decode(8, 1000) - computing.decode(8, 0) == pytest.approx(scores / 1e9)
    assert computing.prefill(200, 20_000) > 2 * computing.prefill(100, 5_000) > computing.prefill(100, 5_000)


class Clock:
    """Time that passes by sleeping, each time a little longer than asked for."""

    def __init__(self, oversleep: float) -> None:
        self.now = 100.0
        self.oversleep = oversleep

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.oversleep


@settings(deadline=None)
@given(
    phases=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30),
    oversleep=st.floats(0, 0.3),
)
def test_phases_together_never_take_less_than_was_asked(phases: list[tuple[float, float]], oversleep: float) -> None:
    clock = Clock(oversleep)
    pacer = Pacer(clock, clock.sleep)
    started, asked, real = clock.now, 0.0, 0.0
    for really, seconds in phases:
        began = clock.now
        clock.now += really
        paced = pacer.pace(began, seconds)
        assert paced == (seconds - (began + really - began) > 0)
        asked, real = asked + seconds, real + really
        assert clock.now - started >= max(asked, real) - 1e-9


def test_oversleeping_is_made_up_for_and_long_work_is_not() -> None:
    clock = Clock(0.01)
    pacer = Pacer(clock, clock.sleep)
    started = clock.now
    for _ in range(100):
        assert pacer.pace(clock.now, 0.1)
    assert clock.now - started == pytest.approx(10.0, abs=0.011)
    clock.now += 5.0
    assert not pacer.pace(clock.now - 5.0, 0.1)
    began = clock.now
    for _ in range(100):
        assert pacer.pace(clock.now, 0.1)
    assert clock.now - began == pytest.approx(10.0, abs=0.025)


def test_real_sleep_is_long_enough_and_the_cpu_is_free() -> None:
    pacer = Pacer()
    began, cpu = time.perf_counter(), time.thread_time()
    assert pacer.pace(began, 0.05)
    assert time.perf_counter() - began >= 0.05
    assert time.thread_time() - cpu < 0.02
