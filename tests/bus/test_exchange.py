"""The protocol against a network that drops, doubles and reorders: a state machine, and single faults."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nereus.bus.codec import PROTOCOL, Envelope, Kind, decode, encode
from nereus.bus.endpoint import Delivery, Fenced, PeerGone, PeerJoined, Undelivered
from nereus.bus.exchange import Exchange, Packet
from nereus.bus.messages import Heartbeat, Ok, Release
from nereus.bus.session import Settings
from nereus.errors import PeerLost

WINDOW = 4
CALM = Settings(window=WINDOW, heartbeat_s=0, resend_s=1.0)
ALIVE = Settings(window=WINDOW, heartbeat_s=1.0, liveness_s=10.0, resend_s=1.0, max_violations=3)


class Net:
    """A server and a client, the packets between them, and a clock."""

    def __init__(self, settings: Settings) -> None:
        self.now = 0.0
        self.server = Exchange("supervisor", "s1", settings, 0.0)
        self.client = Exchange("rollout-0", "c1", settings, 0.0, server="supervisor")
        self.up: list[Packet] = []
        self.down: list[Packet] = []

    def collect(self) -> None:
        self.up += self.client.outbox
        self.client.outbox = []
        self.down += self.server.outbox
        self.server.outbox = []

    def bring_up(self, packet: Packet) -> None:
        self.server.arrived("rollout-0", "c1", packet.head, packet.frames, self.now)
        self.collect()

    def bring_down(self, packet: Packet) -> None:
        if packet.incarnation == "c1":
            self.client.arrived("supervisor", "", packet.head, packet.frames, self.now)
        self.collect()

    def settle(self) -> None:
        """Deliver everything, in order."""
        self.collect()
        while self.up or self.down:
            up, self.up = self.up, []
            for packet in up:
                self.bring_up(packet)
            down, self.down = self.down, []
            for packet in down:
                self.bring_down(packet)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for exchange in (self.client, self.server):
            exchange.acknowledge(self.now)
            exchange.poll(self.now)
        self.collect()


def joined(settings: Settings = ALIVE) -> Net:
    net = Net(settings)
    net.settle()
    assert net.server.next_event(0.0) == PeerJoined("rollout-0", "c1")
    assert net.client.next_event(0.0) == PeerJoined("supervisor", "s1")
    return net


class Faults(RuleBasedStateMachine):
    """Plain messages and requests both ways, while packets are lost, doubled and brought in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(CALM)
        self.net.settle()
        self.sent: dict[str, list[int]] = {"up": [], "down": []}
        self.got: dict[str, list[int]] = {"up": [], "down": []}
        self.asked: dict[int, int] = {}
        self.answers: dict[int, int] = {}
        self.questions: list[Delivery] = []

    def sides(self, way: str) -> tuple[Exchange, str, Exchange]:
        if way == "up":
            return self.net.client, "supervisor", self.net.server
        return self.net.server, "rollout-0", self.net.client

    @rule(way=st.sampled_from(["up", "down"]))
    def send(self, way: str) -> None:
        source, peer, _ = self.sides(way)
        if source.credit(peer) > 0:
            number = len(self.sent[way])
            source.send(peer, Release((number,)), (), self.net.now)
            self.sent[way].append(number)
            self.net.collect()

    @rule()
    def ask(self) -> None:
        if self.net.client.credit("supervisor") > 0:
            number = len(self.sent["up"])
            token = self.net.client.request("supervisor", Release((number,)), (), self.net.now)
            self.sent["up"].append(number)
            self.asked[token] = number
            self.net.collect()

    @precondition(lambda self: self.questions)
    @rule(place=st.integers(0, 100))
    def answer(self, place: int) -> None:
        question = self.questions.pop(place % len(self.questions))
        self.net.server.reply(question, question.message, (), self.net.now)
        self.net.collect()

    @rule(way=st.sampled_from(["up", "down"]))
    def consume(self, way: str) -> None:
        _, _, target = self.sides(way)
        event = target.next_event(self.net.now)
        if isinstance(event, Delivery):
            assert isinstance(event.message, Release)
            self.got[way].append(event.message.groups[0])
            if event.token:
                self.questions.append(event)
        self.net.collect()

    @rule(way=st.sampled_from(["up", "down"]), place=st.integers(0, 100), keep=st.booleans())
    def bring(self, way: str, place: int, keep: bool) -> None:
        packets = self.net.up if way == "up" else self.net.down
        if packets:
            place %= len(packets)
            packet = packets[place] if keep else packets.pop(place)
            (self.net.bring_up if way == "up" else self.net.bring_down)(packet)

    @rule(way=st.sampled_from(["up", "down"]), place=st.integers(0, 100))
    def lose(self, way: str, place: int) -> None:
        packets = self.net.up if way == "up" else self.net.down
        if packets:
            packets.pop(place % len(packets))

    @rule(seconds=st.sampled_from([0.01, 0.5, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.net.pass_time(seconds)
        for exchange in (self.net.client, self.net.server):
            exchange.credited.clear()

    @invariant()
    def in_order_and_at_most_once(self) -> None:
        for way in ("up", "down"):
            assert self.got[way] == self.sent[way][: len(self.got[way])]
        for outcome in self.net.client.outcomes:
            assert isinstance(outcome.result, Release)
            assert outcome.token not in self.answers
            self.answers[outcome.token] = outcome.result.groups[0]
            assert self.answers[outcome.token] == self.asked[outcome.token]
        self.net.client.outcomes.clear()

    @invariant()
    def within_the_window(self) -> None:
        assert len(self.sent["up"]) - len(self.got["up"]) <= WINDOW
        assert len(self.sent["down"]) - len(self.got["down"]) <= WINDOW

    @invariant()
    def honest_packets_are_never_malformed(self) -> None:
        assert self.net.server.malformed == self.net.client.malformed == 0

    def teardown(self) -> None:
        for _ in range(12):
            self.net.pass_time(40.0)
            self.net.settle()
            for _ in range(2 * WINDOW):
                self.consume("up")
                self.consume("down")
            while self.questions:
                self.answer(0)
        self.net.pass_time(1.0)
        self.net.settle()
        self.in_order_and_at_most_once()
        assert self.got == self.sent
        assert self.answers == self.asked
        assert not self.net.client.unacknowledged()
        assert not self.net.server.unacknowledged()
        assert self.net.client.credit("supervisor") == self.net.server.credit("rollout-0") == WINDOW


TestFaults = Faults.TestCase
TestFaults.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_a_replayed_packet_has_no_effect() -> None:
    net = joined()
    net.client.send("supervisor", Heartbeat(), (), 0.0)
    net.collect()
    old = net.up[0]
    net.settle()
    assert isinstance(net.server.next_event(0.0), Delivery)
    for _ in range(5):
        net.bring_up(old)
    assert net.server.next_event(0.0) is None
    assert net.server.malformed == 0


def test_a_silent_peer_is_gone_after_liveness_and_not_before() -> None:
    net = joined()
    for _ in range(9):
        net.now += 1.0
        net.server.poll(net.now)
    assert net.server.next_event(net.now) is None
    net.now += 1.0
    net.server.poll(net.now)
    event = net.server.next_event(net.now)
    assert isinstance(event, PeerGone)
    assert event.why.startswith("silent for 10")


def test_heartbeats_keep_a_peer_alive() -> None:
    net = joined()
    for _ in range(40):
        net.pass_time(1.0)
        net.settle()
    assert net.server.next_event(net.now) is net.client.next_event(net.now) is None


def test_a_process_that_stood_still_does_not_blame_its_peers() -> None:
    net = joined()
    net.now = 100.0
    net.server.poll(net.now)
    assert net.server.next_event(net.now) is None


def test_a_broken_connection_gets_two_heartbeats_to_come_back() -> None:
    net = joined()
    net.server.broken("rollout-0", "c1", net.now)
    net.pass_time(1.0)
    net.settle()
    net.pass_time(1.0)
    assert net.server.next_event(net.now) is None
    net.server.broken("rollout-0", "c1", net.now)
    net.now += 1.0
    net.server.poll(net.now)
    net.now += 1.0
    net.server.poll(net.now)
    event = net.server.next_event(net.now)
    assert isinstance(event, PeerGone)
    assert "connection closed" in event.why


def test_after_it_is_gone_an_incarnation_is_refused_and_learns_it() -> None:
    net = joined()
    for _ in range(10):
        net.now += 1.0
        net.server.poll(net.now)
    net.server.next_event(net.now)
    net.server.outbox.clear()
    net.client.send("supervisor", Heartbeat(), (), net.now)
    net.settle()
    assert net.server.next_event(net.now) is None
    event = net.client.next_event(net.now)
    assert isinstance(event, PeerGone)
    assert event.why.startswith("silent for 10")
    with pytest.raises(PeerLost, match="silent"):
        net.client.send("supervisor", Heartbeat(), (), net.now)


def test_a_server_that_started_anew_does_not_continue_old_sessions() -> None:
    net = joined()
    net.server = Exchange("supervisor", "s2", ALIVE, net.now)
    net.client.send("supervisor", Heartbeat(), (), net.now)
    net.settle()
    assert net.server.next_event(net.now) is None
    assert isinstance(net.client.next_event(net.now), PeerGone)


def test_garbage_is_counted_and_the_peer_is_cut() -> None:
    net = joined()
    token = net.server.request("rollout-0", Heartbeat(), (), 0.0)
    net.settle()
    for _ in range(3):
        assert net.server.peers() == ("rollout-0",)
        net.server.arrived("rollout-0", "c1", b"garbage", (), net.now)
    assert net.server.malformed == 3
    event = net.server.next_event(net.now)
    assert isinstance(event, PeerGone)
    assert "3 malformed packets" in event.why
    assert [outcome.token for outcome in net.server.outcomes] == [token]
    net.settle()
    net.client.next_event(net.now)
    assert isinstance(net.client.next_event(net.now), PeerGone)


def test_garbage_of_strangers_makes_no_session() -> None:
    server = Exchange("supervisor", "s1", ALIVE, 0.0)
    for number in range(3000):
        server.arrived("rollout-0", f"c{number}", b"\xc1", (), 0.0)
    assert server.peers() == ()
    assert server.next_event(0.0) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"ack": 1 << 40},
        {"consumed": 1},
        {"source": "c9"},
        {"target": "s9"},
    ],
    ids=str,
)
def test_lies_about_the_session_are_violations(changes: dict[str, object]) -> None:
    net = joined()
    honest = Envelope(PROTOCOL, Kind.SEND, "c1", "s1", 1, 0, 0, 0, 0, Heartbeat())
    lie = encode(msgspec.structs.replace(honest, **changes))
    net.server.arrived("rollout-0", "c1", lie, (), 0.0)
    assert net.server.malformed == 1
    assert net.server.next_event(0.0) is None


