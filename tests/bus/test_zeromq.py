"""Who gets in over ZeroMQ, what happens to those who should not, and which errors the operator reads."""

from __future__ import annotations

import asyncio
import os
import socket as sockets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from nereus.bus.codec import PROTOCOL, Envelope, Kind, encode
from nereus.bus.endpoint import PeerGone
from nereus.bus.gate import DOMAIN, Gate
from nereus.bus.keys import Keys, make_pair
from nereus.bus.messages import Heartbeat, Ok
from nereus.bus.session import Settings
from nereus.bus.zeromq import ZmqClient, ZmqServer
from nereus.errors import ConfigError, PeerLost
from tests.bus.worlds import ALLOWED, PAIRS, QUICK, ZmqWorld, delivery, gone, keys

ERROR_WITHIN_S = 5.0


class Raw:
    """A DEALER socket that says what a test wants, under whatever key and name."""

    def __init__(self, world: ZmqWorld, address: str, route: bytes, name: str | None, *, allowed: bool = True) -> None:
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.routing_id = route
        if name:
            pair = PAIRS[name] if allowed else make_pair(name)
            self.socket.curve_publickey = pair.public.encode()
            self.socket.curve_secretkey = pair.secret.encode()
            self.socket.curve_serverkey = PAIRS["supervisor"].public.encode()
        self.socket.connect(address)
        world.stack.callback(self.close)

    def close(self) -> None:
        self.socket.close()
        self._context.term()


def packet(source: str, seq: int = 0, kind: Kind = Kind.STATUS) -> bytes:
    return encode(Envelope(PROTOCOL, kind, source, "", seq, 0, 0, 0, 0, Heartbeat() if seq else None))


async def refused(name: str, address: str, its: Keys, **options: object) -> ConfigError:
    """Connect in vain; check that the error comes in time."""
    started = time.monotonic()
    with pytest.raises(ConfigError) as error:
        await ZmqClient.connect(name, server="supervisor", address=address, keys=its, settings=QUICK, **options)  # type: ignore[arg-type]
    assert time.monotonic() - started < ERROR_WITHIN_S
    return error.value


def test_a_key_that_is_not_allowed_is_told_so(zmq_world: ZmqWorld) -> None:
    async def main() -> None:
        server = await zmq_world.server()
        stranger = make_pair("rollout-0")
        error = await refused("rollout-0", server.address, Keys(stranger, ALLOWED))
        assert "supervisor refuses the key of rollout-0" in error.what
        assert error.where == server.address
        assert server.peers == ()

    zmq_world.run(main)


def test_a_wrong_server_key_is_told(zmq_world: ZmqWorld) -> None:
    async def main() -> None:
        server = await zmq_world.server()
        other = ALLOWED | {"supervisor": make_pair("supervisor").public}
        error = await refused("rollout-0", server.address, Keys(PAIRS["rollout-0"], other))
        assert "does not hold the key of supervisor" in error.what

    zmq_world.run(main)


def test_a_null_client_is_told_and_never_heard(zmq_world: ZmqWorld) -> None:
    async def main() -> None:
        server = await zmq_world.server()
        error = await refused("rollout-0", server.address, keys("rollout-0"), secure=False)
        assert "does not speak CURVE" in error.what
        assert server.peers == ()

    zmq_world.run(main)


def test_a_client_under_anothers_key_gets_no_answer(zmq_world: ZmqWorld) -> None:
    async def main() -> None:
        server = await zmq_world.server()
        hasty = msgspec.structs.replace(QUICK, connect_timeout_s=0.5)
        with pytest.raises(ConfigError, match="does the key in use belong to rollout-0"):
            await ZmqClient.connect(
                "rollout-0", server="supervisor", address=server.address, keys=keys("rollout-1"), settings=hasty
            )
        assert server.spoofed > 0
        assert server.peers == ()

    zmq_world.run(main)


def test_nobody_there_is_told(zmq_world: ZmqWorld) -> None:
    async def main() -> None:
        with sockets.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
            hasty = msgspec.structs.replace(QUICK, connect_timeout_s=0.3)
            with pytest.raises(ConfigError, match=r"nothing answered within 0\.3 s"):
                await ZmqClient.connect(
                    "rollout-0", server="supervisor", address=address, keys=keys("rollout-0"), settings=hasty
                )

    zmq_world.run(main)


