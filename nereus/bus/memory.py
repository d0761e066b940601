"""How do endpoints in one process talk to each other?

Owner: a test or the simulator makes one ``MemoryBus``. It is a verified fake: the same protocol, the same bytes and the
same test suite as ``zeromq``; only the wire is a call on the event loop. Frames are passed on as they are.

Time comes from the loop alone and everything happens in the order of the calls, so that a loop with virtual time gives
the same run each time. With ``heartbeat_s=0`` no timer stands while nothing is under way.
"""

from __future__ import annotations

import asyncio
import itertools

from nereus.bus.codec import Envelope
from nereus.bus.driver import Driver
from nereus.bus.exchange import Exchange, Packet
from nereus.bus.session import Frames, Settings
from nereus.core.plan import PlanEpoch
from nereus.errors import ConfigError

_Address = tuple[str, str]
"""Worker id and incarnation."""


class MemoryBus:
    """All endpoints of one process."""

    def __init__(self, settings: Settings | None = None, *, unpacked: bool = False) -> None:
        """``unpacked``: pass messages on as they are; frozen values need no copy. For runs of many endpoints, where
        packing and reading the same plan for each of them is most of the work."""
        self.settings = settings or Settings()
        self.exchange: type[Exchange] = _Unpacked if unpacked else Exchange
        self._servers: dict[str, MemoryEndpoint] = {}
        self._clients: dict[_Address, MemoryEndpoint] = {}
        self._cut: set[frozenset[str]] = set()
        self._ordinals = itertools.count(1)

    def server(self, name: str, *, epoch: PlanEpoch = 0) -> MemoryEndpoint:
        """Make the server endpoint ``name``."""
        if name in self._servers:
            raise ConfigError("is a server already", where=name, remedy="close it first or choose another name")
        endpoint = self._servers[name] = MemoryEndpoint(self, name, self._incarnation(name), epoch, "")
        return endpoint

    def client(self, name: str, *, server: str, epoch: PlanEpoch = 0) -> MemoryEndpoint:
        """Make a client endpoint of ``server``: each call is a new incarnation of ``name``."""
        if server not in self._servers:
            raise ConfigError("no such server", where=server, remedy=f"servers are {sorted(self._servers)}")
        incarnation = self._incarnation(name)
        endpoint = self._clients[name, incarnation] = MemoryEndpoint(self, name, incarnation, epoch, server)
        endpoint.start()
        return endpoint

    def cut(self, *names: str) -> None:
        """Lose every packet from and to one name, or between two, until ``heal``: a network partition."""
        self._cut.add(frozenset(names))

    def heal(self, *names: str) -> None:
        self._cut.discard(frozenset(names))

    def _incarnation(self, name: str) -> str:
        return f"{name}.{next(self._ordinals)}"

    def carry(self, source: MemoryEndpoint, packet: Packet) -> None:
        """Bring ``packet`` to its endpoint, unless there is none."""
        ends = frozenset((source.name, packet.peer))
        if any(cut <= ends for cut in self._cut):
            return
        if source.is_client:
            target = self._servers.get(packet.peer)
            origin = source.incarnation
        else:
            target = self._clients.get((packet.peer, packet.incarnation))
            origin = ""
        if target is None:
            source.lost_connection(packet.peer, packet.incarnation)
        else:
            target.take(source.name, origin, packet.head, packet.frames)

    def remove(self, endpoint: MemoryEndpoint) -> None:
        if endpoint.is_client:
            self._clients.pop((endpoint.name, endpoint.incarnation), None)
        else:
            self._servers.pop(endpoint.name, None)


class _Passed(bytes):
    """No bytes, but the envelope itself."""

    envelope: Envelope


class _Unpacked(Exchange):
    """An exchange whose packets hold the envelopes themselves."""

    def _to_wire(self, envelope: Envelope) -> bytes:
        passed = _Passed()
        passed.envelope = envelope
        return passed

    def _from_wire(self, head: bytes | memoryview, frames: Frames) -> Envelope:
        assert isinstance(head, _Passed), "all endpoints of this bus pass envelopes"
        return head.envelope


class MemoryEndpoint(Driver):
    """One end of a ``MemoryBus``."""

    def __init__(self, bus: MemoryBus, name: str, incarnation: str, epoch: PlanEpoch, server: str) -> None:
        now = asyncio.get_running_loop().time()
        super().__init__(bus.exchange(name, incarnation, bus.settings, now, epoch=epoch, server=server))
        self._bus = bus

    @property
    def is_client(self) -> bool:
        return bool(self._exchange.server)

    def start(self) -> None:
        self._settle()

    def take(self, peer: str, incarnation: str, head: bytes, frames: Frames) -> None:
        """Let a packet arrive in the loop's next round."""
        self._loop.call_soon(self._take, peer, incarnation, head, frames)

    def exclude(self, peer: str, why: str) -> None:
        """Give up the present incarnation of ``peer``: what time-outs do where there are heartbeats."""
        self._exchange.exclude(peer, why, self._loop.time())
        self._settle()

    def lost_connection(self, peer: str, incarnation: str) -> None:
        self._exchange.broken(peer, incarnation, self._loop.time())

    def _take(self, peer: str, incarnation: str, head: bytes, frames: Frames) -> None:
        if not self._closed:
            self._arrived(peer, incarnation, head, frames)
            self._settle()

    def _transmit(self, packet: Packet) -> None:
        self._bus.carry(self, packet)

    def _release(self) -> None:
        self._bus.remove(self)
