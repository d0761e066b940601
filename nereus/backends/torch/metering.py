"""What did a trainer slot's step take, by operation class, and how full was the slot?

Owner: the trainer. Passes over micro-batches are timed as a whole; of each step one pass, over the largest micro-batch
of the first minibatch, is looked at more closely: hooks on its modules tell how a forward pass divides into classes (a
backward pass is divided alike, by the work of each class), and what autograd keeps for the backward pass is counted. So
a step is refused before its first update if the slot's limit would be exceeded, also by a later minibatch. With
``[emulate]`` speeds each phase is paced; what was paced counts with its emulated seconds.

On CUDA, times come from events. Invariants (tests/backends/test_metering.py): hooks are gone after the pass; storages
count once, those of the state not at all; ``OutOfMemory`` comes before an update.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nereus.backends.emulation import NOTHING, Pacer, Seconds, TrainingCosts
from nereus.backends.torch.model import StageModel
from nereus.backends.torch.tensor_parallel import Sum
from nereus.control.cost import FUSED_BACKWARD
from nereus.control.efficiency import OperationClass
from nereus.errors import OutOfMemory

_LAYERS, _HEAD, _BACKWARD = "layers", "head", "backward"
_BACKWARD_WORK = {
    OperationClass.GEMM: 2.0,
    OperationClass.ATTENTION: FUSED_BACKWARD,
    OperationClass.VOCABULARY: 2.0,
    OperationClass.MEMORY: 2.0,
    OperationClass.ALLREDUCE_IN_NODE: 1.0,
}
"""Seconds of a backward pass per second of a forward pass."""

_COMPARED = 2
"""Logits and their scaled copy, beside the probabilities that are kept."""


Buffers = Mapping[str, Sequence[Tensor]]
"""The state of a slot by purpose."""


class Shape(NamedTuple):
    """A micro-batch: fed as [rows, width], ``positions`` of its outputs are projected onto the vocabulary."""

    rows: int
    width: int
    positions: int

    @property
    def tokens(self) -> int:
        return self.rows * self.width


class _HostClock:
    mark = staticmethod(perf_counter)

    @staticmethod
    def seconds(start: float, stop: float) -> float:
        return stop - start


class _DeviceClock:
    @staticmethod
    def mark() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def seconds(start: Any, stop: Any) -> float:
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


class _Division:
    """Divides a forward pass into operation classes: time belongs to the innermost module that runs."""

    def __init__(self, stage: StageModel, clock: Any) -> None:
        self._clock = clock
        self._classes = [(module, kind) for name, module in stage.named_modules() if (kind := _kind(name, module))]
        self._classes += [(layer, OperationClass.MEMORY) for layer in stage.layers]

    @contextlib.contextmanager
    def of_pass(self) -> Iterator[list[tuple[OperationClass, Any, Any]]]:
        """Yield a list that holds (class, start, stop) of all that ran when the context ends."""
        found: list[tuple[OperationClass, Any, Any]] = []
        running = [OperationClass.MEMORY]
        last = self._clock.mark()

        def mark() -> None:
            nonlocal last
            now = self._clock.mark()
            found.append((running[-1], last, now))
            last = now

        def entering(kind: OperationClass) -> Callable[..., None]:
            def enter(_module: nn.Module, _arguments: Any) -> None:
                mark()
                running.append(kind)

            return enter

        def leave(_module: nn.Module, _arguments: Any, _result: Any) -> None:
            mark()
            running.pop()

        hooks = []
        for module, kind in self._classes:
            hooks += [module.register_forward_pre_hook(entering(kind)), module.register_forward_hook(leave)]
        try:
            yield found
        finally:
            mark()
            for hook in hooks:
                hook.remove()


def _kind(name: str, module: nn.Module) -> OperationClass | None:
    leaf = name.rpartition(".")[2]
    if isinstance(module, nn.Linear):
        return OperationClass.GEMM
    if isinstance(module, Sum):
        return OperationClass.ALLREDUCE_IN_NODE
    if leaf == "self_attn":
        return OperationClass.ATTENTION
    return OperationClass.MEMORY if leaf == "mlp" or leaf.endswith("norm") else None


class Kept:
    """Counts the memory that autograd keeps, without ``known`` storages."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {_storage(tensor).data_ptr() for tensor in known}
        self._sizes: dict[int, int] = {}

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield

    @property
    def size_bytes(self) -> int:
        return sum(self._sizes.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if (pointer := storage.data_ptr()) not in self._known:
            self._sizes[pointer] = storage.nbytes()
        # The result of an operation that keeps it would hold itself for ever if no backward pass came.
        return tensor if tensor.grad_fn is None else tensor.detach()


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()


def sizes_bytes(buffers: Buffers) -> dict[str, int]:
    """Return bytes by purpose; a storage counts once, for the first purpose that has it."""
    seen: set[int] = set()
    sizes = dict.fromkeys(buffers, 0)
    for purpose, group in buffers.items():
        for storage in map(_storage, group):
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                sizes[purpose] += storage.nbytes()
    return sizes


@dataclass
class _Pass:
    """The passes over micro-batches that are under way."""

    shapes: Sequence[Shape] = ()
    recompute: bool = False
    sample: int | None = None
    most_tokens: int = 0
    """Of any micro-batch of the step."""
    most_positions: int = 0
    in_flight: int = 1
    kept: Kept = field(default_factory=lambda: Kept(()))
    kept_by_layers: int = 0


class Meter:
    """Times, paces and counts one slot; for one thread."""

    def __init__(
        self,
        stage: StageModel,
        held: Callable[[], Buffers],
        *,
        where: str,
        ranks_left: int,
        vocabulary_bytes: int,
        limit_bytes: int,
        costs: TrainingCosts | None,
    ) -> None:
        """``ranks_left``: pipeline ranks from this one on; ``vocabulary_bytes``: of one token's logits here."""
        device = next(stage.parameters()).device
        self._clock: Any = _DeviceClock if device.type == "cuda" else _HostClock
        self._stage = stage
        self._held = held
        self._where = where
        self._ranks_left = ranks_left
        self._vocabulary_bytes = vocabulary_bytes
        self._limit_bytes = limit_bytes
        self._costs = costs
        self._pacer = Pacer()
        self._division = _Division(stage, self._clock)
        self._pass = _Pass()
        self.forget()

    def forget(self) -> None:
        """Begin anew: what comes now belongs to the next report."""
        self._ran: list[tuple[str | OperationClass, Any, Any]] = []
        self._divided: list[tuple[OperationClass, Any, Any]] = []
        self._paced: dict[OperationClass, float] = {}
        self._recomputed = False
        self._transient_bytes: dict[str, int] = {}

    # Passes

    @contextlib.contextmanager
    def passes(self, shapes: Sequence[Shape], step: Sequence[Shape] = ()) -> Iterator[None]:
        """Time the passes over ``shapes``; given all micro-batches of the ``step``, look closely at the largest one.

        ``OutOfMemory`` within if the step, now or later, takes more than the slot has.
        """
        self._pass = _Pass(shapes, self._stage.recompute)
        if step and shapes and not self._divided:
            self._pass.sample = max(range(len(shapes)), key=lambda number: shapes[number].tokens)
            self._pass.most_tokens = max(shape.tokens for shape in step)
            self._pass.most_positions = max(shape.positions for shape in step)
            self._pass.in_flight = min(self._ranks_left, len(shapes))
            self._pass.kept = Kept(itertools.chain.from_iterable(self._held().values()))
        try:
            yield
        finally:
            self._pass = _Pass()

    @contextlib.contextmanager
    def forward(self, number: int) -> Iterator[None]:
        """Run the layers over micro-batch ``number``."""
        at = self._pass
        shape = at.shapes[number]
        cost = self._costs.forward(shape.rows, shape.width) if self._costs else NOTHING
        if number != at.sample:
            with self.phase(_LAYERS, cost):
                yield
            return
        dividing = self._division.of_pass()
        with self.phase(_LAYERS, cost), self._whole_first_layer(), at.kept.counting(), dividing as found:
            yield
        self._divided += found
        at.kept_by_layers = at.kept.size_bytes
        self._check(shape)

    @contextlib.contextmanager
    def head(self, number: int) -> Iterator[None]:
        """Project hidden states of micro-batch ``number`` onto the vocabulary and compute its loss."""
        at = self._pass
        shape = at.shapes[number]
        cost = self._costs.head(shape.positions) if self._costs else NOTHING
        if number != at.sample:
            with self.phase(_HEAD, cost):
                yield
            return
        start = self._clock.mark()
        with self.phase(_HEAD, cost), at.kept.counting():
            yield
            self._divided.append((OperationClass.VOCABULARY, start, self._clock.mark()))
        self._check(shape)

    @contextlib.contextmanager
    def backward(self, number: int) -> Iterator[None]:
        """Run the backward pass of micro-batch ``number``."""
        shape, again = self._pass.shapes[number], self._pass.recompute
        self._recomputed = again
        cost = self._costs.backward(shape.rows, shape.width, shape.positions, again) if self._costs else NOTHING
        with self.phase(_BACKWARD, cost):
            yield

    @contextlib.contextmanager
    def phase(self, kind: str | OperationClass, cost: Seconds) -> Iterator[None]:
        """Time what runs within, as ``kind``, and make it last as long as ``cost``."""
        start = self._clock.mark()
        yield
        if cost and self._pacer.pace(start, sum(cost.values())):
            for name, seconds in cost.items():
                self._paced[name] = self._paced.get(name, 0.0) + seconds
        else:
            self._ran.append((kind, start, self._clock.mark()))

    def gradients(self, size_bytes: int, replicas: int) -> contextlib.AbstractContextManager[None]:
        """Time the sum of the gradient over replicas."""
        cost = self._costs.gradients(size_bytes, replicas) if self._costs else NOTHING
        return self.phase(OperationClass.GRADIENTS_IN_NODE, cost)

    def update(self, elements: int, exact_bytes: int, rounded_bytes: int) -> contextlib.AbstractContextManager[None]:
        """Time an optimizer update; see ``Speeds.update``."""
        cost = self._costs.speeds.update(elements, exact_bytes, rounded_bytes) if self._costs else NOTHING
        return self.phase(OperationClass.OPTIMIZER, cost)

    # What came of it

    @property
    def needed_bytes(self) -> dict[str, int]:
        """By purpose, at the fullest moment of the step."""
        return {**sizes_bytes(self._held()), **self._transient_bytes}

    def operations(self) -> dict[OperationClass, float]:
        """Return the step's seconds on this slot by operation class."""
        ran: dict[str, float] = {}
        for kind, start, stop in self._ran:
            ran[kind] = ran.get(kind, 0.0) + self._clock.seconds(start, stop)
        layers: dict[OperationClass, float] = {}
        for name, start, stop in self._divided:
            layers[name] = layers.get(name, 0.0) + self._clock.seconds(start, stop)
        again = float(self._recomputed)
        backward = {
            name: seconds * (_BACKWARD_WORK[name] + again * (name != OperationClass.VOCABULARY))
            for name, seconds in layers.items()
        }
        layers.pop(OperationClass.VOCABULARY, None)
        parts = {_LAYERS: layers, _HEAD: {OperationClass.VOCABULARY: 1.0}, _BACKWARD: backward}
        total = dict(self._paced)
        for kind, seconds in ran.items():
            _add(total, parts[kind] if kind in parts else {OperationClass(kind): 1.0}, seconds)
        return total

    @contextlib.contextmanager
    def _whole_first_layer(self) -> Iterator[None]:
        """Let the first layer keep all: with recomputation that is what each layer keeps in its backward pass."""
        self._stage.whole_layers = 1
        try:
            yield
        finally:
            self._stage.whole_layers = 0

    def _check(self, sample: Shape) -> None:
        """Refuse the step if its fullest moment, told from the sample, is beyond the limit."""
        at = self._pass
        by_head = at.kept.size_bytes - at.kept_by_layers
        on_last = self._vocabulary_bytes if self._stage.last else 0
        self._transient_bytes = {
            "activations": math.ceil(at.kept_by_layers * at.in_flight * at.most_tokens / sample.tokens),
            "logits": math.ceil(by_head * at.most_positions / max(1, sample.positions))
            + _COMPARED * at.most_positions * on_last,
        }
        needed = self.needed_bytes
        if self._limit_bytes and sum(needed.values()) > self._limit_bytes:
            raise OutOfMemory(self._where, needed, self._limit_bytes)


def _add(total: dict[OperationClass, float], shares: Mapping[OperationClass, float], seconds: float) -> None:
    """Add ``seconds``, divided in proportion to ``shares``; without a sample to tell them, all are products."""
    whole = sum(shares.values())
    for name, share in shares.items() if whole else [(OperationClass.GEMM, 1.0)]:
        total[name] = total.get(name, 0.0) + seconds * share / (whole or 1.0)
