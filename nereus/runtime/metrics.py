"""How do the figures of each step reach metrics.jsonl and the trackers, without ever stopping the training?

Owner: the supervisor. ``metrics.jsonl`` is always written: one object per step, ``step``, ``version`` and ``wall_s``
first, then the figures by name (``reward/mean``, ``timing_s/wait_for_batch``, ...); NaN is written as null.
Invariants (tests/runtime/test_metrics.py): a tracker that fails is switched off and said once, the file goes on; a
step that is trained again after a resume replaces its earlier line when read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog

_log = structlog.get_logger()


class Tracker(Protocol):
    """Something that shows figures: TensorBoard or the like."""

    name: str

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Writes event files that TensorBoard reads. Imports neither torch nor TensorFlow."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        """Start an event file in ``folder``. ``ImportError`` when the tensorboard package is missing."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event: Any = Event
        self._summary: Any = Summary
        self._writer: Any = EventFileWriter(str(folder))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class MetricsWriter:
    """Writes the figures of each step to the file and to the trackers that still work."""

    def __init__(self, path: Path, trackers: Sequence[Callable[[], Tracker]] = ()) -> None:
        """Append to ``path``; each of ``trackers`` makes one tracker, and may fail."""
        _cut_torn_line(path)
        self._file = path.open("ab", buffering=0)
        self._trackers: list[Tracker] = []
        for make in trackers:
            try:
                self._trackers.append(make())
            except Exception as error:  # noqa: BLE001 - whatever a tracker does, training goes on
                _log.warning("tracker is not used", error=repr(error))

    def write(self, step: int, version: int, wall_s: float, metrics: Mapping[str, float]) -> None:
        """Record the figures of ``step``; ``wall_s`` are the seconds since the run began."""
        line = {"step": step, "version": version, "wall_s": round(wall_s, 4), **metrics}
        self._file.write(msgspec.json.encode(line) + b"\n")
        for tracker in tuple(self._trackers):
            try:
                tracker.write(step, metrics)
            except Exception as error:  # noqa: BLE001 - whatever a tracker does, training goes on
                self._trackers.remove(tracker)
                _log.warning("tracker failed and is switched off", tracker=tracker.name, error=repr(error))

    def close(self) -> None:
        """Close the file and the trackers; safe to call twice."""
        self._file.close()
        while self._trackers:
            tracker = self._trackers.pop()
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001 - whatever a tracker does, training goes on
                _log.warning("tracker failed on closing", tracker=tracker.name, error=repr(error))


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return one dictionary per step in order of steps; null becomes NaN, an unfinished last line is left out.

    ``ValueError`` names the line that is not an object of figures.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    rows: dict[int, dict[str, float]] = {}
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            row = msgspec.json.decode(line, type=dict[str, float | None])
            step = row["step"]
        except (msgspec.MsgspecError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if step is None:
            raise ValueError(f"{path}, line {number}: the step is null")
        rows[int(step)] = {name: math.nan if value is None else value for name, value in row.items()}
    return [rows[step] for step in sorted(rows)]


def _cut_torn_line(path: Path) -> None:
    """Drop an unfinished last line, left by a crash, so that the next line stands alone."""
    if path.exists():
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            with path.open("r+b") as file:
                file.truncate(data.rfind(b"\n") + 1)
