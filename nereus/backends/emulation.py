"""How long would a slower device take for what a slot has just done?

Owner: the torch backends. Work that was really done (tokens with their padding, collectives, bytes read) becomes
seconds by operation class, at the speeds of ``[emulate]``; ``Pacer`` then sleeps until that time is over, which leaves
the CPU to other slots. Formulas are those of ``nereus/control/cost.py`` and ``generation.py``, for one slot and one
phase instead of a whole plan. A speed that is not set costs nothing. What is not emulated: docs/emulation.md.

Invariants (tests/backends/test_emulation.py): seconds follow tokens and layout; phases one after the other never take
less than was asked for all of them together; oversleeping is made up for, real work that takes longer is not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nereus.config import EmulateConfig
from nereus.control.collectives import all_gather_share, all_reduce_share
from nereus.control.cost import FUSED_BACKWARD
from nereus.control.efficiency import OperationClass
from nereus.core.plan import Layout
from nereus.core.shape import ModelShape
from nereus.transition.reshard import layer_range

Seconds = Mapping[OperationClass, float]
"""Emulated seconds of one phase, by class."""

NOTHING: Seconds = {}

OPTIMIZER_PASSES = 7
"""Gradient, master and two moments are read; master and moments written."""

ALL_REDUCES = 2
"""Of each tensor-parallel layer and pass: one for each of its two blocks."""


@dataclass(frozen=True)
class Speeds:
    """What an emulated slot can do; infinite where nothing is emulated."""

    flops_per_s: float
    bytes_per_s: float
    link_bytes_per_s: float
    link_latency_s: float

    @classmethod
    def of(cls, config: EmulateConfig) -> Speeds | None:
        """Return the speeds, or None if nothing is slowed down."""
        if not (config.gflops or config.memory_gb_s or config.link_gb_s or config.link_latency_us):
            return None
        return cls(
            config.gflops * 1e9 or math.inf,
            config.memory_gb_s * 1e9 or math.inf,
            config.link_gb_s * 1e9 or math.inf,
            config.link_latency_us * 1e-6,
        )

    def all_reduces(self, kind: OperationClass, size_bytes: float, width: int, count: float = 1.0) -> Seconds:
        """Return what ``count`` all-reduces of ``size_bytes`` over ``width`` slots take: rings, started by trees."""
        if width < 2 or not count:
            return NOTHING
        on_wire = count * size_bytes * float(all_reduce_share(width))
        return self._messages(kind, on_wire, count * math.ceil(math.log2(width)))

    def all_gather(self, kind: OperationClass, size_bytes: float, width: int) -> Seconds:
        """Return what it takes until each of ``width`` slots that have a part has all ``size_bytes``."""
        if width < 2:
            return NOTHING
        return self._messages(kind, size_bytes * float(all_gather_share(width)), math.ceil(math.log2(width)))

    def send(self, size_bytes: float) -> Seconds:
        """Return what a message to a pipeline neighbour takes."""
        return self._messages(OperationClass.P2P_IN_NODE, size_bytes, 1)

    def update(self, elements: int, exact_bytes: int, rounded_bytes: int) -> Seconds:
        """Return what an optimizer step over ``elements`` takes; ``rounded_bytes``: of a copy in the compute dtype."""
        touched = elements * (OPTIMIZER_PASSES * exact_bytes + rounded_bytes)
        return {OperationClass.OPTIMIZER: touched / self.bytes_per_s}

    def _messages(self, kind: OperationClass, on_wire_bytes: float, starts: float) -> Seconds:
        return {kind: on_wire_bytes / self.link_bytes_per_s, OperationClass.LATENCY: starts * self.link_latency_s}


@dataclass(frozen=True)
class TrainingCosts:
    """What one trainer slot pays: its pipeline rank's layers, cut by its tensor degree."""

    speeds: Speeds
    shape: ModelShape
    layout: Layout
    pp_rank: int
    value_bytes: int
    """Of an activation."""

    @property
    def layers(self) -> int:
        return len(layer_range(self.shape.layers, self.layout.pp, self.pp_rank))

    @property
    def is_first(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        return self.pp_rank == self.layout.pp - 1

    @property
    def splits_vocabulary(self) -> bool:
        return self.shape.vocab % self.layout.tp == 0

    def forward(self, rows: int, width: int) -> Seconds:
        """Return what the layers take for ``rows`` sequences of ``width`` tokens, and the way to the next rank."""
        lookup = float(self.is_first and self.splits_vocabulary)
        return merged(
            self._layers(rows, width, 1.0, 1.0, self.layers * ALL_REDUCES + lookup),
            self._carried(rows * width, takes=not self.is_first, gives=not self.is_last),
        )

    def backward(self, rows: int, width: int, positions: int, recompute: bool) -> Seconds:
        """Return what the backward pass takes, ``positions`` outputs projected onto the vocabulary on the last rank.

        Each product has two backward; fused attention makes its scores again; ``recompute`` runs the layers once more.
        """
        again = float(recompute)
        sums = self.layers * ALL_REDUCES * (1 + again)
        parts = [
            self._layers(rows, width, 2.0 + again, FUSED_BACKWARD + again, sums),
            self._carried(rows * width, takes=not self.is_last, gives=not self.is_first),
        ]
        if self.is_last:
            parts.append(self._projection(positions, 2.0))
            if self.splits_vocabulary:
                parts.append(self._tensor_parallel(positions, 1.0))
        return merged(*parts)

    def head(self, positions: int) -> Seconds:
        """Return what projecting onto the vocabulary takes, and combining the parts of a split one."""
        # One number of each position (the largest logit), then three (sums).
        parts = [
            self.speeds.all_reduces(OperationClass.ALLREDUCE_IN_NODE, 4.0 * numbers * positions, self.layout.tp)
            for numbers in (1, 3)
            if self.splits_vocabulary
        ]
        return merged(self._projection(positions, 1.0), *parts)

    def gradients(self, size_bytes: int, dp: int) -> Seconds:
        """Return what summing the gradient over replicas takes."""
        return self.speeds.all_reduces(OperationClass.GRADIENTS_IN_NODE, size_bytes, dp)

    def _carried(self, tokens: int, *, takes: bool, gives: bool) -> Seconds:
        """Return what passing hidden states on takes: each tensor rank sends its part, and gathers what it took."""
        size, tp = self._hidden_bytes(tokens), self.layout.tp
        return merged(
            self.speeds.all_gather(OperationClass.ALLREDUCE_IN_NODE, size, tp) if takes else NOTHING,
            self.speeds.send(size / tp) if gives else NOTHING,
        )

    def _layers(self, rows: int, width: int, products: float, attentions: float, all_reduces: float) -> Seconds:
        shape, tp = self.shape, self.layout.tp
        per_token = 2.0 * shape.active_matrix_parameters
        # Two products over the causal half of the square.
        square = 2.0 * rows * width * width * shape.heads * shape.head_dim
        rate = self.speeds.flops_per_s * tp / self.layers
        own = {
            OperationClass.GEMM: products * per_token * rows * width / rate,
            OperationClass.ATTENTION: attentions * square / rate,
        }
        return merged(own, self._tensor_parallel(rows * width, all_reduces))

    def _tensor_parallel(self, tokens: int, count: float) -> Seconds:
        return self.speeds.all_reduces(
            OperationClass.ALLREDUCE_IN_NODE, self._hidden_bytes(tokens), self.layout.tp, count
        )

    def _projection(self, positions: int, products: float) -> Seconds:
        # A vocabulary that does not divide is whole on every rank.
        tp = self.layout.tp if self.splits_vocabulary else 1
        flops = products * 2.0 * positions * self.shape.embedding_parameters
        return {OperationClass.VOCABULARY: flops / (self.speeds.flops_per_s * tp)}

    def _hidden_bytes(self, tokens: int) -> float:
        return float(tokens * self.shape.hidden * self.value_bytes)


@dataclass(frozen=True)
class GenerationCosts:
    """What a rollout slot pays that holds a whole model."""

    speeds: Speeds
    shape: ModelShape
    value_bytes: int

    @property
    def _matrices(self) -> int:
        return self.shape.layers * self.shape.active_matrix_parameters

    def prefill(self, tokens: int, square_tokens: int) -> float:
        """Return seconds of the forward pass over prompts, given the sums of lengths and of squared lengths."""
        causal = 2.0 * square_tokens * self.shape.heads * self.shape.head_dim * self.shape.layers
        arithmetic = (2.0 * tokens * self._matrices + causal) / self.speeds.flops_per_s
        return max(arithmetic, self._matrices * self.value_bytes / self.speeds.bytes_per_s)

    def decode(self, live: int, cached_tokens: int) -> float:
        """Return seconds of one token for each of ``live`` sequences, which read ``cached_tokens`` keys and values.

        Either all weights and the cache are read, or the arithmetic is done: what takes longer.
        """
        shape, weights = self.shape, self._matrices + self.shape.embedding_parameters
        cache = cached_tokens * shape.kv_values_per_token * shape.layers
        scores = 4.0 * cached_tokens * shape.heads * shape.head_dim * shape.layers
        arithmetic = (2.0 * live * weights + scores) / self.speeds.flops_per_s
        return max(arithmetic, (weights + cache) * self.value_bytes / self.speeds.bytes_per_s)


class Pacer:
    """Makes phases last as long as they would on the emulated device; for one thread."""

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._now, self._sleep = now, sleep
        self._overslept_s = 0.0

    def pace(self, began: float, seconds: float) -> bool:
        """Sleep until a phase that began at ``began`` has lasted ``seconds``; False if it has already.

        A phase is shortened by what the paced one before it lasted too long.
        """
        left = seconds - (self._now() - began)
        if left <= 0:
            return False
        until = self._now() + left - self._overslept_s
        while (rest := until - self._now()) > 0:
            self._sleep(rest)
        # At most one phase: a process that was stopped for long does not hurry afterwards.
        self._overslept_s = min(self._now() - until, seconds)
        return True


def merged(*parts: Seconds) -> Seconds:
    """Return the sums of all parts, class by class."""
    total: dict[OperationClass, float] = {}
    for part in parts:
        for name, seconds in part.items():
            total[name] = total.get(name, 0.0) + seconds
    return total