def test_a_server_without_a_known_key_is_told(zmq_world: ZmqWorld) -> None:
    async def main() -> None:
        alone = Keys(PAIRS["rollout-0"], {"rollout-0": ALLOWED["rollout-0"]})
        error = await refused("rollout-0", "tcp://127.0.0.1:1", alone)
        assert "no public key of supervisor" in error.what

    zmq_world.run(main)


def test_a_taken_port_is_told_with_its_key(zmq_world: ZmqWorld) -> None:
    async def main() -> None:
        server = await zmq_world.server()
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match="taken") as error:
            await ZmqServer.bind("relay", keys=keys("relay"), port=port, settings=QUICK)
        assert error.value.where == f"bus.port 127.0.0.1:{port}"

    zmq_world.run(main)


def test_a_foreign_address_is_told(zmq_world: ZmqWorld) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=r"bus\.host"):
            await ZmqServer.bind("relay", keys=keys("relay"), host="192.0.2.1", port=1234, settings=QUICK)

    zmq_world.run(main)


def test_a_worker_cannot_speak_for_another(zmq_world: ZmqWorld) -> None:
    async def main() -> None:
        server = await zmq_world.server()
        honest = await zmq_world.client("rollout-0")
        spoof = Raw(zmq_world, server.address, b"rollout-0/evil", "rollout-1")
        await spoof.socket.send(packet("evil"))
        await spoof.socket.send(packet("evil", 1, Kind.SEND))
        await until(lambda: server.spoofed == 2)
        await honest.send("supervisor", Heartbeat())
        assert (await delivery(server)).incarnation == honest.incarnation
        assert server.peers == ("rollout-0",)

    zmq_world.run(main)


def test_a_key_that_is_not_on_the_list_delivers_nothing(zmq_world: ZmqWorld) -> None:
    async def main() -> None:
        server = await zmq_world.server()
        for route, name, allowed in ((b"rollout-0/x", "rollout-0", False), (b"rollout-0/y", None, True)):
            raw = Raw(zmq_world, server.address, route, name, allowed=allowed)
            await raw.socket.send(packet(route.decode()[-1]))
        await zmq_world.client("rollout-1")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                while True:
                    assert getattr(await server.receive(), "peer", "") == "rollout-1"

    zmq_world.run(main)


def test_keys_can_be_added_and_revoked_while_running(zmq_world: ZmqWorld) -> None:
    async def main() -> None:
        server = await zmq_world.server()
        assert isinstance(server, ZmqServer)
        staying, leaving = await zmq_world.client("rollout-0"), await zmq_world.client("rollout-1")
        await leaving.send("supervisor", Heartbeat())
        await delivery(server)
        late = make_pair("rollout-2")
        server.allow({name: ALLOWED[name] for name in ("supervisor", "rollout-0")} | {"rollout-2": late.public})
        assert "no longer on the allow-list" in (await gone(leaving)).why
        assert (await gone(server)).peer == "rollout-1"
        with pytest.raises(PeerLost):
            await leaving.send("supervisor", Heartbeat())
        error = await refused("rollout-1", server.address, keys("rollout-1"))
        assert "refuses the key" in error.what
        new = await ZmqClient.connect(
            "rollout-2", server="supervisor", address=server.address, keys=Keys(late, ALLOWED), settings=QUICK
        )
        zmq_world.stack.push_async_callback(new.close)
        await new.send("supervisor", Heartbeat())
        assert (await delivery(server)).peer == "rollout-2"
        await staying.send("supervisor", Heartbeat())
        assert (await delivery(server)).peer == "rollout-0"

    zmq_world.run(main)


def test_a_replaced_key_silences_who_holds_the_old_one(zmq_world: ZmqWorld) -> None:
    async def main() -> None:
        server = await zmq_world.server()
        assert isinstance(server, ZmqServer)
        raw = Raw(zmq_world, server.address, b"rollout-0/x", "rollout-0")
        await raw.socket.send(packet("x"))
        await server.receive()
        server.allow(ALLOWED | {"rollout-0": make_pair("rollout-0").public})
        assert isinstance(await server.receive(), PeerGone)
        await raw.socket.send(packet("x", 1, Kind.SEND))
        await until(lambda: server.spoofed == 1)

    zmq_world.run(main)


