"""Which operating-system processes does this run own on this host, and are they alive?

Owner: the supervisor. Processes are forked by one server of this run (``forkserver.py``), which has imported already
what takes seconds; each start is a new incarnation of the worker's name. The kernel kills the server when the
supervisor dies, and the workers when the server does, so none is orphaned.

Invariants (tests/runtime/test_processes.py): each exit is reported once; ``stop`` leaves no process behind; without the
server no worker is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence, Set
from pathlib import Path

import msgspec
from msgspec import Struct

from nereus.errors import NereusError
from nereus.runtime.forkserver import Ended, Kill, Order, Report, Said, Start, Started

START_S = 120.0
"""How long a start may take, the server's imports included."""
STOP_S = 10.0


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
    """Processes that this supervisor has started; ``exits`` tells their ends.

    ``preload`` names modules that they will import. The server starts with the first ``open`` or ``start``.
    """

    def __init__(self, logs: Path, *, preload: Sequence[str] = ()) -> None:
        self._logs = logs
        self._preload = tuple(preload)
        self._server: asyncio.subprocess.Process | None = None
        self._listener: asyncio.Task[None] | None = None
        self._running: dict[str, int] = {}
        self._starting: dict[str, asyncio.Future[int]] = {}
        self._said: dict[str, asyncio.Future[str]] = {}
        self._services: set[str] = set()
        self._gone = asyncio.Event()
        self._lost = ""
        self.exits: asyncio.Queue[Exited] = asyncio.Queue()

    async def open(self) -> None:
        """Start the server, unless it runs: it begins to import, which the caller need not wait for."""
        if self._server is not None:
            return
        with (self._logs / "forkserver.log").open("ab") as log:
            self._server = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "nereus.runtime.forkserver",
                *self._preload,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then drains its workers
            )
        self._listener = asyncio.create_task(self._listen(self._server), name="processes")

    async def start(self, worker: str, arguments: Sequence[str]) -> int:
        """Start ``python -m`` with ``arguments`` as ``worker``, its output appended to its log; return the pid."""
        return await self._start(worker, arguments, announces=False)

    async def start_announced(self, worker: str, arguments: Sequence[str], *, timeout_s: float) -> str:
        """Start a process that announces itself with one line on its output, and return that line."""
        self._services.add(worker)
        said: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._said[worker] = said
        await self._start(worker, arguments, announces=True)
        try:
            async with asyncio.timeout(timeout_s):
                return await said
        except TimeoutError:
            raise NereusError(f"{worker} did not announce itself within {timeout_s:g} s; see its log") from None
        finally:
            del self._said[worker]

    def kill(self, worker: str) -> None:
        """Send SIGKILL, if the worker is still running."""
        if worker in self._running:
            self._order(Kill(worker, signal.SIGKILL))

    async def wait(self, *, timeout_s: float) -> tuple[str, ...]:
        """Wait until all workers have left by themselves, which a service (announced) does not; return who has not."""
        return await self._wait(lambda: self._running.keys() - self._services, timeout_s)

    async def stop(self, *, grace_s: float) -> None:
        """Ask what still runs to leave with SIGTERM, kill what has not left within ``grace_s``, and end the server."""
        for worker in self._running:
            self._order(Kill(worker, signal.SIGTERM))
        for worker in await self._wait(self._running.keys, grace_s):
            self.kill(worker)
        await self._wait(self._running.keys, STOP_S)
        await self._close()

    async def _wait(self, names: Callable[[], Set[str]], timeout_s: float) -> tuple[str, ...]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while names():
                    self._gone.clear()
                    await self._gone.wait()
        return tuple(sorted(names()))

    async def _close(self) -> None:
        """End the server, and with it whatever it has left."""
        server, listener, self._server = self._server, self._listener, None
        if server is None or listener is None:
            return
        if server.returncode is None:
            server.kill()  # the kernel kills its children
        await server.wait()
        await listener

    async def _start(self, worker: str, arguments: Sequence[str], *, announces: bool) -> int:
        if worker in self._running or worker in self._starting:
            raise ValueError(f"{worker} is already running as pid {self._running.get(worker, 'unknown')}")
        await self.open()
        started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._starting[worker] = started
        try:
            self._order(Start(worker, tuple(arguments), str(self._logs / f"{worker}.log"), announces))
            async with asyncio.timeout(START_S):
                return await started
        except TimeoutError:
            raise NereusError(f"the fork server did not start {worker} within {START_S:g} s") from None
        finally:
            self._starting.pop(worker, None)

    def _order(self, order: Order) -> None:
        if self._server is None or self._server.stdin is None or self._lost:
            raise NereusError(self._lost or "the fork server does not run")
        self._server.stdin.write(msgspec.json.encode(order) + b"\n")

    async def _listen(self, server: asyncio.subprocess.Process) -> None:
        """Take the server's reports until it ends; then all its children have ended too."""
        assert server.stdout is not None
        decoder = msgspec.json.Decoder(Report)
        async for line in server.stdout:
            match decoder.decode(line):
                case Started(name, pid):
                    self._running[name] = pid
                    if name in self._starting:
                        self._starting[name].set_result(pid)
                case Said(name, said):
                    if name in self._said and not self._said[name].done():
                        self._said[name].set_result(said)
                case Ended(name, pid, code):
                    self._ended(name, pid, code)
        self._lost = f"the fork server ended with code {await server.wait()}; see {self._logs / 'forkserver.log'}"
        for future in self._starting.values():
            if not future.done():
                future.set_exception(NereusError(self._lost))
        for name, pid in tuple(self._running.items()):
            self._ended(name, pid, -signal.SIGKILL)

    def _ended(self, name: str, pid: int, code: int) -> None:
        if name in self._said and not self._said[name].done():
            why = f"{name} ended before it announced itself; see {self._logs / f'{name}.log'}"
            self._said[name].set_exception(NereusError(why))
        del self._running[name]
        self._gone.set()
        self.exits.put_nowait(Exited(name, pid, code))
