"""How does a worker process come up, join its run and leave?

Owner: the supervisor starts it as ``python -m nereus.runtime.worker``. It opens its own server endpoint, connects to
the supervisor under its own key, says ``Hello``, and hosts the actor that its name stands for: ``slot-N`` a slot,
``weights-N`` the weight-sync relay, ``reward-N`` the reward service. When the supervisor is killed it waits for the one
that takes the run over (``actors/tether.py``), which ``supervisor.json`` in the run folder names.

Invariant (tests/live): it leaves with code 0 after ``Shutdown``, with code 1 and one line on its log after a failure,
and outlives its supervisor by ``bus.orphan_s`` at most.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog
from msgspec.structs import replace
from setproctitle import setproctitle

from nereus.actors.host import Actor, host
from nereus.actors.names import RELAY, REWARD, SUPERVISOR, slot_of
from nereus.actors.reward import RewardActor
from nereus.actors.slot import SlotActor
from nereus.actors.tether import Line, Tether
from nereus.actors.weights import Relay, WeightsActor
from nereus.actors.wiring import Wiring
from nereus.bus.endpoint import Endpoint
from nereus.bus.loop import run
from nereus.bus.messages import Hello, Welcome
from nereus.bus.zeromq import ZmqClient
from nereus.config import JobConfig
from nereus.core.plan import PlanEpoch
from nereus.errors import ConfigError, NereusError, PeerLost, ProtocolError
from nereus.lifeline import die_with_parent
from nereus.runtime.exits import EXIT_CONFIG, EXIT_FAILURE
from nereus.runtime.folder import Listening, RunPaths
from nereus.runtime.logs import configure_worker
from nereus.runtime.wire import Wire, load_config

log = structlog.get_logger()


async def work(paths: RunPaths, worker: str, supervisor: str) -> int:
    """Join the run and serve until told to leave."""
    config = load_config(paths)
    configure_worker(
        paths.logs / f"{worker}.log",
        log_format=config.run.log_format,
        level=config.run.log_level,
        run=paths.name,
        worker=worker,
    )
    setproctitle(f"nereus {paths.name} {worker}")
    wire = Wire(worker, paths.keys, config)
    service = await wire.serve()
    try:
        join = Joining(paths, config, wire, worker, service.address)
        tether = Tether(
            await join.first(supervisor), join.newer, beat_s=config.bus.heartbeat_s, patience_s=config.bus.orphan_s
        )
        async with tether.watched():
            join.actor = actor = _actor(worker, paths, config, tether, service, wire)
            return await host(actor, tether, [service])
    finally:
        await service.close()


class Joining:
    """Brings a worker under the supervisor of its run: the one that started it, then those that take the run over."""

    def __init__(self, paths: RunPaths, config: JobConfig, wire: Wire, worker: str, service: str) -> None:
        self._paths = paths
        self._wire = wire
        self._timeout_s = config.bus.start_timeout_s
        self._hello = Hello(worker, "unknown", socket.gethostname(), os.getpid(), service)
        self._attempt = paths.attempt
        self.actor: Actor | None = None

    async def first(self, address: str) -> Line:
        """Join the supervisor at ``address``; ``NereusError`` or ``TimeoutError`` says why that cannot be."""
        line = await self._wire.client(SUPERVISOR, address)
        try:
            return await self._welcomed(line, self._hello)
        except BaseException:
            line.abort()
            raise

    async def newer(self, epoch: PlanEpoch) -> Line | None:
        """Join the supervisor of a later attempt, if there is one that can be reached."""
        listening = self._announced()
        if listening is None or listening.attempt <= self._attempt:
            return None
        try:
            line = await self._wire.client(SUPERVISOR, listening.address)
        except ConfigError:
            return None  # it has left again, or is not there yet
        stage = self.actor.stage if isinstance(self.actor, SlotActor) else ""
        try:
            await self._welcomed(line, replace(self._hello, orphan=True, epoch=epoch, stage=stage))
        except (PeerLost, TimeoutError):
            line.abort()
            return None
        except BaseException:
            line.abort()
            raise
        self._attempt = listening.attempt
        return line

    def _announced(self) -> Listening | None:
        """Return where the newest supervisor says that it listens; ``ConfigError`` if the run is no more."""
        if not self._paths.path.is_dir():
            raise ConfigError("the run folder is gone", where=str(self._paths.path), remedy="start another run")
        try:
            return msgspec.json.decode(self._paths.address.read_bytes(), type=Listening)
        except (OSError, msgspec.MsgspecError):
            return None

    async def _welcomed(self, line: ZmqClient, hello: Hello) -> ZmqClient:
        """Say hello on ``line``; ``ProtocolError`` if it is another run's supervisor, or one of the past."""
        hello = replace(hello, incarnation=line.incarnation)
        welcome = await line.request(SUPERVISOR, hello, timeout_s=self._timeout_s)
        if not isinstance(welcome, Welcome):
            raise ProtocolError(f"the supervisor answered Hello with {type(welcome).__name__}")
        if welcome.run_id != self._paths.name:
            raise ProtocolError(f"the supervisor is that of run {welcome.run_id}, not of {self._paths.name}")
        if welcome.epoch < hello.epoch:
            raise ProtocolError(f"the supervisor is at plan epoch {welcome.epoch}, {hello.worker} at {hello.epoch}")
        line.advance(welcome.epoch)
        return line


def _actor(
    worker: str, paths: RunPaths, config: JobConfig, control: Endpoint, service: Endpoint, wiring: Wiring
) -> Actor:
    slot = slot_of(worker)
    if slot is not None:
        return SlotActor(slot, config, control, wiring, paths.rollouts)
    if worker == RELAY:
        return WeightsActor(Relay(paths.host_name, worker), control, service)
    if worker == REWARD:
        return RewardActor(config, service)
    raise ConfigError(
        f"there is no kind of worker {worker!r}", where="--worker", remedy="use slot-N, weights-0, reward-0"
    )


def main() -> None:
    """Entry of ``python -m nereus.runtime.worker``."""
    die_with_parent()
    try:
        sys.exit(serve(sys.argv[1:]))
    except NereusError as error:  # its log has the reason
        sys.exit(EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILURE)


def serve(words: Sequence[str]) -> int:
    """Be the worker that the command line names; return the exit code, or raise ``NereusError`` with the reason."""
    parser = argparse.ArgumentParser(description="One worker process of a run; started by the supervisor.")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--worker", required=True)
    parser.add_argument("--supervisor", required=True)
    given = parser.parse_args(words)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor alone decides when to drain
    try:
        return run(work(RunPaths(given.run, given.attempt), given.worker, given.supervisor))
    except (NereusError, TimeoutError) as error:
        log.error("leaving", reason=str(error))
        if isinstance(error, NereusError):
            raise
        raise NereusError(f"{given.worker} waited too long: {error}") from None


if __name__ == "__main__":
    main()
