"""How are micro-batches run through the pipeline ranks of one unit?

Owner: the trainer. One pipeline rank: a plain loop. More: torch's 1F1B schedule over micro-batches of one shape, with
shapes declared up front (otherwise torch exchanges pickled metadata), gradients summed and never scaled.

The consumer is called with (hidden states, number of the micro-batch) on the last pipeline rank alone, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
        device = next(self._stage.parameters()).device
        stage = _metered_stage(self._meter)(
            self._stage,
            self._pp_rank,
            self._pp,
            device,
            input_args=(ids if self._stage.first else hidden,),
            output_args=(hidden,),
            group=self._group,
        )
        schedule = Schedule1F1B(stage, count, loss_fn=self._consume, scale_grads=False)
        self._schedule = (key, backward, schedule)
        return schedule


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
