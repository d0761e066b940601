"""How does an operator ask a running job for something, from another process?

Under a key of its own from the run folder, on the supervisor's own endpoint: whoever can read the folder's keys may
ask, nobody else. Every question gets an answer or a reason in bounded time.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

from nereus.actors.names import OPERATOR, SUPERVISOR
from nereus.bus.messages import Admit, Admitted, DrainSlots, Message
from nereus.errors import ConfigError, NereusError, ProtocolError
from nereus.runtime.folder import Listening, RunPaths, read_status
from nereus.runtime.wire import Wire, load_config

TIMEOUT_S = 30.0


def find(folder: Path) -> tuple[RunPaths, Listening]:
    """Return where the run in ``folder`` can be asked; ``ConfigError`` if it is not going on."""
    status = read_status(folder)
    path = RunPaths(folder, 0).address
    try:
        listening = msgspec.json.decode(path.read_bytes(), type=Listening)
    except FileNotFoundError:
        raise ConfigError(
            f"the run is not going on (it is {status.state})", where=str(folder), remedy="start or resume it first"
        ) from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"malformed: {error}", where=str(path), remedy="resume the run") from None
    return RunPaths(folder, listening.attempt), listening


async def ask(folder: Path, message: Message) -> Message:
    """Ask the supervisor of the run in ``folder``; ``ConfigError`` says why it refuses."""
    paths, listening = find(folder)
    wire = Wire(OPERATOR, paths.keys, load_config(paths))
    try:
        endpoint = await wire.client(SUPERVISOR, listening.address)
        try:
            return await endpoint.request(SUPERVISOR, message, timeout_s=TIMEOUT_S)
        finally:
            await endpoint.close()
    except ProtocolError as error:
        raise ConfigError(str(error), where=str(folder), remedy="see nereus status") from None
    except (NereusError, TimeoutError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the supervisor cannot be asked: {error}", where=str(folder), remedy="see its log") from None


async def drain(folder: Path, slot: int) -> str:
    """Have the run do without ``slot``; return what will happen."""
    await ask(folder, DrainSlots((slot,)))
    return f"slot {slot} is drained: the next plan does without it, then its process leaves"


async def join(folder: Path) -> list[str]:
    """Ask to join the run as one more slot; return the arguments of the worker process."""
    admitted = await ask(folder, Admit(f"{socket.gethostname()}:{os.getpid()}"))
    if not isinstance(admitted, Admitted):
        raise ProtocolError(f"the supervisor answered Admit with {type(admitted).__name__}")
    _, listening = find(folder)
    place = ["--run", str(folder), "--attempt", str(admitted.attempt)]
    return [*place, "--worker", admitted.worker, "--supervisor", listening.address]