def test_garbage_is_counted_and_its_sender_cut(zmq_world: ZmqWorld) -> None:
    async def main() -> None:
        server = await zmq_world.server()
        honest = await zmq_world.client("rollout-1")
        raw = Raw(zmq_world, server.address, b"rollout-0/x", "rollout-0")
        await raw.socket.send(packet("x"))
        for garbage in (b"", b"\xc1", b"\x91" * 200_000, os.urandom(100), packet("other")) * 2:
            await raw.socket.send_multipart([garbage, b"frame"])
        lost = await gone(server)
        assert lost.peer == "rollout-0"
        assert "8 malformed packets" in lost.why
        await raw.socket.send(packet("x", 1, Kind.SEND))
        await honest.send("supervisor", Heartbeat())
        assert (await delivery(server)).peer == "rollout-1"

    zmq_world.run(main)


def test_a_pickle_is_never_opened(zmq_world: ZmqWorld, tmp_path: Path) -> None:
    async def main() -> None:
        server = await zmq_world.server()
        touched = tmp_path / "touched"
        bomb = b"cposix\nsystem\n(S'touch " + str(touched).encode() + b"'\ntR."
        raw = Raw(zmq_world, server.address, b"rollout-0/x", "rollout-0")
        await raw.socket.send(packet("x"))
        await raw.socket.send(bomb)
        await raw.socket.send_multipart([packet("x", 1, Kind.SEND), bomb])
        got = await delivery(server)
        assert bytes(got.frames[0]) == bomb
        assert server.malformed == 1
        assert not touched.exists()

    zmq_world.run(main)


def test_an_oversize_message_never_arrives_and_others_do(zmq_world: ZmqWorld) -> None:
    async def main() -> None:
        small = msgspec.structs.replace(QUICK, max_message_bytes=100_000)
        server = await zmq_world.server(settings=small)
        honest = await zmq_world.client("rollout-1", settings=small)
        raw = Raw(zmq_world, server.address, b"rollout-0/x", "rollout-0")
        await raw.socket.send(packet("x"))
        await raw.socket.send_multipart([packet("x", 1, Kind.SEND), bytes(200_000)])
        lost = await gone(server)
        assert lost.peer == "rollout-0"
        await honest.send("supervisor", Heartbeat())
        assert (await delivery(server)).peer == "rollout-1"

    zmq_world.run(main)


def test_a_recorded_message_played_again_has_no_effect(zmq_world: ZmqWorld) -> None:
    async def main() -> None:
        server = await zmq_world.server()
        raw = Raw(zmq_world, server.address, b"rollout-0/x", "rollout-0")
        for data in (packet("x"), packet("x", 1, Kind.SEND)) + (packet("x", 1, Kind.SEND),) * 3:
            await raw.socket.send(data)
        await raw.socket.send(packet("x", 2, Kind.SEND))
        assert (await delivery(server)).message == Heartbeat()
        assert (await delivery(server)).message == Heartbeat()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.receive(), 0.1)
        assert server.malformed == 0

    zmq_world.run(main)


def test_only_loopback_listens(zmq_world: ZmqWorld) -> None:
    async def main() -> None:
        before = listening()
        server = await zmq_world.server()
        await zmq_world.client()
        port = int(server.address.rpartition(":")[2])
        assert listening() - before == {("0100007F", port)}

    zmq_world.run(main)


def left_behind() -> list[str]:
    """Return this process's files in shared memory."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"nereus-{os.getpid()}-")]


async def until(holds: Callable[[], bool]) -> None:
    """Give the event loop its turns until ``holds``; the test's time limit bounds it."""
    while not holds():  # noqa: ASYNC110 - nothing signals that a message was refused
        await asyncio.sleep(0.002)


def listening() -> set[tuple[str, int]]:
    """Return (hexadecimal address, port) of the TCP sockets on which this process listens."""
    mine = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].rpartition(":")
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.add((address, int(port, 16)))
    return found


def test_a_gate_proves_that_it_refuses_strangers_and_only_one_can_stand() -> None:
    async def main() -> None:
        context = zmq.Context()
        gate = Gate(context, ALLOWED)
        await gate.prove(2.0)
        assert gate.refused == 1
        with pytest.raises(ConfigError, match="cannot be made active"):
            Gate(context, ALLOWED)
        gate.close()
        context.term()

    asyncio.run(main())


