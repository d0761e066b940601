"""How is it told whether weights arrived whole?

By xxh3-64, everywhere the same way: of a piece, over its contiguous bytes; of a set of tensors, over the digests of the
tensors (8 bytes each, big-endian) in sorted order of their names. It detects damage, not malice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from nereus.transition.reshard import Piece, TensorSpec, dtype_bytes, tensor_bytes


def piece_checksum(array: NDArray[Any]) -> str:
    """Return the checksum of the array's elements in row-major order, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(_bytes(array))


def tensors_checksum(buffer: Any, specs: Iterable[TensorSpec], offsets: Mapping[str, int]) -> str:
    """Return the checksum of whole tensors that lie row-major at ``offsets`` (bytes) of the bytes-like ``buffer``."""
    view = memoryview(buffer).cast("B")
    digests = {
        spec.name: xxhash.xxh3_64_digest(view[offsets[spec.name] : offsets[spec.name] + tensor_bytes(spec)])
        for spec in specs
    }
    return combined_checksum(digests)


def combined_checksum(digests: Mapping[str, bytes]) -> str:
    """Return the checksum of a set of tensors, given the 8-byte digest of each by name."""
    return xxhash.xxh3_64_hexdigest(b"".join(digests[name] for name in sorted(digests)))


def tensor_view(buffer: Any, spec: TensorSpec, offset: int) -> NDArray[Any]:
    """Return the whole tensor at ``offset`` of ``buffer`` without a copy.

    The elements are unsigned integers of the dtype's width, because numpy knows no bfloat16.
    """
    view = memoryview(buffer).cast("B")[offset : offset + tensor_bytes(spec)]
    return np.frombuffer(view, dtype=f"u{dtype_bytes(spec.dtype)}").reshape(spec.shape)


def piece_view(tensor: NDArray[Any], piece: Piece) -> NDArray[Any]:
    """Return the box ``piece`` of a whole tensor without a copy."""
    box: NDArray[Any] = tensor[tuple(slice(low, high) for low, high in zip(piece.start, piece.stop, strict=True))]
    return box


def _bytes(array: NDArray[Any]) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
