"""How do the processes of a run start at once, although importing what they compute with takes seconds?

Owner: ``processes.LocalProcesses``, which starts one server: ``python -m nereus.runtime.forkserver HANDLE SOCKET
ORPHAN_S MODULE...``. It imports those modules once and then forks a child for every ``Start`` it reads; the child
runs a module as ``python -m`` would. Orders come as JSON lines over a connection to a Unix socket, reports go back the
same way. The server has one thread and uses nothing of what it imports, so that a fork copies no lock that is held.

Whoever connects last is served: a supervisor that takes a run over thereby takes the children over, and the one before
is cut off. Without anybody the server waits, ``ORPHAN_S`` and a little more, as its children do by themselves; then it
kills those that are left.

Invariants (tests/runtime/test_processes.py): each child's end is told once to who is connected; no child outlives the
server; the server outlives its supervisor by a bounded time, and by none once its folder or its children are gone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec import Struct

from nereus.lifeline import die_with_parent

_CHUNK_BYTES = 65536
_MAX_LINE_BYTES = 4096
_LOOK_S = 0.5
"""How often a server without a supervisor looks whether it has still something to wait for."""
_LEAVE_S = 15.0
"""How much longer than its children a server without a supervisor waits."""


class Start(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Run ``python -m`` with ``arguments``; both outputs are appended to ``log``."""

    name: str
    arguments: tuple[str, ...]
    log: str
    announces: bool = False
    """Standard output comes back line by line, as ``Said``."""


