"""How much work is one pass of a model, by operation class, in every layout at once?

Formulas are the field's: 2 FLOPs a weight and token forward, twice that backward; causal attention counts half the
square; one-forward-one-backward pipelines wait ``(pp - 1) / vp`` micro-batches. Everything broadcasts over a
``Setups`` of many alternatives, so one call prices a whole list of candidates. Invariants
(tests/control/test_cost.py): work scales with tokens; recomputation adds one forward pass; more micro-batches shrink
the bubble's share; a group inside a node uses in-node links only.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from nereus.control.collectives import all_gather_share, all_reduce_share, latency_s, ring_bytes_per_s
from nereus.control.efficiency import Array, Flags, OperationClass, Work
from nereus.core.cluster import Cluster
from nereus.core.plan import Layout
from nereus.core.shape import ModelShape

COMPUTE_BYTES = 2.0
"""Bytes of a 16-bit value: weights and activations in flight."""

STATE_BYTES = 4.0
"""Bytes of a 32-bit value: masters, moments, gradients."""

SCORE_PASSES = 5.0
"""How often an attention that stores its scores moves them per forward pass: product, softmax, dropout, product."""

FUSED_BACKWARD = 2.5
"""Fused attention computes five products backward for two forward: it makes the scores again."""

UNALIGNED_HEAD = 6.0
"""Ours: how much longer attention takes when heads are not a multiple of 8 wide, too odd for matrix units."""

OWNER_TURN_S = 1e-3
"""Ours: sharing the optimizer only, backends let each owner send its updated part in turn; refined as ``latency``."""

KERNELS_PER_LAYER = 12
KERNEL_START_S = 4e-6
"""Ours: about a dozen kernels a layer and pass, 4 µs each to start; refined by the ``launch`` efficiency."""


class Recompute(enum.IntEnum):
    """Which activations the backward pass computes again."""

    NONE = 0
    ATTENTION = 1
    """Only the inside of attention (the field's "selective")."""
    FULL = 2
    """Everything but the input of each layer."""
    ALTERNATE = 3
    """Every other matrix product and what lies between (the field's "selective per operation")."""


class Sharding(enum.IntEnum):
    """What data-parallel replicas share instead of each holding it. Elastic model units share nothing."""

    NONE = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    """And gradients, which are reduced and scattered after every micro-batch."""
    PARAMETERS = 3
    """And weights, which are gathered for every pass of every micro-batch."""


class Setups(Struct, frozen=True, eq=False):
    """Alternatives side by side: arrays of equal length."""

    tp: Array
    pp: Array
    dp: Array
    micro_batch: Array
    recompute: Array
    sharding: Array
    cp: Array
    vp: Array
    """Interleaved pipeline chunks per slot."""

    @classmethod
    def grid(
        cls,
        rows: Sequence[tuple[Layout, int, int, Recompute]],
        *,
        sharding: Sharding = Sharding.NONE,
        cp: int = 1,
        vp: int = 1,
    ) -> Setups:
        """Build from (layout, dp, micro-batch, recomputation) rows."""
        table = np.array([(row[0].tp, row[0].pp, row[1], row[2], row[3]) for row in rows], dtype=float).reshape(-1, 5)
        tp, pp, dp, micro_batch, recompute = table.T
        same = np.ones(len(rows))
        return cls(tp, pp, dp, micro_batch, recompute, same * sharding, same * cp, same * vp)

    def __len__(self) -> int:
        return len(self.tp)

    def __getitem__(self, keep: Array) -> Setups:
        return Setups(*(getattr(self, name)[keep] for name in self.__struct_fields__))


class Passes(Struct, frozen=True):
    """What is computed for each optimizer update, or for one scoring pass over the step's samples.

    ``tokens`` and ``square_tokens`` are the sums of lengths and of squared lengths over the samples of one update (all
    replicas together); ``samples`` their number.
    """

    samples: float
    tokens: float
    square_tokens: float
    updates: int = 1
    backward: bool = True


def pass_work(
    shape: ModelShape,
    cluster: Cluster,
    setups: Setups,
    passes: Passes,
    *,
    sequence_parallel: bool = False,
    pipeline_outermost: bool = False,
    head: bool = True,
    fused_attention: bool = True,
) -> Work:
    """Return the work of the slowest replica, with pipeline bubbles, gradient sum and optimizer when training.

    ``sequence_parallel`` cuts norms and residuals over the tensor-parallel group. ``pipeline_outermost`` is Megatron's
    order of ranks (replicas are neighbours, pipeline neighbours far apart); ours keeps a unit's slots adjacent.
    ``head`` is whether the vocabulary projection is computed (a scalar head is free). ``fused_attention`` never writes
    scores to memory and skips what the causal mask hides; without it both are paid.
    """
    work = Work.none(len(setups))
    per_replica = np.ceil(passes.samples / setups.dp)
    micro_batches = np.ceil(per_replica / setups.micro_batch)
    held = per_replica / micro_batches
    """Samples of one micro-batch: packing leaves all about equally full."""
    tokens = held * passes.tokens / passes.samples / setups.cp
    square = held * passes.square_tokens / passes.samples / setups.cp
    layers = np.ceil(shape.layers / setups.pp)
    bubble = (shape.layers - layers) / setups.vp / np.maximum(micro_batches, 1.0) / layers
    runs = micro_batches * layers * (1.0 + bubble)
    """Layer passes of one micro-batch on the critical path, bubbles included."""
    again = np.select([setups.recompute == Recompute.FULL, setups.recompute == Recompute.ALTERNATE], [1.0, 0.5], 0.0)
    forwards = 1.0 + again * float(passes.backward)
    backward = 2.0 if passes.backward else 0.0
    directions = forwards + backward / 2.0
    _add_compute(work, shape, cluster, setups, tokens, runs, forwards, backward, sequence_parallel)
    scored = np.where(setups.recompute == Recompute.ATTENTION, 1.0, np.floor(again)) * float(passes.backward)
    products = FUSED_BACKWARD if fused_attention and backward else backward
    _add_attention(work, shape, cluster, setups, square, runs * (1.0 + scored + products), fused_attention)
    _add_tensor_parallel(work, shape, cluster, setups, tokens, runs, directions)
    _add_context_parallel(work, shape, cluster, setups, tokens, runs, directions)
    work.waiting_s = work.unit_s * (bubble / (1.0 + bubble))[:, None]  # so far there are layer passes only
    _add_pipeline(work, shape, cluster, setups, tokens, micro_batches, passes.backward, pipeline_outermost)
    if head:
        share = _head_excess(shape, setups, forwards + backward, 1.0 + backward)
        _add_vocabulary(work, shape, cluster, setups, tokens * micro_batches * share, 1.0 + backward)
    if passes.backward:
        _add_update(work, shape, cluster, setups, layers, micro_batches, pipeline_outermost)
    work.unit_s *= passes.updates
    work.waiting_s *= passes.updates
    work.fixed_s *= passes.updates
    return work


def _add_compute(
    work: Work,
    shape: ModelShape,
    cluster: Cluster,
    setups: Setups,
    tokens: Array,
    runs: Array,
    forwards: Array,
    backward: float,
    sequence_parallel: bool,
) -> None:
    """Add matrix products, memory traffic and kernel starts of the decoder layers."""
    device = cluster.device
    weights = shape.active_matrix_parameters / setups.tp
    times = forwards + backward
    work.add(OperationClass.GEMM, runs * times * 2.0 * tokens * weights / device.flops_per_s)
    whole = 10.0 * shape.hidden / np.where(sequence_parallel, setups.tp, 1.0)
    cut = ((2 + 2 * shape.gated) * shape.intermediate + 2 * (shape.heads + shape.kv_heads) * shape.head_dim) / setups.tp
    moved = times * (tokens * (whole + cut) + weights) * COMPUTE_BYTES
    moved = moved + (2.0 * STATE_BYTES * weights if backward else 0.0)
    work.add(OperationClass.MEMORY, runs * moved / device.bytes_per_s)
    work.add(OperationClass.LAUNCH, runs * times * KERNELS_PER_LAYER * KERNEL_START_S)


def _add_attention(
    work: Work, shape: ModelShape, cluster: Cluster, setups: Setups, square: Array, runs: Array, fused: bool
) -> None:
    """Add the products of queries, keys and values, and the traffic of the scores where they are stored."""
    product = 2.0 * square * shape.heads * shape.head_dim / setups.tp
    odd = UNALIGNED_HEAD if shape.head_dim % 8 else 1.0
    work.add(OperationClass.ATTENTION, runs * product * odd * (1.0 if fused else 2.0) / cluster.device.flops_per_s)
    if not fused:
        scores = SCORE_PASSES * square * shape.heads / setups.tp * COMPUTE_BYTES
        work.add(OperationClass.MEMORY, runs * scores / cluster.device.bytes_per_s)


def _head_excess(shape: ModelShape, setups: Setups, layer_passes: Array, head_passes: float) -> Array:
    """Return the share of the vocabulary projection that the slowest pipeline rank has on top of its layers.

    Layers that do not divide leave the last rank one layer short, and the projection fills that gap first.
    """
    layer = shape.active_matrix_parameters * layer_passes
    gap = np.where(shape.layers % setups.pp == 0, 0.0, layer)
    return np.asarray(np.maximum(0.0, 1.0 - gap / (shape.embedding_parameters * head_passes)))


def _add_vocabulary(
    work: Work, shape: ModelShape, cluster: Cluster, setups: Setups, tokens: Array, times: float
) -> None:
    """Add the projection onto the vocabulary, computed by the last pipeline rank only."""
    flops = 2.0 * tokens * shape.embedding_parameters / setups.tp * times
    work.add(OperationClass.VOCABULARY, flops / cluster.device.flops_per_s)
    logits = 3.0 * tokens * shape.vocab / setups.tp * STATE_BYTES * times
    work.add(OperationClass.MEMORY, logits / cluster.device.bytes_per_s)


def _add_tensor_parallel(
    work: Work, shape: ModelShape, cluster: Cluster, setups: Setups, tokens: Array, runs: Array, directions: Array
) -> None:
    """Add two all-reduces a layer and direction: after attention and after the feed-forward."""
    speed, crosses = ring_bytes_per_s(cluster, setups.tp, 1.0)
    wire = all_reduce_share(setups.tp) * tokens * shape.hidden * COMPUTE_BYTES
    count = 2.0 * runs * directions
    latency = count * latency_s(cluster, setups.tp, crosses)
    _by_link(work, OperationClass.ALLREDUCE_IN_NODE, count * wire / speed, latency, crosses)


def _add_context_parallel(
    work: Work, shape: ModelShape, cluster: Cluster, setups: Setups, tokens: Array, runs: Array, directions: Array
) -> None:
    """Add the ring that passes keys and values over the parts of a sequence."""
    if np.all(setups.cp == 1):
        return
    speed, crosses = ring_bytes_per_s(cluster, setups.cp, setups.tp)
    wire = (setups.cp - 1.0) * tokens * shape.kv_values_per_token / setups.tp * COMPUTE_BYTES
    _by_link(work, OperationClass.P2P_IN_NODE, runs * directions * wire / speed, 0.0 * runs, crosses)


def _add_pipeline(
    work: Work,
    shape: ModelShape,
    cluster: Cluster,
    setups: Setups,
    tokens: Array,
    micro_batches: Array,
    backward: bool,
    outermost: bool,
) -> None:
    """Add sending activations, and gradients back, between neighbouring pipeline ranks.

    Each tensor rank sends its part, and the tensor ranks that take it gather the whole.
    """
    stride = setups.tp * (setups.cp * setups.dp if outermost else 1.0)
    in_node = stride * setups.pp <= cluster.slots_per_node
    speed = np.where(in_node, cluster.in_node.bytes_per_s, cluster.cross_node.bytes_per_s)
    start = np.where(in_node, cluster.in_node.latency_s, cluster.cross_node.latency_s)
    hops = np.where(setups.pp > 1, (micro_batches + setups.pp - 2.0) * setups.vp * (2.0 if backward else 1.0), 0.0)
    whole = tokens * shape.hidden * COMPUTE_BYTES
    _by_link(work, OperationClass.P2P_IN_NODE, hops * whole / setups.tp / speed, hops * start, ~in_node)
    ring, crosses = ring_bytes_per_s(cluster, setups.tp, 1.0)
    wire = all_gather_share(setups.tp) * whole
    latency = hops * latency_s(cluster, setups.tp, crosses)
    _by_link(work, OperationClass.ALLREDUCE_IN_NODE, hops * wire / ring, latency, crosses)


def _add_update(
    work: Work,
    shape: ModelShape,
    cluster: Cluster,
    setups: Setups,
    layers: Array,
    micro_batches: Array,
    pipeline_outermost: bool,
) -> None:
    """Add the gradient sum over replicas, the parameter gathers of sharded replicas, and the optimizer update."""
    local = layers * shape.active_matrix_parameters / setups.tp + shape.embedding_parameters / setups.tp
    width = setups.dp * setups.cp
    stride = setups.tp * (1.0 if pipeline_outermost else setups.pp)
    speed, crosses = ring_bytes_per_s(cluster, width, stride)
    scatter = np.where(setups.sharding >= Sharding.GRADIENTS, micro_batches * COMPUTE_BYTES, STATE_BYTES)
    once = np.where(setups.sharding == Sharding.NONE, STATE_BYTES, COMPUTE_BYTES)
    gather = np.where(setups.sharding == Sharding.PARAMETERS, 2.0 * micro_batches * COMPUTE_BYTES, once)
    bytes_on_wire = local * all_gather_share(width) * (scatter + gather)
    gathers = np.where(setups.sharding == Sharding.PARAMETERS, 3.0 * micro_batches, 1.0)
    latency = layers * gathers * latency_s(cluster, width, crosses)
    owners = (setups.sharding == Sharding.OPTIMIZER) | (setups.sharding == Sharding.GRADIENTS)
    latency = latency + np.where(owners, (width - 1.0) * OWNER_TURN_S, 0.0)
    _by_link(work, OperationClass.GRADIENTS_IN_NODE, bytes_on_wire / speed, latency, crosses)
    owned = local / np.where(setups.sharding == Sharding.NONE, 1.0, width)
    touched = owned * (7.0 * STATE_BYTES + COMPUTE_BYTES)
    """Gradient, master and two moments read; master and moments written; the 16-bit copy written."""
    work.add(OperationClass.OPTIMIZER, touched / cluster.device.bytes_per_s)


def _by_link(work: Work, in_node: OperationClass, seconds: Array, fixed_s: Array, crosses: Flags) -> None:
    """Add to the in-node class or to its cross-node twin."""
    kind = str(in_node).partition("/")[0]
    work.add(OperationClass.LATENCY, fixed_s)
    work.add(in_node, np.where(crosses, 0.0, seconds))
    work.add(OperationClass(f"{kind}/cross_node"), np.where(crosses, seconds, 0.0))
