"""What is in a checkpoint folder, and is it whole?

A checkpoint is layout-free: pieces of tensors under global names, in one safetensors file per trainer slot, plus the
model's configuration and tokenizer files in ``model/``, plus ``manifest.json``, which is written last and says what the
rest must look like. Torch-free: the supervisor commits and verifies, backends read.

Invariants (tests/runtime/test_checkpoints.py): a manifest proves itself by its own checksum; a name never leads out of
the folder, also not through a symbolic link; whatever byte of a stored tensor changes, ``verify`` names the file.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import xxhash
from msgspec import Meta, Struct

from nereus.errors import CheckpointError
from nereus.transition.reshard import DTYPE_BYTES, Piece, TensorSpec, covers, elements, listing

MANIFEST = "manifest.json"
MODEL_FOLDER = "model"
FORMAT = 1

_MAX_HEADER_BYTES = 100 << 20
_CHUNK_BYTES = 16 << 20
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}

Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Checksum = Annotated[str, Meta(min_length=16, max_length=16)]


class StoredPiece(Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a parameter or of an optimizer moment."""

    kind: str
    """``parameter`` (the master), ``exp_avg``, ``exp_avg_sq``."""
    name: str
    start: tuple[Count, ...]
    stop: tuple[Count, ...]
    dtype: str
    checksum: Checksum
    """xxh3-64 of the piece's bytes."""

    @property
    def key(self) -> str:
        """The piece's name inside its safetensors file."""
        return f"{self.kind}|{self.name}|{','.join(map(str, self.start))}"

    @property
    def piece(self) -> Piece:
        return Piece(self.name, self.start, self.stop)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))


class SlotFile(Struct, frozen=True, forbid_unknown_fields=True):
    """What one trainer slot wrote."""

    file: str
    size_bytes: Count
    step: Count
    counters: dict[str, int | float]
    pieces: tuple[StoredPiece, ...]


class ModelFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A configuration or tokenizer file in ``model/``."""

    file: str
    size_bytes: Count
    checksum: Checksum


class CheckpointManifest(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything a checkpoint consists of."""

    format: int
    step: Count
    slots: tuple[SlotFile, ...]
    model: tuple[ModelFile, ...]
    extra: msgspec.Raw
    """JSON: what the supervisor wants to know again."""


class _Sealed(Struct, frozen=True, forbid_unknown_fields=True):
    checksum: Checksum
    manifest: msgspec.Raw