class Kill(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Send a signal to a child, if it has not ended."""

    name: str
    number: int


class Started(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    name: str
    pid: int


class Said(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A line that an announcing child has printed."""

    name: str
    line: str


class Ended(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A child has ended; a negative code is the signal that ended it."""

    name: str
    pid: int
    code: int


class Serving(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The first report on a connection is complete: before it came all children that run and what they announced."""

    pid: int


Order = Start | Kill
Report = Started | Said | Ended | Serving


class _Lines:
    """Cuts what is read from a pipe or a connection into lines."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self._rest = b""

    def read(self) -> list[bytes] | None:
        """Return the lines that are whole by now; None at the end."""
        try:
            chunk = os.read(self.handle, _CHUNK_BYTES)
        except ConnectionError:
            return None
        if not chunk:
            return None
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return lines


class _Server:
    """The children of one fork server, and who is served."""

    def __init__(self, listener: socket.socket, place: Path, orphan_s: float) -> None:
        listener.listen()  # again, here: from now on the kernel names this process to whoever connects
        self._listener = listener
        self._place = place
        self._orphan_s = orphan_s
        self._orders: _Lines | None = None
        self._alone_since = time.monotonic() + _LEAVE_S  # who has started it connects by then
        self._served = False
        self._decoder: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._children: dict[str, int] = {}
        self._services: dict[str, list[str]] = {}
        """What children that announce themselves have said."""

    def serve(self) -> Start | None:
        """Serve until there is nobody to serve (None); in a new child, return what it is to run."""
        while self._orders is not None or self._waits():
            for key, _ in self._selector.select(_LOOK_S if self._orders is None else None):
                if key.fileobj not in self._selector.get_map():
                    continue  # it was closed by what came before
                act: Callable[[], Start | None] = key.data
                start = act()
                if start is not None:
                    return start
        return None

    def close(self) -> None:
        """Kill the children that are left."""
        for pid in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._listener.close()

    def _waits(self) -> bool:
        """Tell whether a server without a supervisor has children left that wait for another one."""
        alone_s = time.monotonic() - self._alone_since
        if alone_s > self._orphan_s + (_LEAVE_S if self._orphan_s else 0.0):
            return False
        return self._place.exists() and (not self._served or bool(self._children.keys() - self._services.keys()))

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        self._part()
        self._served = True
        self._orders = _Lines(connection.detach())
        self._selector.register(self._orders.handle, selectors.EVENT_READ, self._obey)
        for name, pid in self._children.items():
            self._tell(Started(name, pid))
        for name, lines in self._services.items():
            for line in lines:
                self._tell(Said(name, line))
        self._tell(Serving(os.getpid()))

    def _part(self) -> None:
        """Serve nobody for now."""
        if self._orders is not None:
            self._selector.unregister(self._orders.handle)
            os.close(self._orders.handle)
            self._orders, self._alone_since = None, time.monotonic()

    def _tell(self, report: Report) -> None:
        if self._orders is not None:
            with contextlib.suppress(OSError):  # nobody hears it any more: the end of the orders follows
                os.write(self._orders.handle, msgspec.json.encode(report) + b"\n")

    def _obey(self) -> Start | None:
        """Carry out what has been ordered; in a new child, return its order."""
        assert self._orders is not None, "what is not served any more is not listened to"
        lines = self._orders.read()
        if lines is None:
            self._part()
        for line in lines or ():
            match self._decoder.decode(line):
                case Start() as start:
                    if self._fork(start):
                        return start
                case Kill(name, number):
                    if name in self._children:
                        os.kill(self._children[name], number)  # not yet reaped, so the number is still its own
        return None

    def _fork(self, start: Start) -> bool:
        """Fork a child; return whether this is the child."""
        pipe = os.pipe() if start.announces else None
        server = os.getpid()
        pid = os.fork()
        if not pid:
            die_with_parent()
            if os.getppid() != server:  # it was killed before the kernel was asked
                os._exit(1)
            self._leave(start, pipe)
            return True
        self._children[start.name] = pid
        if start.announces:
            self._services[start.name] = []
        watch = os.pidfd_open(pid)
        self._selector.register(watch, selectors.EVENT_READ, lambda: self._reap(start.name, pid, watch))
        self._tell(Started(start.name, pid))
        if pipe is not None:
            os.close(pipe[1])
            lines = _Lines(pipe[0])
            self._selector.register(pipe[0], selectors.EVENT_READ, lambda: self._pass_on(start.name, lines))
        return False

    def _leave(self, start: Start, pipe: tuple[int, int] | None) -> None:
        """In a new child: take a session and outputs of its own, and let go of what is the server's."""
        os.setsid()
        mine = [key.fd for key in self._selector.get_map().values()]
        self._selector.close()
        self._listener.detach()
        log = os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for handle, standard in ((nothing, 0), (pipe[1] if pipe else log, 1), (log, 2)):
            os.dup2(handle, standard)
        for handle in {*mine, log, nothing, *(pipe or ())} - {0, 1, 2}:
            os.close(handle)

    def _pass_on(self, name: str, lines: _Lines) -> None:
        said = lines.read()
        for line in said or ():
            text = line[:_MAX_LINE_BYTES].decode("utf-8", "replace")
            self._services.get(name, []).append(text)
            self._tell(Said(name, text))
        if said is None:
            self._selector.unregister(lines.handle)
            os.close(lines.handle)

    def _reap(self, name: str, pid: int, watch: int) -> None:
        self._selector.unregister(watch)
        os.close(watch)
        _, status = os.waitpid(pid, 0)
        del self._children[name]
        self._services.pop(name, None)
        self._tell(Ended(name, pid, os.waitstatus_to_exitcode(status)))


def _preload(modules: list[str]) -> None:
    """Import what children will need; one that cannot be imported is left to the child that does need it."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception:  # noqa: BLE001 - any failure to import is the child's to explain
            traceback.print_exc()
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page of what was imported


def main() -> NoReturn:
    """Entry of ``python -m nereus.runtime.forkserver``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handle, place, orphan_s, *modules = sys.argv[1:]
    _preload(modules)
    server = _Server(socket.socket(fileno=int(handle)), Path(place), float(orphan_s))
    start = server.serve()
    if start is None:
        server.close()
        sys.exit(0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    module, *arguments = start.arguments
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
