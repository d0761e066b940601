"""How does an actor process turn what arrives on its endpoints into calls of its actor?

Owner: every worker process runs ``host`` once. Each endpoint has one pump, so what one peer sends is handled in order;
a handler that takes long delays only its own endpoint (heartbeats are the endpoint's affair). The first exception that
leaves a handler ends the process: it is reported to the supervisor as a fatal ``Fault`` first. Once an actor follows a
new plan its endpoints refuse what is said under an older one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Protocol

from nereus.actors.names import SUPERVISOR
from nereus.bus.endpoint import Delivery, Endpoint, PeerGone
from nereus.bus.messages import Commit, Fault, Message, Shutdown
from nereus.errors import PeerLost


class Actor(Protocol):
    """What a worker process does."""

    async def handle(self, delivery: Delivery) -> Message | None:
        """Act on one message; a returned message is the reply to a request."""

    async def peer_gone(self, event: PeerGone) -> None:
        """Forget what was kept for a peer."""

    async def background(self) -> None:
        """Run for the life of the process; an exception here ends it."""

    async def close(self) -> None: ...


async def host(actor: Actor, control: Endpoint, services: Sequence[Endpoint] = ()) -> int:
    """Serve ``actor`` until a ``Shutdown`` (returns 0) or a failure (returns 1).

    The loss of ``control`` is a failure; a process entry passes one that outlives its supervisor (``tether.py``).
    """
    leave = asyncio.Event()

    async def pump(endpoint: Endpoint) -> None:
        while True:
            event = await endpoint.receive()
            if isinstance(event, Delivery):
                if isinstance(event.message, Shutdown):
                    leave.set()
                    return
                answer = await actor.handle(event)
                if isinstance(event.message, Commit):
                    for own in (control, *services):
                        own.advance(event.message.plan.epoch)
                if answer is not None and event.token:
                    # A requester that has died meanwhile needs no answer.
                    with contextlib.suppress(PeerLost):
                        await endpoint.reply(event, answer)
            elif isinstance(event, PeerGone):
                if endpoint is control:
                    raise PeerLost(event.peer, event.why)
                await actor.peer_gone(event)

    async def until_leave() -> None:
        await leave.wait()

    tasks = [asyncio.create_task(pump(endpoint), name=f"pump-{i}") for i, endpoint in enumerate((control, *services))]
    tasks += [asyncio.create_task(actor.background(), name="background"), asyncio.create_task(until_leave())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        while not leave.is_set() and all(task.exception() is None for task in done):
            pending = [task for task in tasks if not task.done()]
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        failure = next((task.exception() for task in done if task.exception() is not None), None)
        if failure is None:
            return 0
        await _report(control, failure)
        raise failure
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await actor.close()


async def _report(control: Endpoint, failure: BaseException) -> None:
    """Tell the supervisor why this process leaves, if it can still be told."""
    try:
        async with asyncio.timeout(5.0):
            await control.send(SUPERVISOR, Fault(control.name, f"{type(failure).__name__}: {failure}"[:4000]))
    except (PeerLost, TimeoutError):
        return  # nobody is left to be told; the exit code and the log say the same
