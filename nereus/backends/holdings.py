"""What does a trainer slot hold of each replica while the plan changes, and how does it get the rest?

Owner: a trainer backend. Besides the committed replica, which it trains, a slot may hold shares of replicas that
primitives have made. All are one logical state, so a share is put together from what is here, as views, and from files
that other slots lend. Nothing is copied before ``settle``.

Memory: the committed share, plus what each other share has *received* (its room is allocated whole, but memory that is
not written to takes no space on a CPU). ``settle`` copies what was resident, kind by kind, and frees that kind of all
other shares before the next: at most one kind of the new share comes on top.

Invariants (tests/backends/test_state_moves.py): after any transition every slot holds exactly its pieces, bit for bit;
what arrives damaged is refused by name and changes nothing; a loan holds each distinct piece once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from nereus.backends.api import STATE_KINDS
from nereus.bus.messages import Loan, Receipt
from nereus.errors import TransitionError
from nereus.transition.primitive import Replica
from nereus.transition.reshard import Move, Piece, box, difference, elements, intersection, remainder

_CHUNK_BYTES = 1 << 20
"""So much is summed and copied at a time: what was just summed is still in the processor's cache."""

Array = Any
"""An array of the device: it can be sliced, and slices can be assigned to."""


class Memory(Protocol):
    """How arrays of the device meet the memory of the host."""

    itemsize: int

    def empty(self, shape: tuple[int, ...]) -> Array:
        """Return an array that is not initialised."""

    def export(self, array: Array) -> NDArray[Any]:
        """Return the elements in row-major order on the host; a view where that is possible."""

    def fill(self, array: Array, read: Callable[[NDArray[Any]], None]) -> None:
        """Let ``read`` write all elements of ``array``, into a row-major array on the host."""


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
        """Write the pieces of ``moves`` into the file ``path``; see ``TrainerBackend.lend``."""
        pieces = distinct(moves)
        for piece in pieces:  # before anything is written
            self._cover(piece)
        try:
            with path.open("r+b", buffering=0) as file:
                checksums = [
                    _write(file.fileno(), self._memory.export(self._read(kind, piece)))
                    for piece in pieces
                    for kind in STATE_KINDS
                ]
                size = file.tell()
        except OSError as error:
            raise TransitionError(f"{len(pieces)} pieces cannot be lent in {path}: {error}") from error
        return Receipt(size, tuple(checksums), self.counters)

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
        if len(promised.checksums) != len(pieces) * len(STATE_KINDS) or promised.size_bytes != sum(sizes) * len(
            STATE_KINDS
        ):
            raise TransitionError(
                f"slot {loan.lender} was to lend {len(pieces)} pieces ({sum(sizes) * len(STATE_KINDS)} bytes), and "
                f"has lent {promised.size_bytes} bytes with {len(promised.checksums)} checksums"
            )
        checksums = iter(promised.checksums)
        offset = read_bytes = 0
        try:
            descriptor = os.open(loan.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise TransitionError(f"what slot {loan.lender} has lent cannot be read: {error}") from error
        try:
            for piece, size in zip(pieces, sizes, strict=True):
                part = _Part(piece, {}, False)
                for kind in STATE_KINDS:
                    checksum = next(checksums)
                    if piece in wanted:
                        what = f"{kind} of {piece.name} {box(piece)} from slot {loan.lender}"
                        part.arrays[kind] = room.view(kind, piece.name)[within(piece, room.pieces[piece.name])]
                        self._memory.fill(part.arrays[kind], _reader(descriptor, offset, checksum, what))
                        read_bytes += size
                    offset += size
                if piece in wanted:
                    parts[piece.name].append(part)
        finally:
            os.close(descriptor)
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


def _chunks(array: NDArray[Any]) -> Iterator[memoryview]:
    content = memoryview(array.reshape(-1).view(np.uint8).data)
    for start in range(0, len(content), _CHUNK_BYTES):
        yield content[start : start + _CHUNK_BYTES]


def _write(descriptor: int, array: NDArray[Any]) -> str:
    """Append a row-major array to a file and return its checksum."""
    digest = xxhash.xxh3_64()
    for chunk in _chunks(array):
        digest.update(chunk)
        while chunk:
            chunk = chunk[os.write(descriptor, chunk) :]
    return digest.hexdigest()


def _reader(descriptor: int, offset: int, checksum: str, what: str) -> Callable[[NDArray[Any]], None]:
    """Return a function that fills a row-major array from a file; it raises if that has not the right checksum."""

    def read(array: NDArray[Any]) -> None:
        digest, position = xxhash.xxh3_64(), offset
        for chunk in _chunks(array):
            wanted = chunk
            while wanted:
                count = os.preadv(descriptor, [wanted], position)
                if not count:
                    raise TransitionError(f"{what}: the file ends before byte {position + len(wanted)}")
                position += count
                wanted = wanted[count:]
            digest.update(chunk)
        if digest.hexdigest() != checksum:
            raise TransitionError(f"{what} arrived with checksum {digest.hexdigest()}, {checksum} was sent")

    return read
