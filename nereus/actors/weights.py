"""How do policy weights get from the trainers' layout to the rollouts, whole or not at all?

Through a relay: it lends shared-memory buffers to trainer slots, which write their pieces into whole tensors; it reads
every piece again, and only an exact, verified cover of the model becomes the visible version, in one assignment.

Owner: the weight-sync unit's process owns the files; writers and readers only map them. Invariants
(tests/actors/test_weights.py): no reader is ever lent a version that is not complete and verified; a buffer is not
written while it is lent or visible; a buffer that a lost or refused peer may still hold open is unlinked and replaced,
never reused; versions only grow; no file outlives ``close``.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from nereus.actors.names import SUPERVISOR
from nereus.bus.endpoint import Delivery, Endpoint, PeerGone
from nereus.bus.messages import (
    Assign,
    Commit,
    Fault,
    Manifest,
    Message,
    Ok,
    Pull,
    PullDone,
    PullFrom,
    PushBegin,
    PushDone,
    PushInto,
    Ready,
    Refused,
    VersionReady,
)
from nereus.core.plan import POLICY_TRAINING, Plan, PolicyVersion
from nereus.errors import PeerLost
from nereus.transition.checksum import piece_checksum, piece_view, tensor_view, tensors_checksum
from nereus.transition.reshard import Piece, TensorSpec, box, conflicts, listing, missing, offsets_of

MAX_BUFFERS = 3
"""The visible version, the one being written, and one that a slow reader still holds."""


class Busy(Struct, frozen=True):
    """Not now: the request can succeed when a loan or another publication ends."""

    reason: str


class _Buffer:
    """One shared file that holds a whole model."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # Reserve the memory now: on a full tmpfs a later write would be a SIGBUS, here it is an OSError.
            os.posix_fallocate(descriptor, 0, size_bytes)
            self.memory = mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        self.version: PolicyVersion = -1
        self.checksum = ""
        self.readers: set[str] = set()
        self.spoilt = False
        """A lost peer may still hold this file open."""

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)
        self.memory.close()


class _Publication:
    """A version that is being written."""

    def __init__(self, version: PolicyVersion, buffer: _Buffer, started_s: float) -> None:
        self.version = version
        self.buffer = buffer
        self.started_s = started_s
        self.writers: set[str] = set()
        self.pushed: dict[str, tuple[Piece, ...]] = {}

    @property
    def pieces(self) -> list[Piece]:
        return [piece for pieces in self.pushed.values() for piece in pieces]


