"""How do endpoints of different processes talk to each other? ROUTER and DEALER sockets under CURVE.

Owner: one process per endpoint. A server admits only keys on its allow-list (``gate.py``) and takes a worker's word
only under that worker's key; a client knows its server by the server's public key. The connection of a client is named
``WORKER/INCARNATION``, so that a restarted worker is never mistaken for its predecessor.

The sockets are read and written on the event loop without waiting and without a task per message: libzmq's file
descriptor only tells that *something* happened, so after each read or write the socket is asked for more. What libzmq
will not take (its bounded queues are full, the peer is away) is lost here and sent again by the protocol.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Mapping
from typing import Self, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from nereus.bus.driver import Driver
from nereus.bus.exchange import Exchange, Packet
from nereus.bus.gate import DOMAIN, Gate
from nereus.bus.keys import Keys
from nereus.bus.session import Frames, Settings
from nereus.bus.shared import SharedMemory, sweep
from nereus.core.plan import PlanEpoch
from nereus.errors import ConfigError

_log = logging.getLogger("nereus.bus")

_MAX_BATCH = 64
"""Messages that are read before other tasks get their turn."""
_LINGER_MS = 250
_RECONNECT_MS = 100
_MAX_RECONNECT_MS = 2000
_BACKLOG = 1024
_MAX_NAME_BYTES = 255
_KEEP_COPYING_BYTES = 4096
"""Frames below this are copied into libzmq: cheaper than telling Python when it has done with them."""

_Socket = zmq.Socket[bytes]
_Context = zmq.Context[_Socket]


class _ZmqEndpoint(Driver):
    """What both ends share: a socket that is read until it is empty whenever something has happened."""

    def __init__(self, exchange: Exchange, context: _Context, socket: _Socket) -> None:
        super().__init__(exchange)
        self._context = context
        self._socket = socket
        self._again = False
        self._reader = _fileno(socket)
        self._loop.add_reader(self._reader, self._readable)
        # A descriptor signals only to who has read until nothing was left.
        self._read_again()

    def _readable(self) -> None:
        """Read what has arrived, up to a batch."""
        self._again = False
        if self._closed:
            return
        read = 0
        try:
            while read < _MAX_BATCH:
                self._read_message()
                read += 1
        except zmq.Again:
            pass
        if read:
            self._settle()
        if read == _MAX_BATCH:
            self._read_again()

    def _read_again(self) -> None:
        if not self._again and not self._closed:
            self._again = True
            self._loop.call_soon(self._readable)

    def _read_message(self) -> None:
        """Read one message and let it arrive; ``zmq.Again`` if there is none."""
        raise NotImplementedError

    def _rest(self, part: zmq.Frame) -> Frames:
        """Read the parts of a message after ``part``, without copies."""
        frames: list[memoryview] = []
        while part.more:
            part = self._socket.recv(zmq.NOBLOCK, copy=False)
            frames.append(part.buffer)
        return tuple(frames)

    def _write(self, packet: Packet) -> None:
        socket, frames = self._socket, packet.frames
        last = len(frames) - 1
        socket.send(packet.head, zmq.NOBLOCK | zmq.SNDMORE if frames else zmq.NOBLOCK)
        for index, frame in enumerate(frames):
            flags = zmq.NOBLOCK | zmq.SNDMORE if index < last else zmq.NOBLOCK
            socket.send(frame, flags, copy=len(frame) < _KEEP_COPYING_BYTES)

    def _settle(self) -> None:
        wrote = bool(self._exchange.outbox)
        super()._settle()
        # Writing may swallow the signal that something has arrived.
        if wrote and not self._closed and _readable_now(self._socket):
            self._read_again()

    def _release(self) -> None:
        self._loop.remove_reader(self._reader)
        self._socket.close(_LINGER_MS)


class ZmqServer(_ZmqEndpoint):
    """The end that others connect to. Made by ``bind``."""

    def __init__(self, exchange: Exchange, context: _Context, socket: _Socket, gate: Gate | None) -> None:
        super().__init__(exchange, context, socket)
        self._gate = gate
        self.address = ""
        """``tcp://host:port`` to give to clients."""
        self.spoofed = 0
        """Messages under a name that the key does not belong to."""
        self._warned: set[bytes] = set()

    @classmethod
    async def bind(
        cls,
        name: str,
        *,
        keys: Keys | None,
        host: str = "127.0.0.1",
        port: int = 0,
        epoch: PlanEpoch = 0,
        settings: Settings | None = None,
        secure: bool = True,
    ) -> Self:
        """Listen on ``host:port`` (0: any free port); ``ConfigError`` if that is taken or the allow-list is not active.

        ``secure=False`` is for benchmarks that measure what CURVE costs.
        """
        settings = settings or Settings()
        context: _Context = zmq.Context()
        gate = None
        socket = context.socket(zmq.ROUTER)
        endpoint: Self | None = None
        try:
            _configure(socket, settings)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.BACKLOG, _BACKLOG)
            if secure:
                if keys is None:
                    raise ValueError("a server needs keys")
                gate = Gate(context, keys.allowed)
                await gate.prove(settings.connect_timeout_s)
                socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
                socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
                socket.curve_server = True
                socket.curve_secretkey = keys.pair.secret.encode()
                socket.curve_publickey = keys.pair.public.encode()
            _bind(socket, host, port)
            sweep()
            now = asyncio.get_running_loop().time()
            exchange = Exchange(name, _incarnation(), settings, now, epoch=epoch, host=SharedMemory())
            endpoint = cls(exchange, context, socket, gate)
            endpoint.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
            return endpoint
        finally:
            if endpoint is None:
                socket.close(0)
                if gate:
                    gate.close()
                context.term()

    def allow(self, allowed: Mapping[str, str]) -> None:
        """Replace the allow-list (worker id -> public key) while running.

        Workers whose key is no longer on it are cut now; new ones may connect from now on.
        """
        if self._gate is None:
            raise ValueError("a server without CURVE has no allow-list")
        before = {peer: self._gate.key_of(peer) for peer in self.peers}
        self._gate.allow(allowed)
        for peer, key in before.items():
            if self._gate.key_of(peer) != key:
                self._exchange.exclude(peer, "its key is no longer on the allow-list", self._loop.time())
        self._settle()

    def _read_message(self) -> None:
        socket = self._socket
        route: bytes = socket.recv(zmq.NOBLOCK)
        part = socket.recv(zmq.NOBLOCK, copy=False)
        frames = self._rest(part)
        peer, _, incarnation = route.decode("ascii", "replace").rpartition("/")
        if self._gate is not None:
            speaker = self._gate.name_of(_user_of(part))
            if speaker != peer:
                self._spoof(route, speaker)
                return
        if peer and incarnation:
            self._arrived(peer, incarnation, part.buffer, frames)

    def _spoof(self, route: bytes, speaker: str | None) -> None:
        """Refuse a message under a name that its key does not belong to."""
        self.spoofed += 1
        if len(self._warned) < _BACKLOG and route not in self._warned:
            self._warned.add(route)
            _log.warning("refused messages as %r under the key of %s", route, speaker or "nobody on the allow-list")

    def _transmit(self, packet: Packet) -> None:
        route = f"{packet.peer}/{packet.incarnation}".encode()
        try:
            self._socket.send(route, zmq.NOBLOCK | zmq.SNDMORE)
            self._write(packet)
        except zmq.Again:
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._exchange.broken(packet.peer, packet.incarnation, self._loop.time())

    def _release(self) -> None:
        super()._release()
        if self._gate:
            self._gate.close()
        self._context.term()


