"""Where does a trainer slot put state that moves, on torch?

Owner: the trainer. What is held and how it moves is ``backends/holdings.py``; here is the memory: the flat buffers in
which ``FlatAdamW`` trains, so that what is received lies where it will be trained, and the model's architecture, from
which a slot that has held nothing yet learns what it will hold. A CPU's buffers are shared memory (``buffers.py``).

Invariants (tests/backends/test_state_moves.py): the pieces of a room are those that ``reshard.held_to_train`` names;
padding between tensors is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereus.backends.torch.buffers import SharedBuffers
from nereus.backends.torch.model import (
    DTYPES,
    Entry,
    build_meta,
    check_layout,
    lay_out,
    read_architecture,
    tensor_specs,
    tied_names,
)
from nereus.bus.messages import Place
from nereus.config import ModelConfig
from nereus.core.plan import Layout
from nereus.transition.reshard import Piece, TensorSpec


class Blueprint:
    """A model without memory: what its slots hold under any layout."""

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        self.config = read_architecture(folder)
        self._attention = model.attention
        self._dtype_name = model.dtype
        self._model: Any = None
        self._specs: dict[Layout, tuple[TensorSpec, ...]] = {}
        self.layers: int = self.config.num_hidden_layers
        self.vocabulary: int = self.config.vocab_size
        whole = self._kept()
        self.tied = tied_names(whole)
        self.tensors = tensor_specs(whole, Layout(), model.dtype)
        """Every stored tensor, cut as far as any layout cuts it (see ``reshard.held_to_train``)."""

    def specs(self, layout: Layout) -> tuple[TensorSpec, ...]:
        """Return every stored tensor as units of ``layout`` cut it; ``ConfigError`` if the layout does not fit."""
        if layout not in self._specs:
            check_layout(self.config, layout)
            self._specs[layout] = tensor_specs(self._kept(), layout, self._dtype_name)
        return self._specs[layout]

    def lay_out(self, layout: Layout, index: int) -> tuple[tuple[Entry, ...], int]:
        """Return what slot number ``index`` of a unit holds, and the elements of its flat buffer."""
        return lay_out(self._kept(), self.specs(layout), layout, index)

    def build(self) -> Any:
        """Return a model on the meta device, for the caller to put parameters into."""
        model, self._model = self._kept(), None
        return model

    def _kept(self) -> Any:
        """Return the model that is looked at only: making one takes as long as moving a small model."""
        if self._model is None:
            self._model = build_meta(self.config, self._attention, DTYPES[self._dtype_name])
        return self._model


class FlatRoom:
    """One slot's share in flat buffers, one for each kind of state."""

    def __init__(
        self,
        entries: Sequence[Entry],
        elements: int,
        dtype: torch.dtype,
        device: torch.device,
        flats: Mapping[str, Tensor] | None = None,
        *,
        buffers: SharedBuffers | None = None,
    ) -> None:
        self.pieces: Mapping[str, Piece] = {entry.spec.name: entry.piece for entry in entries}
        self.entries = tuple(entries)
        self.elements = elements
        self.flats: dict[str, Tensor] = dict(flats or {})
        self._dtype, self._device = dtype, device
        self._buffers = buffers
        self._views = {kind: self._cut(flat) for kind, flat in self.flats.items()}

    def view(self, kind: str, name: str) -> Tensor:
        """Return the place of this slot's piece of a tensor."""
        if kind not in self.flats:
            self.flats[kind] = self._allocate()
            self._views[kind] = self._cut(self.flats[kind])
        return self._views[kind][name]

    def release(self, kind: str) -> None:
        """Free everything of one kind."""
        self.flats.pop(kind, None)
        self._views.pop(kind, None)

    def _cut(self, flat: Tensor) -> dict[str, Tensor]:
        return {entry.spec.name: entry.view(flat) for entry in self.entries}

    def _allocate(self) -> Tensor:
        """Return a flat buffer without touching it, but for the padding."""
        if self._buffers is not None:
            flat = self._buffers.empty(self.elements, self._dtype)
        else:
            flat = torch.empty(self.elements, dtype=self._dtype, device=self._device)
        starts = [entry.offset for entry in self.entries[1:]] + [self.elements]
        for entry, following in zip(self.entries, starts, strict=True):
            if (end := entry.offset + entry.elements) < following:
                flat[end:following].zero_()
        return flat


class TorchMemory:
    """How tensors of a device meet the memory of the host."""

    def __init__(self, dtype: torch.dtype, device: torch.device, buffers: SharedBuffers | None = None) -> None:
        """``buffers``: where the arrays lie, if other processes can look into them."""
        self.itemsize = dtype.itemsize
        self._dtype, self._device = dtype, device
        self._buffers = buffers

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor that is not initialised."""
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def export(self, array: Tensor) -> NDArray[Any]:
        """Return the elements on the host; a view if they are there."""
        exported: NDArray[Any] = array.detach().cpu().numpy()
        return exported

    def locate(self, array: Tensor) -> Place | None:
        """Return where other processes of this host find the elements; None if they cannot look there."""
        return self._buffers.locate(array) if self._buffers is not None else None

    def fill(self, array: Tensor, read: Callable[[NDArray[Any]], None]) -> None:
        """Let ``read`` write all elements of ``array``."""
        if array.device.type == "cpu":
            read(array.detach().numpy())
            return
        landing = np.empty(tuple(array.shape), np.float64 if self.itemsize == 8 else np.float32)
        read(landing)
        array.copy_(torch.from_numpy(landing))
