"""Does work follow from shapes, layouts and links?"""

from __future__ import annotations

import math

import numpy as np
import pytest
from msgspec import structs

from nereus.control.cost import Passes, Recompute, Setups, Sharding, pass_work
from nereus.control.efficiency import COLUMN, Efficiencies, OperationClass, Work
from nereus.control.memory import MARGIN, MemoryCalibration, training_memory, weights_per_slot
from nereus.core.plan import Layout
from nereus.core.profiles import load_cluster, load_model

SHAPE = load_model("llama-3.1-8b")
CLUSTER = load_cluster("a100-64g", 64)
PRIOR = Efficiencies.prior()


def work(
    *rows: tuple[str, int, int, Recompute],
    samples: int = 64,
    tokens: int = 2048,
    backward: bool = True,
    sharding: Sharding = Sharding.NONE,
    vp: int = 1,
) -> Work:
    """Price rows of (t2p4, dp, micro-batch, recomputation)."""
    listed = [(Layout(int(name[1]), int(name[3:])), dp, micro, again) for name, dp, micro, again in rows]
    setups = Setups.grid(listed, sharding=sharding, vp=vp)
    passes = Passes(samples, float(samples * tokens), float(samples * tokens**2), backward=backward)
    return pass_work(SHAPE, CLUSTER, setups, passes)


def of(priced: Work, name: OperationClass, index: int = 0) -> float:
    return float(priced.unit_s[index, COLUMN[name]])


NONE, FULL, INSIDE = Recompute.NONE, Recompute.FULL, Recompute.ATTENTION


def test_training_flops_are_six_per_weight_and_token() -> None:
    one = work(("t1p1", 1, 1, NONE))
    weights = SHAPE.layers * SHAPE.active_matrix_parameters
    flops = of(one, OperationClass.GEMM) * CLUSTER.device.flops_per_s
    assert flops == pytest.approx(6 * weights * 64 * 2048)
    head = of(one, OperationClass.VOCABULARY) * CLUSTER.device.flops_per_s
    assert head == pytest.approx(6 * SHAPE.embedding_parameters * 64 * 2048)


def test_causal_attention_counts_half_the_square() -> None:
    one = work(("t1p1", 1, 1, NONE), backward=False)
    flops = of(one, OperationClass.ATTENTION) * CLUSTER.device.flops_per_s
    assert flops == pytest.approx(2 * 64 * 2048**2 * SHAPE.heads * SHAPE.head_dim * SHAPE.layers)
    longer = work(("t1p1", 1, 1, NONE), backward=False, tokens=4096)
    assert of(longer, OperationClass.ATTENTION) == pytest.approx(4 * of(one, OperationClass.ATTENTION))


def test_a_batch_of_unequal_lengths_costs_more_attention_than_its_mean() -> None:
    setups = Setups.grid([(Layout(), 1, 1, NONE)])
    equal = pass_work(SHAPE, CLUSTER, setups, Passes(8, 8000.0, 8 * 1000.0**2))
    mixed = pass_work(SHAPE, CLUSTER, setups, Passes(8, 8000.0, 4 * 200.0**2 + 4 * 1800.0**2))
    assert of(mixed, OperationClass.ATTENTION) > 1.5 * of(equal, OperationClass.ATTENTION)
    assert of(mixed, OperationClass.GEMM) == of(equal, OperationClass.GEMM)


def test_recomputation_adds_one_forward_pass() -> None:
    plain, inside, full = (work(("t1p1", 1, 1, again)) for again in (NONE, INSIDE, FULL))
    assert of(full, OperationClass.GEMM) == pytest.approx(4 / 3 * of(plain, OperationClass.GEMM))
    assert of(inside, OperationClass.GEMM) == of(plain, OperationClass.GEMM)
    assert of(inside, OperationClass.ATTENTION) == pytest.approx(of(full, OperationClass.ATTENTION))


def test_bubbles_shrink_with_micro_batches_and_interleaving() -> None:
    rows = [("t1p4", 1, micro, NONE) for micro in (1, 4, 16)]
    ideal = of(work(("t1p1", 1, 1, NONE)), OperationClass.GEMM) / 4
    share = [of(work(row), OperationClass.GEMM) / ideal for row in rows]
    assert share == pytest.approx([1 + 3 / 64, 1 + 3 / 16, 1 + 3 / 4])
    assert of(work(rows[2], vp=2), OperationClass.GEMM) / ideal == pytest.approx(1 + 3 / 8)


