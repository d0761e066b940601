"""Which operating-system processes does this run own on this host, and are they alive?

Owner: the supervisor. Processes are forked by one server of this run (``forkserver.py``), which has imported already
what takes seconds; each start is a new incarnation of the worker's name. The kernel kills the workers when the server
dies. The server outlives a supervisor that is killed, for a bounded time: the next one ``adopt``s it with all that it
has started, or ends it.

Invariants (tests/runtime/test_processes.py): each exit is reported once; ``stop`` leaves no process behind; without the
server no worker is waited for; a server has one supervisor, the one that came last.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path

import msgspec
from msgspec import Struct

from nereus.errors import NereusError
from nereus.runtime.forkserver import Ended, Kill, Order, Report, Said, Serving, Start, Started

START_S = 120.0
"""How long a start may take, the server's imports included."""
STOP_S = 10.0
_ANSWER_S = 30.0
"""How long a server that was left alone may take to say what it has: it may still be importing."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a Unix socket (unix(7), SO_PEERCRED)."""


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
    """Processes that this supervisor has started or adopted; ``exits`` tells their ends.

    ``preload`` names modules that they will import. The server starts with the first ``open`` or ``start``, and listens
    at ``place``; without a supervisor it waits ``orphan_s`` for another one.
    """

    def __init__(
        self, logs: Path, *, preload: Sequence[str] = (), place: Path | None = None, orphan_s: float = 0.0
    ) -> None:
        self._logs = logs
        self._preload = tuple(preload)
        self._place = place or logs / "forkserver.sock"
        self._orphan_s = orphan_s
        self._orders: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        """The server, if it was started from here."""
        self._serving: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._running: dict[str, int] = {}
        self._starting: dict[str, asyncio.Future[int]] = {}
        self._said: dict[str, asyncio.Future[str]] = {}
        self._announced: dict[str, str] = {}
        self._services: set[str] = set()
        self._gone = asyncio.Event()
        self._lost = ""
        self._peer = 0
        """The pid of the server, as the kernel knows it."""
        self.exits: asyncio.Queue[Exited] = asyncio.Queue()

    @property
    def running(self) -> Mapping[str, int]:
        """The pids of all that runs, by name."""
        return self._running

    async def open(self) -> None:
        """Start the server, unless it runs: it begins to import, which the caller need not wait for.

        One that an earlier supervisor has left behind is ended first, with all that it has started.
        """
        if self._orders is not None:
            return
        if await self.adopt():
            await self.clear()
        self._place.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        with listener:
            with _reachable(self._place) as path:
                listener.bind(path)
            self._place.chmod(0o600)
            listener.listen()
            words = [str(listener.fileno()), str(self._place), str(self._orphan_s), *self._preload]
            with (self._logs / "forkserver.log").open("ab") as log:
                self._child = subprocess.Popen(  # noqa: ASYNC220 - it is waited for by its connection
                    [sys.executable, "-m", "nereus.runtime.forkserver", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then drains its workers
                )
            await self._connect()

    async def adopt(self) -> bool:
        """Take over the server that an earlier supervisor has left behind; return whether there is one.

        One that does not answer in time, such as one that is stopped, is ended: it would neither serve nor leave.
        """
        try:
            await self._connect()
        except OSError:
            return False
        try:
            async with asyncio.timeout(_ANSWER_S):
                await asyncio.shield(self._serving)
        except TimeoutError:
            self._end_mute()
            await self.abandon()
            return False
        except NereusError:
            await self.abandon()
            return False
        return True

    async def clear(self) -> None:
        """End an adopted server and all that it has started; their ends concern nobody."""
        await self._close()
        self._lost, self._serving = "", asyncio.get_running_loop().create_future()
        self.exits = asyncio.Queue()

    def service(self, worker: str) -> str:
        """Return what an adopted process that announces itself has said; empty if it does not run."""
        if worker not in self._running or worker not in self._announced:
            return ""
        self._services.add(worker)
        return self._announced[worker]

    async def abandon(self) -> None:
        """Leave the server and its children to another supervisor."""
        orders, listener, self._orders = self._orders, self._listener, None
        if orders is not None and listener is not None:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)
            orders.close()
            with contextlib.suppress(ConnectionError):
                await orders.wait_closed()
        self._running.clear()

    def _end_mute(self) -> None:
        """Kill the server at the other end of the connection; the kernel kills its children."""
        with contextlib.suppress(OSError):  # gone meanwhile
            words = Path(f"/proc/{self._peer}/cmdline").read_bytes().split(b"\0")
            if os.fsencode(self._place) in words:  # the kernel names who has begun to listen: its supervisor, at first
                os.kill(self._peer, signal.SIGKILL)

    async def _connect(self) -> None:
        """Become the supervisor that the server serves; ``OSError`` if there is no server."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.setblocking(False)
            with _reachable(self._place) as path:
                connection.connect(path)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            self._peer, _, _ = _CREDENTIALS.unpack(credentials)
        except BaseException:
            connection.close()
            raise
        reader, self._orders = await asyncio.open_unix_connection(sock=connection)
        self._listener = asyncio.create_task(self._listen(reader), name="processes")

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
        orders, listener, self._orders = self._orders, self._listener, None
        if orders is None or listener is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if self._child is not None:
                self._child.kill()  # the kernel kills its children
            elif not listener.done():
                os.kill(await self._serving, signal.SIGKILL)
        await listener
        orders.close()
        self._place.unlink(missing_ok=True)

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
        if self._orders is None or self._lost:
            raise NereusError(self._lost or "the fork server does not run")
        self._orders.write(msgspec.json.encode(order) + b"\n")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Take the server's reports until it ends; then all its children have ended too."""
        decoder = msgspec.json.Decoder(Report)
        with contextlib.suppress(ConnectionError):
            async for line in reader:
                match decoder.decode(line):
                    case Started(name, pid):
                        self._running[name] = pid
                        if name in self._starting:
                            self._starting[name].set_result(pid)
                    case Said(name, said):
                        self._announced.setdefault(name, said)
                        if name in self._said and not self._said[name].done():
                            self._said[name].set_result(said)
                    case Ended(name, pid, code):
                        self._ended(name, pid, code)
                    case Serving(pid):
                        self._serving.set_result(pid)
        self._lost = f"the fork server ended{await self._code()}; see {self._logs / 'forkserver.log'}"
        for future in (*self._starting.values(), self._serving):
            if not future.done():
                future.set_exception(NereusError(self._lost))
                future.exception()  # not everybody asks
        for name, pid in tuple(self._running.items()):
            self._ended(name, pid, -signal.SIGKILL)

    async def _code(self) -> str:
        """Say with which code a server that was started from here has ended, if it has."""
        if self._child is None:
            return ""
        try:
            return f" with code {await asyncio.to_thread(self._child.wait, STOP_S)}"
        except subprocess.TimeoutExpired:
            return ""  # it serves somebody else

    def _ended(self, name: str, pid: int, code: int) -> None:
        if name in self._said and not self._said[name].done():
            why = f"{name} ended before it announced itself; see {self._logs / f'{name}.log'}"
            self._said[name].set_exception(NereusError(why))
        del self._running[name]
        self._announced.pop(name, None)
        self._gone.set()
        self.exits.put_nowait(Exited(name, pid, code))


@contextlib.contextmanager
def _reachable(path: Path) -> Iterator[str]:
    """Yield a name for ``path`` that is short enough for a Unix socket, however deep its folder lies."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