def test_a_server_does_not_listen_behind_a_gate_that_lets_strangers_in(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        before = listening()
        with pytest.raises(ConfigError, match="the allow-list is not active"):
            await ZmqServer.bind("supervisor", keys=keys("supervisor"), settings=QUICK)
        assert listening() == before

    class Everybody(dict[bytes, str]):
        def __contains__(self, key: object) -> bool:
            return True

    monkeypatch.setattr("nereus.bus.gate.public_to_name", lambda allowed: Everybody())
    asyncio.run(main())


@pytest.mark.parametrize("domain", [b"", b"other", b"nereus2"])
def test_only_the_exact_domain_is_served(domain: bytes) -> None:
    async def main() -> None:
        context = zmq.Context()
        gate = Gate(context, ALLOWED)
        probe = context.socket(zmq.REQ)
        probe.connect("inproc://zeromq.zap.01")
        key = zmq.utils.z85.decode(ALLOWED["rollout-0"].encode())
        answers = []
        for asked in (domain, DOMAIN):
            probe.send_multipart([b"1.0", b"7", asked, b"127.0.0.1", b"", b"CURVE", key])
            await until(lambda: probe.poll(0) != 0)
            answers.append(probe.recv_multipart()[2])
        assert answers == [b"400", b"200"]
        probe.close()
        gate.close()
        context.term()

    asyncio.run(main())


def test_big_frames_take_the_shared_memory_and_leave_nothing_there(zmq_world: ZmqWorld) -> None:
    async def main() -> None:
        server, client = await zmq_world.server(), await zmq_world.client()
        big = os.urandom(1 << 20)

        async def answer() -> None:
            for _ in range(5):
                question = await delivery(server)
                assert question.frames == (b"head", big)
                await server.reply(question, Ok())

        answering = asyncio.ensure_future(answer())
        for _ in range(5):
            assert await client.request("supervisor", Heartbeat(), [b"head", big], timeout_s=5) == Ok()
        await answering
        assert left_behind() == []
        await client.send("supervisor", Heartbeat(), [big])
        await client.close()
        await server.close()
        assert left_behind() == []

    zmq_world.run(main)


def test_without_shared_memory_big_frames_go_over_the_wire(zmq_world: ZmqWorld) -> None:
    async def main() -> None:
        wire = msgspec.structs.replace(QUICK, shared_frame_bytes=0)
        server, client = await zmq_world.server(settings=wire), await zmq_world.client(settings=wire)
        big = os.urandom(1 << 20)
        await client.send("supervisor", Heartbeat(), [big, b"tail"])
        got = await delivery(server)
        assert [bytes(frame) for frame in got.frames] == [big, b"tail"]

    zmq_world.run(main)


def test_what_is_lost_on_the_way_is_sent_again(zmq_world: ZmqWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        server, client = await zmq_world.server(), await zmq_world.client()
        await client.send("supervisor", Heartbeat())
        await delivery(server)
        write, count = ZmqClient._write, 0

        def losing(self: ZmqClient, lost_packet: object) -> None:
            nonlocal count
            count += 1
            if count <= 4:
                return
            write(self, lost_packet)  # type: ignore[arg-type]

        monkeypatch.setattr(ZmqClient, "_write", losing)
        for _ in range(4):
            await client.send("supervisor", Heartbeat())
        for _ in range(4):
            await delivery(server)

    zmq_world.run(main)


def test_a_worker_may_outlive_a_short_stop_of_its_connection() -> None:
    """The names are still those of the session after libzmq has connected anew."""

    async def main() -> None:
        slow = Settings(heartbeat_s=0.5, liveness_s=5.0, resend_s=0.2)
        proxy = await Proxy.start()
        server = await ZmqServer.bind("supervisor", keys=keys("supervisor"), settings=slow)
        proxy.target = int(server.address.rpartition(":")[2])
        client = await ZmqClient.connect(
            "rollout-0", server="supervisor", address=proxy.address, keys=keys("rollout-0"), settings=slow
        )
        await client.send("supervisor", Heartbeat())
        await delivery(server)
        proxy.cut()
        for _ in range(3):
            await client.send("supervisor", Heartbeat())
        for _ in range(3):
            assert (await asyncio.wait_for(delivery(server), 4)).incarnation == client.incarnation
        await client.close()
        await server.close()
        await proxy.close()

    asyncio.run(main())


class Proxy:
    """A TCP relay whose connections can be cut."""

    def __init__(self) -> None:
        self.target = 0
        self.address = ""
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @classmethod
    async def start(cls) -> Proxy:
        proxy = cls()
        proxy._server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
        proxy.address = f"tcp://127.0.0.1:{proxy._server.sockets[0].getsockname()[1]}"
        return proxy

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        assert self._server
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.target)
        self._writers += [writer, back]
        for source, sink in ((reader, back), (there, writer)):
            self._tasks.add(asyncio.create_task(self._pump(source, sink)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
        except ConnectionError:
            pass
        sink.close()
