"""What does a generation unit of a simulated run say and do?

The same as a live one: it begins what it is granted, takes new weights as they are offered, and hands finished groups
over. When it does the first two is its system's affair (``serving.py``); how long decoding takes, the engine's and the
world's (``engine.py``, ``truth.py``).

Invariants (tests/sim/test_simulation.py): a unit whose slot is lost generates nothing before it is assigned anew; a
group is handed over by the unit that it was granted to; what is not trained yet goes to every new collector.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection, Sequence

from nereus.actors.names import SUPERVISOR
from nereus.bus.endpoint import Delivery, Endpoint, PeerGone
from nereus.bus.messages import (
    Assign,
    Commit,
    Fault,
    Generated,
    Grant,
    GroupAccepted,
    GroupSpec,
    Message,
    Ok,
    Peers,
    Ready,
    Refused,
    Release,
    Sample,
    Switch,
    WeightsLive,
)
from nereus.config import JobConfig
from nereus.core.plan import Plan, SlotId
from nereus.sim.devices import Devices
from nereus.sim.engine import Drawn, Engine, Speed
from nereus.sim.links import ENGINE_START_S
from nereus.sim.serving import Serving

Draw = Callable[[GroupSpec], Drawn]


def checksum(version: int) -> str:
    """Return what stands for the contents of a version."""
    return f"{version:016x}"


class Rollout:
    """One slot of a generation unit; the first one speaks for the unit (a ``serving.Unit``)."""

    def __init__(
        self, slot: SlotId, config: JobConfig, control: Endpoint, devices: Devices, draw: Draw, serving: Serving
    ) -> None:
        self.slot = slot
        self.engine = Engine(config.rollout.max_live, 1)
        self.waiting: list[Drawn] = []
        self._config = config
        self._control = control
        self._devices = devices
        self._draw = draw
        self._serving = serving
        self._assigned: Assign | None = None
        self._offered = -1
        """The newest version that it was told to take and has not."""
        self._pulling: asyncio.TimerHandle | None = None
        self._running: set[int] = set()
        self._finished: dict[int, GroupAccepted] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._scoring: dict[int, asyncio.TimerHandle] = {}
        self._collector: object = None
        self._told = (0.0, 0.0, 0.0, 0.0)
        self._said: asyncio.Queue[Message] = asyncio.Queue()

    async def handle(self, delivery: Delivery) -> Message | None:
        match delivery.message:
            case Assign() as assign:
                await self._assign(assign)
            case Grant(groups):
                for spec in groups:
                    if spec.group not in self._running and spec.group not in self._finished:
                        self._running.add(spec.group)
                        self.waiting.append(self._draw(spec))
                self.proceed()
            case Release(groups):
                self._release(groups)
            case Switch(version):
                self._offered = version
                self._serving.offered(self)
                self.proceed()
            case Peers():
                """Where servers are is known here."""
            case Commit(plan):
                self._commit(plan)
                return Ok()
            case other:
                return Refused(f"a rollout unit does not understand {type(other).__name__}")
        return None

    async def peer_gone(self, event: PeerGone) -> None:
        """Nothing is kept for a peer."""

    async def background(self) -> None:
        """Tell the supervisor which weights are live here."""
        while True:
            await self._control.send(SUPERVISOR, await self._said.get())

    async def close(self) -> None:
        self._stop()
        if self._halt in self._devices.halts:
            self._devices.halts.remove(self._halt)
        self._devices.broken.pop(self.slot, None)
        self._devices.generating -= {self.slot}

    @property
    def offered(self) -> bool:
        return self._offered >= 0

    @property
    def groups(self) -> Collection[int]:
        return self._running

    @property
    def begun(self) -> int:
        return len(self._running) - len(self.waiting)

    def _time(self) -> float:
        return asyncio.get_running_loop().time()

    async def _assign(self, assign: Assign) -> None:
        began = self._time()
        self._control.advance(assign.plan.epoch)
        self._stop()
        self._assigned = assign
        layout, devices = assign.emu.layout, self._devices
        self.engine = Engine(self._config.rollout.max_live, devices.truth.cache_tokens(layout))
        self.engine.prefill_s = lambda tokens: devices.truth.prefill_s(layout, int(tokens))
        self.engine.restart(began)
        self._told = (0.0, 0.0, 0.0, 0.0)
        self._finished.clear()
        devices.generating |= {self.slot}
        if assign.emu.slots[0] == self.slot:
            devices.broken |= dict.fromkeys(assign.emu.slots, self._stop)
            self._collector = devices.collect
            self._serving.joined(self)
            if self._halt not in devices.halts:
                devices.halts.append(self._halt)
        await asyncio.sleep(ENGINE_START_S)
        await self._control.send(SUPERVISOR, Ready(assign.emu.id, self._time() - began))

    def _stop(self) -> None:
        """Generate nothing any more; what was running is lost."""
        self._running.clear()
        self.waiting.clear()
        for timer in (*self._scoring.values(), self._timer, self._pulling):
            if timer is not None:
                timer.cancel()
        self._scoring.clear()
        self._timer = self._pulling = None
        self._offered = -1
        self._serving.left(self)
        self.engine.restart(self._time())

    def _halt(self, until: float) -> None:
        """Begin anew, after ``until``, what is in flight here."""
        now = self._time()
        self.finished(self.engine.advance(now))
        self.engine.redo(now)
        self.engine.stall(until - now)
        self.reschedule()

    def _commit(self, plan: Plan) -> None:
        """Go on; a new collector gets what is not trained yet."""
        asyncio.get_running_loop().call_soon(self._hand_all_over)

    def _hand_all_over(self) -> None:
        collector = self._devices.collect
        if collector is not None and collector != self._collector:
            self._collector = collector
            for group in tuple(self._finished.values()):
                collector(group)

    # What is begun, and under which weights

    def proceed(self) -> None:
        """Take new weights, or begin what waits, if that is due."""
        if self._pulling is not None or self._assigned is None:
            return
        if self._offered >= 0 and self._serving.may_pull(self):
            return self._pull()
        begin, now = tuple(self._serving.to_begin(self)), self._time()
        begun = {group.spec.group for group in begin}
        self.waiting = [group for group in self.waiting if group.spec.group not in begun]
        for group in begin:
            self.finished(self.engine.add(group, now))
        self.reschedule()

    def again(self, group: Drawn) -> None:
        """Begin one of its groups anew, because another unit has lost it."""
        if group.spec.group in self._running:
            self.waiting.append(group)
            self.proceed()

    def _pull(self) -> None:
        """Take over the newest weights while decoding pauses."""
        assert self._assigned is not None
        if self._devices.publications.tell is None:
            self._offered = -1
            return self._said.put_nowait(Fault(self._control.name, "no new weights", fatal=False))
        pull_s = self._devices.links.from_host_s(self._devices.weights_bytes / len(self._assigned.emu.slots))
        self._pulling = asyncio.get_running_loop().call_later(pull_s, self._pulled, pull_s)
        self.finished(self.engine.advance(self._time()))
        self.engine.stall(pull_s)
        self.reschedule()

    def _pulled(self, pull_s: float) -> None:
        self._pulling = None
        version = max(self._offered, self._devices.publications.visible)
        self._offered = -1
        live = self.engine.live
        self.finished(self.engine.switch(version, self._speed(version), 0.0, self._time()))
        self._said.put_nowait(WeightsLive(version, checksum(version), pull_s, live, self._generated()))
        self.proceed()

    def _generated(self) -> Generated:
        """Return what the engine has done since the last call."""
        engine = self.engine
        now = engine.busy_s, engine.steps, engine.tokens, engine.read_tokens
        seconds, *counts = (new - old for new, old in zip(now, self._told, strict=True))
        self._told = now
        return Generated(seconds, *map(round, counts))

    def _speed(self, version: int) -> Speed:
        assert self._assigned is not None
        truth, emu = self._devices.truth, self._assigned.emu
        slow = truth.noise.slowest(emu.slots, version) * truth.noise.jitter("decode", emu.slots[0], version)
        cached_s = truth.cached_s(emu.layout, version) * slow
        step_s = functools.cache(lambda live: truth.decode_s(emu.layout, emu.slots, live, version) * slow)
        return Speed(step_s, cached_s)

    # What comes out

    def reschedule(self) -> None:
        """Wake when the next sequence ends."""
        if self._timer is not None:
            self._timer.cancel()
        at = self.engine.next_end()
        self._timer = asyncio.get_running_loop().call_at(at, self._wake) if at != float("inf") else None

    def _wake(self) -> None:
        self._timer = None
        self.finished(self.engine.advance(self._time()))
        self.reschedule()

    def finished(self, groups: Sequence[Drawn]) -> None:
        """Have complete groups scored, each on behalf of the unit that it was granted to."""
        for group in groups:
            home = self._serving.home(self, group)
            home.score(group)
        if groups:
            self._serving.changed(self)

    def score(self, group: Drawn) -> None:
        """Have a complete group scored."""
        score_s = self._devices.truth.noise.stream("reward", group.spec.group).lognormvariate(-0.5, 0.6)
        handle = asyncio.get_running_loop().call_later(score_s, self._scored, group, score_s)
        self._scoring[group.spec.group] = handle

    def _scored(self, group: Drawn, score_s: float) -> None:
        spec = group.spec
        del self._scoring[spec.group]
        rewards = self._devices.truth.noise.stream("rewards", spec.group)
        longest = self._config.rollout.max_new_tokens
        samples = tuple(
            Sample(tokens, float(rewards.random() < 0.5), "stop" if tokens < longest else "length", first, last)
            for tokens, first, last in zip(group.lengths, group.firsts, group.lasts, strict=True)
        )
        accepted = GroupAccepted(
            spec.group,
            spec.attempt,
            spec.row,
            self._control.name,
            min(group.firsts),
            max(group.lasts),
            group.prompt_tokens,
            samples,
            self._time() - score_s - group.began,
            score_s,
        )
        self._running.discard(spec.group)
        self._finished[spec.group] = accepted
        collector = self._devices.collect
        if collector is not None:
            self._hand_all_over()
            collector(accepted)
        self._serving.changed(self)

    def _release(self, groups: tuple[int, ...]) -> None:
        for group in self._finished.keys() & groups:
            del self._finished[group]
        if self._running.isdisjoint(groups):
            return
        for group in groups:
            if group in self._running:
                self._running.discard(group)
                self.waiting = [one for one in self.waiting if one.spec.group != group]
                if (timer := self._scoring.pop(group, None)) is not None:
                    timer.cancel()
                host = self._serving.host(self, group)
                host.finished(host.engine.drop(group, self._time()))
                host.reschedule()
                self._serving.changed(self)