def test_a_peer_that_ignores_credit_cannot_fill_the_memory() -> None:
    net = joined()
    for seq in range(1, 2000):
        packet = Envelope(PROTOCOL, Kind.SEND, "c1", "s1", seq, 0, 0, 0, 0, Heartbeat())
        net.server.arrived("rollout-0", "c1", encode(packet), (), 0.0)
    count = 0
    while net.server.next_event(0.0):
        count += 1
    assert count == 256


def test_an_oversize_packet_is_a_violation() -> None:
    small = msgspec.structs.replace(ALIVE, max_message_bytes=1000)
    net = joined(small)
    packet = Envelope(PROTOCOL, Kind.SEND, "c1", "s1", 1, 0, 0, 0, 0, Heartbeat())
    net.server.arrived("rollout-0", "c1", encode(packet), (bytes(1000),), 0.0)
    assert net.server.malformed == 1


def test_fencing_gives_a_plain_message_back_and_fails_a_request() -> None:
    net = joined()
    net.server.advance(2)
    net.client.send("supervisor", Release((1,)), (), 0.0)
    token = net.client.request("supervisor", Heartbeat(), (), 0.0)
    net.settle()
    assert net.server.next_event(0.0) is None
    net.settle()
    assert net.client.next_event(0.0) == Undelivered("supervisor", Release((1,)), 2)
    (outcome,) = net.client.outcomes
    assert outcome.token == token
    assert isinstance(outcome.result, Fenced)
    assert outcome.result.epoch == 2


