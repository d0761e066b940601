"""How do weights that a relay lends in shared memory become weights to decode with?

Owner: the rollout backend. Names, shapes, dtypes, places and the checksum are verified before anything is used; then
everything is copied, so the loan can end.

Invariant (tests/backends/test_rollout_backend.py): a set that differs in a name, a shape or a single bit is refused
with ``TransitionError``.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from nereus.backends.torch.decode_model import DecoderWeights, Shape
from nereus.bus.messages import PullFrom
from nereus.errors import TransitionError
from nereus.transition.checksum import tensors_checksum
from nereus.transition.reshard import tensor_bytes

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_NAMED = 5
"""How many names a message lists."""


def load_weights(source: PullFrom, shape: Shape, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
    """Copy the lent weights to ``device`` in ``dtype``; ``TransitionError`` if they are not whole or do not fit."""
    _check_specs(source, shape)
    try:
        with Path(source.path).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            return _load(source, memoryview(memory), shape, device, dtype)
    except (OSError, ValueError) as error:
        raise TransitionError(f"version {source.version} cannot be read from {source.path}: {error}") from error


def _load(
    source: PullFrom, memory: memoryview, shape: Shape, device: torch.device, dtype: torch.dtype
) -> DecoderWeights:
    with memory:
        for spec in source.tensors:
            if not 0 <= source.offsets[spec.name] <= len(memory) - tensor_bytes(spec):
                raise TransitionError(f"version {source.version}: {spec.name} lies outside {source.path}")
        checksum = tensors_checksum(memory, source.tensors, source.offsets)
        if checksum != source.checksum:
            raise TransitionError(
                f"version {source.version}: {source.path} has checksum {checksum}, expected {source.checksum}"
            )
        lent: dict[str, Tensor] = {}
        for spec in source.tensors:
            start = source.offsets[spec.name]
            flat = torch.frombuffer(memory, dtype=_DTYPES[spec.dtype], count=math.prod(spec.shape), offset=start)
            lent[spec.name] = flat.view(spec.shape)
        # Copies everything: torch does not keep the mapping open, so its views must not outlive this function.
        return DecoderWeights(shape, lent, device, dtype)


def _check_specs(source: PullFrom, shape: Shape) -> None:
    expected = shape.tensors
    given = {spec.name: spec for spec in source.tensors}
    faults = []
    if missing := expected.keys() - given.keys():
        faults.append(f"missing {_list(missing)}")
    if extra := given.keys() - expected.keys():
        faults.append(f"unexpected {_list(extra)}")
    if len(given) != len(source.tensors):
        faults.append("a name is given twice")
    if source.tied != shape.tied_names:
        faults.append(f"tied names are {source.tied}, expected {shape.tied_names}")
    if homeless := given.keys() - source.offsets.keys():
        faults.append(f"no offset for {_list(homeless)}")
    for name in expected.keys() & given.keys():
        spec = given[name]
        if spec.shape != expected[name]:
            faults.append(f"{name} has shape {spec.shape}, expected {expected[name]}")
        if spec.dtype not in _DTYPES:
            faults.append(f"{name} has dtype {spec.dtype}, known are {', '.join(_DTYPES)}")
    if faults:
        raise TransitionError(f"the weights of version {source.version} do not fit: {'; '.join(faults[:_NAMED])}")


def _list(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
