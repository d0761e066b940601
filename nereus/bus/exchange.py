"""Which packets must leave, and which events arose, after what has come in?

The protocol of the bus without any input or output: every endpoint, ``memory`` or ``zeromq``, drives one ``Exchange``.
It is given packets, the calls of the application and the time; it fills ``outbox`` (packets to transmit), ``outcomes``
(requests that ended) and ``credited`` (peers that may be sent to again), and ``next_event`` hands out events.

Invariants (tests/bus/test_exchange.py, a state machine against a network that drops, doubles and reorders): delivery in
order, at most once, and complete while both ends live; an incarnation that is gone is never heard again; no message of
an older plan epoch than the receiver's is delivered; only ``Hello`` is, whose sender cannot know the epoch yet.

A reply is delivered whatever the epoch: the request it answers was checked, and a reply commands nothing.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from nereus.bus.codec import PROTOCOL, Envelope, Kind, decode, encode
from nereus.bus.endpoint import Buffer, Delivery, Event, Fenced, PeerGone, PeerJoined, Undelivered
from nereus.bus.messages import Hello, Message, Refused
from nereus.bus.session import Arrived, Channel, Entry, Frames, Session, Settings
from nereus.core.plan import PlanEpoch
from nereus.errors import PeerLost, ProtocolError

_MAX_STRANGERS = 1024


class Host(Protocol):
    """Makes channels for big frames to peers on the same host (see ``shared.py``)."""

    host: str
    """Equal on two ends iff they share memory; empty: they do not."""

    def channel(self) -> Channel: ...


class Packet(Struct, frozen=True):
    """Bytes for one incarnation of one peer; ``incarnation`` is empty while a client does not know its server's."""

    peer: str
    incarnation: str
    head: bytes
    frames: Frames = ()


class Outcome(Struct, frozen=True):
    """How the request with ``token`` ended."""

    token: int
    result: Message | Exception


class _Waiting(Struct, frozen=True):
    """A delivery that the application has not taken yet."""

    session: Session
    delivery: Delivery


