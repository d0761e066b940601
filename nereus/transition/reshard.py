"""Which slice of which tensor lies on which slot, and what must move when the layout changes?

Index arithmetic only: no tensors. The one description of sharding in Nereus: weight publication, checkpoints and state
moves all use it. Tensors have global, layout-free names (those of the Hugging Face model).
"""

from __future__ import annotations

from msgspec import Struct


class TensorSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a model, whole.

    ``split`` is the dimension that tensor parallelism cuts (``None``: replicated over tp). ``layer`` places it in the
    pipeline: a decoder layer's index, -1 for what lives before the first layer (embedding), and ``None`` for what lives
    after the last (final norm, output head).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    """``float32``, ``bfloat16``, ``float64``, ..."""
    split: int | None = None
    layer: int | None = None


class Piece(Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """A box of one tensor: ``[start, stop)`` in every dimension."""

    name: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
