"""The rules of ``endpoint.py``, for every implementation."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from nereus.bus.endpoint import Delivery, Fenced, PeerGone, PeerJoined, Undelivered
from nereus.bus.messages import Heartbeat, Ok, Pull, Refused, Release
from nereus.errors import PeerLost, ProtocolError
from tests.bus.worlds import QUICK, World, delivery, gone


def numbered(number: int) -> Release:
    return Release((number,))


def number_of(event: Delivery) -> int:
    assert isinstance(event.message, Release)
    return event.message.groups[0]


def test_messages_arrive_in_order_both_ways_with_more_than_a_window_in_flight(world: World) -> None:
    async def main() -> None:
        server, client = await world.server(), await world.client()
        count = 5 * QUICK.window

        async def up() -> None:
            for number in range(count):
                await client.send("supervisor", numbered(number))

        async def down() -> None:
            for number in range(count):
                await server.send("rollout-0", numbered(number))

        async def take(endpoint) -> list[int]:
            return [number_of(await delivery(endpoint)) for _ in range(count)]

        await client.send("supervisor", Heartbeat())
        assert (await delivery(server)).message == Heartbeat()
        _, _, at_server, at_client = await asyncio.gather(up(), down(), take(server), take(client))
        assert at_server == at_client == list(range(count))

    world.run(main)


def test_a_peer_joins_before_its_first_message(world: World) -> None:
    async def main() -> None:
        server, client = await world.server(), await world.client()
        await client.send("supervisor", Heartbeat())
        joined = await server.receive()
        assert joined == PeerJoined("rollout-0", client.incarnation)
        first = await server.receive()
        assert isinstance(first, Delivery)
        assert (first.peer, first.incarnation, first.epoch, first.token) == ("rollout-0", client.incarnation, 0, 0)

    world.run(main)


def test_frames_arrive_beside_the_message(world: World) -> None:
    async def main() -> None:
        server, client = await world.server(), await world.client()
        frames = [b"tokens", b"", bytearray(b"x" * 5000), memoryview(bytes(range(256)) * 4096)]
        await client.send("supervisor", Heartbeat(), frames)
        got = await delivery(server)
        assert [bytes(frame) for frame in got.frames] == [bytes(frame) for frame in frames]

    world.run(main)


def test_a_request_gets_its_own_reply_whatever_the_order(world: World) -> None:
    async def main() -> None:
        server, client = await world.server(), await world.client()
        asked = [
            asyncio.ensure_future(client.request("supervisor", Pull(version, "r"), timeout_s=5))
            for version in range(20)
        ]
        questions = [await delivery(server) for _ in asked]
        for question in reversed(questions):
            assert isinstance(question.message, Pull)
            await server.reply(question, numbered(question.message.version))
        assert await asyncio.gather(*asked) == [numbered(version) for version in range(20)]

    world.run(main)


def test_the_server_can_ask_too(world: World) -> None:
    async def main() -> None:
        server, client = await world.server(), await world.client()
        await client.send("supervisor", Heartbeat())
        await delivery(server)
        asked = asyncio.ensure_future(server.request("rollout-0", Heartbeat(), timeout_s=5))
        await client.reply(await delivery(client), Ok())
        assert await asked == Ok()

    world.run(main)


def test_refused_becomes_an_error_with_the_reason(world: World) -> None:
    async def main() -> None:
        server, client = await world.server(), await world.client()
        asked = asyncio.ensure_future(client.request("supervisor", Heartbeat(), timeout_s=5))
        await server.reply(await delivery(server), Refused("not today"))
        with pytest.raises(ProtocolError, match="supervisor refused: not today"):
            await asked

    world.run(main)


def test_a_request_times_out_naming_peer_and_message_and_its_late_reply_is_dropped(world: World) -> None:
    async def main() -> None:
        server, client = await world.server(), await world.client()
        with pytest.raises(TimeoutError, match=r"supervisor did not answer Pull within 0\.05 s"):
            await client.request("supervisor", Pull(1, "r"), timeout_s=0.05)
        late = await delivery(server)
        await server.reply(late, Ok())
        asked = asyncio.ensure_future(client.request("supervisor", Heartbeat(), timeout_s=5))
        await server.reply(await delivery(server), Refused("second"))
        with pytest.raises(ProtocolError, match="second"):
            await asked

    world.run(main)


def test_send_waits_for_credit_and_a_reply_needs_none(world: World) -> None:
    async def main() -> None:
        small = msgspec.structs.replace(QUICK, window=4, liveness_s=5.0)
        server, client = await world.server(settings=small), await world.client(settings=small)
        for number in range(4):
            await client.send("supervisor", numbered(number))
        blocked = asyncio.ensure_future(client.send("supervisor", numbered(4)))
        with pytest.raises(TimeoutError, match="gave no credit for Heartbeat"):
            await client.request("supervisor", Heartbeat(), timeout_s=0.05)
        assert not blocked.done()
        assert number_of(await delivery(server)) == 0
        await delivery(server)
        await asyncio.wait_for(blocked, 2)
        # The other way: the client takes nothing, and yet gets replies.
        for number in range(4):
            await server.send("rollout-0", numbered(number))
        for _ in range(2):
            await delivery(server)
        asked = asyncio.ensure_future(client.request("supervisor", Heartbeat(), timeout_s=5))
        while not (question := await delivery(server)).token:
            pass
        await server.reply(question, Ok())
        assert await asked == Ok()

    world.run(main)


def test_what_is_not_consumed_is_bounded_by_the_window(world: World) -> None:
    async def main() -> None:
        small = msgspec.structs.replace(QUICK, window=3)
        await world.server(settings=small)
        client = await world.client(settings=small)
        sent = 0

        async def flood() -> None:
            nonlocal sent
            while True:
                await client.send("supervisor", numbered(sent))
                sent += 1

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(flood(), 0.3)
        assert sent == 3

    world.run(main)


def test_cancelling_a_waiting_send_does_not_lose_credit(world: World) -> None:
    async def main() -> None:
        small = msgspec.structs.replace(QUICK, window=1)
        server, client = await world.server(settings=small), await world.client(settings=small)
        await client.send("supervisor", numbered(0))
        cancelled = asyncio.ensure_future(client.send("supervisor", numbered(1)))
        waiting = asyncio.ensure_future(client.send("supervisor", numbered(2)))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert number_of(await delivery(server)) == 0
        await asyncio.wait_for(waiting, 2)
        assert number_of(await delivery(server)) == 2

    world.run(main)


def test_an_older_epoch_is_fenced(world: World) -> None:
    async def main() -> None:
        server, client = await world.server(epoch=3), await world.client(epoch=2)
        taking = asyncio.ensure_future(delivery(server))
        with pytest.raises(Fenced) as fenced:
            await client.request("supervisor", Heartbeat(), timeout_s=5)
        assert (fenced.value.peer, fenced.value.epoch) == ("supervisor", 3)
        await client.send("supervisor", Pull(7, "r"))
        event = await client.receive()
        while isinstance(event, PeerJoined):
            event = await client.receive()
        assert event == Undelivered("supervisor", Pull(7, "r"), 3)
        client.advance(3)
        await client.send("supervisor", numbered(5))
        assert number_of(await taking) == 5
        with pytest.raises(ValueError, match="cannot go back"):
            client.advance(2)

    world.run(main)


def test_what_waits_in_the_inbox_is_fenced_when_the_receiver_advances(world: World) -> None:
    async def main() -> None:
        server, client = await world.server(), await world.client()
        await client.send("supervisor", Pull(7, "r"))
        assert isinstance(await server.receive(), PeerJoined)
        server.advance(1)
        taking = asyncio.ensure_future(delivery(server))
        event = await client.receive()
        while isinstance(event, PeerJoined):
            event = await client.receive()
        assert event == Undelivered("supervisor", Pull(7, "r"), 1)
        client.advance(1)
        await client.send("supervisor", numbered(1))
        assert number_of(await taking) == 1

    world.run(main)


def test_a_newer_epoch_is_delivered(world: World) -> None:
    async def main() -> None:
        server, client = await world.server(), await world.client(epoch=4)
        await client.send("supervisor", Heartbeat())
        assert (await delivery(server)).epoch == 4

    world.run(main)


def test_a_peer_that_closes_is_gone_and_everything_that_waits_for_it_ends(world: World) -> None:
    async def main() -> None:
        server, client = await world.server(), await world.client()
        asked = asyncio.ensure_future(client.request("supervisor", Heartbeat(), timeout_s=5))
        await delivery(server)
        await server.close()
        with pytest.raises(PeerLost, match="supervisor is lost: left"):
            await asked
        assert await gone(client) == PeerGone("supervisor", server.incarnation, "left")
        with pytest.raises(PeerLost):
            await client.send("supervisor", Heartbeat())
        with pytest.raises(PeerLost):
            await server.receive()

    world.run(main)


def test_a_peer_that_dies_without_a_word_is_gone_soon(world: World) -> None:
    async def main() -> None:
        server, client = await world.server(), await world.client()
        await client.send("supervisor", Heartbeat())
        await delivery(server)
        client.abort()
        lost = await asyncio.wait_for(gone(server), 3)
        assert (lost.peer, lost.incarnation) == ("rollout-0", client.incarnation)

    world.run(main)


def test_a_server_that_dies_without_a_word_is_gone_soon(world: World) -> None:
    async def main() -> None:
        server, client = await world.server(), await world.client()
        asked = asyncio.ensure_future(client.request("supervisor", Heartbeat(), timeout_s=5))
        await delivery(server)
        server.abort()
        with pytest.raises(PeerLost, match="connection closed"):
            await asyncio.wait_for(asked, 1.5)
        assert (await gone(client)).incarnation == server.incarnation

    world.run(main)


def test_a_new_incarnation_supersedes_the_old_one_for_ever(world: World) -> None:
    async def main() -> None:
        server, old = await world.server(), await world.client()
        await old.send("supervisor", numbered(1))
        assert number_of(await delivery(server)) == 1
        new = await world.client()
        lost = await gone(server)
        assert lost.incarnation == old.incarnation
        assert "superseded" in lost.why
        await new.send("supervisor", numbered(2))
        assert number_of(await delivery(server)) == 2
        assert "superseded" in (await gone(old)).why
        with pytest.raises(PeerLost, match="superseded"):
            await old.send("supervisor", numbered(3))
        await new.send("supervisor", numbered(4))
        assert number_of(await delivery(server)) == 4

    world.run(main)


def test_a_reply_to_a_superseded_incarnation_is_refused(world: World) -> None:
    async def main() -> None:
        server, old = await world.server(), await world.client()
        asked = asyncio.ensure_future(old.request("supervisor", Heartbeat(), timeout_s=5))
        question = await delivery(server)
        new = await world.client()
        await new.send("supervisor", Heartbeat())
        await gone(server)
        with pytest.raises(PeerLost):
            await server.reply(question, Ok())
        with pytest.raises(PeerLost):
            await asked

    world.run(main)


def test_idle_peers_stay(world: World) -> None:
    async def main() -> None:
        strict = msgspec.structs.replace(QUICK, liveness_s=0.3)
        server, client = await world.server(settings=strict), await world.client(settings=strict)
        await client.send("supervisor", Heartbeat())
        await delivery(server)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.gather(gone(server), gone(client)), 0.8)

    world.run(main)


def test_unknown_peers_wrong_replies_and_second_readers_are_told(world: World) -> None:
    async def main() -> None:
        server, client = await world.server(), await world.client()
        with pytest.raises(PeerLost, match="rollout-9"):
            await server.send("rollout-9", Heartbeat())
        await client.send("supervisor", Heartbeat())
        plain = await delivery(server)
        with pytest.raises(ValueError, match="not a request"):
            await server.reply(plain, Ok())
        reading = asyncio.ensure_future(server.receive())
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="two tasks receive"):
            await server.receive()
        reading.cancel()

    world.run(main)


def test_what_is_too_big_is_refused_at_the_sender(world: World) -> None:
    async def main() -> None:
        small = msgspec.structs.replace(QUICK, max_message_bytes=10_000, max_frames=3)
        server, client = await world.server(settings=small), await world.client(settings=small)
        with pytest.raises(ValueError, match="at most 3 frames and 10000 bytes"):
            await client.send("supervisor", Heartbeat(), [bytes(20_000)])
        with pytest.raises(ValueError, match="at most 10000"):
            await client.send("supervisor", Refused("x" * 20_000))
        with pytest.raises(ValueError, match="at most 3 frames"):
            await client.send("supervisor", Heartbeat(), [b""] * 4)
        await client.send("supervisor", numbered(1), [bytes(9_000)])
        assert number_of(await delivery(server)) == 1

    world.run(main)


def test_closing_hands_over_what_was_sent(world: World) -> None:
    async def main() -> None:
        server, client = await world.server(), await world.client()
        for number in range(10):
            await client.send("supervisor", numbered(number))
        await client.close()
        assert [number_of(await delivery(server)) for _ in range(10)] == list(range(10))
        assert (await gone(server)).why == "left"
        await client.close()

    world.run(main)


def test_no_task_is_left_behind(world: World) -> None:
    async def main() -> None:
        server, client = await world.server(), await world.client()
        await client.send("supervisor", Heartbeat())
        await delivery(server)
        await client.close()
        await server.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    world.run(main)
