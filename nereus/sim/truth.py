"""How long do things really take in the simulated world, and how much memory?

The world's own account of a device, which the planner never sees: every product of every layer by its shape
(``chips.py``), the batch as it was really packed, the pipeline with micro-batches of unequal length, whole decode steps
by the number of live sequences and cached tokens. The planner has one efficiency per class and must learn from steps
what this makes of them; it can be wrong. Drift changes classes of operations as the trace says, slots differ a little
from each other, and some fall behind for a while.

Invariants (tests/sim/test_truth.py): equal seeds give equal seconds; longer sequences and fewer slots never take less
time; what drifts slows its class; utilization is that of real steps.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from nereus.control.efficiency import OperationClass
from nereus.core.cluster import Cluster, Link
from nereus.core.plan import Emu, Layout, SlotId
from nereus.core.shape import ModelShape
from nereus.sim.chips import Array, all_reduce_s, attention_s, chip_of, product_s
from nereus.sim.noise import Noise
from nereus.sim.trace import Trace
from nereus.transition.reshard import TensorSpec

IN_CONCERT = 0.80
"""Ours: what operations reach inside a step of what they reach alone: power, memory traffic of neighbours, host."""

OVERLAP = 0.4
"""Ours: share of the gradient sum that hides behind the backward pass, where backward is long enough."""

KERNELS = 14
"""Of a layer and pass, besides the four products."""

HOST_DECODE_S = 350e-6
HOST_SEQUENCE_S = 1.2e-6
"""Ours: scheduling and sampling of an engine's step, and for each sequence in it."""

BLOCK_TOKENS = 16

GATHER_OVERLAP = 0.7
"""Ours: share of a micro-batch's computing behind which gathers of sharded weights hide."""

WORKSPACE_BYTES = 2.1e9
"""Ours: context, libraries and communicators of a slot."""


class Step(Struct, frozen=True):
    """What one optimizer step took."""

    seconds: float
    operations: dict[str, float]
    peak_bytes: int


class _Times(Struct, frozen=True):
    """How often a micro-batch goes through a layer in each direction."""

    forwards: float
    backward: float


_TRAINED = {False: _Times(1.0, 1.0), True: _Times(2.0, 1.0)}
"""By whether activations are computed again."""

_SCORED = _Times(1.0, 0.0)


