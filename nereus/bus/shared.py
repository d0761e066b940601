"""How do big frames travel between processes of one host? Through shared memory, with a small note on the bus.

Encrypting for a peer on the same host costs more than a core (see benchmarks/bus.py) and protects nothing that a
file's mode does not. The sender copies each big frame into a segment, a file in /dev/shm that both ends keep mapped:
new pages are what is slow there, so segments are used again once the message is acknowledged. The receiver copies the
frame out and checks the checksum of its own copy.

The sender deletes a segment's file as soon as the receiver has mapped it; ``sweep`` deletes what killed senders left.

Invariants (tests/bus/test_shared.py): a note can make the receiver map nothing but a private plain file of this user,
directly in the folder; what the receiver has checked cannot change under it, nor while anybody looks at it; both ends
hold a bounded amount.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import secrets
import stat
import time
from pathlib import Path

import xxhash

from nereus.bus.codec import SharedFrame
from nereus.bus.session import Frames
from nereus.errors import ProtocolError

SHARED_MEMORY = Path("/dev/shm")
MAX_CHANNEL_BYTES = 512 * 1024 * 1024
"""What one end may hold for one peer; frames beyond it go over the bus."""
_MAX_LANDING_BYTES = 32 * 1024 * 1024
_MAX_SEGMENTS = 256
_MIN_SEGMENT_BYTES = 64 * 1024
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FILE = re.compile(r"nereus-(?P<pid>[0-9]{1,10})-[0-9a-f]{32}")


class SharedMemory:
    """The shared memory of this host."""

    def __init__(self, folder: Path = SHARED_MEMORY, *, max_bytes: int = MAX_CHANNEL_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self.host = _host(folder)

    def channel(self) -> SharedChannel:
        """Make this end of a conversation."""
        return SharedChannel(self._folder, self._max_bytes)


class _Segment:
    """A mapped file. ``path`` is empty once the file has no name any more."""

    __slots__ = ("capacity", "name", "path", "view")

    def __init__(self, name: str, path: Path | None, mapped: mmap.mmap) -> None:
        self.name = name
        self.path = path
        self.view = memoryview(mapped)
        self.capacity = len(mapped)

    def unlink(self) -> None:
        if self.path:
            self.path.unlink(missing_ok=True)
            self.path = None


class _Landing:
    """Buffers that received frames are copied into, each used again once nobody looks at its content any more.

    Fresh memory costs more than the copy (benchmarks/bus.py: 0.6 against 2 GB/s), and malloc gives 8 MiB back to the
    system as soon as it is free.
    """

    def __init__(self, max_bytes: int = _MAX_LANDING_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._buffers: list[bytearray] = []

    def copy(self, content: memoryview) -> bytes | memoryview:
        """Return a copy that nobody else writes to."""
        for buffer in self._buffers:
            if len(buffer) >= len(content) and _unseen(buffer):
                break
        else:
            if self._held_bytes + len(content) > self._max_bytes:
                return bytes(content)
            buffer = bytearray(len(content))
            self._held_bytes += len(content)
            self._buffers.append(buffer)
        buffer[: len(content)] = content
        return memoryview(buffer)[: len(content)].toreadonly()


def _unseen(buffer: bytearray) -> bool:
    """Say whether no view of ``buffer`` is left: while there is one, Python refuses to resize it."""
    try:
        buffer.append(0)
    except BufferError:
        return False
    buffer.pop()
    return True


class SharedChannel:
    """One end's segments for one conversation: its own, to write, and those of the peer, to read."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._own: dict[str, _Segment] = {}
        self._free: list[_Segment] = []
        self._own_bytes = 0
        self._peers: dict[str, _Segment] = {}
        self._peers_bytes = 0
        self._landing = _Landing()

    def put(self, frames: Frames, threshold_bytes: int) -> tuple[Frames, tuple[SharedFrame, ...]]:
        """Copy frames of at least ``threshold_bytes`` into segments; return the others and where the copies lie."""
        kept: list[bytes | bytearray | memoryview] = []
        shared: list[SharedFrame] = []
        for index, frame in enumerate(frames):
            segment = self._segment_for(len(frame)) if len(frame) >= threshold_bytes else None
            if segment is None:
                kept.append(frame)
                continue
            segment.view[: len(frame)] = frame
            shared.append(SharedFrame(index, segment.name, len(frame), xxhash.xxh3_64_hexdigest(frame)))
        return tuple(kept), tuple(shared)

    def release(self, shared: tuple[SharedFrame, ...]) -> None:
        """Use these segments again: the peer has taken what is in them."""
        for note in shared:
            if segment := self._own.get(note.name):
                segment.unlink()
                self._free.append(segment)

    def take(self, frames: Frames, shared: tuple[SharedFrame, ...]) -> Frames:
        """Return all frames in their order. ``ProtocolError`` names what is wrong with one."""
        total = len(frames) + len(shared)
        places = {note.index for note in shared}
        if len(places) != len(shared) or max(places) >= total:
            raise ProtocolError(f"shared frames at {sorted(places)} of {total}")
        taken = {note.index: self._read(note) for note in shared}
        kept = iter(frames)
        return tuple(taken[index] if index in taken else next(kept) for index in range(total))

    def close(self) -> None:
        """Delete what has a name still, and let go of the rest."""
        for segment in self._own.values():
            segment.unlink()
        self._own.clear()
        self._free.clear()
        self._peers.clear()

    def _segment_for(self, size: int) -> _Segment | None:
        """Return a segment that holds ``size`` bytes: the smallest free one, a new one, or none if there is no room."""
        fitting = [segment for segment in self._free if segment.capacity >= size]
        if fitting:
            best = min(fitting, key=lambda segment: segment.capacity)
            self._free.remove(best)
            return best
        capacity = max(_MIN_SEGMENT_BYTES, 1 << (size - 1).bit_length())
        if self._own_bytes + capacity > self._max_bytes or len(self._own) >= _MAX_SEGMENTS:
            return None
        segment = self._new_segment(capacity)
        if segment:
            self._own[segment.name] = segment
            self._own_bytes += capacity
        return segment

    def _new_segment(self, capacity: int) -> _Segment | None:
        path, handle = make_private_file(self._folder)
        try:
            # Reserves the pages: writing to a mapped file on a full tmpfs would end the process.
            os.posix_fallocate(handle, 0, capacity)
            return _Segment(path.name, path, mmap.mmap(handle, capacity))
        except OSError:
            path.unlink()
            return None
        finally:
            os.close(handle)

    def _read(self, note: SharedFrame) -> bytes | memoryview:
        segment = self._peers.get(note.name) or self._map(note.name)
        if not 0 < note.size_bytes <= segment.capacity:
            raise ProtocolError(f"segment {note.name} holds {segment.capacity} bytes, not {note.size_bytes}")
        frame = self._landing.copy(segment.view[: note.size_bytes])
        if xxhash.xxh3_64_hexdigest(frame) != note.checksum:
            raise ProtocolError(f"a frame in segment {note.name} does not have the promised checksum")
        return frame

    def _map(self, name: str) -> _Segment:
        """Map a segment of the peer for good."""
        try:
            handle = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise ProtocolError(f"segment {name} cannot be opened: {error.strerror}") from None
        try:
            status = os.fstat(handle)
            mine = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1
            if not mine or stat.S_IMODE(status.st_mode) & 0o077 or not status.st_size:
                raise ProtocolError(f"segment {name} is not a private file of this user")
            self._peers_bytes += status.st_size
            if self._peers_bytes > self._max_bytes or len(self._peers) >= _MAX_SEGMENTS:
                raise ProtocolError(f"segments of more than {self._max_bytes} bytes, or more than {_MAX_SEGMENTS}")
            mapped = mmap.mmap(handle, status.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(handle)
        segment = self._peers[name] = _Segment(name, None, mapped)
        return segment


def make_private_file(folder: Path) -> tuple[Path, int]:
    """Make a file that only this user can read, under a name by which ``sweep`` finds it; return it and its handle."""
    path = folder / f"nereus-{os.getpid()}-{secrets.token_hex(16)}"
    return path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def sweep(folder: Path = SHARED_MEMORY, *, min_age_s: float = 600.0) -> int:
    """Delete this user's files whose senders are dead; return how many.

    A sender in another process-id namespace looks dead, hence the age.
    """
    swept = 0
    oldest = time.time() - min_age_s
    for path in folder.glob("nereus-*"):
        match = _FILE.fullmatch(path.name)
        if not match or Path("/proc", match["pid"]).exists():
            continue
        with contextlib.suppress(OSError):
            if path.stat().st_mtime <= oldest:
                path.unlink()
                swept += 1
    return swept


def _host(folder: Path) -> str:
    """Return text that is equal for two processes iff they see the same shared memory as the same user."""
    with contextlib.suppress(OSError):
        boot = _BOOT_ID.read_text().strip()
        status = folder.stat()
        return hashlib.sha256(f"{boot} {status.st_dev} {status.st_ino} {os.geteuid()}".encode()).hexdigest()[:32]
    return ""
