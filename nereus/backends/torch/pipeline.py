"""How are micro-batches run through the pipeline ranks of one unit?

Owner: the trainer. One pipeline rank: a plain loop. More: torch's 1F1B schedule over micro-batches of one shape, with
shapes declared up front (otherwise torch exchanges pickled metadata), gradients summed and never scaled.

All tensor ranks of a pipeline rank hold the same hidden states, so each sends its part to its neighbour, and the
neighbours gather the whole: what crosses between nodes is one copy and not one for every tensor rank. Gradients go back
in the same way.

The consumer is called with (hidden states, number of the micro-batch) on the last pipeline rank alone, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nereus.backends.torch.metering import Meter
from nereus.backends.torch.model import StageModel

Consumer = Callable[[Tensor, int], Tensor]
"""Takes final hidden states [rows, width, hidden] and a micro-batch's number, returns its loss."""


class Pipeline:
    """Runs a stage's share of the forward and backward passes."""

    def __init__(
        self,
        stage: StageModel,
        group: dist.ProcessGroup | None,
        tp_group: dist.ProcessGroup | None,
        pp: int,
        pp_rank: int,
        *,
        hidden: int,
        dtype: torch.dtype,
        meter: Meter,
    ) -> None:
        self._stage = stage
        self._meter = meter
        self._group = group
        self._tp_group = tp_group if tp_group is not None and hidden % tp_group.size() == 0 else None
        self._pp = pp
        self._pp_rank = pp_rank
        self._hidden = hidden
        self._dtype = dtype
        self._schedule: tuple[tuple[int, int, int], bool, object] | None = None
        self._consumer: Consumer | None = None

    def run(self, micro_batches: Sequence[Tensor], consume: Consumer, *, backward: bool) -> None:
        """Compute all micro-batches (token ids [rows, width]); with ``backward`` add up their gradients."""
        if self._pp == 1:
            self._loop(micro_batches, consume, backward)
        else:
            self._scheduled(micro_batches, consume, backward)

    def _loop(self, micro_batches: Sequence[Tensor], consume: Consumer, backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            for number, ids in enumerate(micro_batches):
                with self._meter.forward(number):
                    hidden = self._stage(ids)
                with self._meter.head(number):
                    loss = consume(hidden, number)
                if backward:
                    with self._meter.backward(number):
                        loss.backward()

    def _scheduled(self, micro_batches: Sequence[Tensor], consume: Consumer, backward: bool) -> None:
        rows, width = micro_batches[0].shape
        schedule = self._schedule_for(len(micro_batches), rows, width, backward)
        self._consumer = consume
        arguments = (torch.cat(list(micro_batches)),) if self._stage.first else ()
        target = torch.arange(len(micro_batches)) if self._stage.last else None
        try:
            with torch.set_grad_enabled(backward):
                run = schedule.step if backward else schedule.eval
                run(*arguments, target=target, return_outputs=False)
        finally:
            self._consumer = None

    def _consume(self, hidden: Tensor, number: Tensor) -> Tensor:
        assert self._consumer is not None
        with self._meter.head(int(number)):
            return self._consumer(hidden, int(number))

    def _schedule_for(self, count: int, rows: int, width: int, backward: bool):  # type: ignore[no-untyped-def]
        """Return the schedule for this shape; the last one is kept, because making one costs a round of messages."""
        from torch.distributed.pipelining import Schedule1F1B

        key = (count, rows, width)
        if self._schedule is not None and self._schedule[:2] == (key, backward):
            return self._schedule[2]
        ids = torch.empty(rows, width, dtype=torch.int64, device="meta")
        hidden = torch.empty(rows, width, self._hidden, dtype=self._dtype, device="meta", requires_grad=backward)
        passed, carried = hidden, self._stage
        if self._tp_group is not None:
            passed = hidden.new_empty(hidden.numel() // self._tp_group.size(), requires_grad=backward)
            carried = _Carried(self._stage, self._tp_group, hidden.shape)
        device = next(self._stage.parameters()).device
        stage = _metered_stage(self._meter)(
            carried,
            self._pp_rank,
            self._pp,
            device,
            input_args=(ids if self._stage.first else passed,),
            output_args=(hidden if self._stage.last else passed,),
            group=self._group,
        )
        schedule = Schedule1F1B(stage, count, loss_fn=self._consume, scale_grads=False)
        self._schedule = (key, backward, schedule)
        return schedule


class _Carried(nn.Module):  # type: ignore[misc]
    """A stage that takes and gives a part of its hidden states, flat, on every tensor rank."""

    def __init__(self, stage: StageModel, group: dist.ProcessGroup, shape: torch.Size) -> None:
        super().__init__()
        self._stage = stage
        self._group = group
        self._shape = shape

    def forward(self, x: Tensor) -> Tensor:
        whole = x if self._stage.first else _Gather.apply(x, self._group).view(self._shape)
        result: Tensor = self._stage(whole)
        return result if self._stage.last else _Part.apply(result, self._group)


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    """The whole from everybody's part; backward, this rank's part of a gradient that is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _part(gradient, ctx.group), None


class _Part(torch.autograd.Function):  # type: ignore[misc]
    """This rank's part of what is the same on all ranks; backward, the whole gradient from everybody's part."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.shape = group, whole.shape
        return _part(whole, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _gathered(gradient, ctx.group).view(ctx.shape), None


def _part(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    return whole.reshape(-1).chunk(group.size())[group.rank()].clone()


def _gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = part.new_empty(part.numel() * group.size())
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole


def _metered_stage(meter: Meter) -> Any:
    """Return a kind of ``PipelineStage`` that runs the passes of a micro-batch under the eyes of ``meter``.

    A class and no wrapped methods: the traceback of a failed pass keeps the functions that it went through, and with
    them what they close over, which must not be the process group.
    """
    from torch.distributed.pipelining import PipelineStage

    class MeteredStage(PipelineStage):  # type: ignore[misc]
        def forward_one_chunk(self, number: int, *arguments: Any, **options: Any) -> Any:
            with meter.forward(number):
                return super().forward_one_chunk(number, *arguments, **options)

        def backward_one_chunk(self, number: int, *arguments: Any, **options: Any) -> Any:
            with meter.backward(number):
                return super().backward_one_chunk(number, *arguments, **options)

    return MeteredStage