def test_a_reply_is_delivered_though_its_requester_advanced_meanwhile() -> None:
    net = joined()
    net.client.request("supervisor", Heartbeat(), (), 0.0)
    net.settle()
    question = net.server.next_event(0.0)
    assert isinstance(question, Delivery)
    net.client.advance(1)
    net.server.reply(question, Ok(), (), 0.0)
    net.settle()
    assert [outcome.result for outcome in net.client.outcomes] == [Ok()]


def test_calm_exchanges_have_nothing_due_when_all_is_done() -> None:
    net = joined(CALM)
    net.client.send("supervisor", Heartbeat(), (), 0.0)
    net.settle()
    net.server.next_event(0.0)
    net.pass_time(5.0)
    net.settle()
    net.pass_time(5.0)
    assert net.client.due == net.server.due == float("inf")
    assert not net.client.owes()
    assert not net.server.owes()


def test_packets_decode_as_they_were_encoded() -> None:
    net = joined()
    net.client.send("supervisor", Release((4,)), (b"frame",), 0.0)
    (packet,) = net.client.outbox
    assert packet.frames == (b"frame",)
    envelope = decode(packet.head, packet.frames)
    assert (envelope.kind, envelope.seq, envelope.target, envelope.message) == (Kind.SEND, 1, "s1", Release((4,)))


