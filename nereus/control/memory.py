"""How much memory does one slot need, term by term, and does it fit?

Owner of every term: parameters, masters, gradients, moments, activations, logits, KV cache, workspaces, co-resident
idle model-stages, and what a transition adds (split replicas, buffers). Bytes are those of the fullest slot of a
unit. Feasible means predicted x 1.10 <= capacity; measured peaks correct the uncertain terms, never the exact ones.
Values broadcast over alternatives. Invariants (tests/control/test_memory.py): state falls with tp and pp, activations
grow with the micro-batch and shrink with recomputation, a calibrated model reproduces the peaks it saw.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np
from msgspec import Struct

from nereus.control.cost import COMPUTE_BYTES, STATE_BYTES, Recompute, Setups, Sharding
from nereus.control.efficiency import Array
from nereus.core.shape import ModelShape

MARGIN = 1.10

WORKSPACE_BYTES = 1.5e9
"""Ours: what an accelerator's driver, libraries and communicators hold before a tensor exists."""


LOGIT_BYTES = 12.0
"""Of each logit in training: 16-bit and 32-bit value, their gradients; measured peaks show 10 to 16."""

SCORE_BYTES = 5.0
"""Of each attention score that is stored: two 16-bit values and a dropout mask."""

ALTERNATE_SHARE = 0.4
"""Of a layer's values, what is left when every other product is computed again: input, attention, half the products."""

GATHERED_LAYERS = 2
"""Layers that a replica with shared parameters holds whole: the running one and the next."""


FACTOR_SPREAD = 0.25
"""Ours: by so much the factor on activations and logits is usually off before anything was measured."""

FACTOR_LIMITS = (0.25, 4.0)
WORKSPACE_LIMITS = (0.1e9, 10e9)
"""What a calibration may find; beyond that the peaks measure something else."""


class MemoryCalibration(Struct, frozen=True):
    """What measured peaks taught: a factor on activations and logits, and the workspace of a slot."""

    transient_factor: float = 1.0
    workspace_bytes: float = WORKSPACE_BYTES

    def refined(self, peaks: Sequence[tuple[float, float, float]]) -> MemoryCalibration:
        """Return the calibration that explains (state, transient, measured peak) rows in the middle.

        State is exact and is never scaled. From four rows on, the slope between rows is the factor and what is left
        the workspace (Theil and Sen: medians, so a wild row counts little), if some rows are twice as large as others
        and both are plausible. Else rows cannot tell the two apart, and each row's gap is shared out as ``explaining``
        does, in part only for one or two rows.
        """
        usable = [(transient, peak - state) for state, transient, peak in peaks if transient > 0]
        if not usable:
            return self
        slopes = [
            (left - other) / (transient - less)
            for (transient, left), (less, other) in itertools.combinations(usable, 2)
            if abs(transient - less) >= 0.5 * max(transient, less)
        ]
        if len(usable) >= 4 and slopes:
            slope = median(slopes)
            rest = median(left - slope * transient for transient, left in usable)
            if _inside(slope, FACTOR_LIMITS) and _inside(rest, WORKSPACE_LIMITS):
                return MemoryCalibration(slope, rest)
        explained = [self.explaining(transient, left) for transient, left in usable]
        trust = min(1.0, len(usable) / 4 + 0.25)
        factor = median(one.transient_factor for one in explained)
        workspace = median(one.workspace_bytes for one in explained)
        return MemoryCalibration(
            self.transient_factor + trust * (factor - self.transient_factor),
            self.workspace_bytes + trust * (workspace - self.workspace_bytes),
        )

    def explaining(self, transient: float, left: float) -> MemoryCalibration:
        """Return the likeliest calibration for one slot whose peak lies ``left`` bytes above its state.

        The factor may be off by ``FACTOR_SPREAD``, the workspace by as much as it is; the gap between prediction and
        peak is shared out by these variances (the maximum of the posterior of two normal priors and one exact
        observation), within the limits.
        """
        gap = left - self.workspace_bytes - self.transient_factor * transient
        fixed, scaled = self.workspace_bytes**2, (FACTOR_SPREAD * transient) ** 2
        share = scaled / (fixed + scaled)
        low, high = FACTOR_LIMITS
        factor = min(high, max(low, self.transient_factor + share * gap / transient))
        least, most = WORKSPACE_LIMITS
        workspace = self.workspace_bytes + (1 - share) * gap
        workspace = min(max(most, self.workspace_bytes), max(min(least, self.workspace_bytes), workspace))
        return MemoryCalibration(factor, workspace)


