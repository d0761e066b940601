"""Where in the memory of the host does a trainer slot's state lie, and how do its neighbours on the host see it?

Owner: the process, as the caching allocator of a GPU is its process's. Tensors lie in anonymous shared files (memfd): a
neighbour that is told a tensor's place copies out of it directly, so lending copies nothing, and nothing is left behind
when processes are killed. Room whose tensors are all gone is joined with its neighbours, kept and used again, and room
may be made ready ahead of its use: new memory is what is slow in a plan change, since the kernel clears it page by page
and a virtual machine may have to ask its host for each.

Invariants (tests/backends/test_buffers.py): no two live tensors share an element; room is used again only when nobody
looks into it; what is kept is bounded; a place lies within a file that cannot shrink.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from bisect import insort
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nereus.bus.messages import Place

_FILE_GRAIN = 2 << 20
"""Files are as large as a multiple of this: a huge page."""

_GRAIN = mmap.PAGESIZE
"""Tensors begin at multiples of this."""

_MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later; Python 3.11 has no name for it."""


@dataclass(eq=False)
class _Arena:
    """One file, mapped at ``address``, and which of its bytes are free."""

    handle: int
    memory: mmap.mmap
    capacity: int
    reserved: bool
    """Whether it stays when nothing of it is in use."""
    address: int = 0
    free: list[tuple[int, int]] = field(default_factory=list)
    """(start, stop), apart from each other, in order."""
    used_to: int = 0
    """From here on every byte is 0: it was never part of a tensor."""

    @classmethod
    def make(cls, capacity: int, *, reserved: bool = False) -> _Arena:
        handle = os.memfd_create("nereus-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(handle, capacity)
            os.fchmod(handle, 0o600)
            fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            memory = mmap.mmap(handle, capacity)
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            os.close(handle)
            raise
        address = np.frombuffer(memory, np.uint8).ctypes.data
        return cls(handle, memory, capacity, reserved, address, [(0, capacity)])

    @property
    def free_bytes(self) -> int:
        return sum(stop - start for start, stop in self.free)

    @property
    def idle(self) -> bool:
        """Whether no tensor lies in it."""
        return self.free == [(0, self.capacity)]

    def tightest(self, size: int) -> tuple[int, int] | None:
        """Return the smallest free range of at least ``size`` bytes."""
        return min((one for one in self.free if one[1] - one[0] >= size), key=lambda one: one[1] - one[0], default=None)

    def take(self, at: tuple[int, int], size: int) -> int:
        """Take the first ``size`` bytes of a free range and return where they begin."""
        start, stop = at
        self.free.remove(at)
        if start + size < stop:
            insort(self.free, (start + size, stop))
        return start

    def give_back(self, start: int, stop: int) -> None:
        """Join a range with the free ones beside it."""
        for before in [one for one in self.free if one[1] == start or one[0] == stop]:
            self.free.remove(before)
            start, stop = min(start, before[0]), max(stop, before[1])
        insort(self.free, (start, stop))

    def close(self) -> None:
        """Give the memory back, as soon as no neighbour looks into it either."""
        self.memory.close()
        os.close(self.handle)


class SharedBuffers:
    """Flat tensors in shared memory, and what is left of earlier ones."""

    def __init__(self) -> None:
        self._arenas: list[_Arena] = []
        self._max_spare_bytes = 0
        self._lock = threading.RLock()  # a tensor may go away in the midst of ``empty``

    def keep(self, max_bytes: int) -> None:
        """Keep at most so much of what is not in use; of a file in which a tensor lies all is kept."""
        with self._lock:
            self._max_spare_bytes = max_bytes
            self._trim()

    def reserve(self, size: int) -> threading.Thread | None:
        """Have ``size`` bytes at hand from now on, and let the kernel make them ready beside what goes on.

        Only the first call counts. Returns the thread that sees to it, or None if there is nothing to do.
        """
        with self._lock:
            if size <= 0 or any(arena.reserved for arena in self._arenas):
                return None
            arena = _Arena.make(_rounded(size, _FILE_GRAIN), reserved=True)
            self._arenas.append(arena)
        thread = threading.Thread(target=_make_ready, args=(arena,), name="reserve", daemon=True)
        thread.start()
        return thread

    @property
    def spare_bytes(self) -> int:
        """What is kept and not in use."""
        with self._lock:
            return sum(arena.free_bytes for arena in self._arenas)

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor that is not initialised."""
        return self._tensor(elements, dtype, clear=False)

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of zeros; memory that is new is not touched for it."""
        return self._tensor(elements, dtype, clear=True)

    def locate(self, tensor: Tensor) -> Place | None:
        """Return where other processes of this host find the elements of ``tensor``; None if they cannot."""
        start = tensor.data_ptr()
        for arena in tuple(self._arenas):
            if arena.address <= start < arena.address + arena.capacity:
                strides = tuple(stride * tensor.element_size() for stride in tensor.stride())
                return Place(f"/proc/{os.getpid()}/fd/{arena.handle}", start - arena.address, strides)
        return None

    def _tensor(self, elements: int, dtype: torch.dtype, *, clear: bool) -> Tensor:
        size = elements * dtype.itemsize
        if not size:
            return torch.zeros(0, dtype=dtype)
        taken = _rounded(size, _GRAIN)
        with self._lock:
            self._trim()
            arena, start = self._room(taken)
            dirty = min(size, max(0, arena.used_to - start))
            arena.used_to = max(arena.used_to, start + taken)
        seen = np.frombuffer(arena.memory, np.uint8, size, start)
        weakref.finalize(seen, self._unused, arena, start, start + taken).atexit = False
        tensor = torch.from_numpy(seen)
        if clear and dirty:
            tensor[:dirty].zero_()
        return tensor.view(dtype)

    def _room(self, size: int) -> tuple[_Arena, int]:
        """Return where ``size`` bytes are free, where they fit best, and count them as taken."""
        fitting = [(at, arena) for arena in self._arenas if (at := arena.tightest(size)) is not None]
        if fitting:
            at, arena = min(fitting, key=lambda one: one[0][1] - one[0][0])
        else:
            arena = _Arena.make(_rounded(size, _FILE_GRAIN))
            self._arenas.append(arena)
            at = (0, arena.capacity)
        return arena, arena.take(at, size)

    def _unused(self, arena: _Arena, start: int, stop: int) -> None:
        with self._lock:
            arena.give_back(start, stop)
            self._trim()

    def _trim(self) -> None:
        """Give back what is kept beyond the bound, the smallest files first."""
        idle = sorted((one for one in self._arenas if one.idle and not one.reserved), key=lambda one: one.capacity)
        spare = self.spare_bytes
        for arena in idle:
            if spare <= self._max_spare_bytes:
                return
            try:
                arena.close()
            except BufferError:  # its last tensor is just going away: it is closed when room is asked for next
                continue
            self._arenas.remove(arena)
            spare -= arena.capacity


def _rounded(size: int, grain: int) -> int:
    return -(-size // grain) * grain


def _make_ready(arena: _Arena) -> None:
    """Let the kernel fill in all pages; what is written to them meanwhile stays.

    In small pieces, since each holds the interpreter's lock. A kernel that does not know how leaves them to their first
    use.
    """
    for start in range(0, arena.capacity, _FILE_GRAIN):
        try:
            arena.memory.madvise(_MADV_POPULATE_WRITE, start, _FILE_GRAIN)
        except (OSError, ValueError):  # not known here, or the file was closed
            return


PROCESS = SharedBuffers()
"""The buffers of this process."""
