"""How do lines get to a reader who may have stopped reading?

A run must not wait for whoever reads its output: a pager, a pipe that nobody empties. ``Outlet`` stands in the place of
a stream that is no terminal: it takes lines at once and a thread writes them. What finds no room is left out and
counted; a reader that is gone is told nothing more. Everything is in the run folder in any case.

Invariants (tests/runtime/test_outlet.py): no call waits or raises because of the reader, ``drain`` at most as long as
it is told to; what is read is in order and says how much was left out.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from types import TracebackType

MOST_KEPT = 2_000
"""Ours: so many pieces of text wait for a reader."""

LAST_WAIT_S = 5.0
"""Ours: so long a reader may take for what is left at the end."""


class Outlet:
    """A text stream onto a file descriptor, for ``rich.console.Console``; leaving its context drains it."""

    encoding = "utf-8"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: deque[str] = deque()
        self._left_out = 0
        self._gone = False
        self._changed = threading.Condition()
        self._writing = False
        threading.Thread(target=self._serve, name="outlet", daemon=True).start()

    def __enter__(self) -> Outlet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drain(LAST_WAIT_S)

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        """Take ``text``, to be written as soon as the reader lets it."""
        with self._changed:
            if len(self._waiting) >= MOST_KEPT:
                self._left_out += text.count("\n")
            elif text and not self._gone:
                if self._left_out:
                    self._waiting.append(self._gap())
                self._waiting.append(text)
                self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Nothing to do: the thread writes without delay."""

    def drain(self, timeout_s: float) -> bool:
        """Wait until all is written; return whether it was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._gone or not (self._waiting or self._writing), timeout_s)

    def _gap(self) -> str:
        left_out, self._left_out = self._left_out, 0
        return f"... {left_out} lines left out: nobody was reading\n"

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                content, self._writing = self._waiting.popleft().encode(errors="replace"), True
            try:
                while content:  # not through sys.stdout: its lock, held by a thread that waits, would outlast the run
                    try:
                        content = content[os.write(self._descriptor, content) :]
                    except BlockingIOError:  # whoever made the pipe has made it so
                        select.select([], [self._descriptor], [])
            except OSError:
                with self._changed:
                    self._gone = True
                    self._waiting.clear()
                    self._changed.notify_all()
                return
