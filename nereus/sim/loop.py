"""How can hours of a run pass in milliseconds? An asyncio event loop on virtual time.

The loop's clock stands still while callbacks run and jumps to the next timer when nothing is ready. When nothing is
ready and no timer is set, nothing can ever wake the program: that is a ``Deadlock``, raised at once instead of a hang.
Work for threads runs inline, because real time must not leak in.

Invariants (tests/sim/test_loop.py): equal programs see equal times; a wait that nobody can end raises ``Deadlock``.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

Result = TypeVar("Result")


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set."""


POLL_EVERY = 64
"""So many rounds of callbacks pass between looks at the outside: it has nothing but signals to say."""


class _JumpingSelector(selectors.SelectSelector):
    """Polls, and passes the time that the loop wanted to sleep by moving the virtual clock."""

    now = 0.0
    _rounds = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._rounds += 1
        if timeout is not None and self._rounds % POLL_EVERY:
            self.now += max(0.0, timeout)
            return []
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is None:
            raise Deadlock("nothing is ready and no timer is set: every task waits for another one")
        self.now += max(0.0, timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose ``time()`` starts at 0 and jumps.

    ``work_s`` tells from its result how long a piece of thread work took in virtual seconds.
    """

    def __init__(self, work_s: Callable[[object], float] = lambda _: 0.0) -> None:
        self._jumping = _JumpingSelector()
        self._work_s = work_s
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        """Call ``func`` now, because threads would bring real time in, and deliver its result in due time.

        A stand-in for work that waits for other processes returns a future, which is awaited in its place.
        """
        future: asyncio.Future[Result] = self.create_future()
        try:
            result = func(*args)
        except Exception as error:  # noqa: BLE001 - it belongs to whoever awaits the work
            future.set_exception(error)
            return future
        if isinstance(result, asyncio.Future):
            return result

        def deliver() -> None:
            if not future.done():
                future.set_result(result)

        self.call_later(self._work_s(result), deliver)
        return future


def run_virtual(main: Coroutine[Any, Any, Result], *, work_s: Callable[[object], float] = lambda _: 0.0) -> Result:
    """Run ``main`` to its end on a fresh virtual-time loop."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(work_s)) as runner:
        return runner.run(main)
