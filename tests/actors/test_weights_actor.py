"""Does the relay answer on the bus as its core decides, wait within bounds, and notice who is gone?"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus.actors.host import host
from nereus.actors.names import RELAY, SUPERVISOR
from nereus.actors.weights import Relay, WeightsActor
from nereus.bus.endpoint import Delivery, Endpoint
from nereus.bus.memory import MemoryBus
from nereus.bus.messages import (
    Assign,
    Fault,
    Heartbeat,
    Manifest,
    Message,
    Ok,
    Pull,
    PullDone,
    PullFrom,
    PushBegin,
    PushDone,
    PushInto,
    Ready,
    Shutdown,
    VersionReady,
)
from nereus.core.plan import POLICY_TRAINING, POLICY_WEIGHTS, Emu, Layout, Plan
from nereus.errors import PeerLost, ProtocolError
from nereus.transition.checksum import piece_checksum
from nereus.transition.reshard import Piece, TensorSpec, whole

SPEC = TensorSpec("w", (4, 2), "float32", 0, 0)
HALVES = (Piece("w", (0, 0), (2, 2)), Piece("w", (2, 0), (4, 2)))
LIMIT_S = 20.0


class Scene:
    """A supervisor, a relay and whoever else connects, in one process."""

    def __init__(self, bus: MemoryBus, supervisor: Endpoint, relay: Relay) -> None:
        self.bus = bus
        self.supervisor = supervisor
        self.relay = relay

    def worker(self, name: str) -> Any:
        return self.bus.client(name, server=RELAY)

    async def tell(self, message: Message) -> Message:
        return await self.supervisor.request(RELAY, message, timeout_s=LIMIT_S)

    async def told(self, kind: type[Any]) -> Any:
        """Return the next message of ``kind`` that reaches the supervisor."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                event = await self.supervisor.receive()
                if isinstance(event, Delivery) and isinstance(event.message, kind):
                    return event.message


@asynccontextmanager
async def scene(folder: Path, **limits: float) -> AsyncIterator[Scene]:
    bus = MemoryBus()
    supervisor = bus.server(SUPERVISOR)
    service = bus.server(RELAY)
    control = bus.client(RELAY, server=SUPERVISOR)
    relay = Relay("run", "policy.weights/0", folder=folder)
    hosted = asyncio.create_task(host(WeightsActor(relay, control, service, **limits), control, [service]))
    here = Scene(bus, supervisor, relay)
    await control.send(SUPERVISOR, Heartbeat())
    await here.told(Heartbeat)
    yield here
    await supervisor.send(RELAY, Shutdown())
    async with asyncio.timeout(LIMIT_S):
        assert await hosted == 0
    assert os.listdir(folder) == []
    for endpoint in (supervisor, service, control):
        await endpoint.close()


def play(folder: Path, act: Callable[[Scene], Awaitable[None]], **limits: float) -> None:
    async def run() -> None:
        async with scene(folder, **limits) as here:
            assert await here.tell(Manifest((SPEC,))) == Ok()
            await act(here)

    asyncio.run(run())


def values(version: int) -> np.ndarray[Any, Any]:
    return np.arange(8, dtype=np.float32).reshape(4, 2) + version


async def ask(worker: Endpoint, message: Message) -> Any:
    return await worker.request(RELAY, message, timeout_s=LIMIT_S)


async def push(worker: Endpoint, version: int, *pieces: Piece) -> None:
    into = await ask(worker, PushBegin(version, worker.name))
    assert isinstance(into, PushInto)
    shared = np.memmap(into.path, np.float32, "r+", into.offsets["w"], (4, 2))
    boxes = [(slice(p.start[0], p.stop[0]), slice(p.start[1], p.stop[1])) for p in pieces]
    for box in boxes:
        shared[box] = values(version)[box]
    checksums = tuple(piece_checksum(values(version)[box]) for box in boxes)
    assert await ask(worker, PushDone(version, worker.name, pieces, checksums)) == Ok()


async def pull(worker: Endpoint, version: int) -> PullFrom:
    source = await ask(worker, Pull(version, worker.name))
    assert isinstance(source, PullFrom)
    found = np.fromfile(source.path, np.float32, 8, offset=source.offsets["w"]).reshape(4, 2)
    assert (found == values(source.version)).all()
    return source


def test_two_writers_a_flip_and_a_reader(tmp_path: Path) -> None:
    async def act(here: Scene) -> None:
        first, second, reader = here.worker("slot-0"), here.worker("slot-1"), here.worker("slot-2")
        await push(first, 1, HALVES[0])
        with pytest.raises(ProtocolError, match="version 1 is not visible; the newest is none yet"):
            await pull(reader, 1)
        await push(second, 1, HALVES[1])
        ready = await here.told(VersionReady)
        assert (ready.version, ready.tensors) == (1, 1)
        source = await pull(reader, 1)
        assert source.checksum == ready.checksum
        assert await ask(reader, PullDone(1, "slot-2")) == Ok()
        with pytest.raises(ProtocolError, match="not lent to slot-2"):
            await ask(reader, PullDone(1, "slot-2"))

    play(tmp_path, act)


