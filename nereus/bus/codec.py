"""How does a message become bytes, and which bytes are refused?

Owner: the exchange (see ``exchange.py``) encodes and decodes every packet here. A packet is one MessagePack array, the
envelope with its message inside, plus raw frames that ride beside it and are never copied here.

Invariants (tests/bus/test_codec.py): encoding is stable (golden bytes); decoding arbitrary bytes gives an envelope or
``ProtocolError``, nothing else; a number that is not finite never passes, in either direction, except where ``finite``
says so.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from nereus.bus.messages import Group, GroupAccepted, Message, Scored, StepDone
from nereus.errors import ProtocolError

PROTOCOL = 1
"""Version of the envelope."""

Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Incarnation = Annotated[str, Meta(max_length=128)]


class Kind(enum.IntEnum):
    """What a packet is for. The first two are control packets without a sequence number."""

    STATUS = 0
    """Carries acknowledgements and says that the sender lives; ``note`` names the sender's shared-memory host."""
    GONE = 1
    """The sender refuses (or leaves) this session for ever; ``note`` says why."""
    SEND = 2
    REQUEST = 3
    REPLY = 4
    FENCED = 5
    """Gives back a message whose epoch was too old; ``epoch`` is the receiver's."""


class SharedFrame(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A frame that lies in a shared-memory file instead of beside the envelope."""

    index: Annotated[int, Meta(ge=0, le=255)]
    """Its place among the message's frames."""
    name: Annotated[str, Meta(pattern=r"^nereus-[0-9]{1,10}-[0-9a-f]{32}$")]
    size_bytes: Count
    checksum: Annotated[str, Meta(min_length=16, max_length=16)]


class Envelope(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What surrounds a message.

    ``source`` and ``target`` are incarnations; ``target`` is empty while the sender does not know it. ``ack``: every
    sequence number up to it has arrived; ``consumed``: every one up to it was taken by the application, which is what
    gives credit back.
    """

    protocol: Annotated[int, Meta(ge=PROTOCOL, le=PROTOCOL)]
    kind: Kind
    source: Incarnation
    target: Incarnation
    seq: Count
    ack: Count
    consumed: Count
    epoch: Count
    token: Count
    message: Message | None = None
    shared: tuple[SharedFrame, ...] = ()
    note: Annotated[str, Meta(max_length=1024)] = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    """Return the bytes of ``envelope``; ``ValueError`` if a number of its message may not travel."""
    message = envelope.message
    if message is not None and (why := finite(message)):
        raise ValueError(f"{type(message).__name__}: {why}")
    return _encoder.encode(envelope)


def decode(data: bytes | memoryview, frames: Sequence[Any] = (), *, max_frames: int = 64) -> Envelope:
    """Read an envelope; ``ProtocolError`` for anything that ``encode`` would not have written."""
    try:
        envelope = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise ProtocolError(f"not a message: {error}") from None
    message = envelope.message
    sequenced = envelope.kind >= Kind.SEND
    if sequenced != (message is not None) or sequenced != (envelope.seq > 0):
        raise ProtocolError(f"{envelope.kind.name} with seq {envelope.seq} and message {type(message).__name__}")
    if envelope.kind in (Kind.REQUEST, Kind.REPLY) and not envelope.token:
        raise ProtocolError(f"{envelope.kind.name} without a token")
    if len(frames) + len(envelope.shared) > max_frames:
        raise ProtocolError(f"{len(frames) + len(envelope.shared)} frames; at most {max_frames} are allowed")
    if frames and not sequenced:
        raise ProtocolError(f"{envelope.kind.name} with frames")
    if message is not None and (why := finite(message)):
        raise ProtocolError(f"{type(message).__name__}: {why}")
    return envelope


def finite(message: Message) -> str:
    """Say which number of ``message`` is not finite though it must be; empty if none.

    A missing reward is ``None``, never NaN. A metric may be NaN (not defined in this step), and anything in a step that
    was skipped because of a gradient that was not finite. All other floats are bounded by their types.
    """
    check = _CHECKS.get(type(message))
    return check(message) if check else ""


def _rewards(rewards: Iterable[float | None]) -> str:
    for index, reward in enumerate(rewards):
        if reward is not None and not math.isfinite(reward):
            return f"reward {index} is {reward}; it must be a finite number or None"
    return ""


def _sample_rewards(message: Group | GroupAccepted) -> str:
    return _rewards(sample.reward for sample in message.samples)


def _metrics(message: StepDone) -> str:
    if message.report.skipped:
        return ""
    for name, value in message.report.metrics.items():
        if math.isinf(value):
            return f"metric {name} is {value}; it must be finite or NaN"
    return ""


_CHECKS: dict[type, Callable[[Any], str]] = {
    Group: _sample_rewards,
    GroupAccepted: _sample_rewards,
    Scored: lambda message: _rewards(message.rewards),
    StepDone: _metrics,
}
