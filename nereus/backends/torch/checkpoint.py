"""How does a trainer slot's state get into a checkpoint, and back into a slot of any other layout?

As pieces of whole tensors under global names and offsets: a slot writes the pieces it is responsible for, and reads
whatever stored pieces overlap those it needs. Padding, flat buffers and ranks never reach the disk.

Invariants (tests/backends/test_checkpoint_pieces.py): what is read equals what was written element by element for any
pair of layouts; each stored piece that is read is verified, and every wanted element is found, or ``CheckpointError``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nereus.backends.manifest import (
    MANIFEST,
    MODEL_FOLDER,
    SlotFile,
    StoredPiece,
    piece_places,
    read_manifest,
    require_checksum,
)
from nereus.errors import CheckpointError
from nereus.transition.checksum import piece_checksum
from nereus.transition.reshard import Piece, TensorSpec, elements, intersection, listing

Wanted = tuple[str, TensorSpec, Piece]
"""Kind of state, whole tensor, the part of it that is needed."""


def is_checkpoint(folder: Path) -> bool:
    """Return whether ``folder`` is a checkpoint, not a model folder."""
    return (folder / MANIFEST).is_file()


def model_folder(source: Path) -> Path:
    """Return where the model's configuration and tokenizer lie: in a checkpoint, or in ``source`` itself."""
    return source / MODEL_FOLDER if is_checkpoint(source) else source


def save_slot(
    folder: Path,
    *,
    slot_name: str,
    step: int,
    pieces: Mapping[tuple[str, str], tuple[Piece, Tensor]],
    counters: Mapping[str, int | float],
) -> bytes:
    """Write ``pieces`` (by kind and tensor name) into one file, on disk when this returns; return its manifest entry.

    ``CheckpointError`` names the file if it cannot be written.
    """
    path = folder / f"slot-{slot_name}.safetensors"
    tensors: dict[str, Tensor] = {}
    stored: list[StoredPiece] = []
    for (kind, name), (piece, value) in pieces.items():
        tensor = value.detach().cpu().contiguous()
        entry = StoredPiece(kind, name, piece.start, piece.stop, dtype_name(tensor.dtype), tensor_checksum(tensor))
        if piece.name != name or entry.shape != tuple(tensor.shape):
            raise ValueError(f"{kind} {name} of shape {tuple(tensor.shape)} is not the piece {piece}")
        tensors[entry.key] = tensor
        stored.append(entry)
    try:
        save_file(tensors, path)
        _to_disk(path)
        _to_disk(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error
    return msgspec.json.encode(SlotFile(path.name, path.stat().st_size, step, dict(counters), tuple(stored)))


def read_pieces(folder: Path, wanted: Sequence[Wanted]) -> dict[tuple[str, str], Tensor]:
    """Return the wanted pieces of a committed checkpoint, by kind and tensor name.

    Only stored pieces that overlap a wanted one are read, each once, and verified. ``CheckpointError`` names a damaged
    file, or lists what is not stored.
    """
    needs: dict[tuple[str, str], tuple[TensorSpec, Piece]] = {
        (kind, spec.name): (spec, piece) for kind, spec, piece in wanted
    }
    found: dict[tuple[str, str], Tensor] = {}
    lacking = {key: elements(piece) for key, (_, piece) in needs.items()}
    for slot in read_manifest(folder).slots:
        overlapping = [
            (stored, common)
            for stored in slot.pieces
            if (stored.kind, stored.name) in needs
            and (common := _overlap(stored, needs[stored.kind, stored.name])) is not None
        ]
        if not overlapping:
            continue
        path = folder / slot.file
        places = piece_places(folder, slot)
        with path.open("rb") as file:
            for stored, common in overlapping:
                key = stored.kind, stored.name
                _, piece = needs[key]
                start, stop = places[stored.key]
                file.seek(start)
                whole = np.empty(stop - start, np.uint8)
                file.readinto(whole.data)
                require_checksum(piece_checksum(whole), stored, path)
                value = torch.from_numpy(whole).view(getattr(torch, stored.dtype)).view(stored.shape)
                if key not in found:
                    shape = [high - low for low, high in zip(piece.start, piece.stop, strict=True)]
                    found[key] = torch.empty(shape, dtype=value.dtype)
                found[key][_within(common, piece)] = value[_within(common, stored.piece)]
                lacking[key] -= elements(common)
    missing = [f"{kind} of {name}: {count} elements" for (kind, name), count in lacking.items() if count]
    if missing:
        raise CheckpointError(f"{folder} does not hold all that this model needs: {listing(missing)}")
    return found


def read_counters(folder: Path) -> dict[str, int | float]:
    """Return the counters, which all slots must have written alike."""
    slots = read_manifest(folder).slots
    if not slots:
        raise CheckpointError(f"{folder} holds no state at all")
    for slot in slots:
        if slot.counters != slots[0].counters:
            raise CheckpointError(
                f"{folder}: {slots[0].file} has the counters {slots[0].counters}, but {slot.file} {slot.counters}"
            )
    return dict(slots[0].counters)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the module: ``float32``."""
    return str(dtype).removeprefix("torch.")


def tensor_checksum(tensor: Tensor) -> str:
    """Return the checksum of a contiguous CPU tensor's bytes."""
    return piece_checksum(tensor.reshape(-1).view(torch.uint8).numpy())


def _overlap(stored: StoredPiece, need: tuple[TensorSpec, Piece]) -> Piece | None:
    spec, piece = need
    if len(stored.start) != len(piece.start) or any(
        end > size for end, size in zip(stored.stop, spec.shape, strict=True)
    ):
        raise CheckpointError(
            f"{stored.name} is stored as {stored.shape} at {stored.start}; the model has {spec.shape}"
        )
    return intersection(stored.piece, piece)


def _within(part: Piece, of: Piece) -> tuple[slice, ...]:
    """Return where ``part`` lies in an array that holds just ``of``."""
    return tuple(
        slice(low - base, high - base) for low, high, base in zip(part.start, part.stop, of.start, strict=True)
    )


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
