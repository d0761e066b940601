"""Where does a run keep its files, and who may write there?

Owner: the supervisor, which holds the folder's lock for as long as it lives (``RunFolder``). Workers and readers see
the same paths without the lock (``RunPaths``). Invariants (tests/runtime/test_folder.py): two processes never hold one
folder; one that was stopped and has lost it is told so; ``STATUS`` is always a whole JSON object; an attempt number is
never reused; ``keys`` is readable by its owner only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from nereus.errors import ConfigError, NereusError

State = Literal["starting", "running", "draining", "finished", "stopped", "failed"]
"""``finished``: all steps done; ``stopped``: drained early, can be resumed; ``failed``: ended by an error."""

_ORDINAL = re.compile(r"-(\d{3,})$")
_ATTEMPT = re.compile(r"attempt_(\d+)$")


class Status(Struct, frozen=True):
    """What ``STATUS`` says: the run at a glance, for people and for schedulers."""

    state: State
    step: int = 0
    version: int = 0
    pid: int = 0
    reason: str = ""
    updated: float = 0.0
    """Unix time of the last change."""


class Listening(Struct, frozen=True):
    """Where the supervisor of a run listens."""

    address: str
    attempt: int


class Superseded(NereusError):
    """Another supervisor has taken the run folder over: this one has no say any more."""


class RunPaths:
    """Where the files of a run are, as seen by attempt number ``attempt``."""

    def __init__(self, path: Path, attempt: int) -> None:
        self.path = path
        self.attempt = attempt

    @property
    def name(self) -> str:
        """The run id."""
        return self.path.name

    @property
    def host_name(self) -> str:
        """What the run is called where names are one host's: two clones may both have a ``quickstart-001``.

        It stays the same over attempts, so that one finds what a killed one has left.
        """
        place = self.path.stat()
        return f"{self.name}-{place.st_dev:x}.{place.st_ino:x}"

    @property
    def configs(self) -> Path:
        return self.path / "configs"

    @property
    def logs(self) -> Path:
        """The log folder of this attempt."""
        return self.path / "logs" / f"attempt_{self.attempt}"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def keys(self) -> Path:
        return self.path / "keys"

    @property
    def address(self) -> Path:
        """Where the supervisor listens, while the run is going on."""
        return self.path / "supervisor.json"

    @property
    def forkserver(self) -> Path:
        """The socket of the process that starts this host's workers."""
        return self.path / "forkserver.sock"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.html"


class RunFolder(RunPaths):
    """The files of one run, locked by this process until ``close``."""

    def __init__(self, path: Path, lock: int) -> None:
        """Take over a locked folder; use ``create`` or ``open``."""
        super().__init__(path, _begin_attempt(path))
        self._lock = lock
        for folder in (self.configs, self.checkpoints, self.rollouts):
            folder.mkdir(parents=True, exist_ok=True)
        self.keys.mkdir(mode=0o700, exist_ok=True)
        self.keys.chmod(0o700)

    def begin_attempt(self) -> None:
        """Go on as another attempt, with logs of its own."""
        self.attempt = _begin_attempt(self.path)

    @classmethod
    def create(cls, root: Path, name: str, *, path: Path | None = None) -> RunFolder:
        """Make a new run folder: ``<root>/<name>-NNN`` with the next free number, or exactly ``path``.

        ``ConfigError`` if ``path`` already holds a run or cannot be written.
        """
        if not name or "/" in name or name.startswith("."):
            raise ConfigError(
                f"{name!r} cannot name a folder", where="run.name", remedy="use letters, digits, dots and dashes"
            )
        if path is not None:
            return cls(empty_folder(path), _acquire(path))
        made = next_folder(root, name)
        return cls(made, _acquire(made))

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Take an existing run folder over, to resume it. ``ConfigError`` if there is none, or if it is in use."""
        if not (path / "STATUS").is_file():
            raise ConfigError(
                "is not a run folder (it has no STATUS)", where=str(path), remedy="name a folder that a run has made"
            )
        return cls(path, _acquire(path))

    @property
    def owned(self) -> bool:
        """Whether nobody has taken the folder over while this process stood still."""
        return _is_current(self.path, self._lock)

    def require_owned(self) -> None:
        """Raise ``Superseded`` if somebody has taken the folder over."""
        if not self.owned:
            raise Superseded(
                f"{self.path}: another supervisor ({_holder(self.path)}) has taken the run over while this one was "
                "stopped; this one leaves, the run is left as it is"
            )

    def announce(self, address: str) -> None:
        """Say where this supervisor listens; who reads it sees the old or the new, never a part."""
        _replace(self.address, msgspec.json.encode(Listening(address, self.attempt)))

    def withdraw(self) -> None:
        """Say that nobody listens any more, unless another has taken over."""
        if self.owned:
            self.address.unlink(missing_ok=True)

    def write_status(self, state: State, *, step: int = 0, version: int = 0, reason: str = "") -> None:
        """Replace ``STATUS`` atomically: a reader sees the old or the new object, never a part."""
        status = Status(state, step, version, os.getpid(), reason, time.time())
        _replace(self.path / "STATUS", msgspec.json.format(msgspec.json.encode(status)) + b"\n")

    def close(self) -> None:
        """Give the folder free; safe to call twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def read_status(path: Path) -> Status:
    """Return what ``STATUS`` in the run folder ``path`` says; needs no lock. ``ConfigError`` if it cannot be read."""
    file = path / "STATUS"
    try:
        return msgspec.json.decode(file.read_bytes(), type=Status)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot be read ({error})", where=str(file), remedy="name a run folder") from None