def _inside(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] <= value <= limits[1]


class Memory(Struct, frozen=True, eq=False):
    """Bytes of one slot by purpose, for many alternatives: ``resident`` all the time, ``transient`` while it runs."""

    resident: dict[str, Array]
    transient: dict[str, Array]

    def resident_bytes(self) -> Array:
        return np.asarray(sum(self.resident.values()))

    def transient_bytes(self, calibration: MemoryCalibration) -> Array:
        """Return the calibrated sum, workspace included."""
        return np.asarray(sum(self.transient.values()) * calibration.transient_factor + calibration.workspace_bytes)

    def table(self, index: int = 0) -> dict[str, float]:
        """Return the terms of one alternative; zeros are left out."""
        terms = {**self.resident, **self.transient}
        sizes = {name: float(term[index]) for name, term in _equal_length(terms).items()}
        return {name: size for name, size in sizes.items() if size}


def _equal_length(terms: dict[str, Array]) -> dict[str, Array]:
    count = max(np.size(term) for term in terms.values())
    return {name: np.broadcast_to(term, (count,)) for name, term in terms.items()}


def weights_per_slot(shape: ModelShape, setups: Setups) -> Array:
    """Return the parameters of the fullest slot: its decoder layers and, with one pipeline rank, both ends."""
    layers = np.ceil(shape.layers / setups.pp)
    per_layer = shape.active_matrix_parameters / setups.tp + 2.0 * shape.hidden
    ends = shape.embedding_parameters / setups.tp * np.where(setups.pp > 1, 1.0, 1.0 if shape.tied else 2.0)
    return np.asarray(layers * per_layer + ends)


def layer_activations(shape: ModelShape, tp: Array | float, *, sequence_parallel: bool = False) -> Array:
    """Return the values that one layer keeps per token for its backward pass, attention scores never stored.

    Whole on each rank (cut by sequence parallelism): two residual inputs, two norm outputs, two block outputs. Cut by
    tp: queries, keys, values and the attention output; the feed-forward's inner activations.
    """
    whole = 6.0 * shape.hidden / (tp if sequence_parallel else 1.0)
    cut = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim + (2 + 2 * shape.gated) * shape.intermediate
    return np.asarray(whole + cut / np.asarray(tp))


def training_memory(
    shape: ModelShape,
    setups: Setups,
    tokens: Array | float,
    micro_batches: Array | float,
    *,
    compute_bytes: float = COMPUTE_BYTES,
    state_bytes: float = STATE_BYTES,
    gradient_bytes: float = STATE_BYTES,
    sequence_parallel: bool = False,
    head: bool = True,
    scored_square: Array | float = 0.0,
) -> Memory:
    """Return the memory of a trainer slot whose micro-batches hold ``tokens`` tokens.

    One forward, one backward: the first pipeline rank keeps ``min(pp, micro_batches)`` micro-batches alive, and
    interleaving keeps a part more. Without recomputation all layers keep all their values; with full recomputation each
    keeps its input, and one layer at a time is whole. ``scored_square`` is the sum of squared lengths in a micro-batch
    where attention stores its scores; fused attention stores none. Replicas that share parameters keep their part of
    the masters and gather two layers at a time; in a pipeline they keep all gathered and sum gradients at the end.
    """
    count = weights_per_slot(shape, setups)
    shards = setups.dp * setups.cp
    owned = np.where(setups.sharding == Sharding.NONE, 1.0, shards)
    local = np.asarray(tokens) / setups.cp
    whole = local * layer_activations(shape, setups.tp, sequence_parallel=sequence_parallel) * compute_bytes
    scores = SCORE_BYTES * np.asarray(scored_square) / setups.cp * shape.heads / setups.tp
    inputs = local * shape.hidden * compute_bytes / (setups.tp if sequence_parallel else 1.0)
    layers = np.ceil(shape.layers / setups.pp)
    interleaved = 1.0 + np.where(setups.vp > 1, (setups.pp - 1.0) / (setups.pp * setups.vp), 0.0)
    alive = np.minimum(setups.pp, micro_batches) * layers * interleaved
    full = setups.recompute == Recompute.FULL
    kept = whole * np.where(setups.recompute == Recompute.ALTERNATE, ALTERNATE_SHARE, 1.0)
    kept = kept + np.where(setups.recompute == Recompute.ATTENTION, 0.0, scores)
    activations = np.where(full, alive * inputs + whole + scores, alive * kept)
    shared = setups.sharding == Sharding.PARAMETERS
    gathered = shared & (setups.pp == 1)
    part = GATHERED_LAYERS / layers + shape.embedding_parameters / setups.tp / count
    masters = count * state_bytes / owned * np.where(shared | (state_bytes != compute_bytes), 1.0, 0.0)
    on_last = np.where(setups.pp > 1, 0.5, 1.0) if head else 0.0
    """The last rank keeps few micro-batches alive, so its logits do not add to the first rank's activations."""
    return Memory(
        {
            "parameters": np.asarray(count * compute_bytes * np.where(gathered, np.minimum(1.0, part), 1.0)),
            "masters": np.asarray(masters),
            "gradients": np.asarray(
                count * gradient_bytes / np.where(gathered | (setups.sharding == Sharding.GRADIENTS), shards, 1.0)
            ),
            "moments": np.asarray(2.0 * count * state_bytes / owned),
        },
        {
            "activations": np.asarray(activations),
            "logits": np.asarray(local * shape.vocab / setups.tp * LOGIT_BYTES * on_last),
        },
    )


