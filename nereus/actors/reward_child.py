"""What does a reward process do? It runs the operator's function, and may be killed at any time.

Owner: ``reward.py`` starts it as ``python -m nereus.actors.reward_child PARENT_PID``. It speaks over the pipe that was
its standard output; what the operator's code prints goes to standard error, and standard input is empty for it. Frames:
length as 4 bytes, big-endian, then MessagePack.

Invariants (tests/actors/test_reward_pool.py): it dies with its parent; a process forked by the operator's code can
never answer in its place.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
from msgspec import Struct

from nereus.actors.reward_function import Judgement, RewardFunction, load_reward
from nereus.config import DataConfig
from nereus.errors import ConfigError
from nereus.lifeline import die_with_parent

FRAME_BYTES = 64 * 1024 * 1024
"""No frame is longer than this, in either direction."""

T = TypeVar("T")


class Setup(Struct, frozen=True, forbid_unknown_fields=True):
    """First frame to the child: which function to load. ``columns`` (if known) are checked against its parameters."""

    function: str
    data: DataConfig
    base: str
    columns: tuple[str, ...] | None = None


class Loaded(Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to Setup; ``what``, ``where``, ``remedy`` of the ConfigError, or empty strings."""

    what: str = ""
    where: str = ""
    remedy: str = ""


class Call(Struct, frozen=True, forbid_unknown_fields=True):
    """Score one group."""

    number: int
    prompt: Any
    completions: tuple[str, ...]
    columns: dict[str, Any]


class Answer(Struct, frozen=True, forbid_unknown_fields=True):
    """What call ``number`` came to."""

    number: int
    judgement: Judgement


def frame(message: Struct) -> bytes:
    """Encode one frame."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


def _read(pipe: BinaryIO, kind: type[T]) -> T | None:
    """Read one frame; None at the end of the pipe."""
    head = pipe.read(4)
    if len(head) < 4:
        return None
    body = pipe.read(int.from_bytes(head, "big"))
    return msgspec.msgpack.decode(body, type=kind)


def _write(pipe: BinaryIO, message: Struct) -> None:
    pipe.write(frame(message))
    pipe.flush()


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep the pipes to the parent for ourselves: the operator's code gets an empty input, and prints to the log."""
    incoming = os.fdopen(os.dup(0), "rb")
    outgoing = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return incoming, outgoing


def _load(setup: Setup) -> tuple[RewardFunction | None, Loaded]:
    try:
        function = load_reward(setup.function, setup.data, Path(setup.base))
        if setup.columns is not None:
            function.check_columns(setup.columns)
    except ConfigError as error:
        return None, Loaded(error.what, error.where, error.remedy)
    return function, Loaded()


def serve(incoming: BinaryIO, outgoing: BinaryIO) -> None:
    """Load the function, then answer calls until the pipe ends."""
    setup = _read(incoming, Setup)
    if setup is None:
        return
    me = os.getpid()
    function, loaded = _load(setup)
    if os.getpid() != me:
        os._exit(1)
    _write(outgoing, loaded)
    if function is None:
        return
    while (call := _read(incoming, Call)) is not None:
        judgement = function.judge(call.prompt, call.completions, call.columns)
        if os.getpid() != me:  # the operator's function forked and both came back; one answer is enough
            os._exit(1)
        _write(outgoing, Answer(call.number, judgement))
    function.close()


def main() -> None:
    """Entry of ``python -m nereus.actors.reward_child``."""
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):  # the parent died before the kernel was asked
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # if memory runs out, this process is the one to lose
        Path("/proc/self/oom_score_adj").write_text("1000")
    serve(*_take_pipes())


if __name__ == "__main__":
    main()
