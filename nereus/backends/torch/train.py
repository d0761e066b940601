"""How does one slot of a trainer unit train?

Owner: the trainer actor's compute thread. Every slot of every unit makes the same calls in the same order. Replicas
meet twice in a step: when the batch is shared and when gradients are summed; a loss is a sum divided once by counts
over all replicas, so uneven shares of samples are exact.

Invariants (tests/backends/test_train_layouts.py): loss, gradients and updates equal those of one process for every
layout; a step is applied on all slots or on none; a slot whose peer dies gets a ``TransitionError`` within the
group's time-out.
"""

from __future__ import annotations

import contextlib
import gc
import math
import mmap
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import msgspec
import numpy as np
import structlog
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from nereus.algo.advantage import zero_std_groups
from nereus.backends.api import TrainBatch
from nereus.backends.emulation import Speeds, TrainingCosts
from nereus.backends.holdings import Holdings
from nereus.backends.recipe import beginning
from nereus.backends.torch import buffers, checkpoint, hf
from nereus.backends.torch.blocks import Block, Cut, check_batch, cut
from nereus.backends.torch.devices import device_of
from nereus.backends.torch.groups import TrainerGroups, agree_to_keep, form_trainer_groups
from nereus.backends.torch.loss import METRICS, grpo_loss, log_probabilities
from nereus.backends.torch.metering import Buffers, Meter, Shape
from nereus.backends.torch.model import (
    DTYPES,
    Holding,
    StageModel,
    holding_slice,
    materialize,
)
from nereus.backends.torch.optimizer import FlatAdamW, exact_dtype, learning_rate
from nereus.backends.torch.pipeline import Pipeline
from nereus.backends.torch.sharing import broadcast_batch
from nereus.backends.torch.state import Blueprint, FlatRoom, TorchMemory
from nereus.bus.messages import Loan, Receipt, Standing, StepReport
from nereus.config import JobConfig
from nereus.control.efficiency import CLASSES
from nereus.core.plan import POLICY_TRAINING, Emu, Plan, Replication, SlotId
from nereus.core.shape import ModelShape
from nereus.core.units import GIB
from nereus.errors import ConfigError, NereusError, OutOfMemory, TransitionError
from nereus.transition import reshard
from nereus.transition.checksum import piece_checksum
from nereus.transition.primitive import Replica
from nereus.transition.reshard import Move, Piece, TensorSpec

_log = structlog.get_logger()

RATIO_TOLERANCE = 1e-3
_FEW_LARGEST = 2
_CLOCKS = ("forward_backward", "reduce", "optimizer", "share")
_WAITING = frozenset(kind for kind in CLASSES if kind.endswith(("/in_node", "/cross_node")))
"""Who comes late to a collective waits least, and tells best what the collective takes."""


@dataclass(frozen=True)
class _Place:
    """Where this slot stands in the plan."""

    emu: Emu
    index: int
    replica: int
    replication: Replication
    lead: SlotId
    recompute: bool

    @classmethod
    def of(cls, emu: Emu, plan: Plan, slot: SlotId) -> _Place:
        units = plan.of(POLICY_TRAINING)
        if emu not in units or slot not in emu.slots:
            raise ValueError(f"slot {slot} is not one of {emu}, or the plan of epoch {plan.epoch} lacks that unit")
        replication = Replication(len(units), emu.layout)
        recompute = POLICY_TRAINING in plan.recomputed
        return cls(emu, emu.slots.index(slot), units.index(emu), replication, units[0].slots[0], recompute)

    @property
    def pp_rank(self) -> int:
        return self.emu.layout.coordinates(self.index)[0]

    @property
    def tp_rank(self) -> int:
        return self.emu.layout.coordinates(self.index)[1]


@dataclass(frozen=True)
class _Share:
    """This slot's share of one model, ready to compute."""

    stage: StageModel
    parameters: dict[str, nn.Parameter]
    pipeline: Pipeline

    def release(self) -> None:
        """Let go of all parameters and of the process group; nothing can be computed any more."""
        self.stage.let_go()
        for module in self.stage.modules():
            module._parameters.clear()
        self.parameters.clear()


@dataclass(frozen=True)
class _Update:
    """An optimizer update that is ready to be applied, or skipped on every slot alike."""

    step: int
    rate: float
    scale: float
    skipped: bool
    self_checked: bool


class _Totals:
    """What the micro-batches of a step add up to on this slot."""

    def __init__(self) -> None:
        self.loss = torch.zeros((), dtype=torch.float64)
        self.sums = torch.zeros(len(METRICS), dtype=torch.float64)
        self.largest = torch.full((_FEW_LARGEST,), -math.inf, dtype=torch.float64)


