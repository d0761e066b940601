"""How does a process send and receive messages, whatever carries them?

Owner: each process has one client endpoint to the supervisor, plus client endpoints to other servers it was told of;
the supervisor, the collector, the relay and the reward service each have one server endpoint.

Rules that every implementation keeps (tests/bus run the same suite against ``memory`` and ``zeromq``):

* delivery in order and at most once per (sender, incarnation), resent until acknowledged or until the peer is lost;
* the only flow control is credit: ``send`` waits while ``window`` messages to that peer are unacknowledged;
* every message carries the sender's plan epoch. One from an older epoch than the receiver's is not delivered: the
  sender's request fails with ``Fenced`` (plain sends are delivered back to the sender as an ``Undelivered`` event);
* a peer that is silent for ``liveness_s`` (monotonic time), or whose connection is refused, becomes one ``PeerGone``
  event, after which messages of that incarnation are refused for ever;
* a message claimed by a worker is only accepted under that worker's own key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from nereus.bus.messages import Message
from nereus.core.plan import PlanEpoch
from nereus.errors import ProtocolError

Buffer = bytes | bytearray | memoryview


class Fenced(ProtocolError):
    """The receiver lives in a newer plan epoch than the sender."""

    def __init__(self, peer: str, epoch: PlanEpoch) -> None:
        super().__init__(f"{peer} is at plan epoch {epoch} and refuses older messages")
        self.peer = peer
        self.epoch = epoch


class Delivery(Struct, frozen=True):
    """A message that arrived. ``token`` identifies a request that waits for a reply (0: none waits)."""

    peer: str
    incarnation: str
    epoch: PlanEpoch
    message: Message
    frames: tuple[Buffer, ...] = ()
    token: int = 0


class PeerJoined(Struct, frozen=True):
    """A peer's connection is authenticated and its first message is about to be delivered."""

    peer: str
    incarnation: str


class PeerGone(Struct, frozen=True):
    """A peer is lost: it left, fell silent, or was superseded by a newer incarnation."""

    peer: str
    incarnation: str
    why: str


class Undelivered(Struct, frozen=True):
    """A plain ``send`` was refused by the receiver because of its epoch."""

    peer: str
    message: Message
    epoch: PlanEpoch


Event = Delivery | PeerJoined | PeerGone | Undelivered


class Endpoint(Protocol):
    """One end of the bus. All methods belong to one event loop."""

    @property
    def name(self) -> str:
        """This process's worker id, such as ``rollout-0``; it is bound to its key."""

    @property
    def epoch(self) -> PlanEpoch: ...

    @property
    def peers(self) -> tuple[str, ...]:
        """Who is connected, or has not been given up yet; once its server is not, a client endpoint is of no use."""

    def advance(self, epoch: PlanEpoch) -> None:
        """Enter a newer plan epoch; ``ValueError`` if it is older than the present one."""

    async def send(self, peer: str, message: Message, frames: Sequence[Buffer] = ()) -> None:
        """Hand ``message`` over for delivery; waits for credit. Raises ``PeerLost`` if ``peer`` is gone or unknown.

        Frames are not copied: they must not change until they are acknowledged.
        """

    async def request(self, peer: str, message: Message, frames: Sequence[Buffer] = (), *, timeout_s: float) -> Message:
        """Send and wait for the reply. Raises ``PeerLost``, ``Fenced``, ``ProtocolError`` (on ``Refused``) or
        ``TimeoutError`` that names the peer and the message."""

    async def reply(self, delivery: Delivery, message: Message, frames: Sequence[Buffer] = ()) -> None:
        """Answer a request."""

    async def receive(self) -> Event:
        """Return the next event; replies to requests do not appear here."""

    async def close(self) -> None:
        """Flush what is acknowledged soon (bounded), close, and leave no task behind."""
