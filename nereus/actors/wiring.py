"""How does an actor reach other actors, whatever carries the messages?

The process entry (``runtime/worker.py``) passes a ``Wiring`` over ZeroMQ; tests and the simulator pass one over the
in-process bus.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from nereus.bus.endpoint import Endpoint
from nereus.bus.messages import Peer


class Wiring(Protocol):
    """Opens client endpoints to servers that the supervisor named."""

    async def connect(self, server: str, address: str) -> Endpoint:
        """Return an authenticated client endpoint to ``server``; bounded by the start time-out."""


class Links:
    """The client endpoints that one actor holds, by server name; reconnects when a server has moved."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._open: dict[str, tuple[str, Endpoint]] = {}
        self._moved = asyncio.Condition()
        self._epoch = 0

    async def update(self, peers: tuple[Peer, ...]) -> None:
        """Connect to every peer whose address is new; an endpoint whose server has moved is closed."""
        for peer in peers:
            address, endpoint = self._open.get(peer.worker, ("", None))
            if address == peer.address:
                continue
            fresh = await self._wiring.connect(peer.worker, peer.address)
            if fresh.epoch < self._epoch:
                fresh.advance(self._epoch)
            self._open[peer.worker] = (peer.address, fresh)
            if endpoint is not None:
                await endpoint.close()
        async with self._moved:
            self._moved.notify_all()

    async def until_moved(self, server: str, endpoint: Endpoint, *, timeout_s: float) -> None:
        """Wait until ``server`` is reached by another endpoint than ``endpoint``; ``TimeoutError`` names it."""
        try:
            async with asyncio.timeout(timeout_s), self._moved:
                await self._moved.wait_for(lambda: self._open[server][1] is not endpoint)
        except TimeoutError:
            raise TimeoutError(f"{server} did not come back within {timeout_s:g} s") from None

    def __getitem__(self, server: str) -> Endpoint:
        return self._open[server][1]

    def __contains__(self, server: str) -> bool:
        return server in self._open

    def get(self, server: str) -> Endpoint | None:
        """Return the endpoint to ``server``; None if it was never named."""
        return self._open[server][1] if server in self._open else None

    def advance(self, epoch: int) -> None:
        """Enter a newer plan epoch on every link, and on those to come."""
        self._epoch = epoch
        for _, endpoint in self._open.values():
            endpoint.advance(epoch)

    async def close(self) -> None:
        while self._open:
            _, (_, endpoint) = self._open.popitem()
            await endpoint.close()
