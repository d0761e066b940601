"""How does the batch of a step reach all trainer slots?

Owner: the trainer. As one broadcast of a fixed header and one of a flat byte buffer over the host group: no pickle.

Invariant (tests/backends/test_train_layouts.py): all slots hold equal arrays afterwards.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from nereus.backends.api import TrainBatch

_HEADER_NUMBERS = 5


def _fields(samples: int, fed: int, drawn: int) -> tuple[tuple[str, type[np.generic], int], ...]:
    """Return name, dtype and size of each array in the buffer, widest elements first: all stay aligned."""
    return (
        ("rewards", np.float64, samples),
        ("prompt_lengths", np.int32, samples),
        ("lengths", np.int32, samples),
        ("group_of", np.int32, samples),
        ("tokens", np.int32, fed),
        ("logprobs", np.float32, drawn),
        ("versions", np.int32, drawn),
    )


def broadcast_batch(batch: TrainBatch | None, lead: int, group: dist.ProcessGroup) -> TrainBatch:
    """Return the batch of slot ``lead`` on all slots of ``group``; the others pass None."""
    header = torch.zeros(_HEADER_NUMBERS, dtype=torch.int64)
    if batch is not None:
        numbers = (batch.step, batch.version, len(batch.lengths), len(batch.tokens), len(batch.logprobs))
        header = torch.tensor(numbers, dtype=torch.int64)
    dist.broadcast(header, lead, group=group)
    step, version, samples, fed, drawn = header.tolist()
    fields = _fields(samples, fed, drawn)
    buffer = np.empty(sum(size * np.dtype(dtype).itemsize for _, dtype, size in fields), np.uint8)
    arrays: dict[str, NDArray[Any]] = {}
    end = 0
    for name, dtype, size in fields:
        start, end = end, end + size * np.dtype(dtype).itemsize
        arrays[name] = buffer[start:end].view(dtype)
        if batch is not None:
            arrays[name][:] = getattr(batch, name)
    dist.broadcast(torch.from_numpy(buffer), lead, group=group)
    return TrainBatch(step=step, version=version, **arrays)
