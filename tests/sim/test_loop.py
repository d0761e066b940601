from __future__ import annotations

import asyncio

import pytest

from nereus.sim.loop import Deadlock, run_virtual


def test_an_hour_passes_at_once_and_in_order() -> None:
    async def main() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        seen: list[tuple[str, float]] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, loop.time()))

        await asyncio.gather(sleeper("late", 3600.0), sleeper("early", 0.5))
        return seen

    assert run_virtual(main()) == [("early", 0.5), ("late", 3600.0)]


def test_a_wait_that_nobody_can_end_is_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_virtual(main())


def test_a_timeout_saves_from_the_deadlock() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 7.0


def test_thread_work_takes_the_time_it_is_said_to_take() -> None:
    async def main() -> tuple[int, float]:
        result = await asyncio.to_thread(lambda: 3)
        return result, asyncio.get_running_loop().time()

    assert run_virtual(main(), work_s=lambda result: float(str(result))) == (3, 3.0)


def test_an_error_in_thread_work_arrives() -> None:
    async def main() -> None:
        await asyncio.to_thread(int, "x")

    with pytest.raises(ValueError, match="invalid literal"):
        run_virtual(main())