class ZmqClient(_ZmqEndpoint):
    """The end that connects to one server. Made by ``connect``."""

    def __init__(self, exchange: Exchange, context: _Context, socket: _Socket, address: str, secure: bool) -> None:
        self._address = address
        self._secure = secure
        self._closings = 0
        self._monitor: _Socket = socket.get_monitor_socket(_WATCHED)
        self._problem = ""
        self._changed: asyncio.Future[None] | None = None
        super().__init__(exchange, context, socket)
        self._loop.add_reader(_fileno(self._monitor), self._watch)
        self._loop.call_soon(self._watch)

    @classmethod
    async def connect(
        cls,
        name: str,
        *,
        server: str,
        address: str,
        keys: Keys | None,
        epoch: PlanEpoch = 0,
        settings: Settings | None = None,
        secure: bool = True,
    ) -> Self:
        """Connect to ``server`` and return when it has answered.

        ``ConfigError`` says within ``connect_timeout_s`` what is wrong: nobody listens, it is not that server, or it
        does not allow this key.
        """
        settings = settings or Settings()
        context: _Context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        loop = asyncio.get_running_loop()
        incarnation = _incarnation()
        endpoint: Self | None = None
        try:
            _configure(socket, settings)
            socket.setsockopt(zmq.ROUTING_ID, f"{name}/{incarnation}".encode())
            if secure:
                if keys is None:
                    raise ValueError("a client needs keys")
                if server not in keys.allowed:
                    raise ConfigError(
                        f"no public key of {server} is known", where=address, remedy="add it to the run's keys"
                    )
                socket.curve_secretkey = keys.pair.secret.encode()
                socket.curve_publickey = keys.pair.public.encode()
                socket.curve_serverkey = keys.allowed[server].encode()
            exchange = Exchange(
                name, incarnation, settings, loop.time(), epoch=epoch, server=server, host=SharedMemory()
            )
            endpoint = cls(exchange, context, socket, address, secure)
            socket.connect(address)
        finally:
            if endpoint is None:
                socket.close(0)
                context.term()
        try:
            patience_s = settings.connect_timeout_s
            if settings.heartbeat_s > 0:
                patience_s = min(patience_s, 0.9 * settings.liveness_s)
            await endpoint._establish(patience_s)
        except BaseException:
            endpoint.abort()
            raise
        return endpoint

    async def _establish(self, timeout_s: float) -> None:
        """Wait for the server's first packet, or for what makes it impossible."""
        self._settle()
        deadline = self._loop.time() + timeout_s
        while not self._exchange.established():
            if self._problem in _HOPELESS:
                break
            if self._exchange.peers() == ():
                self._problem = "refused"
                break
            self._changed = self._loop.create_future()
            left = deadline - self._loop.time()
            if left <= 0 or not (await asyncio.wait([self._changed], timeout=left))[0]:
                break
        self._changed = None
        if not self._exchange.established():
            what, remedy = _PROBLEMS.get(self._problem, _NO_ANSWER)
            server = self._exchange.server
            why = self._exchange.why_gone(server)
            what = what.format(name=self.name, server=server, timeout_s=timeout_s, why=why)
            raise ConfigError(what, where=self._address, remedy=remedy.format(name=self.name))

    def _settle(self) -> None:
        super()._settle()
        decided = self._exchange.established() or not self._exchange.peers()
        if decided and self._changed and not self._changed.done():
            self._changed.set_result(None)

    def _watch(self) -> None:
        """Take what libzmq reports about the connection."""
        while not self._closed and _readable_now(self._monitor):
            event = int(parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._problem = "silent"
            elif event == zmq.EVENT_DISCONNECTED:
                if self._exchange.established():
                    server = self._exchange.server
                    self._exchange.broken(server, self._exchange.incarnation_of(server), self._loop.time())
                    self._arm()
            elif event in _EVENTS:
                self._failed(_EVENTS[event])
            if self._changed and not self._changed.done() and self._problem in _HOPELESS:
                self._changed.set_result(None)

    def _failed(self, problem: str) -> None:
        """Note why a handshake failed; what may be a server just closing counts when it comes twice."""
        if problem == "wrong server key":
            self._closings += 1
            problem = problem if self._closings > 1 else self._problem
        self._problem = problem if self._secure or not problem else "other protocol"

    def _read_message(self) -> None:
        part = self._socket.recv(zmq.NOBLOCK, copy=False)
        frames = self._rest(part)
        self._arrived(self._exchange.server, "", part.buffer, frames)

    def _transmit(self, packet: Packet) -> None:
        try:
            self._write(packet)
        except zmq.Again:
            return

    def _release(self) -> None:
        self._loop.remove_reader(_fileno(self._monitor))
        self._socket.disable_monitor()
        self._monitor.close(0)
        super()._release()
        self._context.term()


_WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_DISCONNECTED
)
_EVENTS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "not allowed",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "wrong server key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "other protocol",
}
_HOPELESS = frozenset({"not allowed", "wrong server key", "other protocol"})
_NO_ANSWER = (
    "nothing answered within {timeout_s:g} s",
    "is the process there, and are address and port right?",
)
_PROBLEMS = {
    "not allowed": (
        "{server} refuses the key of {name}: it is not on the allow-list",
        "add {name} to the run's keys, or use the keys folder of this run",
    ),
    "wrong server key": (
        "whoever listens there does not hold the key of {server}",
        "is the address right, and are the keys those of this run?",
    ),
    "other protocol": (
        "whoever listens there does not speak CURVE as {server} does",
        "is the address right? Nereus servers are always encrypted",
    ),
    "refused": ("{server} refuses {name}: {why}", "start the worker anew, it gets a new incarnation"),
    "silent": (
        "connected as {name}, but {server} did not answer within {timeout_s:g} s",
        "does the key in use belong to {name}, and is the server's process alive?",
    ),
}