class Truth:
    """Seconds and bytes of one model on one cluster."""

    def __init__(
        self,
        shape: ModelShape,
        cluster: Cluster,
        noise: Noise,
        trace: Trace | None = None,
        *,
        head: bool = True,
        sharded: bool = False,
    ) -> None:
        """Efficiencies drift as ``trace`` says.

        ``head``: it has a projection onto the vocabulary; a critic's or reward model's is one number. ``sharded``: the
        replicas share weights, gradients and moments, and gather weights for every pass (ZeRO, stage 3), engines aside.
        """
        self._head = head
        self._sharded = sharded
        self.shape = shape
        self.cluster = cluster
        self.noise = noise
        self._trace = trace
        self._changes = sorted({one.at_step for one in trace.efficiency}) if trace else []
        self._device = cluster.device
        self._chip = chip_of(cluster.device)
        self._node_of = cluster.node_of()
        self._decode: dict[tuple[Layout, bool, int], Array] = {}
        self._prefill: dict[tuple[Layout, int], float] = {}

    # Training

    def step(
        self, units: Sequence[Emu], lengths: Sequence[tuple[int, int]], step: int, budget: int, *, recompute: bool
    ) -> Step:
        """Return one update over samples of (prompt, response) tokens, packed into micro-batches of ``budget`` tokens.

        All units train on equally many samples, give or take one; the slowest has the longest.
        """
        layout = units[0].layout
        piped, longest_s, operations, tokens = self._passes(units, lengths, step, budget, _TRAINED[recompute])
        after = self._update(layout, units, longest_s, step)
        operations |= {name: seconds for name, seconds in after.items() if seconds}
        seconds = piped + sum(after.values())
        slow = self._slow(units, step, "step")
        peak = self._peak(layout, len(units), tokens, recompute) * self.noise.fragments(step)
        return Step(seconds * slow, {name: value * slow for name, value in operations.items()}, round(peak))

    def score(self, units: Sequence[Emu], lengths: Sequence[tuple[int, int]], step: int, budget: int) -> Step:
        """Return one forward pass over samples of (prompt, response) tokens, packed as in training."""
        seconds, _, operations, tokens = self._passes(units, lengths, step, budget, _SCORED)
        slow = self._slow(units, step, units[0].model_stage)
        peak = self._scoring_peak(units[0].layout, len(units), tokens) * self.noise.fragments(step)
        return Step(seconds * slow, {name: value * slow for name, value in operations.items()}, round(peak))

    def _passes(
        self, units: Sequence[Emu], lengths: Sequence[tuple[int, int]], step: int, budget: int, times: _Times
    ) -> tuple[float, float, dict[str, float], Array]:
        """Return the seconds of the slowest unit, of its longest micro-batch, by class, and micro-batches' tokens."""
        layout, dp = units[0].layout, len(units)
        total = np.sort(np.array([prompt + response for prompt, response in lengths], float))[::-1][::dp]
        tokens, square = _packed(total, budget)
        parts = self._parts(layout, units[0], tokens, square, times)
        drift = {name: self._drifted(name, step) for name in parts}
        parts = {name: seconds / drift[name] for name, seconds in parts.items()}
        stage = sum(parts.values(), np.zeros_like(tokens))
        head = self._head_s(layout, tokens, times) / self._drifted(OperationClass.VOCABULARY, step)
        last = stage + head if layout.pp == 1 else np.maximum(stage, stage * self._last_share(layout) + head)
        operations = {str(name): float(seconds.sum()) for name, seconds in parts.items() if seconds.any()}
        if self._head:
            operations[str(OperationClass.VOCABULARY)] = float(head.sum())
        if self._sharded:
            kind, gather = self._gathers(layout, units, step, times)
            shown = np.maximum(0.0, gather - GATHER_OVERLAP * last)
            operations[str(kind)] = float(shown.sum())
            last = last + shown
        piped = float(last.sum() + (layout.pp - 1) * last.max())
        return piped, float(last.max()), operations, tokens

    def _gathers(self, layout: Layout, units: Sequence[Emu], step: int, times: _Times) -> tuple[OperationClass, float]:
        """Return what a micro-batch sends where replicas share weights: a gather, backward another, and gradients.

        Each moves half of what an all-reduce of 16-bit values does.
        """
        link, name = self._ring([slot for unit in units for slot in unit.slots])
        size = np.array([self._local_parameters(layout) * 2.0])
        whole = float(all_reduce_s(self._chip, link.bytes_per_s, link.latency_s, len(units), size)[0])
        kind = OperationClass(f"gradients/{name}")
        return kind, (0.5 + times.backward) * whole / self._drifted(kind, step)

    def _slow(self, units: Sequence[Emu], step: int, what: object) -> float:
        return self.noise.slowest([slot for unit in units for slot in unit.slots], step) * self.noise.jitter(what, step)

    def _parts(
        self, layout: Layout, unit: Emu, tokens: Array, square: Array, times: _Times
    ) -> dict[OperationClass, Array]:
        """Return the seconds of each micro-batch on a pipeline rank by class."""
        shape, tp = self.shape, layout.tp
        layers = math.ceil(shape.layers / layout.pp)
        forwards, backward = times.forwards, times.backward
        gemm = np.zeros_like(tokens)
        for inner, outer in self._products(tp):
            forward = product_s(self._chip, self._device, tokens, outer, inner)
            inputs = product_s(self._chip, self._device, tokens, inner, outer)
            gemm = gemm + (forwards + backward) * forward + backward * inputs
            # the weights' gradient has the forward product's size
        heads = shape.heads / tp
        core = attention_s(self._chip, self._device, tokens, square, heads, shape.head_dim) * (
            forwards + 2.4 * backward
        )
        moved = tokens * 2.0 * (14.0 * shape.hidden + (6.0 * shape.intermediate + 4.0 * shape.hidden) / tp)
        memory = (forwards + 2.0 * backward) * moved / (self._device.bytes_per_s * 0.75)
        starting = (forwards + 2.0 * backward) * KERNELS * self._chip.start_s * np.ones_like(tokens)
        near, name = self._link(unit.slots[:tp])
        reduction = OperationClass(f"allreduce/{name}")
        size = tokens * shape.hidden * 2.0
        reduce = 2.0 * (forwards + backward) * all_reduce_s(self._chip, near.bytes_per_s, near.latency_s, tp, size)
        parts = {
            OperationClass.GEMM: gemm / IN_CONCERT,
            OperationClass.ATTENTION: core / IN_CONCERT,
            OperationClass.MEMORY: memory,
            OperationClass.LAUNCH: starting,
            reduction: reduce,
        }
        parts = {kind: seconds * layers for kind, seconds in parts.items()}
        if layout.pp > 1:
            link, name = self._link(unit.slots)  # the slowest hop of all, which the others wait for
            hops = (1.0 + backward) * (
                link.latency_s + self._chip.link_start_s + size / tp / (link.bytes_per_s * self._chip.link)
            )
            parts[OperationClass(f"p2p/{name}")] = hops
            gather = (1.0 + backward) * all_reduce_s(self._chip, near.bytes_per_s, near.latency_s, tp, size) / 2.0
            parts[reduction] += gather  # each tensor rank has received its part
        return parts

    def _products(self, tp: int) -> tuple[tuple[float, float], ...]:
        """Return (inner, outer) sizes of a layer's matrix products on one tensor rank."""
        shape = self.shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        up = (1 + shape.gated) * shape.intermediate
        return (
            (shape.hidden, (queries + 2 * keys) / tp),
            (queries / tp, shape.hidden),
            (shape.hidden, up / tp),
            (shape.intermediate / tp, shape.hidden),
        )

    def _head_s(self, layout: Layout, tokens: Array, times: _Times) -> Array:
        """Return the projection onto the vocabulary and its loss."""
        if not self._head:
            return np.zeros_like(tokens)
        out = self.shape.vocab / layout.tp
        product = product_s(self._chip, self._device, tokens, out, self.shape.hidden)
        logits = tokens * out * 4.0 * (2.0 + 3.0 * times.backward) / (self._device.bytes_per_s * 0.75)
        seconds: Array = (1.0 + 2.0 * times.backward) * product / IN_CONCERT + logits
        return seconds

    def _last_share(self, layout: Layout) -> float:
        """Return the last pipeline rank's layers as a share of the first's."""
        most = math.ceil(self.shape.layers / layout.pp)
        return (
            (self.shape.layers - most * (layout.pp - 1)) / most if most * (layout.pp - 1) < self.shape.layers else 0.0
        )

    def _update(self, layout: Layout, units: Sequence[Emu], last_s: float, step: int) -> dict[str, float]:
        """Return the gradient sum over units, as far as it shows, and the optimizer."""
        local = self._local_parameters(layout)
        if self._sharded:
            local /= len(units)
        optimizer = local * 30.0 / (self._device.bytes_per_s * 0.8) / self._drifted(OperationClass.OPTIMIZER, step)
        found = {str(OperationClass.OPTIMIZER): optimizer}
        if len(units) > 1 and not self._sharded:
            link, name = self._ring([unit.slots[0] for unit in units])
            size = np.array([local * 4.0])
            whole = float(all_reduce_s(self._chip, link.bytes_per_s, link.latency_s, len(units), size)[0])
            kind = OperationClass(f"gradients/{name}")
            found[str(kind)] = max(whole - OVERLAP * last_s, whole * (1 - OVERLAP)) / self._drifted(kind, step)
        return found

    def _local_parameters(self, layout: Layout) -> float:
        shape = self.shape
        ends = shape.embedding_parameters * (2.0 if self._head and layout.pp == 1 and not shape.tied else 1.0)
        return math.ceil(shape.layers / layout.pp) * shape.layer_parameters(layout.tp) + ends / layout.tp

    def _peak(self, layout: Layout, dp: int, tokens: Array, recompute: bool) -> float:
        """Return the bytes of the fullest slot: state, activations of micro-batches in flight, logits, workspace."""
        shape, tp = self.shape, layout.tp
        layers = math.ceil(shape.layers / layout.pp)
        values = 6.0 * shape.hidden + (3.2 * shape.intermediate + 4.0 * shape.hidden) / tp
        kept = 1.0 * shape.hidden * layers + values if recompute else values * layers
        in_flight = float(np.sort(tokens)[::-1][: layout.pp].sum())
        logits = float(tokens.max()) * shape.vocab / tp * 12.0 / (1.0 if layout.pp == 1 else 2.0) * self._head
        state = self._local_parameters(layout) * 18.0
        if self._sharded:
            state = state / dp + self._gathered_bytes(layout)
        return state + in_flight * kept * 2.0 + logits + WORKSPACE_BYTES

    def _gathered_bytes(self, layout: Layout) -> float:
        """Return what a replica with shared weights holds whole: the running layer, the next one, the largest end."""
        return 2.0 * (2.0 * self.shape.layer_parameters(layout.tp) + self.shape.embedding_parameters / layout.tp)

    def _scoring_peak(self, layout: Layout, dp: int, tokens: Array) -> float:
        """Return the bytes of the fullest slot: weights, one layer's values, logits in 16 and 32 bits, workspace."""
        shape, tp = self.shape, layout.tp
        values = 6.0 * shape.hidden + (3.2 * shape.intermediate + 4.0 * shape.hidden) / tp
        logits = shape.vocab / tp * 6.0 * self._head
        weights = self.shared_weights_bytes(layout, dp) + (self._gathered_bytes(layout) if self._sharded else 0.0)
        return weights + float(tokens.max()) * (values * 2.0 + logits) + WORKSPACE_BYTES

    def weights_bytes(self, layout: Layout) -> float:
        """Return a slot's share of the 16-bit weights."""
        return self._local_parameters(layout) * 2.0

    def shared_weights_bytes(self, layout: Layout, dp: int) -> float:
        """Return what a slot holds of the weights that ``dp`` replicas score with."""
        return self.weights_bytes(layout) / (dp if self._sharded else 1)

    def resident_bytes(self, layout: Layout, dp: int = 1) -> float:
        """Return what a slot of a trainer unit holds between steps: masters, moments, weights, workspace.

        Of ``dp`` replicas that share it each holds a part.
        """
        return self._local_parameters(layout) * 14.0 / (dp if self._sharded else 1) + WORKSPACE_BYTES

    # Generation

    def decode_s(self, layout: Layout, slots: Sequence[SlotId], live: int, step: int) -> float:
        """Return the seconds of a decode step of ``live`` sequences, cached tokens left out."""
        link, name = self._link(slots)
        key = (layout, name == "in_node", bisect.bisect_right(self._changes, step))
        if key not in self._decode:
            self._decode[key] = self._decode_table(layout, link, step)
        table = self._decode[key]
        place = min(math.log2(max(1, live)) * 8.0, len(table) - 1.001)
        low = int(place)
        return float(table[low] + (place - low) * (table[low + 1] - table[low]))

    def _decode_table(self, layout: Layout, link: Link, step: int) -> Array:
        """Return the seconds of decode steps with 2 ** (index / 8) live sequences, up to 4,096."""
        shape, live = self.shape, 2.0 ** (np.arange(97) / 8.0)
        products = sum(
            product_s(self._chip, self._device, live, outer, inner) for inner, outer in self._products(layout.tp)
        )
        head = product_s(self._chip, self._device, live, shape.vocab / layout.tp, shape.hidden)
        reduce = 2.0 * all_reduce_s(self._chip, link.bytes_per_s, link.latency_s, layout.tp, live * shape.hidden * 2.0)
        weights = (products * shape.layers + head) / self._drifted(OperationClass.DECODE, step)
        kernels = shape.layers * (self._chip.cache_start_s + KERNELS * self._chip.start_s / 4)
        hops = (layout.pp - 1) * (link.latency_s + self._chip.link_start_s)
        seconds: Array = weights + reduce * shape.layers + kernels + hops + HOST_DECODE_S + live * HOST_SEQUENCE_S
        return seconds

    def cached_s(self, layout: Layout, step: int) -> float:
        """Return the seconds that each cached token adds to a decode step."""
        per_token = self.shape.layers * self.shape.kv_values_per_token * 2.0 / layout.tp
        return per_token / (self._device.bytes_per_s * self._chip.cache) / self._drifted(OperationClass.CACHE, step)

    def prefill_s(self, layout: Layout, tokens: int) -> float:
        """Return the seconds of computing a prompt; lengths count in blocks, as engines keep them."""
        blocks = max(1, -(-tokens // BLOCK_TOKENS))
        if (layout, blocks) not in self._prefill:
            self._prefill[layout, blocks] = self._prompt_s(layout, blocks * BLOCK_TOKENS)
        return self._prefill[layout, blocks]

    def _prompt_s(self, layout: Layout, tokens: int) -> float:
        rows = np.array([float(tokens)])
        products = sum(float(product_s(self._chip, self._device, rows, o, i)[0]) for i, o in self._products(layout.tp))
        core = attention_s(self._chip, self._device, rows, rows**2, self.shape.heads / layout.tp, self.shape.head_dim)
        return self.shape.layers * (products + float(core[0])) / IN_CONCERT + HOST_DECODE_S

    def cache_tokens(self, layout: Layout, beside_bytes: float = 0.0) -> int:
        """Return how many tokens' keys and values a generation unit has room for.

        ``beside_bytes`` of each slot are taken by others.
        """
        weights = self.shape.parameters * 2.0 / layout.slots
        free = self._device.memory_bytes * 0.92 - weights - WORKSPACE_BYTES - beside_bytes
        return max(1, int(free / (self.shape.layers * self.shape.kv_values_per_token * 2.0 / layout.slots)))

    # Inside

    def _drifted(self, name: str, step: int) -> float:
        """Return the factor on what a class of operations reaches at ``step``."""
        return self._trace.factor_at(step, name) if self._trace is not None and self._changes else 1.0

    def _ring(self, slots: Sequence[SlotId]) -> tuple[Link, str]:
        """Return what a ring over ``slots`` has: it enters and leaves a node once, with the shares of all its members
        there."""
        link, name = self._link(slots)
        if name == "in_node":
            return link, name
        members = min(Counter(self._node_of.get(slot, "") for slot in slots).values())
        return Link(link.latency_s, min(link.bytes_per_s * members, self.cluster.in_node.bytes_per_s)), name

    def _link(self, slots: Sequence[SlotId]) -> tuple[Link, str]:
        near = len({self._node_of.get(slot, "") for slot in slots}) <= 1
        return (self.cluster.in_node, "in_node") if near else (self.cluster.cross_node, "cross_node")


def _packed(total: Array, budget: int) -> tuple[Array, Array]:
    """Return the tokens and summed squares of micro-batches: samples, longest first, each where there is most room.

    Every micro-batch holds at most ``budget`` tokens, except for a sample that is longer.
    """
    count = min(len(total), max(1, math.ceil(float(total.sum()) / budget)))  # none is empty, however long samples are
    while True:
        tokens, square = np.zeros(count), np.zeros(count)
        for first in range(0, len(total), count):
            row = total[first : first + count]
            if first // count % 2:  # there and back again evens the sums out
                tokens[-len(row) :] += row[::-1]
                square[-len(row) :] += row[::-1] ** 2
            else:
                tokens[: len(row)] += row
                square[: len(row)] += row**2
        if count >= len(total) or tokens.max() <= budget:
            return tokens, square
        count += 1


@functools.lru_cache(maxsize=8)
def tensors_of(shape: ModelShape) -> tuple[TensorSpec, ...]:
    """Return the model's state as few tensors: one per layer, cut by tensor parallelism as the real ones are in sum."""
    width = shape.hidden
    rows = max(64, round(shape.layer_parameters() / width / 64) * 64)
    layers = [TensorSpec(f"layers.{i}", (rows, width), "float32", split=0, layer=i) for i in range(shape.layers)]
    ends = [TensorSpec("embedding", (shape.vocab, width), "float32", split=0, layer=-1)]
    if not shape.tied:
        ends.append(TensorSpec("head", (shape.vocab, width), "float32", split=0, layer=None))
    return (*ends[:1], *layers, *ends[1:])
