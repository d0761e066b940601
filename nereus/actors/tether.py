"""How does a worker outlive its supervisor, and how does it come under the next one?

Owner: each worker process holds one ``Tether``: its control endpoint, whichever supervisor is at the other end. It
looks for a newer supervisor once every ``beat_s``, also while the present one seems well: one that was stopped and
wakes up must find nobody that still listens to it. Without any for ``patience_s`` the worker gives up. Meanwhile it
goes on with what it has been told to do; what it would say to a supervisor that is gone is dropped, because the next
one asks for all that it needs to know.

Invariants (tests/actors/test_tether.py): nothing of a former supervisor is delivered once a newer one is known; a
worker without a supervisor leaves in bounded time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from nereus.actors.names import SUPERVISOR
from nereus.bus.endpoint import Buffer, Delivery, Endpoint, Event, PeerGone
from nereus.bus.messages import Message
from nereus.core.plan import PlanEpoch
from nereus.errors import NereusError, PeerLost

log = structlog.get_logger()


class Line(Endpoint, Protocol):
    """A client endpoint that can be closed without a word."""

    @property
    def incarnation(self) -> str: ...

    def abort(self) -> None: ...


Find = Callable[[PlanEpoch], Awaitable[Line | None]]
"""Return a line to a newer supervisor that has welcomed this worker, which lives in the given plan epoch; None: there
is none yet. ``NereusError``: there is one, and it does not want this worker."""


class Tether:
    """The ``Endpoint`` to the supervisor of the run."""

    def __init__(self, line: Line, find: Find, *, beat_s: float, patience_s: float) -> None:
        self._line = line
        self._find = find
        self._beat_s = beat_s
        self._patience_s = patience_s
        self._moved = asyncio.Event()
        self._failure: NereusError | None = None

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Look for newer supervisors in the background; close the line in the end."""
        task = asyncio.create_task(self._watch(), name="tether")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._line.close()

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        lost_at: float | None = None
        try:
            while True:
                await asyncio.sleep(self._beat_s)
                if SUPERVISOR in self._line.peers:
                    lost_at = None
                elif lost_at is None:
                    lost_at = clock()
                    log.warning("the supervisor is lost; waiting for another", seconds=self._patience_s)
                newer = await self._find(self._line.epoch)
                if newer is not None:
                    former, self._line, lost_at = self._line, newer, None
                    former.abort()
                    self._moved.set()
                    log.info("under another supervisor", epoch=newer.epoch)
                elif lost_at is not None and clock() - lost_at >= self._patience_s:
                    raise PeerLost(SUPERVISOR, f"no other one came within {self._patience_s:g} s")
        except NereusError as error:
            self._failure = error
            self._moved.set()
            self._line.abort()

    # Endpoint

    @property
    def name(self) -> str:
        return self._line.name

    @property
    def incarnation(self) -> str:
        return self._line.incarnation

    @property
    def epoch(self) -> PlanEpoch:
        return self._line.epoch

    @property
    def peers(self) -> tuple[str, ...]:
        return self._line.peers

    def advance(self, epoch: PlanEpoch) -> None:
        self._line.advance(epoch)

    async def send(self, peer: str, message: Message, frames: Sequence[Buffer] = ()) -> None:
        """Send, or drop what a supervisor that is lost cannot hear."""
        try:
            await self._line.send(peer, message, frames)
        except PeerLost as error:
            log.info("not said", type=type(message).__name__, why=error.why)

    async def request(self, peer: str, message: Message, frames: Sequence[Buffer] = (), *, timeout_s: float) -> Message:
        return await self._line.request(peer, message, frames, timeout_s=timeout_s)

    async def reply(self, delivery: Delivery, message: Message, frames: Sequence[Buffer] = ()) -> None:
        await self._line.reply(delivery, message, frames)

    async def receive(self) -> Event:
        """Return the next event of the present supervisor; raise why there is no hope for one any more."""
        while True:
            if self._failure is not None:
                raise self._failure
            line = self._line
            try:
                event = await line.receive()
            except PeerLost:
                if line is self._line and self._failure is None:
                    raise
                continue  # it was closed because there is a newer one, or no hope for one
            if line is not self._line:
                continue
            if not isinstance(event, PeerGone):
                return event
            while line is self._line and self._failure is None:
                self._moved.clear()
                await self._moved.wait()

    async def close(self) -> None:
        await self._line.close()
