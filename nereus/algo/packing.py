"""Which samples are computed together, and on which replica?

Owner: the trainer; every rank computes the same packing from the same lengths, so nothing is communicated.

Invariants (tests/algo/test_packing.py): every sample is in exactly one micro-batch; ``rows * width`` stays within the
budget, except for a sample that is longer than the budget, which is computed alone; every replica has the same number
of micro-batches (at least one), so collectives inside a micro-batch loop always match; padding of the sorted packing is
at most ``budget * ln(longest / shortest)`` tokens in all; equal input gives equal output.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

DUMMY_WIDTH = 2
"""Tokens in the row of a dummy micro-batch: the shortest row that has a next token to predict."""


class MicroBatch(Struct, frozen=True):
    """Samples computed in one forward pass as a right-padded ``[rows, width]`` array.

    Row i holds ``samples[i]``; rows beyond the samples are padding and count for nothing. No samples: a dummy that
    keeps collectives matched; it contributes a loss of 0.
    """

    samples: tuple[int, ...]
    rows: int
    width: int

    @property
    def tokens(self) -> int:
        """Padded size, the measure of cost."""
        return self.rows * self.width


class Packing(Struct, frozen=True):
    """``micro_batches[replica]``: what each replica computes, in order."""

    micro_batches: tuple[tuple[MicroBatch, ...], ...]

    @property
    def tokens(self) -> int:
        """Padded tokens over all replicas."""
        return sum(micro.tokens for replica in self.micro_batches for micro in replica)


def pack(lengths: Sequence[int], *, replicas: int, budget: int, uniform: bool = False) -> Packing:
    """Divide samples of ``lengths`` tokens into micro-batches of at most ``budget`` padded tokens on each replica.

    Samples are sorted by length and cut into runs of nearly equal cost; the longest-first order within a replica shows
    its peak memory in the first micro-batch. ``uniform`` gives every micro-batch the same rows and width (what a
    pipeline schedule needs), at the price of more padding. A sample longer than ``budget`` gets a micro-batch of its
    own (uniform: then every micro-batch has one row). ``ValueError`` on an empty sample or a budget below 2.
    """
    if replicas < 1 or budget < DUMMY_WIDTH:
        raise ValueError(f"needs at least 1 replica and a budget of {DUMMY_WIDTH} tokens, got {replicas} and {budget}")
    if any(length < 1 for length in lengths):
        raise ValueError(f"sample {next(i for i, n in enumerate(lengths) if n < 1)} has no tokens")
    order = sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample))
    micro_batches = _equal_shapes if uniform else _runs
    return _assign(micro_batches(order, lengths, replicas, budget), replicas)


def _runs(order: list[int], lengths: Sequence[int], replicas: int, budget: int) -> list[MicroBatch]:
    """Cut the sorted samples into the fewest runs per replica, as equal in cost as that number allows."""
    target = _round_up(len(_cut(order, lengths, budget)), replicas)
    # The smallest cap that still needs no more than `target` runs evens out their cost. The number of runs falls
    # monotonically with the cap, because cutting greedily is optimal for runs of a sorted sequence.
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        if len(_cut(order, lengths, middle)) <= target:
            high = middle
        else:
            low = middle + 1
    runs = _cut(order, lengths, low)
    while len(runs) < target and max((len(run) for run in runs), default=0) > 1:
        costliest = max((len(run) * lengths[run[0]], -i) for i, run in enumerate(runs) if len(run) > 1)
        position = -costliest[1]
        run = runs[position]
        half = len(run) // 2
        runs[position : position + 1] = [run[:half], run[half:]]
    return [MicroBatch(tuple(run), len(run), lengths[run[0]]) for run in runs]


def _cut(order: list[int], lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Cut greedily: each run takes as many rows of its first sample's length as fit into ``cap``, at least one."""
    runs = []
    start = 0
    while start < len(order):
        rows = max(1, cap // lengths[order[start]])
        runs.append(order[start : start + rows])
        start += rows
    return runs


def _equal_shapes(order: list[int], lengths: Sequence[int], replicas: int, budget: int) -> list[MicroBatch]:
    """Share the samples out evenly over micro-batches as wide as the longest sample."""
    width = max((lengths[sample] for sample in order), default=DUMMY_WIDTH)
    most = max(1, budget // width)
    count = _round_up(-(-len(order) // most), replicas)
    # Dealing out in turn puts long and short samples everywhere and leaves no micro-batch more than one row short.
    dealt = [tuple(order[first::count]) for first in range(count)]
    rows = max(1, *map(len, dealt))
    return [MicroBatch(samples, rows, width) for samples in dealt]


def _assign(micro_batches: list[MicroBatch], replicas: int) -> Packing:
    """Give each replica equally many micro-batches: the costliest first, to the least loaded; fill up with dummies."""
    count = _round_up(len(micro_batches), replicas) // replicas
    shares: list[list[MicroBatch]] = [[] for _ in range(replicas)]
    for micro in sorted(micro_batches, key=lambda micro: (-micro.tokens, micro.samples)):
        open_shares = (replica for replica in range(replicas) if len(shares[replica]) < count)
        least = min(open_shares, key=lambda replica: (sum(m.tokens for m in shares[replica]), replica))
        shares[least].append(micro)
    for share in shares:
        share += [MicroBatch((), 1, DUMMY_WIDTH)] * (count - len(share))
    return Packing(tuple(map(tuple, shares)))


def _round_up(count: int, multiple: int) -> int:
    """Return the smallest positive multiple of ``multiple`` that is at least ``count``."""
    return max(1, -(-count // multiple)) * multiple
