"""How does an event loop drive an ``Exchange``?

Owner: one endpoint. This half of it is the same for every transport: it turns credit, outcomes and events into futures,
and keeps one timer. A transport adds ``_transmit`` and calls ``_arrived``. No task is created; nothing waits unbounded
except ``receive`` and a ``send`` without credit, which end when the peer is gone.

Time is the loop's, so that a loop with virtual time works too.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence

from nereus.bus.endpoint import Buffer, Delivery, Event
from nereus.bus.exchange import Exchange, Packet
from nereus.bus.messages import Message
from nereus.bus.session import Frames
from nereus.core.plan import PlanEpoch
from nereus.errors import PeerLost


class Driver:
    """An ``Endpoint`` without a transport."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._receiver: asyncio.Future[None] | None = None
        self._creditors: dict[str, deque[asyncio.Future[None]]] = {}
        self._requests: dict[int, asyncio.Future[Message]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf
        self._quiet: asyncio.Future[None] | None = None

    @property
    def name(self) -> str:
        return self._exchange.name

    @property
    def incarnation(self) -> str:
        """Tells this endpoint apart from earlier ones of the same name; peers see it in ``Delivery``."""
        return self._exchange.incarnation

    @property
    def epoch(self) -> PlanEpoch:
        return self._exchange.epoch

    @property
    def peers(self) -> tuple[str, ...]:
        """Who is connected now."""
        return self._exchange.peers()

    @property
    def malformed(self) -> int:
        """How many packets were refused because they were malformed."""
        return self._exchange.malformed

    def advance(self, epoch: PlanEpoch) -> None:
        self._exchange.advance(epoch)

    async def send(self, peer: str, message: Message, frames: Sequence[Buffer] = ()) -> None:
        self._check_open(peer)
        if peer in self._creditors or self._exchange.credit(peer) <= 0:
            await self._wait_for_credit(peer)
        self._exchange.send(peer, message, frames, self._loop.time())
        self._settle()

    async def request(self, peer: str, message: Message, frames: Sequence[Buffer] = (), *, timeout_s: float) -> Message:
        self._check_open(peer)
        token = 0
        try:
            async with asyncio.timeout(timeout_s):
                if peer in self._creditors or self._exchange.credit(peer) <= 0:
                    await self._wait_for_credit(peer)
                answer: asyncio.Future[Message] = self._loop.create_future()
                token = self._exchange.request(peer, message, frames, self._loop.time())
                self._requests[token] = answer
                self._settle()
                return await answer
        except TimeoutError:
            what = f"{'did not answer' if token else 'gave no credit for'} {type(message).__name__}"
            raise TimeoutError(f"{peer} {what} within {timeout_s:g} s (plan epoch {self.epoch})") from None
        finally:
            if token:
                self._requests.pop(token, None)
                self._exchange.forget(token)

    async def reply(self, delivery: Delivery, message: Message, frames: Sequence[Buffer] = ()) -> None:
        self._check_open(delivery.peer)
        self._exchange.reply(delivery, message, frames, self._loop.time())
        self._settle()

    async def receive(self) -> Event:
        while True:
            event = self._exchange.next_event(self._loop.time())
            self._settle()
            if event is not None:
                return event
            self._check_open(self.name)
            if self._receiver is not None:
                raise ValueError(f"two tasks receive at the endpoint of {self.name}; one must hand out the events")
            self._receiver = self._loop.create_future()
            try:
                await self._receiver
            finally:
                self._receiver = None

    async def close(self) -> None:
        if self._closed:
            return
        if self._exchange.unacknowledged():
            self._quiet = self._loop.create_future()
            await asyncio.wait([self._quiet], timeout=self._exchange.settings.linger_s)
        if not self._closed:
            self._exchange.acknowledge(self._loop.time())
            self._exchange.leave(self._loop.time())
            self._settle()
            self._stop()

    def abort(self) -> None:
        """Close at once, without a word to the peers, as if the process had died."""
        if not self._closed:
            self._exchange.leave(self._loop.time())
            self._exchange.outbox.clear()
            self._settle()
            self._stop()

    # For the transport

    def _transmit(self, packet: Packet) -> None:
        """Give ``packet`` to the network, or lose it; never wait."""
        raise NotImplementedError

    def _release(self) -> None:
        """Close what the transport holds."""
        raise NotImplementedError

    def _arrived(self, peer: str, incarnation: str, head: bytes | memoryview, frames: Frames) -> None:
        """Take a packet; the transport calls ``_settle`` after a batch of them."""
        self._exchange.arrived(peer, incarnation, head, frames, self._loop.time())

    def _settle(self) -> None:
        """Carry out what the exchange has decided."""
        exchange = self._exchange
        while exchange.outbox:
            packets, exchange.outbox = exchange.outbox, []
            for packet in packets:
                self._transmit(packet)
        if exchange.outcomes:
            self._finish_requests()
        if exchange.credited:
            self._give_credit()
        if self._receiver and not self._receiver.done() and exchange.has_events():
            self._receiver.set_result(None)
        if self._quiet and not self._quiet.done() and not exchange.unacknowledged():
            self._quiet.set_result(None)
        if not self._closed:
            self._arm()

    # Inside

    def _check_open(self, peer: str) -> None:
        if self._closed:
            raise PeerLost(peer, f"the endpoint of {self.name} is closed")

    async def _wait_for_credit(self, peer: str) -> None:
        """Wait in line for credit; ``PeerLost`` if the peer goes meanwhile."""
        while True:
            waiter: asyncio.Future[None] = self._loop.create_future()
            line = self._creditors.setdefault(peer, deque())
            line.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                self._exchange.credited.append(peer)
                raise
            finally:
                line.remove(waiter)
                if not line:
                    self._creditors.pop(peer, None)
                if self._exchange.credited:
                    self._give_credit()
            if self._exchange.credit(peer) > 0:
                return

    def _give_credit(self) -> None:
        peers, self._exchange.credited = self._exchange.credited, []
        for peer in peers:
            line = self._creditors.get(peer)
            if not line:
                continue
            try:
                free = self._exchange.credit(peer)
            except PeerLost:
                free = len(line)
            for waiter in tuple(line)[:free]:
                if not waiter.done():
                    waiter.set_result(None)

    def _finish_requests(self) -> None:
        outcomes, self._exchange.outcomes = self._exchange.outcomes, []
        for outcome in outcomes:
            answer = self._requests.pop(outcome.token, None)
            if answer is None or answer.done():
                continue
            if isinstance(outcome.result, Exception):
                answer.set_exception(outcome.result)
            else:
                answer.set_result(outcome.result)

    def _arm(self) -> None:
        """Set the timer for the next thing that is due."""
        exchange = self._exchange
        due = exchange.due
        if exchange.owes():
            due = min(due, self._loop.time() + exchange.settings.ack_delay_s)
        if due < self._due:
            if self._timer:
                self._timer.cancel()
            self._due = due
            self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer, self._due = None, math.inf
        # Event loops call timers up to their clock's resolution early.
        now = self._loop.time() + 0.001
        self._exchange.acknowledge(now)
        if now >= self._exchange.due:
            self._exchange.poll(now)
        self._settle()

    def _stop(self) -> None:
        self._closed = True
        if self._timer:
            self._timer.cancel()
        if self._quiet and not self._quiet.done():
            self._quiet.set_result(None)
        if self._receiver and not self._receiver.done():
            self._receiver.set_exception(PeerLost(self.name, "the endpoint is closed"))
        self._release()
