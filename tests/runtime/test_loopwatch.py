"""Does the watch tell a loop that computes from one that sleeps?"""

from __future__ import annotations

import asyncio
import time

from nereus.runtime.loopwatch import PERIOD_S, LoopWatch


def _measured(block_s: float) -> float:
    async def main() -> float:
        watch = LoopWatch()
        task = asyncio.create_task(watch.run())
        await asyncio.sleep(0)
        until = time.thread_time() + block_s
        while time.thread_time() < until:
            pass
        await asyncio.sleep(2 * PERIOD_S)
        task.cancel()
        return watch.longest_s()

    return asyncio.run(main())


def test_a_loop_that_computes_is_blocked() -> None:
    assert _measured(3 * PERIOD_S) >= 1.5 * PERIOD_S


def test_a_loop_that_rests_is_not() -> None:
    assert _measured(0.0) < PERIOD_S / 2
