"""How long does a replica take to generate its share of responses, given how their lengths are distributed?

Continuous batching over the survivor curve. A decode step costs a part per step (weights are read once), a part per
live sequence (matrix products) and a part per cached token (keys and values are read). All three are sums over the
curve, so the total is exact without walking it: steps are those in which anything is alive, sequence-steps are all
response tokens, cached tokens are the areas under the sequences. Where the cache holds fewer sequences than there
are, slots refill as sequences end (waves) and the last ones drain along the curve of remaining lengths. The long tail
enters by the expected longest response, never the mean. Invariants (tests/control/test_generation.py): equal to a
step-by-step simulation; a longer tail of equal mean costs more; a smaller cache never helps.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np

from nereus.control.collectives import all_reduce_share, latency_s, ring_bytes_per_s
from nereus.control.cost import COMPUTE_BYTES, KERNEL_START_S, KERNELS_PER_LAYER, Setups
from nereus.control.efficiency import Array, OperationClass, Work
from nereus.core.cluster import Cluster
from nereus.core.shape import ModelShape
from nereus.core.workload import Lengths, Workload

HOST_STEP_S = 200e-6
"""Ours: scheduling and sampling on the host for each decode step of an engine; refined by the ``launch`` efficiency."""


PIECES = 64
"""Atoms of the distribution of remaining lengths."""


@functools.lru_cache(maxsize=256)
def remaining(lengths: Lengths) -> Lengths:
    """Return the distribution of what is left of a sequence met at a random decode step.

    The density at t is survivors(t) / mean: flat between atoms, so wide gaps are cut into pieces.
    """
    pieces = list[tuple[int, float]]()
    for start, end in itertools.pairwise((0, *lengths.tokens)):
        count = min(end - start, max(1, PIECES * (end - start) // lengths.longest))
        width, alive = (end - start) / count, lengths.survivors(start)
        pieces += [(max(1, round(start + (piece + 0.5) * width)), alive * width) for piece in range(count)]
    return Lengths.weighted(pieces)


def _expected_longest(lengths: Lengths, counts: Array) -> Array:
    """Return the expected longest of each number of sequences."""
    below = np.cumsum((0.0, *lengths.shares)).clip(0.0, 1.0)
    raised = below[None, :] ** np.maximum(counts, 1e-9)[:, None]
    return np.asarray(np.diff(raised, axis=1) @ np.array(lengths.tokens, dtype=float))


def decode_steps(lengths: Lengths, sequences: Array, live: Array) -> Array:
    """Return the expected number of decode steps for ``sequences`` of which at most ``live`` are alive at once."""
    waiting = np.maximum(0.0, sequences - live)
    at_once = _expected_longest(lengths, np.minimum(sequences, live))
    unfinished = lengths.mean_square / (2.0 * lengths.mean)
    """What a live sequence has left, in the mean, when the queue runs empty."""
    refilling = sequences * lengths.mean / live - unfinished
    drain = _expected_longest(remaining(lengths), live)
    shortest = lengths.tokens[0]
    in_step = np.ceil(sequences / live) * shortest
    """Whole waves bound the steps from both sides; sequences of equal length run in whole waves."""
    waves = np.minimum(
        np.maximum(np.maximum(refilling + drain, in_step), at_once), in_step / shortest * lengths.longest
    )
    return np.asarray(np.where(waiting > 0, waves, at_once))


def peak_context(workload: Workload) -> float:
    """Return the largest mean cached tokens per started sequence: the cache a live sequence needs.

    The fullest moment of a batch started together, or the mean of a refilled one, whichever is more.
    """
    prompt, responses = workload.prompts.mean, workload.responses
    together = max((prompt + tokens) * responses.survivors(tokens - 1) for tokens in responses.tokens)
    refilled = prompt + responses.mean_square / (2 * responses.mean)
    return max(together, refilled)


def generation_work(
    shape: ModelShape,
    cluster: Cluster,
    setups: Setups,
    workload: Workload,
    live: Array,
    *,
    responses_per_sample: float = 1.0,
    shared_prefix: bool = True,
) -> Work:
    """Return the work of the slowest replica for one step's responses; at most ``live`` sequences at once on each.

    ``shared_prefix``: the responses of a group are generated on one replica, which computes their prompt once.
    """
    work = Work.none(len(setups))
    device, lengths, prompts = cluster.device, workload.responses, workload.prompts
    sequences = np.ceil(workload.groups / setups.dp) * workload.group_size * responses_per_sample
    alive = np.minimum(live, sequences)
    steps = decode_steps(lengths, sequences, alive)
    tokens = sequences * lengths.mean
    context = sequences * (prompts.mean * lengths.mean + lengths.mean_square / 2.0)
    if workload.lead > 1:
        steps = np.maximum(steps / workload.lead, _flowing_steps(workload, sequences, live))
    add_decoding(work, shape, cluster, setups, steps, tokens, context)
    matrices = shape.layers * shape.active_matrix_parameters + shape.embedding_parameters
    cut = setups.tp * setups.pp
    prefills = sequences / (workload.group_size if shared_prefix else 1.0)
    work.add(OperationClass.GEMM, prefills * prompts.mean * 2.0 * matrices / cut / device.flops_per_s)
    causal = 2.0 * prompts.mean_square * shape.heads * shape.head_dim * shape.layers
    work.add(OperationClass.ATTENTION, prefills * causal / cut / device.flops_per_s)
    _add_links(work, shape, cluster, setups, 0.0 * steps, prefills * prompts.mean)
    return work


def add_decoding(
    work: Work, shape: ModelShape, cluster: Cluster, setups: Setups, steps: Array, tokens: Array, context: Array
) -> None:
    """Add ``steps`` decode steps in which ``tokens`` tokens are drawn, which read ``context`` cached tokens in all."""
    device, cut = cluster.device, setups.tp * setups.pp
    matrices = shape.layers * shape.active_matrix_parameters + shape.embedding_parameters
    work.add(OperationClass.DECODE, steps * matrices / setups.tp * COMPUTE_BYTES / device.bytes_per_s)
    cached = shape.layers * shape.kv_values_per_token / cut * COMPUTE_BYTES
    work.add(OperationClass.CACHE, context * cached / device.bytes_per_s)
    work.add(OperationClass.GEMM, tokens * 2.0 * matrices / cut / device.flops_per_s)
    kernels = steps * shape.layers * KERNELS_PER_LAYER * KERNEL_START_S / 4.0
    """Engines replay recorded graphs: a quarter of the starts remains."""
    work.add(OperationClass.LAUNCH, kernels + steps * HOST_STEP_S)
    _add_links(work, shape, cluster, setups, steps, tokens)


def _flowing_steps(workload: Workload, sequences: Array, live: Array) -> Array:
    """Return the decode steps for one step's responses where ``lead`` steps are generated ahead and nothing drains.

    Of the groups in flight those sequences are alive that are shorter than the longest of their group.
    """
    lengths = workload.responses
    tail = lengths.expected_longest(workload.group_size) / lengths.mean
    return np.asarray(sequences * lengths.mean / np.minimum(live, (workload.lead + 1) * sequences / tail))


def _add_links(work: Work, shape: ModelShape, cluster: Cluster, setups: Setups, steps: Array, tokens: Array) -> None:
    """Add two all-reduces a layer and one hop per pipeline neighbour for every decode step."""
    speed, crosses = ring_bytes_per_s(cluster, setups.tp, 1.0)
    wire = 2.0 * shape.layers / setups.pp * all_reduce_share(setups.tp) * tokens * shape.hidden * COMPUTE_BYTES / speed
    latency = 2.0 * shape.layers * steps * latency_s(cluster, setups.tp, crosses)
    work.add(OperationClass.LATENCY, latency)
    work.add(OperationClass.ALLREDUCE_IN_NODE, np.where(crosses, 0.0, wire))
    work.add(OperationClass.ALLREDUCE_CROSS_NODE, np.where(crosses, wire, 0.0))
    in_node = setups.tp * setups.pp <= cluster.slots_per_node
    hop = np.where(in_node, cluster.in_node.bytes_per_s, cluster.cross_node.bytes_per_s)
    sent = np.where(setups.pp > 1, tokens * shape.hidden * COMPUTE_BYTES / hop, 0.0)
    start = np.where(in_node, cluster.in_node.latency_s, cluster.cross_node.latency_s)
    work.add(OperationClass.LATENCY, (setups.pp - 1.0) * steps * start)
    work.add(OperationClass.P2P_IN_NODE, np.where(in_node, sent, 0.0))
    work.add(OperationClass.P2P_CROSS_NODE, np.where(in_node, 0.0, sent))
