"""How do worker processes live in one process? As tasks on the in-memory bus.

Owner: a ``World``. A worker is a task that ``kill`` cancels without a word to anybody, and that ``hang`` cuts off from
everybody. It implements the supervisor's ``Launcher``, so starts, exits and replacements take the way they take live.

Invariants (tests/virtual/test_losses.py): a death is told once, with its pid; a worker that is started anew is a new
incarnation; equal programs make equal names, pids and times.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from nereus.actors.host import Actor, host
from nereus.actors.names import SUPERVISOR
from nereus.actors.slot import SlotActor
from nereus.actors.tether import Tether
from nereus.actors.wiring import Wiring
from nereus.bus.endpoint import Endpoint
from nereus.bus.memory import MemoryBus, MemoryEndpoint
from nereus.bus.messages import Hello, Welcome
from nereus.core.plan import PlanEpoch
from nereus.errors import ConfigError, NereusError, PeerLost
from nereus.runtime.processes import Exited

FIRST_PID = 100
HELLO_TIMEOUT_S = 30.0

Build = Callable[[str, Endpoint, Endpoint, Wiring], Actor]
"""Makes the actor of a worker, given its name, its control and service endpoints and its way to others."""


def _nobody(_worker: str) -> None:
    """Nobody is told."""


class VirtualProcesses:
    """The worker processes of one run."""

    def __init__(
        self,
        bus: MemoryBus,
        build: Build,
        *,
        boot_s: Callable[[str], float] = lambda _: 0.2,
        connect_s: float = 0.02,
        host_of: Callable[[str], str] = lambda _: "here",
        died: Callable[[str], None] = _nobody,
        left: Callable[[str], None] = _nobody,
        stalled: Callable[[str], None] = _nobody,
        note: Callable[[str], None] = _nobody,
        orphan_s: float = 0.0,
    ) -> None:
        """``boot_s``: from the start to the first word; infinite: not now, the worker is started by ``boot`` later.

        ``host_of`` names a worker's host. ``died``, ``left`` and ``stalled`` are told of workers that vanish, that are
        gone in any way, and that hang in their work; ``note`` of words to show. Without a supervisor they wait
        ``orphan_s`` for that of a later ``attempt``.
        """
        self.exits: asyncio.Queue[Exited] = asyncio.Queue()
        self._bus = bus
        self._build = build
        self._boot_s = boot_s
        self._connect_s = connect_s
        self._host_of = host_of
        self._died = died
        self._left = left
        self._stalled = stalled
        self._note = note
        self._orphan_s = orphan_s
        self.attempt = 1
        """The newest attempt that is announced."""
        self._pid_of: dict[str, int] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._endpoints: dict[str, list[MemoryEndpoint]] = {}
        self._hung: set[str] = set()
        self._pids = itertools.count(FIRST_PID)

    def __contains__(self, worker: str) -> bool:
        return worker in self._tasks

    # Launcher

    @property
    def running(self) -> Mapping[str, int]:
        return {worker: self._pid_of[worker] for worker in self._tasks}

    async def start(self, worker: str) -> int:
        boot_s = self._boot_s(worker)
        return 0 if boot_s == float("inf") else self.boot(worker, boot_s)

    def boot(self, worker: str, boot_s: float) -> int:
        """Start a process that says its first word after ``boot_s``; return its pid."""
        self._hung.discard(worker)
        self._bus.heal(worker)
        pid = self._pid_of[worker] = next(self._pids)
        self._tasks[worker] = asyncio.create_task(self._process(worker, pid, boot_s), name=worker)
        return pid

    def kill(self, worker: str) -> None:
        """Let a worker vanish."""
        if worker in self._tasks:
            self._died(worker)
            self._abort(worker)
            self._tasks[worker].cancel()

    async def wait(self, *, timeout_s: float) -> tuple[str, ...]:
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=timeout_s)
        return tuple(sorted(self._tasks))

    async def stop(self, *, grace_s: float) -> None:
        for worker in tuple(self._tasks):
            self.kill(worker)
        await self.wait(timeout_s=grace_s)

    # What may go wrong

    def hang(self, worker: str) -> None:
        """Let a worker fall silent, with all its connections open, until somebody kills it."""
        if worker in self._tasks:
            self.stall(worker)
            self._hung.add(worker)
            self._bus.cut(worker)

    def hangs(self, worker: str) -> bool:
        """Say whether ``worker`` has fallen silent and is still there."""
        return worker in self._hung and worker in self._tasks

    def stall(self, worker: str) -> None:
        """Let a worker hang in its work, and be well otherwise."""
        if worker in self._tasks:
            self._stalled(worker)

    def drop(self, seconds: float, *workers: str) -> None:
        """Lose everything that a worker says or is told, or what passes between two, for a while; they work on."""
        if all(worker in self._tasks for worker in workers):
            self._bus.cut(*workers)
            asyncio.get_running_loop().call_later(seconds, self._heal, *workers)

    def _heal(self, *workers: str) -> None:
        if len(workers) > 1 or not self._hung.intersection(workers):
            self._bus.heal(*workers)

    # The life of one

    async def _process(self, worker: str, pid: int, boot_s: float) -> None:
        code = 1
        try:
            service = self._bus.server(worker)
            control = self._bus.client(worker, server=SUPERVISOR)
            self._endpoints[worker] = [service, control]
            await asyncio.sleep(boot_s)
            hello = Hello(worker, control.incarnation, self._host_of(worker), pid, f"{worker}#{pid}")
            welcome = await control.request(SUPERVISOR, hello, timeout_s=HELLO_TIMEOUT_S)
            assert isinstance(welcome, Welcome)
            control.advance(welcome.epoch)
            wiring = _Wiring(self, worker)
            if self._orphan_s:
                code = await self._outlive(hello, control, service, wiring)
            else:
                code = await host(self._build(worker, control, service, wiring), control, [service])
                await control.close()
            await service.close()
        except asyncio.CancelledError:
            code = -9
        except (NereusError, TimeoutError) as error:
            self._note(f"{worker}: {error}")
            self._abort(worker)
        finally:
            self._tasks.pop(worker, None)
            self._left(worker)
            self.exits.put_nowait(Exited(worker, pid, code))

    async def _outlive(self, hello: Hello, control: MemoryEndpoint, service: MemoryEndpoint, wiring: Wiring) -> int:
        """Be the worker that said ``hello``, under this supervisor and those of later attempts."""
        actor: Actor | None = None
        under = self.attempt

        async def newer(epoch: PlanEpoch) -> MemoryEndpoint | None:
            nonlocal under
            announced = self.attempt
            if announced <= under:
                return None
            try:
                line = self._bus.client(hello.worker, server=SUPERVISOR)
            except ConfigError:
                return None  # it is gone already
            self._endpoints[hello.worker].append(line)
            stage = actor.stage if isinstance(actor, SlotActor) else ""
            again = replace(hello, incarnation=line.incarnation, orphan=True, epoch=epoch, stage=stage)
            try:
                welcome = await line.request(SUPERVISOR, again, timeout_s=HELLO_TIMEOUT_S)
            except (PeerLost, TimeoutError):
                line.abort()
                return None
            assert isinstance(welcome, Welcome)
            line.advance(welcome.epoch)
            under = announced
            return line

        tether = Tether(control, newer, beat_s=1.0, patience_s=self._orphan_s)
        async with tether.watched():
            actor = self._build(hello.worker, tether, service, wiring)
            return await host(actor, tether, [service])

    def _abort(self, worker: str) -> None:
        for endpoint in self._endpoints.pop(worker, []):
            endpoint.abort()

    async def connect(self, worker: str, server: str) -> Endpoint:
        """Open a client endpoint of ``worker`` that dies with it."""
        await asyncio.sleep(self._connect_s)
        endpoint = self._bus.client(worker, server=server)
        self._endpoints.setdefault(worker, []).append(endpoint)
        return endpoint


class _Wiring:
    def __init__(self, processes: VirtualProcesses, worker: str) -> None:
        self._processes = processes
        self._worker = worker

    async def connect(self, server: str, address: str) -> Endpoint:
        return await self._processes.connect(self._worker, server)