def _incarnation() -> str:
    """Return text that nobody can guess: it is part of the connection's name."""
    return secrets.token_hex(8)


def _user_of(part: zmq.Frame) -> bytes:
    """Return the public key under which a message came; empty without CURVE."""
    try:
        return str(part.get("User-Id")).encode()
    except zmq.ZMQError:
        return b""


def _fileno(socket: _Socket) -> int:
    """Return the descriptor that becomes readable when something has happened to ``socket``."""
    return cast(int, socket.getsockopt(zmq.FD))


def _readable_now(socket: _Socket) -> bool:
    return bool(cast(int, socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _configure(socket: _Socket, settings: Settings) -> None:
    """Bound everything a socket can hold or wait for."""
    queue = 4 * settings.window + 64
    socket.setsockopt(zmq.SNDHWM, queue)
    socket.setsockopt(zmq.RCVHWM, queue)
    socket.setsockopt(zmq.MAXMSGSIZE, settings.max_message_bytes)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, math.ceil(settings.connect_timeout_s * 1000))
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
    if settings.heartbeat_s > 0:
        # Closes a connection whose other end vanished without a word, so that its name becomes free.
        socket.setsockopt(zmq.HEARTBEAT_IVL, math.ceil(settings.heartbeat_s * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, math.ceil(settings.liveness_s * 1000))


def _bind(socket: _Socket, host: str, port: int) -> None:
    where = f"bus.port {host}:{port}"
    try:
        socket.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise ConfigError(
                "the port is taken by another process", where=where, remedy="set bus.port to another, or to 0 for any"
            ) from None
        raise ConfigError(
            f"cannot listen there ({error.strerror})", where=where, remedy="set bus.host to an address of this machine"
        ) from None