class Relay:
    """The bookkeeping and the files of one weight-sync unit. Not thread-safe: one call at a time."""

    def __init__(
        self, run_id: str, emu: str, *, folder: Path = Path("/dev/shm"), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Own the files ``nereus-<run id>-<unit>-<k>`` in ``folder``; those of a dead predecessor are removed."""
        self._folder = folder
        self._prefix = shared_prefix(run_id, emu)
        self._clock = clock
        self._specs: dict[str, TensorSpec] = {}
        self._tied: dict[str, str] = {}
        self._offsets: dict[str, int] = {}
        self._size_bytes = 0
        self._buffers: list[_Buffer] = []
        self._visible: _Buffer | None = None
        self._publication: _Publication | None = None
        self._dropped: dict[PolicyVersion, str] = {}
        self._made = 0
        self.writers = 0
        """How many writers push each version; 0: not known, then missing tensors show only when time is up."""
        self.leftovers = remove_leftovers(folder, self._prefix)

    @property
    def version(self) -> PolicyVersion:
        """The newest visible version; -1 before the first."""
        return self._visible.version if self._visible else -1

    @property
    def publishing(self) -> PolicyVersion:
        """The version that is being written; -1 if none is."""
        return self._publication.version if self._publication else -1

    def configure(self, tensors: Iterable[TensorSpec], tied: Mapping[str, str]) -> None:
        """Say which tensors a version consists of, and drop what is half-pushed.

        May be repeated, but not with another model (``ValueError``).
        """
        specs = {spec.name: spec for spec in tensors}
        if not specs:
            raise ValueError("a model without tensors cannot be relayed")
        wrong = [f"{alias} -> {name}" for alias, name in tied.items() if alias in specs or name not in specs]
        if wrong:
            raise ValueError(f"a tied name must point to a stored tensor and not be stored itself: {listing(wrong)}")
        differences = _differences(self._specs, specs) if self._specs else []
        if differences:
            raise ValueError(f"the relay holds another model already: {listing(differences)}")
        self._specs, self._tied = specs, dict(tied)
        self._offsets, self._size_bytes = offsets_of(specs.values())
        if self._publication:
            self._drop("the model was announced anew")

    def follow(self, writers: int) -> str | None:
        """Let so many writers push each version from now on; return what was being written and is dropped for it."""
        self.writers = writers
        return self._drop("the plan has changed") if self._publication else None

    # Writers

    def begin_push(self, version: PolicyVersion, writer: str) -> PushInto | Refused | Busy:
        """Let ``writer`` write its pieces of ``version``; all writers of a version share one buffer."""
        if not self._specs:
            return Refused("the relay does not know the model's tensors yet; it needs a Manifest first")
        if version <= self.version:
            return Refused(f"version {version} cannot be published: version {self.version} is visible already")
        publication = self._publication
        if publication and publication.version != version:
            return Busy(f"version {publication.version} is still being written by {_names(self._unfinished())}")
        if publication and writer in publication.pushed:
            return Refused(f"{writer} has pushed its pieces of version {version} already")
        if publication is None:
            buffer = self._free_buffer()
            if not isinstance(buffer, _Buffer):
                return buffer
            publication = self._publication = _Publication(version, buffer, self._clock())
        publication.writers.add(writer)
        return PushInto(version, str(publication.buffer.path), self._offsets)

    def push_done(self, done: PushDone) -> VersionReady | Refused | None:
        """Verify the pieces of one writer; make the version visible if they complete it.

        A refused push counts for nothing: its writer may begin again. None: accepted, more is to come.
        """
        publication = self._publication
        if publication is None or publication.version != done.version:
            why = self._dropped.get(done.version, f"the relay is not receiving it (visible: {self.version})")
            return Refused(f"version {done.version} from {done.writer} is not taken: {why}")
        if done.writer not in publication.writers:
            return Refused(f"{done.writer} has not begun to push version {done.version}")
        if done.writer in publication.pushed:
            return Refused(f"{done.writer} has pushed its pieces of version {done.version} already")
        problems = self._problems(publication, done)
        if problems:
            publication.writers.discard(done.writer)
            return Refused(f"version {done.version} from {done.writer} is refused: {listing(problems)}")
        publication.pushed[done.writer] = done.pieces
        lacking = missing(self._specs.values(), publication.pieces)
        if not lacking:
            return self._flip(publication)
        if self.writers and len(publication.pushed) >= self.writers:
            return Refused(self._drop(f"all {self.writers} writers have pushed, but {listing(lacking)}"))
        return None

    def writer_gone(self, writer: str) -> str | None:
        """Drop the publication that ``writer`` takes part in; return what was dropped and why."""
        publication = self._publication
        if publication is None or writer not in publication.writers:
            return None
        return self._drop(f"its writer {writer} is gone")

    def expire(self, version: PolicyVersion, limit_s: float) -> str | None:
        """Drop the publication of ``version`` if it takes longer than ``limit_s``; return what lacked."""
        publication = self._publication
        if publication is None or publication.version != version or self._clock() - publication.started_s < limit_s:
            return None
        lacking = missing(self._specs.values(), publication.pieces)
        return self._drop(
            f"not complete after {limit_s:g} s; pushed by {_names(publication.pushed)}, "
            f"begun by {_names(self._unfinished())}; {listing(lacking)}"
        )

    # Readers

    def pull(self, version: PolicyVersion, reader: str) -> PullFrom | Refused:
        """Lend the newest visible version, if it is at least ``version``."""
        buffer = self._visible
        if buffer is None or buffer.version < version:
            return Refused(f"version {version} is not visible; the newest is {self.version if buffer else 'none yet'}")
        buffer.readers.add(reader)
        return PullFrom(
            buffer.version, str(buffer.path), self._offsets, tuple(self._specs.values()), self._tied, buffer.checksum
        )

    def pull_done(self, version: PolicyVersion, reader: str) -> bool:
        """End a loan; return whether it existed."""
        for buffer in self._buffers:
            if buffer.version == version and reader in buffer.readers:
                buffer.readers.discard(reader)
                self._retire()
                return True
        return False

    def reader_gone(self, reader: str) -> None:
        """End the loans of a lost reader. It may yet live and read: what it was lent is not written again."""
        for buffer in self._buffers:
            if reader in buffer.readers:
                buffer.readers.discard(reader)
                buffer.spoilt = True
        self._retire()

    def close(self) -> None:
        """Remove all files. Readers that still map one keep their view of it."""
        for buffer in self._buffers:
            buffer.unlink()
        self._buffers.clear()
        self._visible = self._publication = None

    # Inside

    def _unfinished(self) -> set[str]:
        assert self._publication
        return self._publication.writers - self._publication.pushed.keys()

    def _free_buffer(self) -> _Buffer | Refused | Busy:
        for buffer in self._buffers:
            if buffer is not self._visible and not buffer.readers:
                buffer.version = -1
                return buffer
        if len(self._buffers) == MAX_BUFFERS:
            lent = (f"version {held.version} by {_names(held.readers)}" for held in self._buffers if held.readers)
            return Busy(f"all {MAX_BUFFERS} buffers are in use: {'; '.join(lent)}")
        path = self._folder / f"{self._prefix}{self._made}"
        try:
            buffer = _Buffer(path, self._size_bytes)
        except OSError as error:
            return Refused(
                f"{path}: cannot reserve {self._size_bytes} bytes ({error.strerror}); free memory in {self._folder} "
                f"(the relay needs up to {MAX_BUFFERS} copies of the weights)"
            )
        self._made += 1
        self._buffers.append(buffer)
        return buffer

    def _problems(self, publication: _Publication, done: PushDone) -> list[str]:
        if len(done.pieces) != len(done.checksums):
            return [f"{len(done.pieces)} pieces came with {len(done.checksums)} checksums"]
        touched = {piece.name for piece in done.pieces}
        specs = [spec for name, spec in self._specs.items() if name in touched]
        before = [piece for piece in publication.pieces if piece.name in touched]
        problems = list(conflicts(specs, [*before, *done.pieces]))
        if problems:
            return problems
        for piece, expected in zip(done.pieces, done.checksums, strict=True):
            found = self._checksum(publication.buffer, piece)
            if found != expected:
                problems.append(
                    f"{piece.name} {box(piece)}: the sent checksum is {expected}, the written bytes have {found}"
                )
        return problems

    def _checksum(self, buffer: _Buffer, piece: Piece) -> str:
        tensor = tensor_view(buffer.memory, self._specs[piece.name], self._offsets[piece.name])
        return piece_checksum(piece_view(tensor, piece))

    def _flip(self, publication: _Publication) -> VersionReady:
        buffer = publication.buffer
        buffer.checksum = tensors_checksum(buffer.memory, self._specs.values(), self._offsets)
        buffer.version = publication.version
        self._visible, self._publication = buffer, None
        self._dropped.clear()
        self._retire()
        seconds = self._clock() - publication.started_s
        return VersionReady(buffer.version, buffer.checksum, len(self._specs), self._size_bytes, seconds)

    def _drop(self, why: str) -> str:
        publication = self._publication
        assert publication
        publication.buffer.spoilt = True
        self._publication = None
        self._retire()
        self._dropped[publication.version] = f"the publication was dropped: {why}"
        return f"the publication of version {publication.version} is dropped: {why}"

    def _retire(self) -> None:
        """Unlink the spoilt buffers that nobody needs any more."""
        busy = (self._visible, self._publication.buffer if self._publication else None)
        for buffer in [held for held in self._buffers if held.spoilt and held not in busy and not held.readers]:
            buffer.unlink()
            self._buffers.remove(buffer)


def shared_prefix(run_id: str, emu: str = "") -> str:
    """Return how the names of a unit's (or, without ``emu``, a whole run's) shared files begin."""
    return f"nereus-{run_id}-" + (f"{emu.replace('/', '.')}-" if emu else "")


def remove_leftovers(folder: Path, prefix: str) -> tuple[Path, ...]:
    """Remove the shared files of a dead process by their exact ``prefix``; return them."""
    left = tuple(sorted(path for path in folder.iterdir() if path.name.startswith(prefix)))
    for path in left:
        path.unlink(missing_ok=True)
    return left


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nobody"


def _differences(old: Mapping[str, TensorSpec], new: Mapping[str, TensorSpec]) -> list[str]:
    """Return how two models differ; how they are split is a matter of the trainers' layout."""
    lost = [f"{name} is missing" for name in old if name not in new]
    added = [f"{name} is new" for name in new if name not in old]
    kept = [(old[name], new[name]) for name in old if name in new]
    changed = [
        f"{after.name} is {after.dtype} {after.shape}, not {before.dtype} {before.shape}"
        for before, after in kept
        if (before.shape, before.dtype) != (after.shape, after.dtype)
    ]
    return lost + added + changed


