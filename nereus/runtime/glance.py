"""How is a run doing, as seen from outside? Reads STATUS and the newest figures; needs no lock and disturbs nothing."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from nereus.runtime.folder import Status, read_status

_TAIL_BYTES = 1 << 16


class Glance(Struct, frozen=True):
    """A run at one moment."""

    folder: str
    status: Status
    alive: bool
    """False also if the run is on another host, whose processes cannot be seen."""
    metrics: dict[str, float | None]
    """The newest line of metrics.jsonl; empty before the first step."""


def glance(folder: Path) -> Glance:
    """Look at the run folder; ``ConfigError`` if it is none."""
    status = read_status(folder)
    return Glance(str(folder), status, _alive(status.pid), _last_metrics(folder / "metrics.jsonl"))


def render(seen: Glance, *, as_json: bool) -> str:
    """Return the glance as JSON or as lines for people."""
    if as_json:
        return msgspec.json.encode(seen).decode() + "\n"
    status = seen.status
    state: str = status.state
    if state in ("starting", "running", "draining"):
        state += f" (pid {status.pid})" if seen.alive else f", but pid {status.pid} is not on this host: lost?"
    lines = [f"{seen.folder}: {state}", f"step {status.step}, version {status.version}"]
    if status.reason:
        lines.append(f"reason: {status.reason}")
    lines += [f"{name} {'nan' if value is None else f'{value:.6g}'}" for name, value in sorted(seen.metrics.items())]
    return "\n".join(lines) + "\n"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # it exists, and is another user's
    return pid > 0


def _last_metrics(path: Path) -> dict[str, float | None]:
    """Return the last whole line, reading only the file's end; a line still being written is passed over."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().rpartition(b"\n")[0].splitlines()
    except FileNotFoundError:
        return {}
    return msgspec.json.decode(lines[-1], type=dict[str, float | None]) if lines else {}
