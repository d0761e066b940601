"""Which bytes are refused, and that the bytes of today stay those of tomorrow."""

from __future__ import annotations

import contextlib
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.bus.codec import PROTOCOL, Envelope, Kind, SharedFrame, decode, encode
from nereus.bus.messages import (
    Grant,
    GroupAccepted,
    GroupSpec,
    Heartbeat,
    Message,
    Pull,
    Ready,
    Sample,
    Saved,
    Score,
    Scored,
    StepDone,
    StepReport,
)
from nereus.core.plan import Emu, Layout, ModelStage, Plan, Stage
from nereus.errors import ProtocolError


def envelope(message: Message | None, kind: Kind = Kind.SEND, **changes: object) -> Envelope:
    token = 0 if kind in (Kind.SEND, Kind.STATUS, Kind.GONE) else 9
    plain = Envelope(PROTOCOL, kind, "aa", "bb", 0 if message is None else 7, 5, 4, 3, token, message)
    return msgspec.structs.replace(plain, **changes)


def accepted(reward: float | None) -> GroupAccepted:
    return GroupAccepted(1, 0, 2, "rollout-0", 3, 4, 5, (Sample(6, reward, "stop", 3, 4),))


def step(metrics: dict[str, float], skipped: bool = False) -> StepDone:
    return StepDone(StepReport(1, 2, 0.5, 100, metrics, skipped), "policy.training/0")