def plain(seq: int) -> bytes:
    return encode(Envelope(PROTOCOL, Kind.SEND, "c1", "s1", seq, 0, 0, 0, 0, Release((seq,))))


def test_what_came_early_is_delivered_without_being_sent_again() -> None:
    net = joined()
    for seq in (3, 2, 1):
        net.server.arrived("rollout-0", "c1", plain(seq), (), 0.0)
    events = [net.server.next_event(0.0) for _ in range(3)]
    assert [event.message for event in events if isinstance(event, Delivery)] == [Release((seq,)) for seq in (1, 2, 3)]


def test_what_came_early_is_bounded_and_what_came_late_is_not_kept() -> None:
    net = joined()
    for seq in (1, 2, *range(4, 5000), 1, 2):
        net.server.arrived("rollout-0", "c1", plain(seq), (), 0.0)
    early = net.server._sessions["rollout-0"].early
    assert 0 < len(early) <= 256
    assert min(early) == 4


def test_a_lost_acknowledgement_is_repeated_when_the_message_comes_again() -> None:
    net = joined()
    net.client.send("supervisor", Heartbeat(), (), 0.0)
    net.collect()
    (again,) = net.up
    net.settle()
    net.server.next_event(0.0)
    net.server.acknowledge(0.0)
    net.server.outbox.clear()  # the acknowledgement is lost
    assert net.client.unacknowledged()
    net.bring_up(again)
    net.server.acknowledge(0.0)
    net.settle()
    assert not net.client.unacknowledged()


def test_credit_comes_back_for_what_was_consumed_and_not_for_what_arrived() -> None:
    net = joined()
    for _ in range(WINDOW):
        net.client.send("supervisor", Heartbeat(), (), 0.0)
    assert net.client.credit("supervisor") == 0
    net.settle()
    net.server.acknowledge(0.0)
    net.settle()
    assert not net.client.unacknowledged()
    assert net.client.credit("supervisor") == 0
    net.server.next_event(0.0)
    net.server.acknowledge(0.0)
    net.settle()
    assert net.client.credit("supervisor") == 1
