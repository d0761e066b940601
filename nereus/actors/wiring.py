"""How does an actor reach other actors, whatever carries the messages?

The process entry (``runtime/worker.py``) passes a ``Wiring`` over ZeroMQ; tests and the simulator pass one over the
in-process bus.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

from nereus.bus.endpoint import Endpoint
from nereus.bus.messages import Peer
from nereus.errors import NereusError, PeerLost


class Wiring(Protocol):
    """Opens client endpoints to servers that the supervisor named."""

    async def connect(self, server: str, address: str) -> Endpoint:
        """Return an authenticated client endpoint to ``server``; bounded by the start time-out."""


class Links:
    """The client endpoints that one actor holds, by server name.

    A link is made when it is first used and again when it was lost: two processes may lose each other while the
    supervisor hears both, and one that it has just named may be dead by now. Neither may cost more than one request.
    """

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._named: dict[str, str] = {}
        self._open: dict[str, tuple[str, Endpoint]] = {}
        self._connecting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._news = asyncio.Condition()
        self._epoch = 0

    async def update(self, peers: Iterable[Peer]) -> None:
        """Learn where servers are; an endpoint whose server has moved is closed."""
        for peer in peers:
            if self._named.get(peer.worker) == peer.address:
                continue
            self._named[peer.worker] = peer.address
            _, endpoint = self._open.pop(peer.worker, ("", None))
            if endpoint is not None:
                await endpoint.close()
        async with self._news:
            self._news.notify_all()

    def address(self, server: str) -> str:
        """Return where ``server`` is; empty if it was never named."""
        return self._named.get(server, "")

    async def to(self, server: str) -> Endpoint:
        """Return an endpoint that is connected to ``server``; ``PeerLost`` if it cannot be reached."""
        async with self._connecting[server]:
            address = self.address(server)
            if not address:
                raise PeerLost(server, "nobody has said where it is")
            made_for, endpoint = self._open.get(server, ("", None))
            if endpoint is not None:
                if made_for == address and server in endpoint.peers:
                    return endpoint
                del self._open[server]
                await endpoint.close()
            try:
                fresh = await self._wiring.connect(server, address)
            except NereusError as error:
                raise PeerLost(server, str(error)) from error
            if fresh.epoch < self._epoch:
                fresh.advance(self._epoch)
            self._open[server] = (address, fresh)
            return fresh

    async def wait_for_news(self, seconds: float) -> None:
        """Wait until the supervisor says where servers are, at most so long."""
        try:
            async with asyncio.timeout(seconds), self._news:
                await self._news.wait()
        except TimeoutError:
            return

    def advance(self, epoch: int) -> None:
        """Enter a newer plan epoch on every link, and on those to come."""
        self._epoch = epoch
        for _, endpoint in self._open.values():
            endpoint.advance(epoch)

    async def close(self) -> None:
        while self._open:
            _, (_, endpoint) = self._open.popitem()
            await endpoint.close()
