"""Which slice of which tensor lies on which slot, and what must move when the layout changes?

Index arithmetic only: no tensors. The one description of sharding in Nereus: weight publication, checkpoints and state
moves all use it. Tensors have global, layout-free names (those of the Hugging Face model).

Invariants (tests/transition/test_reshard.py): the pieces of one unit cover every tensor, those that ``publication``
names over all slots cover the model exactly once, and ``moves`` brings each missing element to each slot exactly once
and none that is already there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from nereus.core.plan import Emu, Layout, SlotId

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

ALIGNMENT_BYTES = 64
"""Tensors in a shared file start at multiples of this: a cache line."""

_LISTED = 20
"""So many problems of a kind are written out; the rest is counted."""


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


class Move(Struct, frozen=True, order=True):
    """Copy ``piece`` from one slot to another."""

    piece: Piece
    from_slot: SlotId
    to_slot: SlotId

    @property
    def name(self) -> str:
        return self.piece.name


Held = Callable[[TensorSpec, int, Layout, int], Piece | None]
"""Which piece of a tensor lies on a slot: ``held(spec, layers, layout, index)``, like ``piece_of``."""


# Boxes


def dtype_bytes(dtype: str) -> int:
    """Return the size of one element; ``ValueError`` names an unknown dtype and the known ones."""
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is unknown; known are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def elements(piece: Piece) -> int:
    """Return how many elements lie in ``piece``."""
    return math.prod(stop - start for start, stop in zip(piece.start, piece.stop, strict=True))


def tensor_bytes(spec: TensorSpec) -> int:
    """Return the size of the whole tensor."""
    return math.prod(spec.shape) * dtype_bytes(spec.dtype)


def piece_bytes(spec: TensorSpec, piece: Piece) -> int:
    """Return the size of ``piece`` in the dtype of its tensor."""
    return elements(piece) * dtype_bytes(spec.dtype)


def whole(spec: TensorSpec) -> Piece:
    """Return the piece that is the whole tensor."""
    return Piece(spec.name, (0,) * len(spec.shape), spec.shape)


def intersection(one: Piece, other: Piece) -> Piece | None:
    """Return the box that two pieces of one tensor share, or None if they share no element."""
    start = tuple(map(max, one.start, other.start))
    stop = tuple(map(min, one.stop, other.stop))
    if any(low >= high for low, high in zip(start, stop, strict=True)):
        return None
    return Piece(one.name, start, stop)


def difference(piece: Piece, hole: Piece) -> Iterator[Piece]:
    """Yield disjoint boxes that make up ``piece`` without the elements of ``hole``."""
    common = intersection(piece, hole)
    if common is None:
        yield piece
        return
    start, stop = list(piece.start), list(piece.stop)
    for dim in range(len(start)):
        if start[dim] < common.start[dim]:
            yield Piece(piece.name, tuple(start), (*stop[:dim], common.start[dim], *stop[dim + 1 :]))
        if common.stop[dim] < stop[dim]:
            yield Piece(piece.name, (*start[:dim], common.stop[dim], *start[dim + 1 :]), tuple(stop))
        start[dim], stop[dim] = common.start[dim], common.stop[dim]


def remainder(piece: Piece, holes: Iterable[Piece]) -> list[Piece]:
    """Return disjoint boxes that make up ``piece`` without the elements of any of ``holes``."""
    rest = [piece]
    for hole in holes:
        rest = [part for left in rest for part in difference(left, hole)]
    return rest


# Placement inside one unit


def layer_range(layers: int, pp: int, pp_rank: int) -> range:
    """Return the decoder layers of one pipeline rank: balanced, earlier ranks take the remainder.

    ``ValueError`` if a rank would have no layer.
    """
    if not 0 <= pp_rank < pp:
        raise ValueError(f"pipeline rank {pp_rank} is not one of {pp}")
    if layers < pp:
        raise ValueError(f"{layers} layers cannot be pipelined over {pp} ranks: each needs at least one layer")
    share, extra = divmod(layers, pp)
    start = pp_rank * share + min(pp_rank, extra)
    return range(start, start + share + (pp_rank < extra))


def pp_rank_of(spec: TensorSpec, layers: int, pp: int) -> int:
    """Return the pipeline rank that holds ``spec``; ``ValueError`` if its layer is not one of the model's."""
    if spec.layer is None:
        return pp - 1
    if spec.layer == -1:
        return 0
    if not 0 <= spec.layer < layers:
        raise ValueError(f"{spec.name} is said to be of layer {spec.layer}, but the model has {layers} layers")
    return next(rank for rank in range(pp) if spec.layer in layer_range(layers, pp, rank))