class Exchange:
    """All conversations of one endpoint. A client's only peer is ``server``; a server admits whoever speaks to it."""

    def __init__(
        self,
        name: str,
        incarnation: str,
        settings: Settings,
        now: float,
        *,
        epoch: PlanEpoch = 0,
        server: str = "",
        host: Host | None = None,
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.settings = settings
        self.epoch = epoch
        self.server = server
        self.outbox: list[Packet] = []
        self.outcomes: list[Outcome] = []
        self.credited: list[str] = []
        self.late_replies = 0
        """Replies to requests that nobody waits for any more."""
        self.malformed = 0
        """Packets that were refused because they were malformed."""
        self.due = now + settings.heartbeat_s if settings.heartbeat_s > 0 else float("inf")
        """When ``poll`` has something to do; infinity: not before something is sent or arrives."""
        self._memory = host if host and host.host and settings.shared_frame_bytes else None
        self._host = self._memory.host if self._memory else ""
        self._max_pending = max(4 * settings.window, 256)
        self._tokens = itertools.count(1)
        self._requests: dict[int, str] = {}
        self._events: deque[_Waiting | Event] = deque()
        self._sessions: dict[str, Session] = {}
        self._owing: set[Session] = set()
        self._gone: dict[tuple[str, str], str] = {}
        self._lost: dict[str, str] = {}
        self._strangers: dict[tuple[str, str], int] = {}
        if server:
            session = self._sessions[server] = Session(server, "", now, self._channel())
            self._status(session, now)

    # What the application asks

    def credit(self, peer: str) -> int:
        """Return how many plain messages and requests may be sent to ``peer`` now; ``PeerLost`` if it is gone."""
        return self.settings.window - self._session(peer).in_flight()

    def send(self, peer: str, message: Message, frames: Sequence[Buffer], now: float) -> None:
        """Send ``message``; the caller has asked for credit."""
        self._post(self._session(peer), Kind.SEND, 0, message, _flat(frames), now)

    def request(self, peer: str, message: Message, frames: Sequence[Buffer], now: float) -> int:
        """Send ``message`` and return the token of the outcome to come."""
        session = self._session(peer)
        token = next(self._tokens)
        self._post(session, Kind.REQUEST, token, message, _flat(frames), now)
        self._requests[token] = peer
        return token

    def forget(self, token: int) -> None:
        """Expect no outcome of this request any more."""
        self._requests.pop(token, None)

    def reply(self, delivery: Delivery, message: Message, frames: Sequence[Buffer], now: float) -> None:
        """Answer a request; needs no credit, because the request has paid for it."""
        if not delivery.token:
            raise ValueError(f"{type(delivery.message).__name__} of {delivery.peer} is not a request")
        session = self._session(delivery.peer)
        if session.incarnation != delivery.incarnation:
            raise PeerLost(delivery.peer, "superseded by a newer incarnation")
        self._post(session, Kind.REPLY, delivery.token, message, _flat(frames), now)

    def advance(self, epoch: PlanEpoch) -> None:
        """Enter a newer plan epoch."""
        if epoch < self.epoch:
            raise ValueError(f"{self.name} is at plan epoch {self.epoch} and cannot go back to {epoch}")
        self.epoch = epoch

    def next_event(self, now: float) -> Event | None:
        """Return the oldest event, giving credit back for a delivery; refuse what is of an older epoch."""
        while self._events:
            event = self._events.popleft()
            if not isinstance(event, _Waiting):
                return event
            session, delivery = event.session, event.delivery
            living = self._sessions.get(delivery.peer) is session
            if living:
                session.consume()
                self._owing.add(session)
            if delivery.epoch >= self.epoch or isinstance(delivery.message, Hello):
                if living and 2 * (session.consumed - session.told_consumed) >= self.settings.window:
                    self._status(session, now)
                return delivery
            if living:
                self._post(session, Kind.FENCED, delivery.token, delivery.message, (), now)
        return None

    def has_events(self) -> bool:
        return bool(self._events)

    def unacknowledged(self) -> bool:
        """Tell whether anything sent has not arrived yet."""
        return any(session.unacked for session in self._sessions.values())

    def established(self) -> bool:
        """Tell whether the server of this client has spoken."""
        session = self._sessions.get(self.server)
        return session is not None and bool(session.incarnation)

    def incarnation_of(self, peer: str) -> str:
        """Return the present incarnation of ``peer``; empty if it is not known."""
        session = self._sessions.get(peer)
        return session.incarnation if session else ""

    def why_gone(self, peer: str) -> str:
        """Say why ``peer`` was lost last; empty if it was not."""
        return self._lost.get(peer, "")

    def peers(self) -> tuple[str, ...]:
        return tuple(self._sessions)

    def leave(self, now: float, why: str = "left") -> None:
        """Tell every peer that this end is gone, and forget them."""
        for session in tuple(self._sessions.values()):
            self._refuse(session.peer, session.incarnation, why, now)
            self._drop(session, "this end is closed", event=False)

    # What the network brings

    def arrived(self, peer: str, incarnation: str, head: bytes | memoryview, frames: Frames, now: float) -> None:
        """Take a packet of ``peer`` (whose name the transport has authenticated).

        ``incarnation`` is what the transport says; a client, whose transport cannot know it, passes the empty string.
        """
        if incarnation and (why := self._gone.get((peer, incarnation))) is not None:
            self._refuse(peer, incarnation, why, now)
            return
        try:
            envelope = self._from_wire(head, frames)
            if incarnation and envelope.source != incarnation:
                raise ProtocolError(f"claims incarnation {envelope.source!r}, the connection is of {incarnation!r}")
            self._take(peer, envelope, frames, now)
        except ProtocolError as error:
            self._violation(peer, incarnation, str(error), now)

    def broken(self, peer: str, incarnation: str, now: float) -> None:
        """Note that the transport has lost its connection; the peer has two heartbeats to come back."""
        session = self._sessions.get(peer)
        if session and session.incarnation == incarnation and session.broken_at is None:
            session.broken_at = now
            self.due = min(self.due, now + 2 * self.settings.heartbeat_s)

    def exclude(self, peer: str, why: str, now: float) -> None:
        """Cut the present incarnation of ``peer`` for ever."""
        if session := self._sessions.get(peer):
            self._refuse(peer, session.incarnation, why, now)
            self._drop(session, why)

    # What time brings

    def acknowledge(self, now: float) -> None:
        """Send the acknowledgements that found no message to ride on."""
        for session in self._owing:
            if session.owes_ack() and self._sessions.get(session.peer) is session:
                self._status(session, now)
        self._owing.clear()

    def owes(self) -> bool:
        """Tell whether ``acknowledge`` has something to look at."""
        return bool(self._owing)

    def poll(self, now: float) -> None:
        """Send again, send heartbeats, give up silent peers; set ``due`` anew."""
        settings = self.settings
        beats = settings.heartbeat_s > 0
        late = now - self.due
        due = float("inf")
        for session in tuple(self._sessions.values()):
            if beats and late > settings.heartbeat_s:
                # This process itself stood still: what peers said meanwhile lies unread.
                session.excuse(late, now)
            if why := self._silence(session, now):
                self._refuse(session.peer, session.incarnation, why, now)
                self._drop(session, why)
                continue
            for entry in session.overdue(now, settings.resend_s):
                self._transmit(session, entry, now)
            if beats and now - session.spoke_at >= settings.heartbeat_s:
                self._status(session, now)
            due = min(due, session.next_resend(settings.resend_s))
            if beats:
                due = min(due, session.spoke_at + settings.heartbeat_s, session.heard_at + settings.liveness_s)
            if session.broken_at is not None:
                due = min(due, session.broken_at + 2 * settings.heartbeat_s)
        self.due = due

    def _silence(self, session: Session, now: float) -> str:
        """Say why a peer counts as gone; empty if it does not."""
        settings = self.settings
        if session.broken_at is not None and now - session.broken_at >= 2 * settings.heartbeat_s:
            return f"its connection closed {now - session.broken_at:.1f} s ago"
        if settings.heartbeat_s > 0 and now - session.heard_at >= settings.liveness_s:
            return f"silent for {now - session.heard_at:.1f} s"
        return ""

    # Outgoing

    def _session(self, peer: str) -> Session:
        session = self._sessions.get(peer)
        if session is None:
            raise PeerLost(peer, self._lost.get(peer, f"it is not connected to {self.name}"))
        return session

    def _post(self, session: Session, kind: Kind, token: int, message: Message, frames: Frames, now: float) -> None:
        """Number ``message``, keep it until it is acknowledged, and transmit it."""
        settings = self.settings
        size = sum(len(frame) for frame in frames)
        if size > settings.max_message_bytes or len(frames) > settings.max_frames:
            raise ValueError(
                f"{type(message).__name__} to {session.peer} has {len(frames)} frames of {size} bytes; at most "
                f"{settings.max_frames} frames and {settings.max_message_bytes} bytes are allowed"
            )
        entry = Entry(session.next_seq, kind, self.epoch, token, message, frames, (), now)
        head = self._encode(session, entry)
        if len(head) + size > settings.max_message_bytes:
            raise ValueError(
                f"{type(message).__name__} to {session.peer} takes {len(head) + size} bytes; "
                f"at most {settings.max_message_bytes} are allowed"
            )
        if frames and session.channel and session.host == self._host:
            entry.frames, entry.shared = session.channel.put(frames, settings.shared_frame_bytes)
            if entry.shared:
                head = self._encode(session, entry)
        session.take_number()
        session.unacked.append(entry)
        session.told(now)
        self.due = min(self.due, now + settings.resend_s)
        self.outbox.append(Packet(session.peer, session.incarnation, head, entry.frames))

    def _transmit(self, session: Session, entry: Entry, now: float) -> None:
        self.outbox.append(Packet(session.peer, session.incarnation, self._encode(session, entry), entry.frames))
        session.told(now)

    def _encode(self, session: Session, entry: Entry) -> bytes:
        return self._to_wire(
            Envelope(
                PROTOCOL,
                entry.kind,
                self.incarnation,
                session.incarnation,
                entry.seq,
                session.received,
                session.consumed,
                entry.epoch,
                entry.token,
                entry.message,
                entry.shared,
            )
        )

    def _status(self, session: Session, now: float) -> None:
        self._control(session.peer, session.incarnation, Kind.STATUS, self._host, session)
        session.told(now)

    def _refuse(self, peer: str, incarnation: str, why: str, now: float) -> None:
        self._control(peer, incarnation, Kind.GONE, why[:1024], None)

    def _control(self, peer: str, incarnation: str, kind: Kind, note: str, session: Session | None) -> None:
        ack, consumed = (session.received, session.consumed) if session else (0, 0)
        envelope = Envelope(
            PROTOCOL, kind, self.incarnation, incarnation, 0, ack, consumed, self.epoch, 0, None, (), note
        )
        self.outbox.append(Packet(peer, incarnation, self._to_wire(envelope)))

    def _to_wire(self, envelope: Envelope) -> bytes:
        return encode(envelope)

    # Incoming

    def _from_wire(self, head: bytes | memoryview, frames: Frames) -> Envelope:
        """Return the envelope; ``ProtocolError`` if it is none, or too large."""
        size = len(head) + sum(len(frame) for frame in frames)
        if size > self.settings.max_message_bytes:
            raise ProtocolError(f"{size} bytes; at most {self.settings.max_message_bytes} are allowed")
        return decode(head, frames, max_frames=self.settings.max_frames)

    def _take(self, peer: str, envelope: Envelope, frames: Frames, now: float) -> None:
        session = self._sessions.get(peer)
        if envelope.kind == Kind.GONE:
            if session and session.incarnation in ("", envelope.source) and envelope.target == self.incarnation:
                self._drop(session, envelope.note or "left")
            elif session and self.server and envelope.target == self.incarnation:
                self._drop(session, "superseded by a new incarnation")
            return
        if session is None or session.incarnation != envelope.source:
            session = self._open(session, peer, envelope, now)
            if session is None:
                return
        if envelope.target not in ("", self.incarnation):
            raise ProtocolError(f"speaks to incarnation {envelope.target!r}, this is {self.incarnation!r}")
        if session.heard(envelope, now):
            self.credited.append(peer)
        if envelope.kind == Kind.STATUS:
            session.host = envelope.note
            return
        self._owing.add(session)
        for following in session.accept(Arrived(envelope, frames), max_pending=self._max_pending):
            try:
                taken = self._frames_of(session, following)
            except ProtocolError as error:
                self.malformed += 1
                self.exclude(peer, str(error), now)
                return
            self._deliver(session, following.envelope, taken)

    def _open(self, old: Session | None, peer: str, envelope: Envelope, now: float) -> Session | None:
        """Meet an incarnation for the first time; ``None`` if it is refused."""
        source = envelope.source
        if self.server:
            if old is None:
                return None
            if old.incarnation:
                self._drop(old, f"superseded by incarnation {source}")
                return None
            old.incarnation = source
            self._events.append(PeerJoined(peer, source))
            return old
        if envelope.target not in ("", self.incarnation):
            self._refuse(peer, source, "this server started anew and does not know the session", now)
            return None
        if old is not None:
            why = f"superseded by incarnation {source}"
            self._refuse(peer, old.incarnation, why, now)
            self._drop(old, why)
        session = self._sessions[peer] = Session(peer, source, now, self._channel())
        session.host = envelope.note
        self._lost.pop(peer, None)
        self._strangers.pop((peer, source), None)
        self._events.append(PeerJoined(peer, source))
        self._status(session, now)
        if self.settings.heartbeat_s > 0:
            self.due = min(self.due, now + self.settings.heartbeat_s)
        return session

    def _channel(self) -> Channel | None:
        return self._memory.channel() if self._memory else None

    def _frames_of(self, session: Session, arrived: Arrived) -> Frames:
        shared = arrived.envelope.shared
        if not shared:
            return arrived.frames
        if session.channel is None:
            raise ProtocolError("shared frames to an endpoint that shares no memory")
        return session.channel.take(arrived.frames, shared)

    def _deliver(self, session: Session, envelope: Envelope, frames: Frames) -> None:
        message = envelope.message
        assert message is not None
        if envelope.kind in (Kind.SEND, Kind.REQUEST):
            delivery = Delivery(session.peer, session.incarnation, envelope.epoch, message, frames, envelope.token)
            self._events.append(_Waiting(session, delivery))
        elif envelope.kind == Kind.REPLY:
            result: Message | Exception = message
            if isinstance(message, Refused):
                result = ProtocolError(f"{session.peer} refused: {message.reason}")
            self._settle(session.peer, envelope.token, result)
        elif envelope.token:
            self._settle(session.peer, envelope.token, Fenced(session.peer, envelope.epoch))
        else:
            self._events.append(Undelivered(session.peer, message, envelope.epoch))

    def _settle(self, peer: str, token: int, result: Message | Exception) -> None:
        if self._requests.get(token) == peer:
            del self._requests[token]
            self.outcomes.append(Outcome(token, result))
        else:
            self.late_replies += 1

    def _violation(self, peer: str, incarnation: str, why: str, now: float) -> None:
        """Count a malformed packet; cut the peer when it has sent too many."""
        self.malformed += 1
        session = self._sessions.get(peer)
        if session and incarnation in ("", session.incarnation):
            session.violations += 1
            if session.violations >= self.settings.max_violations:
                why = f"sent {session.violations} malformed packets, the last: {why}"
                self._refuse(peer, session.incarnation, why, now)
                self._drop(session, why)
            return
        count = self._strangers[peer, incarnation] = self._strangers.get((peer, incarnation), 0) + 1
        if len(self._strangers) > _MAX_STRANGERS:
            self._strangers.pop(next(iter(self._strangers)))
        if count >= self.settings.max_violations:
            self._gone[peer, incarnation] = f"sent {count} malformed packets, the last: {why}"

    def _drop(self, session: Session, why: str, *, event: bool = True) -> None:
        """End a session for ever: its incarnation is fenced, its requests fail."""
        del self._sessions[session.peer]
        self._owing.discard(session)
        self._gone[session.peer, session.incarnation] = why
        self._lost[session.peer] = why
        if session.channel:
            session.channel.close()
        for token in [token for token, peer in self._requests.items() if peer == session.peer]:
            self._settle(session.peer, token, PeerLost(session.peer, why))
        self.credited.append(session.peer)
        if event:
            self._events.append(PeerGone(session.peer, session.incarnation, why))


def _flat(frames: Sequence[Buffer]) -> Frames:
    """Return the frames as flat byte views, so that ``len`` is their size; ``ValueError`` if not contiguous."""
    return tuple(_bytes_of(frame) for frame in frames)


def _bytes_of(frame: Buffer) -> Buffer:
    if isinstance(frame, bytes):
        return frame
    view = memoryview(frame)
    if not view.c_contiguous:
        raise ValueError("frames must be contiguous")
    return view.cast("B") if view.nbytes else b""