GOLDEN = {
    "status": (envelope(None, Kind.STATUS, note="host"), "9c0100a26161a262620005040300c090a4686f7374"),
    "send": (envelope(Heartbeat()), "9c0102a26161a262620705040300" + "81a474797065a9486561727462656174" + "90a0"),
    "request": (
        envelope(Pull(8, "r"), Kind.REQUEST),
        "9c0103a26161a262620705040309" + "83a474797065a450756c6ca776657273696f6e08a6726561646572a172" + "90a0",
    ),
    "shared": (
        envelope(Heartbeat(), shared=(SharedFrame(1, f"nereus-1-{'0' * 32}", 9, "f" * 16),)),
        "9c0102a26161a262620705040300"
        + "81a474797065a9486561727462656174"
        + "9194"
        + "01d929"
        + f"nereus-1-{'0' * 32}".encode().hex()
        + "09b0"
        + ("f" * 16).encode().hex()
        + "a0",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_bytes_are_golden(name: str) -> None:
    value, golden = GOLDEN[name]
    assert encode(value).hex() == golden
    assert decode(bytes.fromhex(golden)) == value


@pytest.mark.parametrize(
    "message",
    [
        accepted(0.5),
        accepted(None),
        step({"loss": math.pi}),
        Scored((1.0, None), {"timeout": 1}),
        Grant((GroupSpec(1, 0, 2, b'"prompt"', b"{}"),)),
        Score(b'"prompt"', ("a", "b"), b'{"answer": "1"}'),
        Saved(1, "policy.training/0", b"{}"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_survive(message: Message) -> None:
    assert decode(encode(envelope(message))).message == message


def test_json_given_as_raw_does_not_break_the_message() -> None:
    spec = GroupSpec(1, 0, 2, msgspec.Raw(b'"prompt"'), msgspec.Raw(b"{}"))  # type: ignore[arg-type]
    assert decode(encode(envelope(Grant((spec,))))).message == Grant((GroupSpec(1, 0, 2, b'"prompt"', b"{}"),))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("make", [accepted, lambda value: Scored((value,)), lambda value: Ready("e", value)])
def test_numbers_that_are_not_finite_never_pass(make, value: float) -> None:
    message = make(value)
    raw = msgspec.msgpack.encode(envelope(message))
    with pytest.raises(ProtocolError):
        decode(raw)
    if not isinstance(message, Ready):  # bounded by its type on arrival
        with pytest.raises(ValueError, match="reward 0"):
            encode(envelope(message))


def test_a_metric_may_be_nan_and_anything_if_the_step_was_skipped() -> None:
    done = decode(encode(envelope(step({"kl": math.nan})))).message
    assert isinstance(done, StepDone)
    assert math.isnan(done.report.metrics["kl"])
    decode(encode(envelope(step({"grad_norm": math.inf}, skipped=True))))
    with pytest.raises(ValueError, match="metric grad_norm is inf"):
        encode(envelope(step({"grad_norm": math.inf})))
    with pytest.raises(ProtocolError, match="metric grad_norm is inf"):
        decode(msgspec.msgpack.encode(envelope(step({"grad_norm": math.inf}))))


def hostile() -> dict[str, bytes]:
    good = encode(envelope(Pull(8, "r")))
    plain = msgspec.msgpack.decode(good)
    deep = b"\x81\xa1x" * 200_000 + b"\xc0"

    def changed(index: int, value: object) -> bytes:
        return msgspec.msgpack.encode([*plain[:index], value, *plain[index + 1 :]])

    layout = {"tp": 1, "pp": 1, "x": msgspec.Raw(b"\x91" * 200_000 + b"\xc0")}
    stage = {"stage": 0, "model": "policy"}
    emu = {"model_stage": stage, "ordinal": 0, "layout": layout, "slots": [0]}
    return {
        "empty": b"",
        "truncated": good[:-3],
        "trailing": good + b"\x00",
        "deep": deep,
        "deep below an unknown field": changed(9, {"type": "Assign", "emu": emu, "plan": {"epoch": 0, "emus": []}}),
        "claims 4 GiB": b"\xdd\xff\xff\xff\xff",
        "claims a long string": good[:2] + b"\xdb\xff\xff\xff\xff",
        "other protocol": changed(0, 2),
        "unknown kind": changed(1, 17),
        "negative": changed(4, -1),
        "huge number": changed(4, 2**63),
        "huge number in the message": changed(9, {"type": "Pull", "version": 2**64 - 1, "reader": "r"}),
        "unknown tag": changed(9, {"type": "Exec", "code": "1"}),
        "unknown field": changed(9, {"type": "Pull", "version": 1, "reader": "r", "x": 1}),
        "wrong type": changed(9, {"type": "Pull", "version": "1", "reader": "r"}),
        "too long a name": changed(9, {"type": "Pull", "version": 1, "reader": "r" * 257}),
        "inconsistent plan": changed(
            9,
            {
                "type": "Assign",
                "emu": {"model_stage": stage, "ordinal": 0, "layout": {"tp": 2, "pp": 1}, "slots": [0]},
                "plan": {"epoch": 0, "emus": []},
            },
        ),
        "no message": changed(9, None),
        "no number": changed(4, 0),
        "request without token": changed(1, 3),
        "a path in a shared name": changed(10, [[0, "../../etc/passwd", 1, "f" * 16]]),
        "one element more": msgspec.msgpack.encode([*plain, 1]),
        "pickle": b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94",
    }


@pytest.mark.parametrize("name", hostile())
def test_hostile_bytes_are_a_protocol_error(name: str) -> None:
    with pytest.raises(ProtocolError):
        decode(hostile()[name])


def test_too_many_frames_and_frames_of_control_packets_are_refused() -> None:
    with pytest.raises(ProtocolError, match="65 frames"):
        decode(encode(envelope(Heartbeat())), [b""] * 65)
    with pytest.raises(ProtocolError, match="STATUS with frames"):
        decode(encode(envelope(None, Kind.STATUS)), [b""])


def test_a_plan_travels() -> None:
    emu = Emu(ModelStage(Stage.TRAINING), 0, Layout(2, 2), (0, 1, 2, 3))
    value = msgspec.msgpack.decode(msgspec.msgpack.encode(Plan(3, (emu,))), type=Plan)
    assert value == Plan(3, (emu,))


@given(st.binary(max_size=200))
@settings(max_examples=50, deadline=None)
def test_arbitrary_bytes_give_an_envelope_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert decode(data).kind in Kind


@given(st.integers(0, 200), st.binary(min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_damaged_bytes_give_an_envelope_or_a_protocol_error(place: int, damage: bytes) -> None:
    good = encode(envelope(accepted(0.5)))
    place %= len(good)
    with contextlib.suppress(ProtocolError):
        assert decode(good[:place] + damage + good[place + len(damage) :]).kind in Kind