def test_links_follow_the_width_of_the_group() -> None:
    inside, across = work(("t4p1", 1, 1, NONE)), work(("t8p1", 1, 1, NONE))
    assert of(inside, OperationClass.ALLREDUCE_IN_NODE) > 0 and of(inside, OperationClass.ALLREDUCE_CROSS_NODE) == 0
    assert of(across, OperationClass.ALLREDUCE_CROSS_NODE) > 0 and of(across, OperationClass.ALLREDUCE_IN_NODE) == 0
    assert of(work(("t1p1", 4, 1, NONE)), OperationClass.GRADIENTS_IN_NODE) > 0
    assert of(work(("t1p1", 8, 1, NONE)), OperationClass.GRADIENTS_CROSS_NODE) > 0
    assert of(work(("t1p1", 1, 1, NONE)), OperationClass.GRADIENTS_IN_NODE) == 0
    assert of(work(("t1p4", 1, 1, NONE)), OperationClass.P2P_IN_NODE) > 0


def test_a_ring_over_whole_nodes_uses_all_their_adapters() -> None:
    """Sixteen replicas on four full nodes reduce faster than sixteen that are alone on their nodes."""
    together = of(work(("t1p1", 16, 1, NONE)), OperationClass.GRADIENTS_CROSS_NODE)
    apart = of(work(("t4p1", 16, 1, NONE)), OperationClass.GRADIENTS_CROSS_NODE)
    assert together < 1.2 * apart, "four times the bytes over four times the adapters"


def test_an_update_costs_what_the_slot_holds() -> None:
    whole, cut = work(("t1p1", 2, 1, NONE)), work(("t4p1", 2, 1, NONE))
    assert of(whole, OperationClass.OPTIMIZER) == pytest.approx(4 * of(cut, OperationClass.OPTIMIZER))
    shared = work(("t1p1", 2, 1, NONE), sharding=Sharding.OPTIMIZER)
    assert of(shared, OperationClass.OPTIMIZER) == pytest.approx(of(whole, OperationClass.OPTIMIZER) / 2)
    scoring = work(("t1p1", 2, 1, NONE), backward=False)
    assert of(scoring, OperationClass.OPTIMIZER) == of(scoring, OperationClass.GRADIENTS_IN_NODE) == 0


def test_many_alternatives_cost_what_each_costs_alone() -> None:
    rows = [("t1p1", 8, 1, NONE), ("t2p2", 4, 2, FULL), ("t4p2", 2, 4, NONE), ("t4p1", 3, 1, NONE)]
    together = work(*rows).seconds(PRIOR)
    alone = np.array([float(work(row).seconds(PRIOR)[0]) for row in rows])
    assert together == pytest.approx(alone)
    assert np.isfinite(together).all() and (together > 0).all()


def test_the_slowest_replica_counts_when_the_batch_does_not_divide() -> None:
    assert of(work(("t1p1", 3, 1, NONE)), OperationClass.GEMM) == pytest.approx(
        of(work(("t1p1", 1, 1, NONE)), OperationClass.GEMM) * math.ceil(64 / 3) / 64
    )


def test_the_split_adds_up() -> None:
    priced = work(("t2p2", 4, 1, NONE))
    assert sum(priced.split(PRIOR).values()) == pytest.approx(float(priced.seconds(PRIOR)[0]))


def test_attention_that_stores_scores_pays_traffic_and_the_whole_square() -> None:
    setups = Setups.grid([(Layout(), 1, 1, NONE)])
    passes = Passes(8, 8 * 2048.0, 8 * 2048.0**2)
    fused, stored = (pass_work(SHAPE, CLUSTER, setups, passes, fused_attention=kind) for kind in (True, False))
    assert of(stored, OperationClass.MEMORY) > 1.5 * of(fused, OperationClass.MEMORY)
    assert of(stored, OperationClass.ATTENTION) == pytest.approx(2 * 3 / 3.5 * of(fused, OperationClass.ATTENTION))