class TorchTrainer:
    """One slot of a trainer unit on torch; implements ``TrainerBackend``."""

    def __init__(self, config: JobConfig, slot: SlotId = 0) -> None:
        self._config = config
        self._train = config.train
        self._dtype = DTYPES[config.model.dtype]
        self._device = device_of(config.cluster.device, slot)
        torch.set_num_threads(config.cluster.threads_per_slot)
        self._groups = TrainerGroups()
        self._place: _Place | None = None
        self._blueprint: Blueprint | None = None
        self._reference_folder: Path | None = None
        self._shared = buffers.PROCESS if self._device.type == "cpu" else None
        buffers.PROCESS.keep(config.adapt.spare_mb * 1_000_000)
        if self._shared is not None:
            self._shared.reserve(config.adapt.reserve_mb * 1_000_000)
        memory = TorchMemory(exact_dtype(self._dtype), self._device, self._shared)
        self._holdings: Holdings[FlatRoom] = Holdings(memory)
        self._room: FlatRoom | None = None
        self._optimizer: FlatAdamW | None = None
        self._share_of_policy: _Share | None = None
        self._share_of_reference: _Share | None = None
        self._kept_meter: Meter | None = None
        self._step = 0
        self._self_checked = False
        self._ready: _Update | None = None
        self._torn = False
        self._seconds = dict.fromkeys(_CLOCKS, 0.0)

    # Placement

    def assign(self, emu: Emu, plan: Plan, slot: SlotId, *, store: str) -> None:
        """Join the process groups of ``plan`` as ``slot``; groups of an earlier plan are left first.

        A unit of which nothing but its number changes keeps the groups that it has for itself, and what computes.
        """
        cluster = self._config.cluster
        before, place = self._place, _Place.of(emu, plan, slot)
        same = before is not None and (before.emu.slots, before.emu.layout) == (emu.slots, emu.layout)
        willing = same and self._share_of_policy is not None
        with _noted("groups"):
            if agree_to_keep(emu, plan, slot, willing, store=store, timeout_s=cluster.group_timeout_s):
                kept = self._groups.within_unit
                self._groups.between_units.leave()
            else:
                self.close()
                kept = TrainerGroups()
            self._place = place
            self._groups = form_trainer_groups(
                emu, plan, slot, store=store, transport=cluster.transport, timeout_s=cluster.group_timeout_s, kept=kept
            )

    def load(self, source: Path) -> int:
        """Build this slot's share from a model folder (step 0) or a committed checkpoint; return its step.

        ``ConfigError`` before anything is allocated if the layout does not fit the model.
        """
        place = self._placed
        resumed = checkpoint.is_checkpoint(source)
        blueprint = Blueprint(checkpoint.model_folder(source), self._config.model)
        entries, elements = blueprint.lay_out(place.emu.layout, place.index)
        self._reference_folder = self._find_reference(source, resumed)
        self._blueprint = blueprint
        self._forget()
        self._holdings.clear()
        self._optimizer = optimizer = self._make_optimizer(elements)
        flats = optimizer.buffers()
        self._room = FlatRoom(entries, elements, optimizer.master.dtype, self._device, flats, buffers=self._shared)
        self._step = self._restore(source) if resumed else self._read_weights(source, optimizer.master)
        self._holdings.commit(Replica.of(place.emu), self._room, self._counters)
        self._compute()
        return self._step

    def _make_optimizer(self, elements: int, state: dict[str, Tensor] | None = None) -> FlatAdamW:
        zeros = self._shared.zeros if self._shared is not None else None
        return FlatAdamW(elements, self._dtype, self._device, self._train, state, zeros=zeros)

    def _find_reference(self, source: Path, resumed: bool) -> Path | None:
        if not self._train.loss.kl_coefficient:
            return None
        if not resumed:
            return source
        folder = self._beginning()
        if folder is None:
            raise ConfigError(
                "the reference model of a resumed run is not there",
                where="model.path",
                remedy="name the model folder that the run began with, or set train.loss.kl_coefficient to 0",
            )
        return folder

    def _beginning(self) -> Path | None:
        """Return the model that the run began with, if the job names it and it is still there."""
        model = self._config.model
        if not (model.path or model.recipe):
            return None
        folder = beginning(model)
        return folder if folder.is_dir() else None

    def _compute(self) -> None:
        """Build what computes with the state that is here, and the reference model."""
        blueprint, room, optimizer = self._known, self._share_room, self._policy_optimizer
        layout = self._placed.emu.layout
        if blueprint.vocabulary % layout.tp:
            _log.info("vocabulary kept whole on every tp rank", vocabulary=blueprint.vocabulary, tp=layout.tp)
        optimizer.refresh()
        self._kept_meter = None
        self._share_of_policy = self._build(blueprint.build(), optimizer.compute, self._placed.recompute)
        self._collect_gradients(self._share_of_policy)
        self._share_of_reference = None
        if self._reference_folder is not None:
            weights = torch.zeros(room.elements, dtype=self._dtype, device=self._device)
            self._read_weights(self._reference_folder, weights)
            self._share_of_reference = self._build(blueprint.build(), weights, False)

    def _build(self, model: Any, flat: Tensor, recompute: bool) -> _Share:
        place, groups = self._placed, self._groups
        layout = place.emu.layout
        stage, parameters = materialize(
            model, self._share_room.entries, flat, layout, place.index, tp_group=groups.tp, recompute=recompute
        )
        if self._kept_meter is None:  # the policy is built first
            self._kept_meter = self._make_meter(stage)
        pipeline = Pipeline(
            stage,
            groups.pp,
            groups.tp,
            layout.pp,
            place.pp_rank,
            hidden=model.config.hidden_size,
            dtype=self._dtype,
            meter=self._kept_meter,
        )
        return _Share(stage, parameters, pipeline)

    def _make_meter(self, stage: StageModel) -> Meter:
        place, emulate = self._placed, self._config.emulate
        layout, speeds, known = place.emu.layout, Speeds.of(emulate), self._known.config
        costs = None
        if speeds is not None:
            shape = ModelShape.from_config(known.to_dict())
            costs = TrainingCosts(speeds, shape, layout, place.pp_rank, self._dtype.itemsize)
        columns = known.vocab_size // (1 if stage.vocabulary_start is None else layout.tp)
        return Meter(
            stage,
            self._buffers,
            where=self._where,
            ranks_left=layout.pp - place.pp_rank,
            vocabulary_bytes=columns * exact_dtype(self._dtype).itemsize,
            limit_bytes=emulate.memory_mb * 1_000_000,
            costs=costs,
        )

    def _buffers(self) -> Buffers:
        """Return the state of this slot by purpose; parameters in the masters' precision are the masters."""
        optimizer, reference = self._policy_optimizer, self._share_of_reference
        return {
            "masters": [optimizer.master],
            "gradient": [optimizer.gradient],
            "moments": list(optimizer.moments.values()),
            "parameters": [optimizer.compute],
            "reference": list(reference.parameters.values()) if reference is not None else [],
        }

    def _read_weights(self, folder: Path, flat: Tensor) -> int:
        entries = self._share_room.entries
        values = hf.read_pieces(folder, [(entry.spec, entry.piece) for entry in entries], flat.dtype)
        for entry in entries:
            entry.view(flat).copy_(values[entry.spec.name])
        return 0

    def _restore(self, source: Path) -> int:
        optimizer, entries = self._policy_optimizer, self._share_room.entries
        wanted = [(kind, entry.spec, entry.piece) for kind in optimizer.buffers() for entry in entries]
        values = checkpoint.read_pieces(source, wanted)
        for kind, buffer in optimizer.buffers().items():
            for entry in entries:
                entry.view(buffer).copy_(values[kind, entry.spec.name])
        counters = checkpoint.read_counters(source)
        optimizer.updates = int(counters["updates"])
        self._self_checked = bool(counters["self_checked"])
        return int(counters["step"])

    def _collect_gradients(self, share: _Share) -> None:
        """Let the backward pass add gradients up in the flat buffer, in the masters' precision.

        Plain parameters in that precision get a view of it as ``.grad``, which autograd adds to in place; others hand
        each micro-batch's gradient over.
        """
        gradient = self._policy_optimizer.gradient
        for entry in self._share_room.entries:
            parameter, view = share.parameters[entry.name], entry.view(gradient)
            if parameter.dtype != gradient.dtype:
                parameter.register_post_accumulate_grad_hook(_adder(view))
            else:
                parameter.grad = view

    # What there is

    @property
    def _placed(self) -> _Place:
        if self._place is None:
            raise ValueError("this slot is not assigned to a unit yet")
        return self._place

    @property
    def _policy_optimizer(self) -> FlatAdamW:
        if self._optimizer is None:
            raise ValueError("this slot has not loaded a model yet")
        return self._optimizer

    @property
    def _policy(self) -> _Share:
        if self._share_of_policy is None:
            raise ValueError("this slot has not loaded a model yet")
        return self._share_of_policy

    @property
    def _where(self) -> str:
        return f"{self._placed.emu.id} on slot {self._placed.emu.slots[self._placed.index]}"

    @property
    def _meter(self) -> Meter:
        if self._kept_meter is None:
            raise ValueError("this slot has not loaded a model yet")
        return self._kept_meter

    @property
    def _known(self) -> Blueprint:
        if self._blueprint is None:
            raise ValueError("this slot does not know its model yet")
        return self._blueprint

    @property
    def _share_room(self) -> FlatRoom:
        if self._room is None:
            raise ValueError("this slot has not loaded a model yet")
        return self._room

    @property
    def _counters(self) -> dict[str, int]:
        return {
            "step": self._step,
            "updates": self._policy_optimizer.updates,
            "self_checked": int(self._self_checked),
        }

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every tensor of the model, whole, the same under every layout; tied aliases are left out."""
        return self._known.tensors

    @property
    def tied(self) -> dict[str, str]:
        """Alias name -> stored name, by real aliasing."""
        return self._known.tied

    @property
    def updates(self) -> int:
        """How many optimizer updates were applied."""
        return self._policy_optimizer.updates

    def pieces(self, kind: str) -> dict[str, tuple[Piece, Tensor]]:
        """Return this slot's part, by stored name, of ``parameter`` (masters), ``exp_avg``, ... or ``gradient``."""
        optimizer = self._policy_optimizer
        buffer = optimizer.gradient if kind == "gradient" else optimizer.buffers()[kind]
        stored = (entry for entry in self._share_room.entries if entry.holding != Holding.ALIAS)
        return {entry.spec.name: (entry.piece, entry.view(buffer)) for entry in stored}

    # Training

    def share(self, batch: TrainBatch | None) -> TrainBatch:
        """Broadcast the batch from the lead slot to all trainer slots; ``ValueError`` if the wrong slot has it."""
        place = self._placed
        is_lead = place.emu.slots[place.index] == place.lead
        if is_lead != (batch is not None):
            raise ValueError(f"slot {place.lead} alone shares the batch")
        if batch is not None:
            check_batch(batch, self._known.vocabulary)
        if self._groups.everyone is None:
            assert batch is not None
            return batch
        with self._timed("share"), self._bounded("sharing a batch"):
            return broadcast_batch(batch, place.lead, self._groups.everyone)

    def train(self, batch: TrainBatch) -> StepReport:
        """Make one training step: ``train.minibatches`` optimizer updates from the samples of ``batch``.

        The last collective of the step is the agreement to apply its last update: no slot gets past it before every
        slot has come to it with the update ready, and after it nothing can fail. ``TransitionError`` if a peer is lost,
        ``OutOfMemory`` before any update if this slot has too little memory for the step; this slot's groups are broken
        then and have been left, and ``standing`` tells how far it has come.
        """
        began = perf_counter()
        check_batch(batch, self._known.vocabulary)
        place = self._placed
        self._ready = None
        with self._bounded(f"step {batch.step}"):
            cuts = cut(batch, self._train, place.replication, place.replica, self._device, self._dtype)
            with self._timed("forward_backward"):
                self._score(cuts)
            totals = _Totals()
            norms: list[float] = []
            update: _Update | None = None
            for number in cuts:
                if update is not None:
                    self._torn = True  # until the last update is applied, the state is that of no step
                    self._apply(update)
                self._backward(number.blocks, totals, cuts)
                norms.append(self._reduce())
                update = self._prepare(batch, norms[-1])
            assert update is not None, "a step has at least one update"
            self._ready = update
            report = self._report(batch, cuts, totals, norms, update, began)
            self._finish(update)
            return msgspec.structs.replace(report, seconds=perf_counter() - began)

    def standing(self) -> Standing:
        """Return how far this slot has come, and of which replicas it holds a share."""
        return Standing(self._step, self._ready is not None, self._torn, self._holdings.replicas)

    def recall(self, step: int) -> None:
        """Let ``step`` be the next: apply the update that is ready, or forget it."""
        if self._ready is not None and step == self._ready.step + 1:
            self._finish(self._ready)
        elif self._torn or step != self._step:
            torn = ", some updates of which are applied," if self._torn else ""
            raise ValueError(f"this slot stands before step {self._step}{torn} and cannot come to step {step}")
        self._ready = None

    def _prepare(self, batch: TrainBatch, norm: float) -> _Update:
        """Return the update with the gradient at hand, whose norm is the same on every slot."""
        updates = self._policy_optimizer.updates
        rate = learning_rate(self._train, updates, self._config.run.steps * self._train.minibatches)
        scale = min(1.0, self._train.max_grad_norm / (norm + 1e-6))
        return _Update(batch.step, rate, scale, not math.isfinite(norm), self._self_checked or _on_policy(batch))

    def _apply(self, update: _Update) -> None:
        if not update.skipped:
            optimizer = self._policy_optimizer
            master, compute = optimizer.master, optimizer.compute
            rounded_bytes = 0 if compute is master else compute.itemsize
            measured: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if self._kept_meter is not None:  # nothing is measured in a step that has failed
                measured = self._kept_meter.update(master.numel(), master.itemsize, rounded_bytes)
            with self._timed("optimizer"), measured:
                optimizer.step(update.rate, update.scale)

    def _finish(self, update: _Update) -> None:
        """Apply the last update of a step."""
        self._apply(update)
        self._step = update.step + 1
        self._self_checked = update.self_checked
        self._ready, self._torn = None, False

    def _score(self, cuts: list[Cut]) -> None:
        """Add reference and, where the policy changes within the step, proximal log-probabilities to the blocks."""
        for share, field, wanted in (
            (self._share_of_reference, "reference", self._share_of_reference is not None),
            (self._share_of_policy, "proximal", len(cuts) > 1),
        ):
            if wanted and share is not None:
                for part in cuts:
                    part.blocks[:] = self._with_log_probabilities(share, part.blocks, field)

    def _with_log_probabilities(self, share: _Share, blocks: list[Block], field: str) -> list[Block]:
        found: dict[int, Tensor] = {}

        stage = share.stage  # not the share, see ``_backward``

        def keep(hidden: Tensor, number: int) -> Tensor:
            block = blocks[number]
            if len(block.positions):
                found[number], _ = self._log_probabilities(stage, hidden, block)
            return hidden.new_zeros(())

        if blocks:
            with self._meter.passes(_shapes(blocks)):
                share.pipeline.run([block.ids for block in blocks], keep, backward=False)
        return [
            block._replace(targets=block.targets._replace(**{field: found[number]})) if number in found else block
            for number, block in enumerate(blocks)
        ]

    def _log_probabilities(self, stage: StageModel, hidden: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy [n] at the block's positions; only these see the output head."""
        chosen = hidden.flatten(0, 1).index_select(0, block.positions)
        start = stage.vocabulary_start
        return log_probabilities(
            stage.logits(chosen),
            block.targets.tokens,
            self._config.rollout.temperature,
            start=start,
            group=None if start is None else self._groups.tp,
            with_entropy_gradient=self._train.loss.entropy_coefficient != 0,
        )

    def _backward(self, blocks: list[Block], totals: _Totals, cuts: list[Cut]) -> None:
        # The traceback of a failure keeps what ``consume`` closes over: nothing that has a process group.
        stage = self._policy.stage
        step = [shape for part in cuts for shape in _shapes(part.blocks)]

        def consume(hidden: Tensor, number: int) -> Tensor:
            block = blocks[number]
            if not len(block.positions):
                return hidden.sum() * 0
            outcome = grpo_loss(*self._log_probabilities(stage, hidden, block), block.targets, self._train.loss)
            totals.loss += outcome.loss.detach().cpu()
            totals.sums += outcome.sums.cpu()
            totals.largest = torch.maximum(totals.largest, outcome.largest.cpu())
            return outcome.loss

        with self._timed("forward_backward"):
            self._policy_optimizer.gradient.zero_()
            if blocks:
                with self._meter.passes(_shapes(blocks), step):
                    self._policy.pipeline.run([block.ids for block in blocks], consume, backward=True)

    def _reduce(self) -> float:
        """Sum the gradient over replicas and over the slots that share a tensor; return its global norm.

        Each logical parameter counts once: shards of all tp ranks, replicas of tp rank 0, tied tensors where stored.
        """
        gradient, groups = self._policy_optimizer.gradient, self._groups
        with self._timed("reduce"):
            if groups.ends is not None and self.tied:
                dist.all_reduce(self._tied_gradient(), group=groups.ends)
            summed = self._slice(Holding.SUMMED)
            if groups.tp is not None and summed.start < summed.stop:
                dist.all_reduce(gradient[summed], group=groups.tp)
            if groups.dp is not None:
                with self._meter.gradients(gradient.nbytes, self._placed.replication.dp):
                    dist.all_reduce(gradient, group=groups.dp)
            counted = [gradient[self._slice(Holding.SHARDED)]]
            if self._placed.tp_rank == 0:
                counted.append(gradient[self._slice(Holding.REPLICATED, Holding.SUMMED)])
            square = sum(float(torch.linalg.vector_norm(part)) ** 2 for part in counted)
            if groups.unit is not None:
                total = torch.tensor([square], dtype=torch.float64, device=self._device)
                dist.all_reduce(total, group=groups.unit)
                square = float(total)
        return math.sqrt(square)

    def _slice(self, *holdings: Holding) -> slice:
        return holding_slice(self._share_room.entries, len(self._policy_optimizer.gradient), *holdings)

    def _tied_gradient(self) -> Tensor:
        names = set(self.tied) if self._placed.pp_rank else set(self.tied.values())
        entry = next(entry for entry in self._share_room.entries if entry.name in names)
        return entry.view(self._policy_optimizer.gradient)

    # Reports

    def _report(
        self,
        batch: TrainBatch,
        cuts: list[Cut],
        totals: _Totals,
        norms: list[float],
        last: _Update,
        began: float,
    ) -> StepReport:
        """Sum up the step over all slots; the optimizer's time is that of the last step."""
        place = self._placed
        skipped = not all(map(math.isfinite, norms))
        counts = place.pp_rank == place.emu.layout.pp - 1 and place.tp_rank == 0
        sums = torch.cat((totals.loss[None], totals.sums)) * counts
        clocks = [self._seconds[name] for name in _CLOCKS]
        measured = self._meter.operations()
        kinds = [measured.get(kind, 0.0) * (-1 if kind in _WAITING else 1) for kind in CLASSES]
        numbers = [*clocks, perf_counter() - began, float(self._peak_bytes()), *kinds]
        largest = torch.cat((totals.largest, torch.tensor(numbers, dtype=torch.float64)))
        if self._groups.everyone is not None:
            dist.all_reduce(sums, group=self._groups.everyone)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._groups.everyone)
        self._seconds = dict.fromkeys(_CLOCKS, 0.0)
        self._meter.forget()
        drawn, fed = sum(part.tokens for part in cuts), sum(part.fed_tokens for part in cuts)
        loss, *means = sums.tolist()
        log_ratio, distance, *numbers = largest.tolist()
        clocks, (seconds, peak, *kinds) = numbers[: len(_CLOCKS)], numbers[len(_CLOCKS) :]
        metrics = {
            "loss": loss / len(cuts),
            "optim/grad_norm": math.nan if skipped else sum(norms) / len(norms),
            "optim/lr": last.rate,
            "perf/tokens_per_s": fed / max(seconds, 1e-9),
            "perf/peak_mem_gib": peak / GIB,
            **{f"timing_s/{name}": clock for name, clock in zip(_CLOCKS, clocks, strict=True)},
            **_batch_metrics(batch),
        }
        if drawn:
            metrics |= {name: total / drawn for name, total in zip(METRICS, means, strict=True)}
            metrics["mismatch/ratio_max"] = math.exp(min(log_ratio, 700.0))
            metrics |= self._self_check(batch, log_ratio, distance)
        if self._share_of_reference is None:
            metrics.pop("kl/ref", None)
        operations = {str(kind): abs(value) for kind, value in zip(CLASSES, kinds, strict=True) if value}
        return StepReport(batch.step, batch.version, seconds, fed, metrics, skipped, int(peak), operations)

    def _peak_bytes(self) -> int:
        if self._device.type != "cuda":
            return sum(self._meter.needed_bytes.values())
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return int(peak)

    def _self_check(self, batch: TrainBatch, log_ratio: float, distance: float) -> dict[str, float]:
        """On the first step that is all on-policy, compare the trainer's log-probabilities with the sampler's."""
        if self._self_checked or not _on_policy(batch):
            return {}
        error = max(math.expm1(min(log_ratio, 700.0)), -math.expm1(-distance))
        if error > RATIO_TOLERANCE:
            rollout = self._config.rollout
            _log.warning(
                "the policy that trains is not the one that sampled: on-policy ratio is not 1",
                ratio_error=error,
                step=batch.step,
                likely_causes="temperature applied on one side only; top_p or top_k cut the distribution; dropout; "
                "wrong positions or mask of padded rows; stale or differently rounded weights",
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                dtype=self._config.model.dtype,
            )
        return {"mismatch/first_step_ratio_error": error}

    # Weights and checkpoints

    def publication(self) -> Sequence[Piece]:
        """Return the pieces this slot pushes, so that each piece of the model is pushed by exactly one slot."""
        place, blueprint = self._placed, self._known
        layout = place.emu.layout
        return reshard.publication(
            blueprint.specs(layout), blueprint.layers, layout, place.index, place.replica, place.replication.dp
        )

    def write(self, pieces: Sequence[Piece], path: Path, offsets: dict[str, int]) -> list[str]:
        """Write ``pieces`` into the shared file and return the xxh3-64 of each one's contiguous bytes."""
        entries = {entry.spec.name: entry for entry in self._share_room.entries if entry.holding != Holding.ALIAS}
        checksums = []
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
            for piece in pieces:
                entry = entries.get(piece.name)
                if entry is None or entry.piece != piece:
                    raise ValueError(f"this slot does not hold {piece}")
                local = _bits(entry.view(self._policy_optimizer.compute))
                _write_box(shared, offsets[piece.name], entry.spec.shape, piece, local)
                checksums.append(piece_checksum(local))
        return checksums

    def save(self, folder: Path, step: int) -> bytes:
        """Write this slot's share of masters, moments and counters into ``folder``; return its JSON manifest entry."""
        place, optimizer = self._placed, self._policy_optimizer
        mine = {piece.name for piece in self.publication()}
        held = {
            (kind, name): part
            for kind in optimizer.buffers()
            for name, part in self.pieces(kind).items()
            if name in mine
        }
        counters = {**self._counters, "step": step}
        slot_name = f"{place.replica}-{place.index}"
        entry: bytes = checkpoint.save_slot(folder, slot_name=slot_name, step=step, pieces=held, counters=counters)
        return entry

    # State moves

    def lend(self, moves: Sequence[Move], path: Path) -> Receipt:
        """Write the pieces of ``moves`` into the existing file ``path``."""
        self._count()
        with _noted("lend"):
            return self._holdings.lend(moves, path)

    def take(self, replica: Replica, index: int, loans: Sequence[Loan], model: Path) -> int:
        """Hold slot number ``index`` of ``replica`` as well; return the bytes that were read."""
        self._count()
        with _noted("blueprint"):
            self._learn(model)
        blueprint, dtype = self._known, exact_dtype(self._dtype)

        def make_room() -> FlatRoom:
            entries, elements = blueprint.lay_out(replica.layout, index)
            return FlatRoom(entries, elements, dtype, self._device, buffers=self._shared)

        with _noted("take"):
            return self._holdings.take(replica, index, loans, make_room)

    def _learn(self, model: Path) -> None:
        """Read the architecture, unless it is known."""
        if self._blueprint is None:
            start = self._beginning() or model
            self._reference_folder = self._find_reference(start, checkpoint.is_checkpoint(start))
            self._blueprint = Blueprint(checkpoint.model_folder(model), self._config.model)

    def drop(self, replica: Replica) -> None:
        """Forget one replica; if it is the one in training, what computes with it goes too."""
        self._count()
        if replica == self._holdings.committed:
            self._forget()
        self._holdings.drop(replica)

    def adopt(self) -> int:
        """Train the assigned unit with what is held of it; return the step that comes next.

        Held at most, on a CPU: the shares of before (see ``Holdings``) without gradient and rounded parameters, and one
        kind of the new share; then the new share and its gradient.
        """
        replica = Replica.of(self._placed.emu)
        self._holdings.require(replica)
        self._count()
        counters = self._holdings.counters
        with _noted("forget"):
            if replica != self._holdings.committed:
                self._forget()
        with _noted("settle"):
            self._room = room = self._holdings.settle(replica)
        if self._optimizer is None:
            with _noted("optimizer"):
                self._optimizer = self._make_optimizer(room.elements, room.flats)
            self._optimizer.updates = counters["updates"]
            self._step, self._self_checked = counters["step"], bool(counters["self_checked"])
        if self._share_of_policy is None:
            with _noted("build"):
                self._compute()
        self._policy.stage.recompute = self._placed.recompute
        return self._step

    def abandon(self) -> None:
        """Forget every replica but the committed one."""
        self._holdings.abandon()

    def _count(self) -> None:
        if self._optimizer is not None:
            self._holdings.count(self._counters)

    def _forget(self) -> None:
        """Let go of all that computes with the state, and of the gradient."""
        self._drop_shares()
        self._optimizer = self._room = self._ready = None

    def _drop_shares(self) -> None:
        """Free what computes; modules refer to each other, so their memory is taken from them."""
        for share in filter(None, (self._share_of_policy, self._share_of_reference)):
            share.release()
        self._share_of_policy = self._share_of_reference = self._kept_meter = None

    def close(self) -> None:
        """Leave all process groups; safe when peers are dead."""
        self._drop_shares()
        self._groups.leave()
        self._groups = TrainerGroups()

    @contextlib.contextmanager
    def _timed(self, clock: str) -> Iterator[None]:
        began = perf_counter()
        yield
        self._seconds[clock] += perf_counter() - began

    @contextlib.contextmanager
    def _bounded(self, what: str) -> Iterator[None]:
        """Turn a broken collective into a ``TransitionError``; let go of all groups at once, which frees the peers.

        So does a slot that has too little memory (``OutOfMemory``). Masters and moments stay; the slot must be assigned
        and its share be built anew.
        """
        try:
            yield
        except (RuntimeError, OutOfMemory) as error:
            failure = self._failure(what, error)
            if failure is None:
                raise
            self.close()
            for cause in _causes(error):  # the frames hold groups, and a group closes when nobody does
                traceback.clear_frames(cause.__traceback__)
            gc.collect()
            raise failure from (None if failure is error else error)

    def _failure(self, what: str, error: Exception) -> NereusError | None:
        """Return what ``error`` means; None if it is a bug."""
        causes = list(_causes(error))
        if isinstance(error, OutOfMemory):
            return error
        if any(isinstance(cause, torch.OutOfMemoryError) for cause in causes):
            return self._exhausted()
        if any(map(_is_collective, causes)):
            return TransitionError(f"{what} of {self._where} lost a peer: {causes[-1]}")
        return None

    def _exhausted(self) -> OutOfMemory:
        """Say what the device held when it had no more to give."""
        needed = self._meter.needed_bytes
        needed["other"] = max(0, torch.cuda.max_memory_allocated(self._device) - sum(needed.values()))
        return OutOfMemory(self._where, needed, torch.cuda.get_device_properties(self._device).total_memory)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it came from: a pipelined pass wraps what its stage raises."""
    while error is not None:
        yield error
        error = error.__cause__


@contextlib.contextmanager
def _noted(what: str) -> Iterator[None]:
    """Log how long a part of a plan change takes, and how much of it this thread had a processor."""
    began, busy = perf_counter(), thread_time()
    yield
    _log.info("state moved", what=what, seconds=perf_counter() - began, busy_s=thread_time() - busy)


def _is_collective(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "nccl", "by peer", "timed out"))


def _adder(view: Tensor):  # type: ignore[no-untyped-def]
    """Return a hook that moves a parameter's fresh gradient into ``view``."""

    def add(parameter: Tensor) -> None:
        view.add_(parameter.grad)
        parameter.grad = None

    return add


