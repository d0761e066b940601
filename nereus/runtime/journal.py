"""What happened in this run, in order, so that it can be checked and continued?

Owner: the supervisor appends; everybody else reads. One JSON object per line: ``{"seq", "t", "record": {"kind"}}``.
Invariants (tests/runtime/test_journal.py): ``seq`` counts from 0 without gaps over all attempts; ``t`` (seconds, on a
monotonic clock that continues over attempts) never falls; a record is with the operating system before ``append``
returns, and on disk before a checkpoint or the end of the run is reported; a failed write leaves no torn line behind.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from nereus.bus.messages import GroupRef
from nereus.core.plan import Plan


class _Record(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", kw_only=True):
    """Base of all records."""


class RunStarted(_Record, frozen=True, tag="run_started", kw_only=True):
    """An attempt begins. ``step``, ``version`` and ``cursor`` are those of the checkpoint it goes on from (0: afresh):
    what was trained after that checkpoint is void and is trained again."""

    run: str
    attempt: int
    config: str
    """Fingerprint of the resolved configuration."""
    data: str
    """Fingerprint of the data set."""
    seed: int
    wall: float
    """Unix time."""
    step: int = 0
    version: int = 0
    cursor: int = 0


class Readopted(_Record, frozen=True, tag="readopted", kw_only=True):
    """This attempt goes on from live workers, not from a checkpoint: none of what was trained is void.

    ``workers`` have outlived the supervisor of the attempt before, ``lost`` have not; the trainers stand before
    ``step`` under the plan of ``epoch``. ``completed``: the last step was told by the trainers, not by the journal.
    """

    attempt: int
    epoch: int
    step: int
    workers: tuple[str, ...]
    lost: tuple[str, ...] = ()
    completed: bool = False


class WorkerJoined(_Record, frozen=True, tag="worker_joined", kw_only=True):
    worker: str
    incarnation: str
    host: str = ""
    pid: int = 0


class WorkerGone(_Record, frozen=True, tag="worker_gone", kw_only=True):
    worker: str
    incarnation: str
    why: str
    expected: bool = False
    """True when the supervisor had asked it to leave."""


class PlanCommitted(_Record, frozen=True, tag="plan_committed", kw_only=True):
    plan: Plan
    why: str = ""


class TransitionBegun(_Record, frozen=True, tag="transition_begun", kw_only=True):
    """State moves towards ``plan`` begin, at a weight-sync point."""

    plan: Plan
    primitives: tuple[str, ...]
    why: str


class TransitionEnded(_Record, frozen=True, tag="transition_ended", kw_only=True):
    """The plan of ``epoch`` is in force, or the change to it was given up because of ``reason``."""

    epoch: int
    ok: bool
    reason: str = ""
    seconds: float = 0.0
    moved_bytes: int = 0
    """What slots lent to others: parameters and moments."""


class Decided(_Record, frozen=True, tag="decided", kw_only=True):
    """The controller weighed something; ``because`` is its own sentence and ``numbers`` are what made it."""

    decision: str
    """``trigger``, a verdict (``opportunistic``, ``urgent``, ``stay``), ``widen``, ``restart``, ``failed`` or
    ``stale``: the kinds of ``nereus.control.controller.Record``."""
    because: str
    numbers: Mapping[str, float | None] = {}
    """Units are in the names; what is not finite is written as null and read as None."""


class Happened(_Record, frozen=True, tag="happened", kw_only=True):
    """What the controller was told (``nereus.control.controller``): ``nereus replay`` tells it to another one."""

    event: Mapping[str, Any]
    """Its fields and its ``type``; numbers that are not finite stand as text."""


class Compared(_Record, frozen=True, tag="compared", kw_only=True):
    """What was predicted of the plan of ``epoch``, beside what was measured."""

    epoch: int
    what: Literal["step", "transition"]
    """Seconds of a step under that plan, or of the way to it."""
    predicted_s: float
    measured_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.predicted_s) and math.isfinite(self.measured_s)):
            raise ValueError(f"a comparison needs finite seconds, got {self.predicted_s} and {self.measured_s}")


class Granted(_Record, frozen=True, tag="granted", kw_only=True):
    """``owner`` may start these groups, when the newest policy version is ``version``."""

    groups: tuple[GroupRef, ...]
    owner: str
    version: int


class Accepted(_Record, frozen=True, tag="accepted", kw_only=True):
    """The collector holds this group, complete and checked."""

    group: int
    attempt: int
    row: int
    rollout: str
    version_first: int
    version_last: int
    rewards: tuple[float | None, ...]


class Reissued(_Record, frozen=True, tag="reissued", kw_only=True):
    """The group's earlier attempt is lost; it will be granted again as ``attempt``."""

    group: int
    attempt: int
    reason: str


