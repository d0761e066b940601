"""Where in the memory of the host does a trainer slot's state lie, and how do its neighbours on the host see it?

Owner: the process, as the caching allocator of a GPU is its process's. Every buffer is an anonymous shared file
(memfd): a neighbour that is told its place copies out of it directly, so lending copies nothing, and nothing is left
behind when processes are killed. A buffer whose tensors are all gone is kept and used again, because new memory is what
is slow in a plan change: the kernel clears it page by page, and a virtual machine may have to ask its host for each.

Invariants (tests/backends/test_buffers.py): a buffer is used again only when nobody looks into it; what is kept is
bounded; a place lies within a file that cannot shrink.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nereus.bus.messages import Place

_GRAIN_BYTES = 2 << 20
"""Files are as large as a multiple of this: a huge page."""


@dataclass(eq=False)
class _Buffer:
    """One file, mapped; ``address`` is where."""

    handle: int
    memory: mmap.mmap
    capacity: int
    address: int = 0
    touched: bool = False
    """Whether it may hold something else than zeros."""

    @classmethod
    def make(cls, capacity: int) -> _Buffer:
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
        return cls(handle, memory, capacity)

    def close(self) -> None:
        """Give the memory back, as soon as no neighbour looks into it either."""
        self.memory.close()
        os.close(self.handle)


class SharedBuffers:
    """Flat tensors in shared memory, and what is left of earlier ones."""

    def __init__(self) -> None:
        self._live: dict[int, _Buffer] = {}
        self._spare: list[_Buffer] = []
        self._max_spare_bytes = 0
        self._lock = threading.RLock()  # a tensor may go away in the midst of ``empty``

    def keep(self, max_bytes: int) -> None:
        """Keep at most so much of what is not in use."""
        with self._lock:
            self._max_spare_bytes = max_bytes
            self._trim()

    @property
    def spare_bytes(self) -> int:
        """What is kept and not in use."""
        return sum(buffer.capacity for buffer in self._spare)

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor that is not initialised."""
        return self._tensor(elements, dtype, clear=False)

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of zeros; memory that is new is not touched for it."""
        return self._tensor(elements, dtype, clear=True)

    def locate(self, tensor: Tensor) -> Place | None:
        """Return where other processes of this host find the elements of ``tensor``; None if they cannot."""
        start = tensor.data_ptr()
        for buffer in tuple(self._live.values()):
            if buffer.address <= start < buffer.address + buffer.capacity:
                strides = tuple(stride * tensor.element_size() for stride in tensor.stride())
                return Place(f"/proc/{os.getpid()}/fd/{buffer.handle}", start - buffer.address, strides)
        return None

    def _tensor(self, elements: int, dtype: torch.dtype, *, clear: bool) -> Tensor:
        size = elements * dtype.itemsize
        if not size:
            return torch.zeros(0, dtype=dtype)
        with self._lock:
            buffer = self._fitting(size) or _Buffer.make(-(-size // _GRAIN_BYTES) * _GRAIN_BYTES)
            seen = np.frombuffer(buffer.memory, np.uint8, size)
            buffer.address = seen.ctypes.data
            self._live[buffer.address] = buffer
            weakref.finalize(seen, self._unused, buffer.address).atexit = False
        tensor = torch.from_numpy(seen)
        if clear and buffer.touched:
            tensor.zero_()
        buffer.touched = True
        return tensor.view(dtype)

    def _fitting(self, size: int) -> _Buffer | None:
        """Return the smallest spare buffer that holds ``size`` bytes, if there is one."""
        found = min(
            (buffer for buffer in self._spare if buffer.capacity >= size),
            key=lambda buffer: buffer.capacity,
            default=None,
        )
        if found is not None:
            self._spare.remove(found)
        return found

    def _unused(self, address: int) -> None:
        with self._lock:
            self._spare.append(self._live.pop(address))
            self._trim()

    def _trim(self) -> None:
        """Give back what is kept beyond the bound, the smallest first."""
        self._spare.sort(key=lambda buffer: -buffer.capacity)
        while self.spare_bytes > self._max_spare_bytes:
            self._spare.pop().close()


PROCESS = SharedBuffers()
"""The buffers of this process."""