def _bits(tensor: Tensor) -> NDArray[Any]:
    """Return the tensor's elements as unsigned integers of equal width: numpy knows no bfloat16."""
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()]
    bits: NDArray[Any] = tensor.detach().cpu().contiguous().view(width).numpy()
    return bits


def _write_box(shared: mmap.mmap, offset: int, shape: tuple[int, ...], piece: Piece, local: NDArray[Any]) -> None:
    whole = np.ndarray(shape, local.dtype, shared, offset)
    whole[tuple(slice(low, high) for low, high in zip(piece.start, piece.stop, strict=True))] = local
    del whole  # the map cannot be closed while an array looks into it


def _shapes(blocks: Sequence[Block]) -> list[Shape]:
    return [Shape(block.ids.shape[0], block.ids.shape[1], len(block.positions)) for block in blocks]


def _on_policy(batch: TrainBatch) -> bool:
    """Say whether the policy that trains has sampled all of the batch."""
    return bool(len(batch.versions) and (batch.versions == batch.version).all())


def _batch_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return what can be told from the samples alone; rewards that are None count nowhere."""
    rewards = batch.rewards[~np.isnan(batch.rewards)]
    both = batch.prompt_lengths + batch.lengths
    metrics = {
        "response_length/mean": float(batch.lengths.mean()),
        "response_length/p95": float(np.percentile(batch.lengths, 95)),
        "response_length/max": float(batch.lengths.max()),
        "response_length/min": float(batch.lengths.min()),
        "prompt_length/mean": float(batch.prompt_lengths.mean()),
        "length/mean": float(both.mean()),
        "length/p95": float(np.percentile(both, 95)),
        "reward/none": float(len(batch.rewards) - len(rewards)),
        "reward/zero_std_groups": float(zero_std_groups(batch.rewards, batch.group_of)),
    }
    if len(rewards):
        metrics |= {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "reward/max": float(rewards.max()),
            "reward/min": float(rewards.min()),
        }
    return metrics