def next_folder(root: Path, name: str) -> Path:
    """Make ``<root>/<name>-NNN`` with the next free number; ``ConfigError`` if ``root`` cannot be written."""
    _make(root)
    taken = [int(match[1]) for entry in root.glob(f"{name}-*") if (match := _ORDINAL.search(entry.name))]
    for ordinal in range(max(taken, default=0) + 1, 1 << 31):
        candidate = root / f"{name}-{ordinal:03d}"
        with contextlib.suppress(FileExistsError):  # another run took this number first
            candidate.mkdir()
            return candidate
    raise AssertionError("unreachable: there are more numbers than folders")


def empty_folder(path: Path) -> Path:
    """Make ``path``, or take it as it is if it is empty; ``ConfigError`` if it is not, or cannot be written."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(
            "already exists and is not empty", where=str(path), remedy="resume it, or name another folder"
        )
    _make(path)
    return path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is either whole or not there; ``ConfigError`` if it cannot be written."""
    _make(path.parent)
    try:
        _replace(path, content)
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise ConfigError(what, where=str(path), remedy="name another file") from None


def _begin_attempt(path: Path) -> int:
    """Make the log folder of a new attempt, point ``logs/latest`` at it and return its number."""
    logs = path / "logs"
    logs.mkdir(exist_ok=True)
    used = [int(match[1]) for entry in logs.iterdir() if (match := _ATTEMPT.fullmatch(entry.name))]
    attempt = max(used, default=0) + 1
    (logs / f"attempt_{attempt}").mkdir()
    staged = logs / ".latest.tmp"
    staged.unlink(missing_ok=True)
    staged.symlink_to(f"attempt_{attempt}")
    staged.replace(logs / "latest")
    return attempt


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot be made ({error.strerror})", where=str(folder), remedy="set run.dir to a folder you may write to"
        ) from None


def _replace(path: Path, data: bytes) -> None:
    """Replace a file in one go."""
    staged = path.with_name(f".{path.name}.tmp")
    staged.write_bytes(data)
    staged.replace(path)


def _acquire(path: Path) -> int:
    """Lock ``path`` for this process and return the descriptor that holds the lock.

    The kernel drops the lock when the process ends in any way, so a crash leaves nothing to clean up. The file's text
    names the holder. One that is *stopped* (SIGSTOP) loses the folder to who asks: the lock file is replaced, by which
    it sees when it wakes up that it has no say any more (``require_owned``).
    """
    while True:
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            if (taken := _take_from_stopped(path)) >= 0:
                return taken
            raise ConfigError(
                f"is in use by the process {_holder(path)}",
                where=str(path),
                remedy="stop that run first, or start another one",
            ) from None
        if _is_current(path, descriptor):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
            return descriptor
        os.close(descriptor)  # it was replaced meanwhile


def _take_from_stopped(path: Path) -> int:
    """Replace the lock of a holder that is stopped by one of this process, and return it; -1 if it is not stopped.

    Files that the old holder has open are replaced too, by copies: what it may still be writing goes nowhere.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # of two that would take it over, one comes first
        if not _is_stopped(path):
            return -1
        staged = path / ".lock.tmp"
        descriptor = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        staged.replace(path / "lock")
        for file in (path / "journal.jsonl", path / "metrics.jsonl"):
            if file.exists():
                _replace(file, file.read_bytes())
        return descriptor
    finally:
        os.close(folder)


def _is_stopped(path: Path) -> bool:
    """Tell whether the holder of the lock is a process of this host that is stopped."""
    try:
        stat = Path(f"/proc/{int((path / 'lock').read_text())}/stat").read_text()
    except (OSError, ValueError):
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def _holder(path: Path) -> str:
    try:
        return f"with pid {int((path / 'lock').read_text())}"
    except (OSError, ValueError):
        return "with an unknown pid"


def _is_current(path: Path, descriptor: int) -> bool:
    """Tell whether ``descriptor`` is of the lock file that stands there now."""
    try:
        return descriptor >= 0 and os.path.samestat(os.fstat(descriptor), (path / "lock").stat())
    except FileNotFoundError:
        return False