class Dropped(_Record, frozen=True, tag="dropped", kw_only=True):
    """The group will never be trained."""

    group: int
    attempt: int
    reason: str


class StepBegun(_Record, frozen=True, tag="step_begun", kw_only=True):
    """The trainers are told to make ``step`` from these groups."""

    step: int
    version: int
    groups: tuple[GroupRef, ...]


class Trained(_Record, frozen=True, tag="trained", kw_only=True):
    """Optimizer step ``step`` consumed policy ``version`` and these groups; it produced ``version + 1``."""

    step: int
    version: int
    groups: tuple[GroupRef, ...]
    samples: int
    skipped: bool = False


class VersionReady(_Record, frozen=True, tag="version_ready", kw_only=True):
    version: int
    checksum: str


class WeightsLive(_Record, frozen=True, tag="weights_live", kw_only=True):
    worker: str
    version: int
    checksum: str


class CheckpointBegun(_Record, frozen=True, tag="checkpoint_begun", kw_only=True):
    step: int
    folder: str


class CheckpointCommitted(_Record, frozen=True, tag="checkpoint_committed", kw_only=True):
    step: int
    version: int
    cursor: int
    folder: str


class Drain(_Record, frozen=True, tag="drain", kw_only=True):
    """The run was asked to end early: finish the step, save, leave."""

    reason: str


class RunEnded(_Record, frozen=True, tag="run_ended", kw_only=True):
    reason: str
    ok: bool


Record = (
    RunStarted
    | Readopted
    | WorkerJoined
    | WorkerGone
    | PlanCommitted
    | TransitionBegun
    | TransitionEnded
    | Decided
    | Happened
    | Compared
    | Granted
    | Accepted
    | Reissued
    | Dropped
    | StepBegun
    | Trained
    | VersionReady
    | WeightsLive
    | CheckpointBegun
    | CheckpointCommitted
    | Drain
    | RunEnded
)

_DURABLE = (RunStarted, Readopted, PlanCommitted, CheckpointBegun, CheckpointCommitted, RunEnded)
"""Records that must outlive a crash of the host: resuming depends on them."""


class Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the journal."""

    seq: int
    t: float
    record: Record


class JournalError(ValueError):
    """The journal is damaged elsewhere than at its torn end."""


class Contents(Struct, frozen=True):
    """What a journal file holds."""

    entries: tuple[Entry, ...]
    size_bytes: int
    """Length of the whole lines."""
    torn_bytes: int = 0
    """Length of an unfinished last line, left by a crash in mid-write; it is not among ``entries``."""


class Journal:
    """Appends records to one file. Not for several writers: the run folder's lock sees to that."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Open or create ``path`` and go on after its last whole line; ``torn_bytes`` tells what was cut off."""
        before = read_journal(path) if path.exists() else Contents((), 0)
        last = before.entries[-1] if before.entries else None
        self.path = path
        self.torn_bytes = before.torn_bytes
        self._seq = last.seq + 1 if last else 0
        self._clock = clock
        self._zero = clock() - (last.t if last else 0.0)
        self._size = before.size_bytes
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._file, self._size)
        self._encoder = msgspec.json.Encoder()

    def append(self, *records: Record) -> None:
        """Write ``records`` as one batch at one time. ``OSError`` (a full disk) leaves the journal as it was."""
        t = self._clock() - self._zero
        entries = [Entry(self._seq + index, t, record) for index, record in enumerate(records)]
        batch = memoryview(b"".join(self._encoder.encode(entry) + b"\n" for entry in entries))
        written = 0
        try:
            while written < len(batch):
                written += os.pwrite(self._file, batch[written:], self._size + written)
            if any(isinstance(record, _DURABLE) for record in records):
                os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += written
        self._seq += len(entries)

    def close(self) -> None:
        """Put everything on disk and close; safe to call twice."""
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1