def test_a_refused_push_is_loud(tmp_path: Path) -> None:
    async def act(here: Scene) -> None:
        writer = here.worker("slot-0")
        await ask(writer, PushBegin(1, "slot-0"))
        with pytest.raises(ProtocolError, match=r"the sent checksum is 0{16}"):
            await ask(writer, PushDone(1, "slot-0", (whole(SPEC),), ("0" * 16,)))
        fault = await here.told(Fault)
        assert not fault.fatal and "w [0:4, 0:2]: the sent checksum is" in fault.reason

    play(tmp_path, act)


def test_a_lost_writer_is_reported_and_its_half_dropped(tmp_path: Path) -> None:
    async def act(here: Scene) -> None:
        first, second = here.worker("slot-0"), here.worker("slot-1")
        await push(first, 1, HALVES[0])
        await ask(second, PushBegin(1, "slot-1"))
        await second.close()
        fault = await here.told(Fault)
        assert "version 1 is dropped: its writer slot-1 is gone" in fault.reason
        assert here.relay.version == -1
        again = here.worker("slot-1")
        await push(first, 1, HALVES[0])
        await push(again, 1, HALVES[1])
        assert (await here.told(VersionReady)).version == 1

    play(tmp_path, act)


def test_a_push_waits_for_a_slow_reader_and_no_longer_than_allowed(tmp_path: Path) -> None:
    async def act(here: Scene) -> None:
        writer = here.worker("slot-0")
        readers = [here.worker(f"slot-{i}") for i in (1, 2, 3)]
        for version, reader in enumerate(readers, 1):
            await push(writer, version, whole(SPEC))
            await pull(reader, version)
        with pytest.raises(
            ProtocolError, match=r"version 4 found no room within 0.2 s: all 3 buffers are in use: .*slot-1"
        ):
            await push(writer, 4, whole(SPEC))
        waiting = asyncio.create_task(push(writer, 4, whole(SPEC)))
        await readers[0].close()
        await waiting
        assert here.relay.version == 4

    play(tmp_path, act, wait_s=0.2)


def test_a_writer_lost_while_it_waits_is_granted_nothing(tmp_path: Path) -> None:
    async def act(here: Scene) -> None:
        writer, late = here.worker("slot-0"), here.worker("slot-1")
        await push(writer, 1, HALVES[0])
        waiting = asyncio.create_task(ask(late, PushBegin(2, "slot-1")))
        with pytest.raises(ProtocolError, match="not visible"):
            await pull(late, 1)  # answered after the push was: it waits now
        await late.close()
        with pytest.raises(PeerLost):
            await waiting
        other = here.worker("slot-2")
        await push(other, 1, HALVES[1])
        assert (await here.told(VersionReady)).version == 1
        await push(writer, 2, whole(SPEC))
        assert (await here.told(VersionReady)).version == 2

    play(tmp_path, act)


def test_a_publication_that_never_ends_is_dropped_and_named(tmp_path: Path) -> None:
    async def act(here: Scene) -> None:
        await push(here.worker("slot-0"), 1, HALVES[0])
        fault = await here.told(Fault)
        assert "not complete after 0.1 s; pushed by slot-0" in fault.reason
        assert "w: 4 of 8 elements are missing" in fault.reason

    play(tmp_path, act, publish_s=0.1)


def test_the_plan_says_how_many_writers_there_are(tmp_path: Path) -> None:
    async def act(here: Scene) -> None:
        relay, trainer = Emu(POLICY_WEIGHTS, 0, Layout(), (9,)), Emu(POLICY_TRAINING, 0, Layout(2), (0, 1))
        await here.supervisor.send(RELAY, Assign(relay, Plan(0, (trainer, relay))))
        assert (await here.told(Ready)).emu == "policy.weights/0"
        assert here.relay.writers == 2
        first, second = here.worker("slot-0"), here.worker("slot-1")
        await push(first, 1, HALVES[0])
        await ask(second, PushBegin(1, "slot-1"))
        with pytest.raises(ProtocolError, match="all 2 writers have pushed, but w: 4 of 8 elements are missing"):
            await ask(second, PushDone(1, "slot-1", (), ()))

    play(tmp_path, act)


def test_nobody_speaks_for_another_and_nonsense_is_refused(tmp_path: Path) -> None:
    async def act(here: Scene) -> None:
        worker = here.worker("slot-0")
        for message, fault in (
            (PushBegin(1, "slot-1"), "slot-0 may not push for slot-1"),
            (Pull(1, "slot-1"), "slot-0 may not pull for slot-1"),
            (Heartbeat(), "does not understand Heartbeat"),
        ):
            with pytest.raises(ProtocolError, match=fault):
                await ask(worker, message)
        with pytest.raises(ProtocolError, match="without tensors"):
            await here.tell(Manifest(()))

    play(tmp_path, act)