def seal(manifest: CheckpointManifest) -> bytes:
    """Return the content of ``manifest.json``."""
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Sealed(xxhash.xxh3_64_hexdigest(body), msgspec.Raw(body)))


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest of ``folder``; ``CheckpointError`` if it is missing, damaged or of another format."""
    path = folder / MANIFEST
    try:
        _require_regular(path)
        sealed = msgspec.json.decode(path.read_bytes(), type=_Sealed)
        body = bytes(sealed.manifest)
        if xxhash.xxh3_64_hexdigest(body) != sealed.checksum:
            raise CheckpointError(f"{path} is damaged: its checksum does not fit")
        number = msgspec.json.decode(body, type=_Format).format
        if number != FORMAT:
            raise CheckpointError(f"{path} is of checkpoint format {number}; this Nereus reads format {FORMAT}")
        manifest = msgspec.json.decode(body, type=CheckpointManifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    names = [slot.file for slot in manifest.slots] + [file.file for file in manifest.model]
    for name in names:
        if not _SAFE_NAME.fullmatch(name):
            raise CheckpointError(f"{path} names the file {name!r}, which is not a plain file name")
    if len(set(names)) != len(names):
        raise CheckpointError(f"{path} names a file twice")
    return manifest


class _Format(Struct, frozen=True):
    format: int


def verify(folder: Path, manifest: CheckpointManifest, *, content: bool = True) -> None:
    """Check every file of ``folder`` against ``manifest``: kind, size, header and, if ``content``, all checksums.

    ``CheckpointError`` names the first file that does not fit, or the tensors that are not whole.
    """
    stored_tensors(manifest)
    for slot in manifest.slots:
        if slot.step != manifest.step:
            raise CheckpointError(f"{folder / slot.file} is of step {slot.step}, not of step {manifest.step}")
        places = piece_places(folder, slot)
        if content:
            with (folder / slot.file).open("rb") as file:
                for piece in slot.pieces:
                    start, stop = places[piece.key]
                    require_checksum(_hash(file, start, stop), piece, folder / slot.file)
    for model in manifest.model:
        path = folder / MODEL_FOLDER / model.file
        _require_regular(path.parent, directory=True)
        _require_size(path, model.size_bytes)
        if content and file_checksum(path) != model.checksum:
            raise CheckpointError(f"{path} is damaged: its checksum does not fit")


def stored_tensors(manifest: CheckpointManifest) -> dict[str, tuple[TensorSpec, ...]]:
    """Return the whole tensors of each kind, in order of names; ``CheckpointError`` lists those that are not whole."""
    pieces: dict[str, list[StoredPiece]] = {}
    for slot in manifest.slots:
        for piece in slot.pieces:
            if len(piece.start) != len(piece.stop):
                raise CheckpointError(f"{slot.file}: {piece.key} is not a box")
            pieces.setdefault(piece.kind, []).append(piece)
    stored = {kind: tuple(_specs(held)) for kind, held in sorted(pieces.items())}
    for kind, held in pieces.items():
        faults = covers(stored[kind], [piece.piece for piece in held])
        if faults:
            raise CheckpointError(f"the checkpoint of step {manifest.step} holds no whole {kind}: {listing(faults)}")
    every = {piece.name for held in pieces.values() for piece in held}
    odd = sorted({name for held in pieces.values() for name in every - {piece.name for piece in held}})
    if odd:
        raise CheckpointError(f"the checkpoint of step {manifest.step} lacks a kind of {listing(odd)}")
    return stored


def _specs(pieces: Iterable[StoredPiece]) -> Iterator[TensorSpec]:
    held: dict[str, list[StoredPiece]] = {}
    for piece in pieces:
        held.setdefault(piece.name, []).append(piece)
    for name, parts in sorted(held.items()):
        if len({(len(part.stop), part.dtype) for part in parts}) > 1:
            raise CheckpointError(f"the pieces of {name} differ in dtype or dimensions")
        shape = tuple(max(ends) for ends in zip(*(part.stop for part in parts), strict=True))
        yield TensorSpec(name, shape, parts[0].dtype)


def require_checksum(found: str, piece: StoredPiece, path: Path) -> None:
    """``CheckpointError`` if ``piece`` was not read as it was written."""
    if found != piece.checksum:
        raise CheckpointError(f"{path} is damaged: the checksum of {piece.key} is {found}, not {piece.checksum}")


def piece_places(folder: Path, slot: SlotFile) -> dict[str, tuple[int, int]]:
    """Return where each piece of a slot's file lies, in bytes ``[start, stop)``.

    ``CheckpointError`` if the file is missing, of another size, or its header does not list exactly these pieces.
    """
    path = folder / slot.file
    _require_size(path, slot.size_bytes)
    header, begin = _header(path, slot.size_bytes)
    wanted = {piece.key: piece for piece in slot.pieces}
    if set(header) != set(wanted):
        odd = sorted(set(header) ^ set(wanted))
        raise CheckpointError(f"{path} does not hold what the manifest says: {', '.join(odd[:5])}")
    places: dict[str, tuple[int, int]] = {}
    for key, entry in header.items():
        piece = wanted[key]
        if piece.dtype not in DTYPE_BYTES:
            raise CheckpointError(f"{folder / MANIFEST} gives {key} the unknown dtype {piece.dtype}")
        start, stop = (begin + offset for offset in entry.data_offsets)
        right = (_SAFETENSORS_DTYPES.get(entry.dtype), entry.shape) == (piece.dtype, piece.shape)
        size = elements(piece.piece) * DTYPE_BYTES[piece.dtype]
        if not right or stop - start != size or stop > slot.size_bytes:
            raise CheckpointError(f"{path} does not hold {key} as the manifest says ({piece.dtype} {piece.shape})")
        places[key] = (start, stop)
    return places


class _HeaderEntry(Struct, frozen=True):
    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


def _header(path: Path, size_bytes: int) -> tuple[dict[str, _HeaderEntry], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_MAX_HEADER_BYTES, size_bytes - 8):
            raise CheckpointError(f"{path} is damaged: its header claims {length} bytes")
        try:
            raw = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            entries = {key: msgspec.json.decode(entry, type=_HeaderEntry) for key, entry in raw.items()}
        except (msgspec.DecodeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: its header is not readable ({error})") from error
    return entries, 8 + length


def file_checksum(path: Path) -> str:
    """Return the xxh3-64 of a whole file, as 16 hexadecimal digits."""
    with path.open("rb") as file:
        return _hash(file, 0, path.stat().st_size)


def _hash(file: BinaryIO, start: int, stop: int) -> str:
    digest = xxhash.xxh3_64()
    for chunk in _chunks(file, start, stop):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(file: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    file.seek(start)
    while start < stop and (chunk := file.read(min(_CHUNK_BYTES, stop - start))):
        start += len(chunk)
        yield chunk


def _require_size(path: Path, size_bytes: int) -> None:
    _require_regular(path)
    found = path.stat().st_size
    if found != size_bytes:
        raise CheckpointError(f"{path} is damaged: it has {found} bytes, not {size_bytes}")


def _require_regular(path: Path, *, directory: bool = False) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    if not (stat.S_ISDIR(mode) if directory else stat.S_ISREG(mode)):
        raise CheckpointError(f"{path} is not a regular {'folder' if directory else 'file'}")
