from __future__ import annotations

import asyncio

import pytest

from nereus.actors.tether import Tether
from nereus.bus.endpoint import Delivery, Event, PeerJoined
from nereus.bus.memory import MemoryBus, MemoryEndpoint
from nereus.bus.messages import Ok, Shutdown
from nereus.bus.session import Settings
from nereus.core.plan import PlanEpoch
from nereus.errors import PeerLost, ProtocolError
from nereus.sim.loop import run_virtual

SETTINGS = Settings(heartbeat_s=1.0, liveness_s=5.0)
PATIENCE_S = 20.0


async def _next(tether: Tether) -> Event:
    """Return the next event that is more than a connection."""
    while isinstance(event := await tether.receive(), PeerJoined):
        pass
    return event


async def _nobody(epoch: PlanEpoch) -> MemoryEndpoint | None:
    return None


def test_without_a_supervisor_a_worker_gives_up_in_bounded_time() -> None:
    async def main() -> float:
        bus = MemoryBus(SETTINGS)
        supervisor = bus.server("supervisor")
        tether = Tether(bus.client("slot-0", server="supervisor"), _nobody, beat_s=1.0, patience_s=PATIENCE_S)
        async with tether.watched():
            await asyncio.sleep(3.0)
            supervisor.abort()
            with pytest.raises(PeerLost, match="no other one came within 20 s"):
                await _next(tether)
        return asyncio.get_running_loop().time()

    assert 3.0 + PATIENCE_S < run_virtual(main()) < 3.0 + PATIENCE_S + 10.0


def test_what_is_said_to_nobody_is_dropped_and_the_next_supervisor_is_heard() -> None:
    async def main() -> None:
        bus = MemoryBus(SETTINGS)
        former = bus.server("supervisor")
        there = False

        async def find(epoch: PlanEpoch) -> MemoryEndpoint | None:
            return bus.client("slot-0", server="supervisor") if there else None

        tether = Tether(bus.client("slot-0", server="supervisor"), find, beat_s=1.0, patience_s=PATIENCE_S)
        async with tether.watched():
            tether.advance(2)
            await asyncio.sleep(1.5)
            former.abort()
            await asyncio.sleep(8.0)
            await tether.send("supervisor", Ok())
            newer = bus.server("supervisor")
            receiving = asyncio.create_task(_next(tether))
            there = True
            while "slot-0" not in newer.peers:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.1)
            there = False
            await newer.send("slot-0", Shutdown("told by the newer"))
            event = await receiving
            assert isinstance(event, Delivery)
            assert event.message == Shutdown("told by the newer")

    run_virtual(main())


def test_a_stopped_supervisor_that_wakes_up_is_not_heard_any_more() -> None:
    async def main() -> None:
        first, second = MemoryBus(SETTINGS), MemoryBus(SETTINGS)  # two supervisors of one name
        former, newer = first.server("supervisor"), second.server("supervisor")
        lines = [second.client("slot-0", server="supervisor")]

        async def find(epoch: PlanEpoch) -> MemoryEndpoint | None:
            return lines.pop() if lines else None

        tether = Tether(first.client("slot-0", server="supervisor"), find, beat_s=1.0, patience_s=PATIENCE_S)
        async with tether.watched():
            await asyncio.sleep(0.5)
            await former.send("slot-0", Shutdown("said before, read after"))
            await asyncio.sleep(1.0)
            await newer.send("slot-0", Shutdown("told by the newer"))
            event = await _next(tether)
            assert isinstance(event, Delivery)
            assert event.message == Shutdown("told by the newer")
        former.abort()

    run_virtual(main())


def test_a_supervisor_that_refuses_a_worker_ends_it() -> None:
    async def main() -> None:
        bus = MemoryBus(SETTINGS)
        bus.server("supervisor")

        async def find(epoch: PlanEpoch) -> MemoryEndpoint | None:
            raise ProtocolError("supervisor refused: slot-0 is not among the living")

        tether = Tether(bus.client("slot-0", server="supervisor"), find, beat_s=1.0, patience_s=PATIENCE_S)
        async with tether.watched():
            with pytest.raises(ProtocolError, match="not among the living"):
                await _next(tether)

    run_virtual(main())
