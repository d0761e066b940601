"""Does pack place every sample once, within budget, in equally many micro-batches on every replica?"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.algo.packing import DUMMY_WIDTH, MicroBatch, Packing, pack

lengths_lists = st.lists(st.integers(1, 90), max_size=60)
replica_counts = st.integers(1, 7)
budgets = st.integers(2, 300)


def flat(packing: Packing) -> list[MicroBatch]:
    return [micro for replica in packing.micro_batches for micro in replica]


@given(lengths_lists, replica_counts, budgets, st.booleans())
def test_every_sample_once_in_budget_and_equal_counts(
    lengths: list[int], replicas: int, budget: int, uniform: bool
) -> None:
    packing = pack(lengths, replicas=replicas, budget=budget, uniform=uniform)
    assert sorted(sample for micro in flat(packing) for sample in micro.samples) == list(range(len(lengths)))
    assert len(packing.micro_batches) == replicas
    assert len({len(replica) for replica in packing.micro_batches}) == 1
    assert len(packing.micro_batches[0]) >= 1
    for micro in flat(packing):
        assert micro.rows >= max(1, len(micro.samples)) and micro.width >= 1
        assert all(lengths[sample] <= micro.width for sample in micro.samples)
        longest = max((lengths[sample] for sample in (range(len(lengths)) if uniform else micro.samples)), default=0)
        assert micro.tokens <= budget or (micro.rows == 1 and micro.width == longest > budget)
    if uniform:
        assert len({(micro.rows, micro.width) for micro in flat(packing)}) == 1
    assert packing == pack(lengths, replicas=replicas, budget=budget, uniform=uniform)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=60), replica_counts, budgets)
def test_sorted_packing_bounds_padding_and_count(lengths: list[int], replicas: int, budget: int) -> None:
    packing = pack(lengths, replicas=replicas, budget=budget)
    real = [micro for micro in flat(packing) if micro.samples]
    padding = sum(micro.tokens for micro in real) - sum(lengths)
    assert padding <= budget * math.log(max(lengths) / min(lengths)) + 1e-6
    assert all(micro == MicroBatch((), 1, DUMMY_WIDTH) for micro in flat(packing) if not micro.samples)
    # No replica idles while another could hand over a row.
    idle = [replica for replica in packing.micro_batches if not any(micro.samples for micro in replica)]
    assert not idle or all(len(micro.samples) <= 1 for micro in real)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=60), replica_counts, budgets)
def test_dummies_only_when_samples_run_out(lengths: list[int], replicas: int, budget: int) -> None:
    micros = flat(pack(lengths, replicas=replicas, budget=budget))
    dummies = sum(not micro.samples for micro in micros)
    assert dummies == 0 or all(len(micro.samples) <= 1 for micro in micros)


def test_ranks_that_used_to_disagree_now_agree() -> None:
    """One replica would hold 475 tokens and the other 100: counts must still match (a collective would hang)."""
    packing = pack([95, 95, 95, 95, 95, 25, 25, 25, 25], replicas=2, budget=100)
    assert [len(replica) for replica in packing.micro_batches] == [3, 3]


def test_cost_is_balanced_over_replicas() -> None:
    packing = pack([10 + i % 17 for i in range(64)], replicas=4, budget=120)
    loads = [sum(micro.tokens for micro in replica) for replica in packing.micro_batches]
    assert max(loads) <= 1.2 * min(loads)


def test_one_small_batch_is_shared_by_all_replicas() -> None:
    packing = pack([8, 8, 8, 8], replicas=2, budget=4096)
    assert packing.micro_batches == ((MicroBatch((0, 1), 2, 8),), (MicroBatch((2, 3), 2, 8),))


def test_sample_longer_than_the_budget_is_alone() -> None:
    packing = pack([50, 5, 5], replicas=1, budget=20)
    assert packing.micro_batches == ((MicroBatch((0,), 1, 50), MicroBatch((1, 2), 2, 5)),)


def test_no_samples_still_gives_every_replica_a_micro_batch() -> None:
    assert pack([], replicas=2, budget=16).micro_batches == ((MicroBatch((), 1, 2),),) * 2


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 1 has no tokens"):
        pack([3, 0], replicas=1, budget=8)
    with pytest.raises(ValueError, match="at least 1 replica"):
        pack([3], replicas=0, budget=8)
