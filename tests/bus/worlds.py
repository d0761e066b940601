"""Worlds in which the same tests run: endpoints in memory on virtual time, and over ZeroMQ on both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

from nereus.bus.endpoint import Delivery, Event, PeerGone, PeerJoined
from nereus.bus.keys import Keys, make_pair
from nereus.bus.memory import MemoryBus, MemoryEndpoint
from nereus.bus.session import Settings
from nereus.bus.zeromq import ZmqClient, ZmqServer
from nereus.sim.loop import VirtualTimeLoop

NAMES = ("supervisor", "relay", "rollout-0", "rollout-1")
PAIRS = {name: make_pair(name) for name in NAMES}
ALLOWED = {name: pair.public for name, pair in PAIRS.items()}
QUICK = Settings(heartbeat_s=0.05, liveness_s=2.0, resend_s=0.2, linger_s=1.0, connect_timeout_s=3.0)
AnyEndpoint = MemoryEndpoint | ZmqServer | ZmqClient


def keys(name: str) -> Keys:
    return Keys(PAIRS[name], ALLOWED)


class World:
    """Makes endpoints and closes them at the end."""

    def __init__(self, loops: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self._loops = loops
        self.stack = AsyncExitStack()

    def run(self, test: Callable[[], Coroutine[Any, Any, None]], timeout_s: float = 10.0) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(timeout_s), self.stack:
                await test()

        with asyncio.Runner(loop_factory=self._loops) as runner:
            runner.run(bounded())

    async def server(self, name: str = "supervisor", *, epoch: int = 0, settings: Settings = QUICK) -> AnyEndpoint:
        endpoint = await self._server(name, epoch, settings)
        self.stack.push_async_callback(endpoint.close)
        return endpoint

    async def client(
        self, name: str = "rollout-0", server: str = "supervisor", *, epoch: int = 0, settings: Settings = QUICK
    ) -> AnyEndpoint:
        endpoint = await self._client(name, server, epoch, settings)
        self.stack.push_async_callback(endpoint.close)
        return endpoint

    async def _server(self, name: str, epoch: int, settings: Settings) -> AnyEndpoint:
        raise NotImplementedError

    async def _client(self, name: str, server: str, epoch: int, settings: Settings) -> AnyEndpoint:
        raise NotImplementedError


class MemoryWorld(World):
    def __init__(self) -> None:
        super().__init__(VirtualTimeLoop)
        self.bus = MemoryBus()

    async def _server(self, name: str, epoch: int, settings: Settings) -> AnyEndpoint:
        self.bus.settings = settings
        return self.bus.server(name, epoch=epoch)

    async def _client(self, name: str, server: str, epoch: int, settings: Settings) -> AnyEndpoint:
        self.bus.settings = settings
        return self.bus.client(name, server=server, epoch=epoch)


class ZmqWorld(World):
    def __init__(self, loops: Callable[[], asyncio.AbstractEventLoop]) -> None:
        super().__init__(loops)
        self.addresses: dict[str, str] = {}

    async def _server(self, name: str, epoch: int, settings: Settings) -> AnyEndpoint:
        endpoint = await ZmqServer.bind(name, keys=keys(name), epoch=epoch, settings=settings)
        self.addresses[name] = endpoint.address
        return endpoint

    async def _client(self, name: str, server: str, epoch: int, settings: Settings) -> AnyEndpoint:
        address = self.addresses[server]
        return await ZmqClient.connect(
            name, server=server, address=address, keys=keys(name), epoch=epoch, settings=settings
        )


async def delivery(endpoint: AnyEndpoint) -> Delivery:
    """Return the next message, passing over who joined."""
    while True:
        event: Event = await endpoint.receive()
        if isinstance(event, Delivery):
            return event
        assert isinstance(event, PeerJoined), event


async def gone(endpoint: AnyEndpoint) -> PeerGone:
    """Return the next loss of a peer, passing over all else."""
    while True:
        event = await endpoint.receive()
        if isinstance(event, PeerGone):
            return event
