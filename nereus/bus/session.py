"""What does one end know about its conversation with one incarnation of one peer?

Owner: an ``Exchange``, which keeps one session per living peer. Pure bookkeeping: sequence numbers, what has arrived
and what was consumed on either side, what must be sent again, when the peer was last heard. Time is an argument.

Invariants (tests/bus/test_exchange.py): messages come out in the order of their numbers, each once, whatever the
network drops, doubles or reorders; credit never exceeds the window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from msgspec import Struct

from nereus.bus.codec import Envelope, Kind, SharedFrame
from nereus.bus.endpoint import Buffer
from nereus.bus.messages import Message
from nereus.core.plan import PlanEpoch
from nereus.errors import ProtocolError

Frames = tuple[Buffer, ...]

_MAX_BACKOFF = 5


class Channel(Protocol):
    """Carries the big frames of one conversation past the bus (see ``shared.py``)."""

    def put(self, frames: Frames, threshold_bytes: int) -> tuple[Frames, tuple[SharedFrame, ...]]:
        """Move big frames away; return the others and where the moved ones lie."""

    def release(self, shared: tuple[SharedFrame, ...]) -> None:
        """Note that the peer has taken these."""

    def take(self, frames: Frames, shared: tuple[SharedFrame, ...]) -> Frames:
        """Undo ``put`` on the other end; ``ProtocolError`` if a frame is not what was promised."""

    def close(self) -> None: ...


class Settings(Struct, frozen=True, kw_only=True):
    """The numbers an endpoint keeps to; both ends of a bus should use the same."""

    window: int = 64
    """Unconsumed messages to one peer."""
    heartbeat_s: float = 1.0
    """A status packet is sent after this long without another; 0: neither heartbeats nor liveness."""
    liveness_s: float = 15.0
    """A peer that was not heard for this long is gone."""
    resend_s: float = 2.0
    """First time-out of an unacknowledged message; it doubles with each attempt, up to 32 times."""
    ack_delay_s: float = 0.005
    """How long an acknowledgement waits for a message that could carry it."""
    max_message_bytes: int = 256 * 1024 * 1024
    """Envelope and all frames."""
    max_frames: int = 64
    max_violations: int = 8
    """Malformed packets after which a peer is cut."""
    connect_timeout_s: float = 5.0
    linger_s: float = 2.0
    """How long ``close`` waits for acknowledgements."""
    shared_frame_bytes: int = 256 * 1024
    """Frames of at least this size go through shared memory to a peer on the same host; 0: never."""


class Entry(Struct):
    """A message that the peer has not acknowledged yet."""

    seq: int
    kind: Kind
    epoch: PlanEpoch
    token: int
    message: Message
    frames: Frames
    shared: tuple[SharedFrame, ...]
    sent_at: float
    tries: int = 0


class Arrived(Struct, frozen=True):
    """A sequenced packet as it came."""

    envelope: Envelope
    frames: Frames


class Session:
    """One conversation; ``incarnation`` is empty until the peer has spoken (client ends only).

    ``pending`` holds the numbers that wait for the application; ``early`` what came before its turn.
    """

    __slots__ = (
        "acked",
        "broken_at",
        "channel",
        "consumed",
        "credited",
        "early",
        "heard_at",
        "host",
        "incarnation",
        "next_seq",
        "peer",
        "pending",
        "received",
        "spoke_at",
        "told_ack",
        "told_consumed",
        "unacked",
        "violations",
    )

    def __init__(self, peer: str, incarnation: str, now: float, channel: Channel | None) -> None:
        self.peer = peer
        self.incarnation = incarnation
        self.host = ""
        self.channel = channel
        self.next_seq = 1
        self.acked = 0
        self.credited = 0
        self.unacked: deque[Entry] = deque()
        self.received = 0
        self.consumed = 0
        self.pending: deque[int] = deque()
        self.early: dict[int, Arrived] = {}
        self.told_ack = 0
        self.told_consumed = 0
        self.heard_at = now
        self.spoke_at = now
        self.broken_at: float | None = None
        self.violations = 0

    def in_flight(self) -> int:
        """Return how many messages the peer's application has not consumed."""
        return self.next_seq - 1 - self.credited

    def owes_ack(self) -> bool:
        """Tell whether the peer does not know yet what arrived or was consumed here."""
        return self.told_ack != self.received or self.told_consumed != self.consumed

    def take_number(self) -> int:
        seq = self.next_seq
        self.next_seq += 1
        return seq

    def told(self, now: float) -> None:
        """Note that a packet with the present acknowledgements leaves now."""
        self.told_ack = self.received
        self.told_consumed = self.consumed
        self.spoke_at = now

    def heard(self, envelope: Envelope, now: float) -> bool:
        """Take the acknowledgements of any packet; return whether credit came back.

        ``ProtocolError`` if the peer acknowledges what was never sent.
        """
        ack, consumed = envelope.ack, envelope.consumed
        if ack >= self.next_seq or consumed > ack:
            raise ProtocolError(f"acknowledges {ack}, consumed {consumed} of {self.next_seq - 1} messages")
        self.heard_at = now
        self.broken_at = None
        if ack > self.acked:
            self.acked = ack
            unacked = self.unacked
            while unacked and unacked[0].seq <= ack:
                entry = unacked.popleft()
                if entry.shared and self.channel:
                    self.channel.release(entry.shared)
        if consumed > self.credited:
            self.credited = consumed
            return True
        return False

    def accept(self, arrived: Arrived, *, max_pending: int) -> Iterator[Arrived]:
        """Yield what can be delivered now that ``arrived`` is here, in order.

        Duplicates and what is far ahead are dropped: the peer sends the latter again. So is everything while
        ``max_pending`` messages wait for the application, which a peer that keeps to its credit never causes.
        """
        seq = arrived.envelope.seq
        if seq != self.received + 1:
            if self.received < seq <= self.received + max_pending:
                self.early.setdefault(seq, arrived)
            else:
                self.told_ack = -1
            return
        following: Arrived | None = arrived
        while following is not None:
            waits = following.envelope.kind in (Kind.SEND, Kind.REQUEST)
            if waits and len(self.pending) >= max_pending:
                return
            self.received += 1
            if waits:
                self.pending.append(self.received)
            elif not self.pending:
                self.consumed = self.received
            yield following
            following = self.early.pop(self.received + 1, None)

    def consume(self) -> None:
        """Note that the application took the oldest waiting message."""
        self.pending.popleft()
        self.consumed = self.pending[0] - 1 if self.pending else self.received

    def excuse(self, seconds: float, now: float) -> None:
        """Do not hold ``seconds`` of silence against the peer."""
        self.heard_at = min(now, self.heard_at + seconds)
        if self.broken_at is not None:
            self.broken_at = min(now, self.broken_at + seconds)

    def overdue(self, now: float, resend_s: float) -> Iterator[Entry]:
        """Yield the messages that must be sent again, and count the attempt."""
        for entry in self.unacked:
            if now >= entry.sent_at + resend_s * (1 << min(entry.tries, _MAX_BACKOFF)):
                entry.tries += 1
                entry.sent_at = now
                yield entry

    def next_resend(self, resend_s: float) -> float:
        """Return when the first unacknowledged message is due again; infinity if there is none."""
        return min(
            (entry.sent_at + resend_s * (1 << min(entry.tries, _MAX_BACKOFF)) for entry in self.unacked),
            default=float("inf"),
        )
