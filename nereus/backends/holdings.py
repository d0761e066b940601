"""What does a trainer slot hold of each replica while the plan changes, and how does it get the rest?

Owner: a trainer backend. Besides the committed replica, which it trains, a slot may hold shares of replicas that
primitives have made. All are one logical state, so a share is put together from what is here, as views, and from what
other slots lend: their own memory, where others can look into it, or a copy in a file. Nothing that is here is copied
before ``settle``.

Memory: the committed share, plus what each other share has *received* (its room is allocated whole, but memory that is
not written to takes no space on a CPU). ``settle`` copies what was resident, kind by kind, and frees that kind of all
other shares before the next: at most one kind of the new share comes on top.

Invariants (tests/backends/test_state_moves.py): after any transition every slot holds exactly its pieces, bit for bit;
what arrives damaged is refused by name and changes nothing; a loan holds each distinct piece once.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from nereus.backends.api import STATE_KINDS
from nereus.bus.messages import Loan, Place, Receipt
from nereus.errors import TransitionError
from nereus.transition.primitive import Replica
from nereus.transition.reshard import Move, Piece, box, difference, elements, intersection, remainder

_BLOCK_BYTES = 512 << 10
"""So much is copied and summed at a time: what was just copied is still in the processor's cache."""

Array = Any
"""An array of the device: it can be sliced, and slices can be assigned to."""


class Memory(Protocol):
    """How arrays of the device meet the memory of the host."""

    itemsize: int

    def empty(self, shape: tuple[int, ...]) -> Array:
        """Return an array that is not initialised."""

    def export(self, array: Array) -> NDArray[Any]:
        """Return the elements on the host; a view where that is possible."""

    def locate(self, array: Array) -> Place | None:
        """Return where other processes of this host find the elements; None if they cannot look there."""

    def fill(self, array: Array, read: Callable[[NDArray[Any]], None]) -> None:
        """Let ``read`` write all elements of ``array``, into an array on the host."""


class Room(Protocol):
    """Memory for one slot's share of a replica."""

    pieces: Mapping[str, Piece]
    """What the slot holds of each tensor, by stored name."""

    def view(self, kind: str, name: str) -> Array:
        """Return the place of this slot's piece of a tensor; every kind is allocated when it is first asked for."""

    def release(self, kind: str) -> None:
        """Free everything of one kind."""


AnyRoom = TypeVar("AnyRoom", bound=Room)


@dataclass
class _Part:
    """A box of a tensor and where its elements are, by kind; ``borrowed``: in the room of another share."""

    piece: Piece
    arrays: dict[str, Array]
    borrowed: bool

    def of(self, piece: Piece, *, borrowed: bool) -> _Part:
        """Return the part of this one that is ``piece``, as views."""
        where = within(piece, self.piece)
        return _Part(piece, {kind: array[where] for kind, array in self.arrays.items()}, borrowed)


@dataclass
class _Share(Generic[AnyRoom]):
    """What this slot holds of one replica; the parts of a tensor are disjoint and make up the room's piece."""

    room: AnyRoom
    parts: dict[str, list[_Part]]

    @classmethod
    def whole(cls, room: AnyRoom) -> _Share[AnyRoom]:
        """Return a share all of which lies in its room."""
        parts = {
            name: [_Part(piece, {kind: room.view(kind, name) for kind in STATE_KINDS}, False)]
            for name, piece in room.pieces.items()
        }
        return cls(room, parts)

    def gather(self, kind: str) -> None:
        """Copy into the room what is elsewhere."""
        for name, parts in self.parts.items():
            for part in parts:
                array = part.arrays.pop(kind)
                if part.borrowed:
                    self.room.view(kind, name)[within(part.piece, self.room.pieces[name])] = array

    def release(self, kind: str) -> None:
        """Free one kind of state."""
        for parts in self.parts.values():
            for part in parts:
                part.arrays.pop(kind, None)
        self.room.release(kind)