def test_heads_too_odd_for_matrix_units_are_slow() -> None:
    """Sizes of a public comparison: 13,824 channels in 96 heads of 144 or in 128 heads of 108."""
    setups, passes = Setups.grid([(Layout(), 1, 1, NONE)]), Passes(1, 2048.0, 2048.0**2)
    even, odd = (
        pass_work(structs.replace(SHAPE, heads=heads, kv_heads=heads, head_dim=13824 // heads), CLUSTER, setups, passes)
        for heads in (96, 128)
    )
    assert of(odd, OperationClass.ATTENTION) > 5 * of(even, OperationClass.ATTENTION)


def test_owners_of_a_shared_optimizer_take_turns() -> None:
    rows = [("t1p1", dp, 1, NONE) for dp in (8, 64)]
    few, many = (of(work(*rows, sharding=Sharding.OPTIMIZER), OperationClass.LATENCY, index) for index in (0, 1))
    assert many > 5 * few > 0
    assert of(work(rows[1]), OperationClass.LATENCY) < many / 5


def test_sharing_gradients_reduces_them_for_every_micro_batch() -> None:
    rows = ("t1p1", 4, 1, NONE)
    once, each = (work(rows, sharding=kind) for kind in (Sharding.OPTIMIZER, Sharding.GRADIENTS))
    assert of(each, OperationClass.GRADIENTS_IN_NODE) > 4 * of(once, OperationClass.GRADIENTS_IN_NODE)


def test_layers_that_do_not_divide_leave_room_for_the_head() -> None:
    """30 layers on four ranks: the last has seven and the vocabulary's projection, the others up to eight."""
    shape = structs.replace(SHAPE, layers=30)
    passes = Passes(64, 64 * 2048.0, 64 * 2048.0**2)
    even, uneven = (pass_work(shape, CLUSTER, Setups.grid([(Layout(1, pp), 1, 1, NONE)]), passes) for pp in (2, 4))
    assert of(uneven, OperationClass.VOCABULARY) < of(even, OperationClass.VOCABULARY)


def test_computing_every_other_product_again_lies_between_none_and_all() -> None:
    none, some, full = (work(("t1p1", 1, 1, again)) for again in (NONE, Recompute.ALTERNATE, FULL))
    assert of(none, OperationClass.GEMM) < of(some, OperationClass.GEMM) < of(full, OperationClass.GEMM)
    assert of(some, OperationClass.ATTENTION) == of(none, OperationClass.ATTENTION)


def settings(tokens: int, slots: int, plans: list[tuple[Layout, int]], beside: float) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds of training Llama-3.1-8B, and whether it fits, with ``beside`` bytes a parameter resident too."""
    cluster = load_cluster("a100-64g", slots)
    setups = Setups.grid([(layout, slots // layout.slots, micro, NONE) for layout, micro in plans])
    batch = 512 if slots > 16 else 128
    priced = pass_work(SHAPE, cluster, setups, Passes(batch, float(batch * tokens), float(batch * tokens**2)))
    memory = training_memory(SHAPE, setups, setups.micro_batch * tokens, batch / setups.dp / setups.micro_batch)
    total = memory.resident_bytes() + memory.transient_bytes(MemoryCalibration())
    total = total + beside * weights_per_slot(SHAPE, setups)
    return priced.seconds(PRIOR), total * MARGIN <= cluster.device.memory_bytes


def test_longer_sequences_turn_the_choice_of_degrees_around() -> None:
    """The paper's fact on 16 A100-64GB. It leaves open: micro-batch 1, nothing recomputed, rollout weights beside."""
    plans = [(Layout(2, 2), 1), (Layout(4, 1), 1)]
    seconds, fits = settings(2048, 16, plans, beside=2.0)
    assert fits.all() and seconds[0] < seconds[1], "at 2K d4t2p2 is faster"
    _, fits = settings(4096, 16, plans, beside=2.0)
    assert fits.tolist() == [False, True], "at 4K only d4t4p1 fits"
    _, alone = settings(4096, 16, plans, beside=0.0)
    assert alone.all(), "and without the generation weights both would: the fact needs them"


def test_the_best_degrees_differ_between_32_and_256_slots() -> None:
    plans = [(Layout(tp, pp), micro) for tp in (1, 2, 4) for pp in (1, 2, 4) for micro in (1, 2)]
    best = []
    for slots in (32, 256):
        seconds, fits = settings(4096, slots, plans, beside=0.0)
        best.append(plans[int(np.argmin(np.where(fits, seconds, np.inf)))][0])
    assert best[0] != best[1]


def test_what_pipeline_ranks_send_is_shared_among_tensor_ranks() -> None:
    whole, cut = work(("t1p4", 1, 1, NONE)), work(("t2p4", 1, 1, NONE))
    assert of(cut, OperationClass.P2P_IN_NODE) < 0.6 * of(whole, OperationClass.P2P_IN_NODE)
    alone = work(("t2p1", 1, 1, NONE))
    # a quarter of the layers is reduced on each rank, and what is received is gathered
    assert of(cut, OperationClass.ALLREDUCE_IN_NODE) > of(alone, OperationClass.ALLREDUCE_IN_NODE) / 4


def test_waiting_for_other_pipeline_ranks_is_no_work_of_a_slot() -> None:
    priced = work(("t1p1", 1, 1, NONE), ("t1p4", 1, 1, NONE))
    whole, cut = (priced.busy_s(index) for index in range(2))
    for name in (OperationClass.GEMM, OperationClass.ATTENTION):
        assert of(priced, name, 1) > of(priced, name) / 4, "a step lasts as long as its bubble, too"
        assert cut[COLUMN[name]] == pytest.approx(whole[COLUMN[name]] / 4)
    for name in (OperationClass.OPTIMIZER, OperationClass.VOCABULARY, OperationClass.P2P_IN_NODE):
        assert cut[COLUMN[name]] == of(priced, name, 1), "outside of the layers nobody waits"