def read_journal(path: Path) -> Contents:
    """Read a journal, also while it is being written.

    An unfinished last line is left out and reported; any other damage (garbage, a gap in ``seq``, time running
    backwards) raises ``JournalError`` with the line number.
    """
    data = path.read_bytes()
    size = data.rfind(b"\n") + 1
    decoder = msgspec.json.Decoder(Entry)
    entries: list[Entry] = []
    for number, line in enumerate(data[:size].splitlines(), start=1):
        try:
            entry = decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise JournalError(f"{path}, line {number}: {error}") from None
        if entry.seq != len(entries):
            raise JournalError(f"{path}, line {number}: record {entry.seq} stands where {len(entries)} belongs")
        if entries and entry.t < entries[-1].t:
            raise JournalError(f"{path}, line {number}: time runs backwards, {entry.t} after {entries[-1].t}")
        entries.append(entry)
    return Contents(tuple(entries), size, len(data) - size)


def plain(entries: Iterable[Entry]) -> Iterator[dict[str, Any]]:
    """Yield every entry as one flat dictionary (``seq``, ``t``, ``kind``, the record's fields): what checkers take."""
    for entry in entries:
        yield {"seq": entry.seq, "t": entry.t, **msgspec.to_builtins(entry.record)}


class Progress(Struct):
    """How far a run has come, rebuilt from its journal."""

    attempt: int = 0
    step: int = 0
    version: int = 0
    trained: dict[int, int] = {}
    """Group -> step that trained it."""
    dropped: dict[int, str] = {}
    outstanding: dict[int, str] = {}
    """Group -> owner that may be working on it."""
    accepted: dict[int, int] = {}
    """Group -> attempt that the collector holds and that is not trained yet."""
    attempts: dict[int, int] = {}
    """Group -> newest attempt."""
    rewards: dict[int, tuple[float | None, ...]] = {}
    live: dict[str, int] = {}
    """Worker -> policy version it serves."""
    committed: dict[int, str] = {}
    """Step -> folder of its checkpoint, as committed."""
    changes: int = 0
    """Plan changes that came into force, and what all of them together took and moved."""
    changes_s: float = 0.0
    moved_bytes: int = 0
    given_up: int = 0
    """Plan changes that were not carried out to their end."""
    lost: int = 0
    """Workers that left without being asked to."""
    reissued: int = 0
    ended: str = ""

    @property
    def cursor(self) -> int:
        """The first group of the global sample order that is neither trained nor dropped."""
        group = 0
        while group in self.trained or group in self.dropped:
            group += 1
        return group


def replay(entries: Iterable[Entry]) -> Progress:
    """Rebuild the counters of a run. A ``RunStarted`` rolls back to the checkpoint that it names."""
    progress = Progress()
    for entry in entries:
        _apply(progress, entry.record)
    return progress


def _apply(progress: Progress, record: Record) -> None:
    match record:
        case RunStarted(attempt=attempt, step=step, version=version):
            progress.attempt, progress.step, progress.version, progress.ended = attempt, step, version, ""
            progress.trained = {group: at for group, at in progress.trained.items() if at < step}
            progress.outstanding, progress.accepted, progress.live = {}, {}, {}
        case WorkerGone(worker=worker, expected=expected):
            progress.live.pop(worker, None)
            progress.lost += not expected
        case TransitionEnded(ok=ok, seconds=seconds, moved_bytes=moved_bytes):
            progress.changes += ok
            progress.given_up += not ok
            progress.changes_s += seconds
            progress.moved_bytes += moved_bytes
        case Granted(groups=groups, owner=owner):
            for ref in groups:
                progress.outstanding[ref.group] = owner
                progress.attempts[ref.group] = ref.attempt
        case Accepted(group=group, attempt=attempt, rewards=rewards):
            progress.outstanding.pop(group, None)
            progress.accepted[group] = attempt
            progress.rewards[group] = rewards
        case Reissued(group=group, attempt=attempt):
            progress.outstanding.pop(group, None)
            progress.accepted.pop(group, None)
            progress.attempts[group] = attempt
            progress.reissued += 1
        case Dropped(group=group, reason=reason):
            progress.outstanding.pop(group, None)
            progress.accepted.pop(group, None)
            progress.dropped[group] = reason
        case Trained(step=step, version=version, groups=groups):
            progress.step, progress.version = step + 1, version + 1
            for ref in groups:
                progress.accepted.pop(ref.group, None)
                progress.trained[ref.group] = step
        case WeightsLive(worker=worker, version=version):
            progress.live[worker] = version
        case CheckpointCommitted(step=step, folder=folder):
            progress.committed[step] = folder
        case RunEnded(reason=reason):
            progress.ended = reason
        case _:
            pass