def piece_of(spec: TensorSpec, layers: int, layout: Layout, index: int) -> Piece | None:
    """Return what slot number ``index`` of a unit holds of ``spec``, or None if it holds nothing.

    Tensor parallelism cuts like ``torch.chunk``: every rank has ``ceil(n / tp)`` rows, later ranks fewer or none. No
    padding exists here: it is a matter of the device, never of names and indices.
    """
    pp_rank, tp_rank = layout.coordinates(index)
    if not 0 <= index < layout.slots:
        raise ValueError(f"a unit of layout {layout} has no slot number {index}")
    if pp_rank != pp_rank_of(spec, layers, layout.pp):
        return None
    piece = whole(spec)
    if spec.split is None or layout.tp == 1:
        return piece
    if not 0 <= spec.split < len(spec.shape):
        raise ValueError(f"{spec.name} of shape {spec.shape} cannot be split in dimension {spec.split}")
    size = spec.shape[spec.split]
    chunk = -(-size // layout.tp)
    low, high = min(size, tp_rank * chunk), min(size, (tp_rank + 1) * chunk)
    if low == high:
        return None
    return Piece(spec.name, _replace(piece.start, spec.split, low), _replace(piece.stop, spec.split, high))


def held_to_train(tied: Collection[str] = ()) -> Held:
    """Return what a slot of a trainer unit holds of a tensor, which differs from ``piece_of`` in two ways.

    A tensor that tp does not divide evenly is whole on every tp rank, whatever its ``split``: so ``specs`` may be those
    of tp=1 for every layout. A tensor named in ``tied`` lies on the last pipeline rank too, which computes with it.
    """

    def held(spec: TensorSpec, layers: int, layout: Layout, index: int) -> Piece | None:
        if spec.split is not None and spec.shape[spec.split] % layout.tp:
            spec = replace(spec, split=None)
        pp_rank, tp_rank = layout.coordinates(index)
        if spec.name in tied and pp_rank == layout.pp - 1:
            return piece_of(spec, layers, Layout(layout.tp), tp_rank)
        return piece_of(spec, layers, layout, index)

    return held


def pieces_of(specs: Iterable[TensorSpec], layers: int, layout: Layout, index: int) -> tuple[Piece, ...]:
    """Return all that slot number ``index`` of a unit holds, in the order of ``specs``."""
    held = (piece_of(spec, layers, layout, index) for spec in specs)
    return tuple(piece for piece in held if piece is not None)


def _replace(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


# Who writes what


def publication(
    specs: Sequence[TensorSpec], layers: int, layout: Layout, index: int, replica: int, replicas: int
) -> tuple[Piece, ...]:
    """Return the pieces that one slot pushes, so that all slots of all replicas push each element exactly once.

    A tensor is pushed by one replica: the one with the fewest bytes so far on the pipeline rank that holds it, largest
    tensors first (ties: name, replica). Within the replica tp rank 0 pushes what is replicated. In order of names.
    """
    if not 0 <= replica < replicas:
        raise ValueError(f"replica {replica} is not one of {replicas}")
    _, tp_rank = layout.coordinates(index)
    pushed = []
    for spec in _shares(specs, layers, layout.pp, replicas)[replica]:
        if spec.split is None and tp_rank > 0:
            continue
        piece = piece_of(spec, layers, layout, index)
        if piece is not None:
            pushed.append(piece)
    return tuple(sorted(pushed))


def _shares(specs: Sequence[TensorSpec], layers: int, pp: int, replicas: int) -> list[list[TensorSpec]]:
    loads = [[0] * replicas for _ in range(pp)]
    shares: list[list[TensorSpec]] = [[] for _ in range(replicas)]
    for spec in sorted(specs, key=lambda spec: (-tensor_bytes(spec), spec.name)):
        load = loads[pp_rank_of(spec, layers, pp)]
        replica = load.index(min(load))
        load[replica] += tensor_bytes(spec)
        shares[replica].append(spec)
    return shares


def covers(specs: Sequence[TensorSpec], pieces: Sequence[Piece]) -> tuple[str, ...]:
    """Return what keeps ``pieces`` from being an exact cover of ``specs``: one sentence a fault, none if it is one."""
    return conflicts(specs, pieces) or missing(specs, pieces)


def conflicts(specs: Iterable[TensorSpec], pieces: Iterable[Piece]) -> tuple[str, ...]:
    """Return which pieces cannot be right: of an unknown tensor, out of bounds, or overlapping another."""
    by_name = {spec.name: spec for spec in specs}
    problems: list[str] = []
    held: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        problem = _misfit(by_name.get(piece.name), piece)
        if problem:
            problems.append(problem)
            continue
        twice = (other for other in held[piece.name] if intersection(piece, other))
        problems += [f"{piece.name}: {box(piece)} overlaps {box(other)}" for other in twice]
        held[piece.name].append(piece)
    return tuple(problems)


def missing(specs: Iterable[TensorSpec], pieces: Iterable[Piece]) -> tuple[str, ...]:
    """Return which tensors ``pieces`` do not cover whole, and how many of their elements lack."""
    held: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        held[piece.name].append(piece)
    problems: list[str] = []
    for spec in specs:
        lacking = sum(map(elements, remainder(whole(spec), held[spec.name])))
        if lacking:
            problems.append(f"{spec.name}: {lacking} of {math.prod(spec.shape)} elements are missing")
    return tuple(problems)


def listing(problems: Sequence[str]) -> str:
    """Return ``problems`` as one text of bounded length."""
    more = len(problems) - _LISTED
    return "; ".join(problems[:_LISTED]) + (f"; and {more} more" if more > 0 else "")


def _misfit(spec: TensorSpec | None, piece: Piece) -> str | None:
    if spec is None:
        return f"{piece.name}: the model has no tensor of this name"
    if len(piece.start) != len(spec.shape) or len(piece.stop) != len(spec.shape):
        return f"{piece.name}: piece {box(piece)} has other dimensions than shape {spec.shape}"
    inside = (0 <= low < high <= size for low, high, size in zip(piece.start, piece.stop, spec.shape, strict=True))
    return None if all(inside) else f"{piece.name}: piece {box(piece)} is empty or out of bounds of shape {spec.shape}"


def box(piece: Piece) -> str:
    """Return the bounds of ``piece`` as text, such as ``[0:4, 2:8]``."""
    return "[" + ", ".join(f"{low}:{high}" for low, high in zip(piece.start, piece.stop, strict=False)) + "]"


def offsets_of(specs: Iterable[TensorSpec]) -> tuple[dict[str, int], int]:
    """Return where each whole tensor starts in a file, in the order of ``specs``, and the file size in bytes."""
    offsets: dict[str, int] = {}
    end = 0
    for spec in specs:
        offsets[spec.name] = end
        end += -(-tensor_bytes(spec) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end


# From layout to layout

_ONE_NODE: Mapping[SlotId, str] = {}


def moves(
    specs: Iterable[TensorSpec],
    layers: int,
    source: Sequence[Emu],
    target: Sequence[Emu],
    *,
    held: Held = piece_of,
    node_of: Mapping[SlotId, str] = _ONE_NODE,
) -> tuple[Move, ...]:
    """Return the copies that give every slot of ``target`` its pieces, from slots of ``source``.

    What a slot holds already is not moved; every other element comes exactly once. It comes from the receiver's own
    node where a slot there has it, for links between nodes are the slowest (slots that ``node_of`` does not name are
    together on one). The sender is then the one with the largest part of what is wanted, then the one that sends the
    fewest bytes so far, then the lowest slot. ``ValueError`` if no slot of ``source`` holds a wanted element.
    """
    sent: dict[SlotId, int] = defaultdict(int)
    result: list[Move] = []
    for spec in specs:
        holders: dict[Piece, list[SlotId]] = defaultdict(list)
        near: dict[str | None, dict[Piece, list[SlotId]]] = defaultdict(lambda: defaultdict(list))
        resident: dict[SlotId, list[Piece]] = defaultdict(list)
        for slot, piece in _holders(spec, layers, source, held):
            holders[piece].append(slot)
            near[node_of.get(slot)][piece].append(slot)
            resident[slot].append(piece)
        for slot, piece in _holders(spec, layers, target, held):
            for part in remainder(piece, resident[slot]):
                result += _fetch(spec, part, slot, (near[node_of.get(slot)], holders), sent)
            resident[slot].append(piece)
    return tuple(result)


def moved_bytes(specs: Iterable[TensorSpec], copies: Iterable[Move]) -> int:
    """Return how many bytes ``copies`` carry between slots."""
    by_name = {spec.name: spec for spec in specs}
    return sum(piece_bytes(by_name[copy.name], copy.piece) for copy in copies)


def _holders(spec: TensorSpec, layers: int, emus: Sequence[Emu], held: Held) -> Iterator[tuple[SlotId, Piece]]:
    of_layout: dict[Layout, list[tuple[int, Piece]]] = {}  # replicas hold the same: each layout is looked at once
    for emu in emus:
        if emu.layout not in of_layout:
            found = ((index, held(spec, layers, emu.layout, index)) for index in range(emu.layout.slots))
            of_layout[emu.layout] = [(index, piece) for index, piece in found if piece is not None]
        for index, piece in of_layout[emu.layout]:
            yield emu.slots[index], piece


def _fetch(
    spec: TensorSpec,
    lacking: Piece,
    slot: SlotId,
    sources: Sequence[Mapping[Piece, Sequence[SlotId]]],
    sent: dict[SlotId, int],
) -> Iterator[Move]:
    """Yield the copies of what is ``lacking``, from the first of ``sources`` that has any of it."""
    wanted = [lacking]
    while wanted:
        part = wanted.pop()
        for senders in sources:
            parts = [(common, piece) for piece in senders if (common := intersection(part, piece))]
            if parts:
                break
        else:
            raise ValueError(f"no slot of the source holds {part.name} {box(part)}, which slot {slot} needs")
        largest = max(elements(common) for common, _ in parts)
        sender, common = min(
            (min(senders[piece], key=lambda holder: (sent[holder], holder)), common)
            for common, piece in parts
            if elements(common) == largest
        )
        sent[sender] += piece_bytes(spec, common)
        yield Move(common, sender, slot)
        wanted += difference(part, common)