class WeightsActor:
    """Answers the bus for one relay. Verification runs on a thread, so that the event loop keeps its heartbeats.

    A push that finds no free buffer waits at most ``wait_s``; a publication that is not complete after ``publish_s`` is
    dropped and reported to the supervisor.
    """

    def __init__(
        self,
        relay: Relay,
        control: Endpoint,
        service: Endpoint,
        *,
        wait_s: float = 45.0,
        publish_s: float = 120.0,
    ) -> None:
        """``control`` reaches the supervisor; trainers and rollouts ask at ``service``."""
        self.relay = relay
        self._control = control
        self._service = service
        self._wait_s = wait_s
        self._publish_s = publish_s
        self._lock = asyncio.Lock()
        self._freed = asyncio.Condition(self._lock)
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, list[asyncio.Task[None]]] = {}
        """Pushes that wait for room, by writer."""
        self._failed: asyncio.Queue[BaseException] = asyncio.Queue()

    async def handle(self, delivery: Delivery) -> Message | None:
        """Return the answer to a request, or None if it comes later or is not due.

        A writer or reader speaks for itself only: its name must be that of the peer.
        """
        message = delivery.message
        match message:
            case Assign():
                await self._assign(message)
                return None
            case Commit(plan):
                await self._follow(plan)
                return Ok()
            case Manifest():
                return await self._configure(message)
            case PushBegin(writer=name) | PushDone(writer=name) if name != delivery.peer:
                return Refused(f"{delivery.peer} may not push for {name}")
            case Pull(reader=name) | PullDone(reader=name) if name != delivery.peer:
                return Refused(f"{delivery.peer} may not pull for {name}")
            case PushBegin():
                return await self._begin(delivery, message)
            case PushDone():
                return await self._done(message)
            case Pull():
                async with self._lock:
                    return self.relay.pull(message.version, message.reader)
            case PullDone():
                async with self._lock:
                    lent = self.relay.pull_done(message.version, message.reader)
                    self._freed.notify_all()
                return Ok() if lent else Refused(f"version {message.version} is not lent to {message.reader}")
            case _:
                return Refused(f"a weight relay does not understand {type(message).__name__}")

    async def peer_gone(self, event: PeerGone) -> None:
        """Take back what a lost peer was lent; drop what it was writing, and say so."""
        async with self._lock:
            self.relay.reader_gone(event.peer)
            dropped = self.relay.writer_gone(event.peer)
            self._freed.notify_all()
        for task in self._waiting.pop(event.peer, ()):
            task.cancel()
        if dropped:
            await self._report(dropped)

    async def background(self) -> None:
        """Run as long as the process: the first of the actor's own tasks that breaks ends it."""
        raise await self._failed.get()

    async def close(self) -> None:
        """Stop waiting, and remove the shared files."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        async with self._lock:
            self.relay.close()

    async def _assign(self, assign: Assign) -> None:
        await self._follow(assign.plan)
        await self._control.send(SUPERVISOR, Ready(assign.emu.id))

    async def _follow(self, plan: Plan) -> None:
        """Serve the units of ``plan``: so many trainer slots push from now on."""
        self._control.advance(plan.epoch)
        self._service.advance(plan.epoch)
        async with self._lock:
            self.relay.follow(sum(len(emu.slots) for emu in plan.of(POLICY_TRAINING)))
            self._freed.notify_all()

    async def _configure(self, message: Manifest) -> Message:
        async with self._lock:
            try:
                self.relay.configure(message.tensors, message.tied)
            except ValueError as error:
                return Refused(str(error))
            self._freed.notify_all()
        return Ok()

    async def _begin(self, delivery: Delivery, message: PushBegin) -> Message | None:
        async with self._lock:
            answer = self._begin_now(message)
        if not isinstance(answer, Busy):
            return answer
        waiting = self._spawn(self._begin_later(delivery, message), f"push {message.version} of {message.writer} waits")
        self._waiting.setdefault(message.writer, []).append(waiting)
        return None

    def _begin_now(self, message: PushBegin) -> PushInto | Refused | Busy:
        first = self.relay.publishing != message.version
        answer = self.relay.begin_push(message.version, message.writer)
        if first and isinstance(answer, PushInto):
            self._spawn(self._watch(message.version), f"publication {message.version} is watched")
        return answer

    async def _begin_later(self, delivery: Delivery, message: PushBegin) -> None:
        answer: PushInto | Refused | Busy = Busy("")
        try:
            async with asyncio.timeout(self._wait_s), self._lock:
                while isinstance(answer := self._begin_now(message), Busy):
                    await self._freed.wait()
        except TimeoutError:
            why = answer.reason if isinstance(answer, Busy) else ""
            answer = Refused(f"version {message.version} found no room within {self._wait_s:g} s: {why}")
        self._waiting.pop(message.writer, None)
        assert not isinstance(answer, Busy)
        with contextlib.suppress(PeerLost):  # its PeerGone takes back what it was granted
            await self._service.reply(delivery, answer)

    async def _done(self, message: PushDone) -> Message:
        async with self._lock:
            result = await asyncio.to_thread(self.relay.push_done, message)
            self._freed.notify_all()
        match result:
            case Refused():
                await self._report(result.reason)
                return result
            case VersionReady():
                await self._control.send(SUPERVISOR, result)
        return Ok()

    async def _watch(self, version: PolicyVersion) -> None:
        await asyncio.sleep(self._publish_s)
        async with self._lock:
            dropped = self.relay.expire(version, self._publish_s)
            self._freed.notify_all()
        if dropped:
            await self._report(dropped)

    async def _report(self, reason: str) -> None:
        await self._control.send(SUPERVISOR, Fault("weight relay", reason, fatal=False))

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed.put_nowait(error)
