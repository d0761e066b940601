"""Which operating-system processes does this run own on this host, and are they alive?

Owner: the supervisor. Workers run as ``python -m nereus.runtime.worker``; each start is a new incarnation of the
worker's name. A worker asks the kernel to be killed when its parent dies (see ``worker.py``), so none is orphaned.

Invariants (tests/runtime/test_processes.py): each exit is reported once; ``stop`` leaves no process behind.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from nereus.errors import NereusError


class Exited(Struct, frozen=True):
    """A worker process has ended; a negative code is the signal that ended it."""

    worker: str
    pid: int
    code: int

    @property
    def why(self) -> str:
        if self.code < 0:
            return f"killed by {signal.Signals(-self.code).name}"
        return f"exited with code {self.code}"


class LocalProcesses:
    """Processes of one kind that this supervisor has started; ``exits`` may be shared with another kind."""

    def __init__(self, logs: Path, exits: asyncio.Queue[Exited] | None = None) -> None:
        self._logs = logs
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self.exits: asyncio.Queue[Exited] = asyncio.Queue() if exits is None else exits

    async def start(self, worker: str, arguments: Sequence[str]) -> int:
        """Start ``python -m`` with ``arguments`` as ``worker``, its output appended to its log; return the pid."""
        return (await self._spawn(worker, arguments, announces=False)).pid

    async def start_announced(self, worker: str, arguments: Sequence[str], *, timeout_s: float) -> str:
        """Start a process that announces itself with one line on its output, and return that line."""
        process = await self._spawn(worker, arguments, announces=True)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await process.stdout.readline()
        except TimeoutError:
            raise NereusError(f"{worker} did not announce itself within {timeout_s:g} s; see its log") from None
        if not line:
            raise NereusError(f"{worker} ended before it announced itself; see {self._logs / f'{worker}.log'}")
        return line.decode()

    def kill(self, worker: str) -> None:
        """Send SIGKILL, if the worker is still running."""
        process = self._running.get(worker)
        if process is not None and process.returncode is None:
            process.kill()

    async def wait(self, *, timeout_s: float) -> tuple[str, ...]:
        """Wait until all workers have left by themselves; return the names of those that have not."""
        if self._watches:
            await asyncio.wait(self._watches, timeout=timeout_s)
        return tuple(sorted(self._running))

    async def stop(self, *, grace_s: float) -> None:
        """Ask what still runs to leave with SIGTERM, kill what has not left within ``grace_s``, and reap all."""
        for process in self._running.values():
            if process.returncode is None:
                process.terminate()
        for worker in await self.wait(timeout_s=grace_s):
            self.kill(worker)
        await self.wait(timeout_s=10.0)

    async def _spawn(self, worker: str, arguments: Sequence[str], *, announces: bool) -> asyncio.subprocess.Process:
        if worker in self._running:
            raise ValueError(f"{worker} is already running as pid {self._running[worker].pid}")
        with (self._logs / f"{worker}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if announces else log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then drains its workers
            )
        self._running[worker] = process
        watch = asyncio.create_task(self._watch(worker, process), name=f"watch-{worker}")
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return process

    async def _watch(self, worker: str, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if self._running.get(worker) is process:
            del self._running[worker]
        self.exits.put_nowait(Exited(worker, process.pid, code))
