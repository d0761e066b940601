"""How do the processes of a run start at once, although importing what they compute with takes seconds?

Owner: ``processes.LocalProcesses``, which starts one server: ``python -m nereus.runtime.forkserver MODULE...``. It
imports those modules once and then forks a child for every ``Start`` it reads; the child runs a module as ``python -m``
would. Orders come as JSON lines on standard input, events go back the same way. The server has one thread and uses
nothing of what it imports, so that a fork copies no lock that is held.

Invariants (tests/runtime/test_processes.py): each child's end is told once; no child outlives the server, and the
server does not outlive the process that started it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import selectors
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import msgspec
from msgspec import Struct

from nereus.lifeline import die_with_parent

_CHUNK_BYTES = 65536
_MAX_LINE_BYTES = 4096


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


Order = Start | Kill
Report = Started | Said | Ended


class _Lines:
    """Cuts what is read from a pipe into lines."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self._rest = b""

    def read(self) -> list[bytes] | None:
        """Return the lines that are whole by now; None at the end of the pipe."""
        chunk = os.read(self.handle, _CHUNK_BYTES)
        if not chunk:
            return None
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return lines


class _Server:
    """The children and the pipes of one fork server."""

    def __init__(self, orders: int, reports: int) -> None:
        self._orders = _Lines(orders)
        self._reports = reports
        self._decoder: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
        self._selector = selectors.DefaultSelector()
        self._selector.register(orders, selectors.EVENT_READ, self._obey)
        self._children: dict[str, int] = {}

    def serve(self) -> Start | None:
        """Serve until there is nobody to serve (None); in a new child, return what it is to run."""
        while True:
            for key, _ in self._selector.select():
                act: Callable[[], Start | bool] = key.data
                come_of_it = act()
                if come_of_it is False:
                    return None
                if isinstance(come_of_it, Start):
                    return come_of_it

    def close(self) -> None:
        """Kill the children that are left."""
        for pid in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _tell(self, report: Report) -> None:
        os.write(self._reports, msgspec.json.encode(report) + b"\n")

    def _obey(self) -> Start | bool:
        """Carry out what has been ordered; False when there will be no more orders, in a new child its order."""
        lines = self._orders.read()
        for line in lines or ():
            match self._decoder.decode(line):
                case Start() as start:
                    if self._fork(start):
                        return start
                case Kill(name, number):
                    if name in self._children:
                        os.kill(self._children[name], number)  # not yet reaped, so the number is still its own
        return lines is not None

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
        log = os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for handle, standard in ((nothing, 0), (pipe[1] if pipe else log, 1), (log, 2)):
            os.dup2(handle, standard)
        for handle in {*mine, self._reports, log, nothing, *(pipe or ())} - {0, 1, 2}:
            os.close(handle)

    def _pass_on(self, name: str, lines: _Lines) -> bool:
        said = lines.read()
        for line in said or ():
            self._tell(Said(name, line[:_MAX_LINE_BYTES].decode("utf-8", "replace")))
        if said is None:
            self._selector.unregister(lines.handle)
            os.close(lines.handle)
        return True

    def _reap(self, name: str, pid: int, watch: int) -> bool:
        self._selector.unregister(watch)
        os.close(watch)
        _, status = os.waitpid(pid, 0)
        del self._children[name]
        self._tell(Ended(name, pid, os.waitstatus_to_exitcode(status)))
        return True


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
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reports = os.dup(1)
    os.dup2(2, 1)  # what an import prints must not end up among the reports
    _preload(sys.argv[1:])
    server = _Server(0, reports)
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
