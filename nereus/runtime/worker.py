"""How does a worker process come up, join its run and leave?

Owner: the supervisor starts it as ``python -m nereus.runtime.worker``. It opens its own server endpoint, connects to
the supervisor under its own key, says ``Hello``, and hosts the actor that its name stands for: ``slot-N`` a slot,
``weights-N`` the weight-sync relay, ``reward-N`` the reward service.

Invariant (tests/live): it leaves with code 0 after ``Shutdown``, with code 1 and one line on its log after a failure,
and never outlives the supervisor that started it.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog
from setproctitle import setproctitle

from nereus.actors.host import Actor, host
from nereus.actors.names import RELAY, REWARD, SUPERVISOR, slot_of
from nereus.actors.reward import RewardActor
from nereus.actors.slot import SlotActor
from nereus.actors.weights import Relay, WeightsActor
from nereus.actors.wiring import Wiring
from nereus.bus.endpoint import Endpoint
from nereus.bus.loop import run
from nereus.bus.messages import Hello, Welcome
from nereus.config import JobConfig
from nereus.errors import ConfigError, NereusError, ProtocolError
from nereus.lifeline import die_with_parent
from nereus.runtime.folder import RunPaths
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
        control = await wire.client(SUPERVISOR, supervisor)
        try:
            hello = Hello(worker, control.incarnation, socket.gethostname(), os.getpid(), service.address)
            welcome = await control.request(SUPERVISOR, hello, timeout_s=config.bus.start_timeout_s)
            if not isinstance(welcome, Welcome):
                raise ProtocolError(f"the supervisor answered Hello with {type(welcome).__name__}")
            control.advance(welcome.epoch)
            actor = _actor(worker, paths, config, control, service, wire)
            return await host(actor, control, [service])
        finally:
            await control.close()
    finally:
        await service.close()


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
    sys.exit(serve(sys.argv[1:]))


def serve(words: Sequence[str]) -> int:
    """Be the worker that the command line names; return the exit code."""
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
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    main()
