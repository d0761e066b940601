"""Does anything keep the supervisor's event loop from its work?

A timer that comes late because this thread was computing has been blocked; one that comes late because others had the
processor has not. Both clocks are read, and the smaller of lateness and of the thread's own processor time counts.
"""

from __future__ import annotations

import asyncio
import time

import structlog

PERIOD_S = 0.1

MOST_S = 0.05
"""A longer block is told: messages, heartbeats and deadlines wait for it."""

log = structlog.get_logger()


class LoopWatch:
    """Keeps the longest block of the loop since it was last asked."""

    def __init__(self) -> None:
        self._longest_s = 0.0

    async def run(self) -> None:
        """Watch for ever."""
        loop = asyncio.get_running_loop()
        while True:
            due, used = loop.time() + PERIOD_S, time.thread_time()
            await asyncio.sleep(PERIOD_S)
            late, computed = loop.time() - due, time.thread_time() - used
            blocked = min(late, computed)
            self._longest_s = max(self._longest_s, blocked)
            if blocked > MOST_S:
                log.warning("the event loop was kept from its work", seconds=round(blocked, 3), at_most=MOST_S)

    def longest_s(self) -> float:
        """Return the longest block since the last call."""
        longest, self._longest_s = self._longest_s, 0.0
        return longest