class Holdings(Generic[AnyRoom]):
    """The shares of one slot, by replica."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._shares: dict[Replica, _Share[AnyRoom]] = {}
        self._committed: Replica | None = None
        self._counters: dict[str, int] = {}
        self._scratch = np.empty(_BLOCK_BYTES, np.uint8)

    @property
    def committed(self) -> Replica | None:
        """The replica that this slot trains."""
        return self._committed

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """What this slot holds a share of."""
        return tuple(self._shares)

    @property
    def counters(self) -> dict[str, int]:
        """How far the held state has been trained; empty if there is none."""
        return dict(self._counters)

    def count(self, counters: Mapping[str, int]) -> None:
        """Note how far the held state has been trained."""
        self._counters = dict(counters)

    def commit(self, replica: Replica, room: AnyRoom, counters: Mapping[str, int]) -> None:
        """Hold ``replica`` alone, all of it in ``room``."""
        self._shares = {replica: _Share.whole(room)}
        self._committed = replica
        self.count(counters)

    def lend(self, moves: Sequence[Move], path: Path) -> Receipt:
        """Let others read the pieces of ``moves``; see ``TrainerBackend.lend``."""
        pieces = distinct(moves)
        for piece in pieces:  # before anything is written
            self._cover(piece)
        size, places, checksums = 0, [], []
        try:
            with path.open("r+b", buffering=0) as file:
                for piece in pieces:
                    for kind in STATE_KINDS:
                        array = self._read(kind, piece)
                        place = self._memory.locate(array)
                        elements_here = self._memory.export(array)
                        checksums.append(_sum(elements_here, None if place else file.fileno(), self._scratch))
                        places.append(place or Place())
                        size += elements_here.nbytes
        except OSError as error:
            raise TransitionError(f"{len(pieces)} pieces cannot be lent in {path}: {error}") from error
        return Receipt(size, tuple(checksums), self.counters, tuple(places))

    def take(self, replica: Replica, index: int, loans: Sequence[Loan], make_room: Callable[[], AnyRoom]) -> int:
        """Hold slot number ``index`` of ``replica`` as well; see ``TrainerBackend.take``."""
        if replica == self._committed:
            raise ValueError(f"this slot has the committed {replica} already")
        counters = self._agree(loans)
        room = make_room()
        parts: dict[str, list[_Part]] = {name: [] for name in room.pieces}
        read_bytes = 0
        for loan in loans:
            wanted = frozenset(move.piece for move in loan.moves if move.to_slot == replica.slots[index])
            if wanted:
                read_bytes += self._receive(loan, wanted, room, parts)
        for name, whole in room.pieces.items():
            for lacking in remainder(whole, [part.piece for part in parts[name]]):
                parts[name] += [part.of(common, borrowed=True) for common, part in self._cover(lacking)]
        self._shares[replica] = _Share(room, parts)
        self._counters = counters
        return read_bytes

    def clear(self) -> None:
        """Forget everything."""
        for replica in self.replicas:
            self.drop(replica)

    def drop(self, replica: Replica) -> None:
        """Forget one replica."""
        self._shares.pop(replica, None)
        if replica == self._committed:
            self._committed = None
        if not self._shares:
            self._counters = {}

    def abandon(self) -> None:
        """Forget every replica but the committed one."""
        for replica in self.replicas:
            if replica != self._committed:
                self.drop(replica)

    def require(self, replica: Replica) -> None:
        """``ValueError`` if there is no share of ``replica``."""
        if replica not in self._shares:
            held = "; ".join(map(str, self._shares)) or "nothing"
            raise ValueError(f"this slot holds nothing of {replica}; it holds {held}")

    def settle(self, replica: Replica) -> AnyRoom:
        """Commit ``replica``, gather its share in its room, forget all others, and return the room."""
        self.require(replica)
        share = self._shares.pop(replica)
        others = list(self._shares.values())
        self._shares.clear()
        if replica != self._committed:
            for kind in STATE_KINDS:
                share.gather(kind)
                for other in others:
                    other.release(kind)
        self.commit(replica, share.room, self._counters)
        return share.room

    def _agree(self, loans: Sequence[Loan]) -> dict[str, int]:
        """Return the counters of the logical state that all of ``loans`` and what is held here are parts of."""
        known, where = self.counters, "this slot"
        for loan in loans:
            theirs = loan.receipt.counters
            if known and theirs != known:
                raise TransitionError(f"slot {loan.lender} lends the state of {theirs}, but {where} has {known}")
            known, where = dict(theirs), f"slot {loan.lender}"
        return known

    def _receive(self, loan: Loan, wanted: frozenset[Piece], room: AnyRoom, parts: dict[str, list[_Part]]) -> int:
        """Read ``wanted`` into the room and verify it; return the bytes read."""
        pieces = distinct(loan.moves)
        sizes = [elements(piece) * self._memory.itemsize for piece in pieces]
        promised = loan.receipt
        count = len(pieces) * len(STATE_KINDS)
        places = promised.places or (Place(),) * count
        if {len(promised.checksums), len(places)} != {count} or promised.size_bytes != sum(sizes) * len(STATE_KINDS):
            raise TransitionError(
                f"slot {loan.lender} was to lend {len(pieces)} pieces ({sum(sizes) * len(STATE_KINDS)} bytes), and "
                f"has lent {promised.size_bytes} bytes with {len(promised.checksums)} checksums"
            )
        notes = zip(places, promised.checksums, strict=True)
        offset = read_bytes = 0
        with _Lent(loan, self._memory.itemsize) as lent:
            for piece, size in zip(pieces, sizes, strict=True):
                part = _Part(piece, {}, False)
                for kind in STATE_KINDS:
                    place, checksum = next(notes)
                    if piece in wanted:
                        what = f"{kind} of {piece.name} {box(piece)} from slot {loan.lender}"
                        part.arrays[kind] = room.view(kind, piece.name)[within(piece, room.pieces[piece.name])]
                        fetch = lent.near(place, piece, what) if place.path else lent.filed(offset, piece, what)
                        self._memory.fill(part.arrays[kind], _reader(fetch, checksum, what, self._scratch))
                        read_bytes += size
                    if not place.path:
                        offset += size
                if piece in wanted:
                    parts[piece.name].append(part)
        return read_bytes

    def _read(self, kind: str, piece: Piece) -> Array:
        """Return the elements of ``piece``: a view where they lie together."""
        found = self._cover(piece)
        if len(found) == 1:
            ((_, part),) = found
            return part.arrays[kind][within(piece, part.piece)]
        together = self._memory.empty(_shape(piece))
        for common, part in found:
            together[within(common, piece)] = part.arrays[kind][within(common, part.piece)]
        return together

    def _cover(self, piece: Piece) -> list[tuple[Piece, _Part]]:
        """Return disjoint boxes that make up ``piece``, each with a part that holds it; one box if one part has all."""
        parts = [part for share in self._shares.values() for part in share.parts.get(piece.name, ())]
        for part in parts:
            if intersection(piece, part.piece) == piece:
                return [(piece, part)]
        lacking, found = [piece], []
        for part in parts:
            still: list[Piece] = []
            for want in lacking:
                common = intersection(want, part.piece)
                if common is None:
                    still.append(want)
                else:
                    found.append((common, part))
                    still += difference(want, common)
            lacking = still
        if lacking:
            raise ValueError(f"this slot does not hold {piece.name} {box(lacking[0])}")
        return found


def distinct(moves: Iterable[Move]) -> tuple[Piece, ...]:
    """Return what a file for ``moves`` holds: each piece once, in the order in which they are first named."""
    return tuple(dict.fromkeys(move.piece for move in moves))


def within(part: Piece, of: Piece) -> tuple[slice, ...]:
    """Return where ``part`` lies in an array that holds just ``of``."""
    return tuple(
        slice(low - base, high - base) for low, high, base in zip(part.start, part.stop, of.start, strict=True)
    )


def _shape(piece: Piece) -> tuple[int, ...]:
    return tuple(high - low for low, high in zip(piece.start, piece.stop, strict=True))


Fetch = Callable[[slice, NDArray[Any]], None]
"""``fetch(rows, into)``: copy some rows (elements of a vector) of a lent piece into a row-major array."""


class _Lent:
    """What one slot lends, opened to be read."""

    def __init__(self, loan: Loan, itemsize: int) -> None:
        self._loan = loan
        self._dtype = np.dtype(f"u{itemsize}")
        self._open = contextlib.ExitStack()
        self._near: dict[str, tuple[int, int]] = {}
        """Handle and size of each lender's file."""
        self._mapped: dict[str, mmap.mmap] = {}

    def __enter__(self) -> _Lent:
        with self._named():
            self._file = os.open(self._loan.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._open.callback(os.close, self._file)
        return self

    def __exit__(self, *_: object) -> None:
        self._mapped.clear()
        self._open.close()

    def filed(self, offset: int, piece: Piece, what: str) -> Fetch:
        """Return how to read a piece that lies at ``offset`` of the loan's file."""
        return _read_from(self._file, offset, self._dtype.itemsize * elements(piece), _shape(piece), what)

    def near(self, place: Place, piece: Piece, what: str) -> Fetch:
        """Return how to read a piece that lies in the lender's own memory.

        What lies together is read, which is faster than to map it: no page of it has to be found first.
        """
        if place.path not in self._near:
            with self._named():
                self._near[place.path] = opened = _open_sealed(place.path)
                self._open.callback(os.close, opened[0])
        handle, holds = self._near[place.path]
        shape, size = _shape(piece), self._dtype.itemsize * elements(piece)
        if place.strides == _row_major(shape, self._dtype.itemsize):
            if place.offset + size > holds:
                raise TransitionError(f"{what} is said to lie where it cannot: beyond the {holds} bytes of its file")
            return _read_from(handle, place.offset, size, shape, what)
        if place.path not in self._mapped:
            self._mapped[place.path] = mmap.mmap(handle, holds, mmap.MAP_SHARED, mmap.PROT_READ)
        try:
            lies: NDArray[Any] = np.ndarray(shape, self._dtype, self._mapped[place.path], place.offset, place.strides)
        except (TypeError, ValueError) as error:
            raise TransitionError(f"{what} is said to lie where it cannot: {error}") from error

        def fetch(rows: slice, into: NDArray[Any]) -> None:
            into[...] = lies[rows] if lies.ndim else lies

        return fetch

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TransitionError(f"what slot {self._loan.lender} has lent cannot be read: {error}") from error


def _open_sealed(path: str) -> tuple[int, int]:
    """Open a file of this user that cannot shrink, for looking into one that does ends the process; return its size,
    too."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise OSError(f"{path} is not a file of this user")
        if not fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError(f"{path} can shrink while it is read")
    except OSError:
        os.close(handle)
        raise
    return handle, status.st_size


def _read_from(handle: int, offset: int, size: int, shape: tuple[int, ...], what: str) -> Fetch:
    """Return how to read an array of ``size`` bytes that lies row-major at ``offset`` of a file."""
    row_bytes = size // max(1, (*shape, 1)[0])

    def fetch(rows: slice, into: NDArray[Any]) -> None:
        wanted, position = _bytes(into), offset + rows.start * row_bytes
        while wanted:
            count = os.preadv(handle, [wanted], position)
            if not count:
                raise TransitionError(f"{what}: the file ends before byte {position + len(wanted)}")
            position += count
            wanted = wanted[count:]

    return fetch


def _row_major(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides of an array whose elements lie together, in bytes."""
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _bytes(array: NDArray[Any]) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8).data)