def scoring_memory(
    shape: ModelShape, setups: Setups, tokens: Array | float, *, compute_bytes: float = COMPUTE_BYTES, head: bool = True
) -> Memory:
    """Return the memory of a slot that only computes forward passes over ``tokens`` tokens at a time."""
    whole = np.asarray(tokens) * layer_activations(shape, setups.tp) * compute_bytes
    logits = np.asarray(tokens) * shape.vocab / setups.tp * (compute_bytes + STATE_BYTES) * float(head)
    count = weights_per_slot(shape, setups)
    return Memory({"parameters": count * compute_bytes}, {"activations": whole, "logits": np.asarray(logits)})


def generation_memory(
    shape: ModelShape,
    setups: Setups,
    live: Array | float,
    cached_tokens: Array | float,
    prefill_tokens: Array | float,
    *,
    compute_bytes: float = COMPUTE_BYTES,
) -> Memory:
    """Return the memory of a rollout slot: ``live`` sequences that together cache ``cached_tokens`` tokens."""
    count = weights_per_slot(shape, setups)
    layers = np.ceil(shape.layers / setups.pp)
    cache = np.asarray(cached_tokens) * layers * shape.kv_values_per_token / setups.tp * compute_bytes
    prefill = np.asarray(prefill_tokens) * layer_activations(shape, setups.tp) * compute_bytes
    logits = np.asarray(live) * shape.vocab * STATE_BYTES
    return Memory(
        {"parameters": count * compute_bytes},
        {"KV cache": np.asarray(cache), "activations": np.asarray(prefill), "logits": np.asarray(logits)},
    )


def relay_bytes(shape: ModelShape, *, compute_bytes: float = COMPUTE_BYTES) -> float:
    """Return the host memory of a weight-sync relay: the visible version and the one being written."""
    return 2.0 * shape.parameters * compute_bytes


class SlotLoad(Struct, frozen=True):
    """Everything on one slot at one moment, in bytes."""

    resident: tuple[float, ...]
    """Resident bytes of every model-stage on the slot, running or idle."""
    running: tuple[float, ...] = ()
    """Transient bytes of the model-stages that run now: at most one of those that take turns."""
    split_replicas: float = 0.0
    """Copies that a transition keeps beside their origin until it is destroyed."""
    buffers: float = 0.0
    """Send and receive buffers of a transition."""

    @property
    def total(self) -> float:
        return sum(self.resident) + sum(self.running) + self.split_replicas + self.buffers


def shortfall_bytes(load: SlotLoad, capacity_bytes: float) -> float:
    """Return how many bytes a slot lacks with the margin counted; 0 or less when it fits."""
    return load.total * MARGIN - capacity_bytes


def transition_load(
    before: Iterable[float], arriving: Iterable[float], *, split_replicas: float = 0.0, buffers: float = 0.0
) -> SlotLoad:
    """Return a slot's load while units move: what is there stays until what arrives is complete."""
    return SlotLoad((*before, *arriving), (), split_replicas, buffers)
