"""Who looks for a better plan without keeping the event loop from its work? A process of its own.

``python -m nereus.runtime.searching`` reads questions from its standard input and writes what was found to its standard
output: MessagePack behind four bytes of length, checked by type on both sides. The parent (``ProcessSearcher``) starts
it with the first question and again if it has died; a search that takes too long is given up with a reason.

Invariant (tests/runtime/test_searching.py): every question gets an answer in bounded time.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import sys
from typing import BinaryIO, Protocol

import msgspec
import structlog
from msgspec import Struct

from nereus.control.choose import Question
from nereus.control.controller import PlanFound, Widening
from nereus.control.propose import answer, latency_now

SEARCH_TIMEOUT_S = 60.0
MOST_BYTES = 16 << 20

_SIZE = struct.Struct("<I")
log = structlog.get_logger()


class Asked(Struct, frozen=True):
    """A question on its way."""

    search: int
    widening: Widening
    question: Question


class Answered(Struct, frozen=True):
    """What was found, and what the plan that runs is expected to take."""

    found: PlanFound
    now_s: float = 0.0


class Searcher(Protocol):
    """Answers the planner's questions."""

    async def prepare(self) -> None:
        """Do ahead what the first question would have to wait for."""

    async def search(self, asked: Asked) -> Answered:
        """Return what was found; a failure is an answer without proposals that says why."""

    async def close(self) -> None: ...


def solve(asked: Asked) -> Answered:
    """Answer here and now."""
    return Answered(answer(asked.question, asked.search, asked.widening), latency_now(asked.question))


class ProcessSearcher:
    """Asks a process of its own; one question at a time."""

    def __init__(self, *, timeout_s: float = SEARCH_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Answered)

    async def prepare(self) -> None:
        async with self._turn:
            await self._started()

    async def search(self, asked: Asked) -> Answered:
        async with self._turn:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._ask(asked)
            except (TimeoutError, OSError, EOFError, asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
                await self._stop()
                why = f"the search came to nothing: {error or type(error).__name__}"
                log.warning("search failed", search=asked.search, why=why)
                return Answered(PlanFound(asked.search, because=why))

    async def close(self) -> None:
        await self._stop()

    async def _ask(self, asked: Asked) -> Answered:
        process = await self._started()
        assert process.stdin is not None and process.stdout is not None
        body = self._encoder.encode(asked)
        process.stdin.write(_SIZE.pack(len(body)) + body)
        await process.stdin.drain()
        (size,) = _SIZE.unpack(await process.stdout.readexactly(_SIZE.size))
        if size > MOST_BYTES:
            raise OSError(f"an answer of {size} bytes is above {MOST_BYTES}")
        return self._decoder.decode(await process.stdout.readexactly(size))

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "nereus.runtime.searching",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        return self._process

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the questions end."""
    decoder, encoder = msgspec.msgpack.Decoder(Asked), msgspec.msgpack.Encoder()
    while head := questions.read(_SIZE.size):
        (size,) = _SIZE.unpack(head)
        if size > MOST_BYTES:
            raise OSError(f"a question of {size} bytes is above {MOST_BYTES}")
        body = encoder.encode(solve(decoder.decode(questions.read(size))))
        answers.write(_SIZE.pack(len(body)) + body)
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