def _blocks(array: NDArray[Any]) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Yield the rows (elements of a vector) of ``array`` by blocks of bounded size, as views."""
    rows = array if array.ndim else array.reshape(1)
    step = max(1, _BLOCK_BYTES // max(1, rows[0].nbytes)) if len(rows) else 1
    for start in range(0, len(rows), step):
        where = slice(start, min(len(rows), start + step))
        yield where, rows[where]


def _packed(scratch: NDArray[np.uint8], block: NDArray[Any]) -> NDArray[Any]:
    """Return a row-major array like ``block``, in ``scratch`` if that is large enough: new memory is slow."""
    if block.nbytes > len(scratch):
        return np.empty(block.shape, block.dtype)
    return scratch[: block.nbytes].view(block.dtype).reshape(block.shape)


def _sum(array: NDArray[Any], descriptor: int | None, scratch: NDArray[np.uint8]) -> str:
    """Return the checksum of the elements in row-major order; append them to a file, if one is given."""
    digest = xxhash.xxh3_64()
    for _, block in _blocks(array):
        packed = block
        if not block.flags.c_contiguous:
            packed = _packed(scratch, block)
            packed[...] = block
        content = _bytes(packed)
        digest.update(content)
        while descriptor is not None and content:
            content = content[os.write(descriptor, content) :]
    return digest.hexdigest()


def _reader(fetch: Fetch, checksum: str, what: str, scratch: NDArray[np.uint8]) -> Callable[[NDArray[Any]], None]:
    """Return a function that fills an array of any strides; it raises if what came has not the right checksum.

    Summed is this side's copy, which nobody else can change.
    """

    def read(array: NDArray[Any]) -> None:
        digest = xxhash.xxh3_64()
        for rows, block in _blocks(array.view(f"u{array.itemsize}")):
            if block.flags.c_contiguous:
                fetch(rows, block)
                digest.update(_bytes(block))
            else:
                packed = _packed(scratch, block)
                fetch(rows, packed)
                digest.update(_bytes(packed))
                block[...] = packed
        if digest.hexdigest() != checksum:
            raise TransitionError(f"{what} arrived with checksum {digest.hexdigest()}, {checksum} was sent")

    return read
