"""Which keys may connect? The ZAP handler (RFC 27) behind a server's CURVE socket.

Owner: one ``ZmqServer``. libzmq asks it for every handshake in its context; without an answer nobody gets in, because
the server socket enforces its ZAP domain. A key that is on the list gets the key itself as its ``User-Id``: who that is
now, and whether it still is anybody, is looked up for every packet (``name_of``), so a revoked key is silenced at once.

Invariant (tests/bus/test_zeromq.py): a server never listens unless its gate has refused a probe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

import zmq
from zmq.utils import z85

from nereus.bus.keys import public_to_name
from nereus.errors import ConfigError

DOMAIN = b"nereus"
_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_MAX_BATCH = 256


class Gate:
    """Answers libzmq's questions on the event loop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: Mapping[str, str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._names = public_to_name(allowed)
        self.refused = 0
        """Handshakes that were refused."""
        self._context = context
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        try:
            self._socket.bind(_ADDRESS)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(
                f"the allow-list cannot be made active ({error})", where="bus", remedy="use one context per server"
            ) from None
        self._loop.add_reader(self._socket.fileno(), self._readable)

    def allow(self, allowed: Mapping[str, str]) -> None:
        """Replace the allow-list."""
        self._names = public_to_name(allowed)

    def name_of(self, public: bytes) -> str | None:
        """Return whose key this is; ``None`` if it is not, or no longer, on the list."""
        return self._names.get(public)

    def key_of(self, name: str) -> bytes | None:
        """Return the key of ``name`` on the present list."""
        return next((public for public, owner in self._names.items() if owner == name), None)

    async def prove(self, timeout_s: float) -> None:
        """Ask as libzmq does, with a key that cannot be on the list; ``ConfigError`` unless it is refused in time."""
        stranger, _ = zmq.curve_keypair()
        answered: asyncio.Future[bytes] = self._loop.create_future()
        probe = self._context.socket(zmq.DEALER)
        probe.linger = 0

        def readable() -> None:
            while cast(int, probe.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                reply = probe.recv_multipart()
                if not answered.done():
                    answered.set_result(reply[3])

        try:
            probe.connect(_ADDRESS)
            self._loop.add_reader(probe.fileno(), readable)
            probe.send_multipart([b"", _VERSION, b"probe", DOMAIN, b"", b"", b"CURVE", z85.decode(stranger)])
            self._loop.call_soon(readable)
            self._readable()
            status = await asyncio.wait_for(answered, timeout_s)
        except TimeoutError:
            status = b""
        finally:
            self._loop.remove_reader(probe.fileno())
            probe.close()
        if status != b"400":
            raise ConfigError(
                f"the allow-list is not active (a stranger's key got {status!r})",
                where="bus",
                remedy="this is a fault of Nereus or of libzmq; do not run without authentication",
            )

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _readable(self) -> None:
        for _ in range(_MAX_BATCH):
            try:
                request = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(request)
        self._loop.call_soon(self._readable)

    def _answer(self, request: list[bytes]) -> None:
        """Answer one request: [route, empty, version, id, domain, address, identity, mechanism, key]."""
        if len(request) < 8 or request[1] != b"" or request[2] != _VERSION:
            return
        route, number, domain, mechanism, credentials = request[0], request[3], request[4], request[7], request[8:]
        public = z85.encode(credentials[0]) if len(credentials) == 1 and len(credentials[0]) == 32 else b""
        admitted = domain == DOMAIN and mechanism == b"CURVE" and public in self._names
        self.refused += not admitted
        status, text, user = (b"200", b"OK", public) if admitted else (b"400", b"key is not on the allow-list", b"")
        self._socket.send_multipart([route, b"", _VERSION, number, status, text, user, b""], zmq.NOBLOCK)
