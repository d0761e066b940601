"""How does one slot of a trainer unit take part in a run?

Owner: one ``TrainerActor`` per trainer slot. Blocking work runs on one compute thread, in the order of the supervisor's
messages, because every rank must make the same collective calls in the same order. The lead slot (first slot of the
first unit) is also the *collector*: it receives finished groups on the sample plane, checks them and holds them until
they are trained.

Invariant (tests/actors/test_collector.py): a group is accepted only if its frames, counts and numbers fit together.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from nereus.actors.names import RELAY, SUPERVISOR
from nereus.actors.wiring import Links, Wiring
from nereus.backends.api import TrainBatch, TrainerBackend
from nereus.bus.endpoint import Delivery, Endpoint, PeerGone
from nereus.bus.messages import (
    Abandon,
    Assign,
    Commit,
    Group,
    GroupAccepted,
    GroupRef,
    Lend,
    Lent,
    Message,
    Ok,
    Peers,
    Publish,
    PublishFailed,
    PushBegin,
    PushDone,
    PushInto,
    Ready,
    Recall,
    Refused,
    Release,
    Return,
    Save,
    Saved,
    SaveFailed,
    Stand,
    StepDone,
    StepFailed,
    Take,
    Train,
)
from nereus.bus.shared import SHARED_MEMORY, make_private_file
from nereus.core.plan import POLICY_TRAINING, SlotId
from nereus.errors import CheckpointError, NereusError, OutOfMemory, ProtocolError, TransitionError

Result = TypeVar("Result")

PUSH_TIMEOUT_S = 60.0
"""How long a trainer waits for the relay to lend a buffer or to verify a version."""


class HeldGroup(msgspec.Struct, frozen=True):
    """One finished group in the collector's hands."""

    message: Group
    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]


def read_group(message: Group, frames: tuple[bytes | bytearray | memoryview, ...]) -> HeldGroup:
    """View the frames of ``message`` as arrays, without copies; ``ProtocolError`` says what does not fit."""
    if len(frames) != 4:
        raise ProtocolError(f"group {message.group}: expected 4 frames, got {len(frames)}")
    total = sum(sample.tokens for sample in message.samples)
    sizes = (message.prompt_tokens, total, total, total)
    for index, (frame, size) in enumerate(zip(frames, sizes, strict=True)):
        if memoryview(frame).nbytes != 4 * size:
            raise ProtocolError(
                f"group {message.group}: frame {index} has {memoryview(frame).nbytes} bytes, expected {4 * size}"
            )
    prompt, tokens, versions = (np.frombuffer(frames[index], np.int32) for index in (0, 1, 3))
    logprobs = np.frombuffer(frames[2], np.float32)
    if not np.isfinite(logprobs).all():
        raise ProtocolError(f"group {message.group}: a log-probability is not finite")
    if total and (tokens.min() < 0 or prompt.min(initial=0) < 0):
        raise ProtocolError(f"group {message.group}: a token id is negative")
    if any(sample.tokens == 0 for sample in message.samples):
        raise ProtocolError(f"group {message.group}: a completion is empty")
    return HeldGroup(message, prompt, tokens, logprobs, versions)


def make_batch(step: int, version: int, groups: Iterable[HeldGroup]) -> TrainBatch:
    """Lay the groups' samples side by side as the flat arrays of a ``TrainBatch``, in the order given."""
    prompt_lengths, lengths, group_of, rewards = [], [], [], []
    tokens: list[NDArray[np.int32]] = []
    held = list(groups)
    for index, group in enumerate(held):
        start = 0
        for sample in group.message.samples:
            tokens += [group.prompt, group.tokens[start : start + sample.tokens]]
            start += sample.tokens
            prompt_lengths.append(group.message.prompt_tokens)
            lengths.append(sample.tokens)
            group_of.append(index)
            rewards.append(np.nan if sample.reward is None else sample.reward)
    return TrainBatch(
        step=step,
        version=version,
        prompt_lengths=np.array(prompt_lengths, np.int32),
        lengths=np.array(lengths, np.int32),
        group_of=np.array(group_of, np.int32),
        rewards=np.array(rewards, np.float64),
        tokens=np.concatenate(tokens),
        logprobs=np.concatenate([group.logprobs for group in held]),
        versions=np.concatenate([group.versions for group in held]),
    )


class Collector:
    """The groups that are finished and not yet trained, by (group, attempt)."""

    def __init__(self) -> None:
        self._held: dict[GroupRef, HeldGroup] = {}

    def accept(self, held: HeldGroup) -> bool:
        """Keep a group; return False if this attempt is already held (a repeated delivery)."""
        ref = GroupRef(held.message.group, held.message.attempt)
        if ref in self._held:
            return False
        self._held[ref] = held
        return True

    def take(self, refs: Iterable[GroupRef]) -> list[HeldGroup]:
        """Return the groups in order, still held; ``ProtocolError`` names those that are not here."""
        wanted = list(refs)
        missing = [f"{ref.group} (attempt {ref.attempt})" for ref in wanted if ref not in self._held]
        if missing:
            raise ProtocolError(f"the collector does not hold group {', '.join(missing)}")
        return [self._held[ref] for ref in wanted]

    def release(self, groups: Iterable[int]) -> None:
        """Forget every attempt at ``groups``."""
        gone = frozenset(groups)
        self._held = {ref: held for ref, held in self._held.items() if ref.group not in gone}

    def __len__(self) -> int:
        return len(self._held)


class Loans:
    """The files in shared memory through which a slot lends state, by primitive."""

    def __init__(self, folder: Path = SHARED_MEMORY) -> None:
        self._folder = folder
        self._files: dict[str, Path] = {}

    def open(self, primitive: str) -> Path:
        """Make an empty file that only this user can read."""
        path, handle = make_private_file(self._folder)
        os.close(handle)
        self._files[primitive] = path
        return path

    def give_back(self, primitive: str) -> None:
        """Delete the file of ``primitive``, if there is one."""
        path = self._files.pop(primitive, None)
        if path is not None:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        for primitive in tuple(self._files):
            self.give_back(primitive)


class TrainerActor:
    """One slot of a trainer unit."""

    def __init__(self, backend: TrainerBackend, slot: SlotId, control: Endpoint, wiring: Wiring) -> None:
        self._backend = backend
        self._slot = slot
        self._control = control
        self._links = Links(wiring)
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._collector = Collector()
        self._assigned: Assign | None = None
        self._apart = False
        """Whether this slot has left its process groups, because a peer is lost or has not come."""
        self._loans = Loans()
        self._pushes: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Queue[BaseException] = asyncio.Queue()

    async def handle(self, delivery: Delivery) -> Message | None:
        match delivery.message:
            case Assign() as assign:
                await self._assign(assign)
            case Group() as group:
                return await self._collect(group, delivery)
            case Train() as train:
                await self._train(train)
            case Publish(version):
                return await self._publish_again(version)
            case Stand(describe):
                return await self._stand(describe)
            case Recall(step):
                return await self._recall(step)
            case Save() as save:
                await self._save(save)
            case Release(groups):
                self._collector.release(groups)
            case Peers(peers):
                await self._links.update(peers)
            case Lend() as lend:
                return await self._lend(lend)
            case Take() as take:
                return await self._take(take)
            case Return(primitive):
                self._loans.give_back(primitive)
                return Ok()
            case Abandon():
                self._loans.close()
                await self._run(self._backend.abandon)
            case Commit() as commit:
                return await self._commit(commit)
            case other:
                return Refused(f"a trainer does not understand {type(other).__name__}")
        return None

    async def peer_gone(self, event: PeerGone) -> None:
        """A rollout that is gone changes nothing here: what it has finished is held."""

    async def background(self) -> None:
        """Wait for a publication that fails behind the trainer's back."""
        raise await self._failed.get()

    async def close(self) -> None:
        for task in self._pushes:
            task.cancel()
        await self._links.close()
        self._loans.close()
        self._compute.shutdown(wait=False, cancel_futures=True)
        self._backend.close()

    @property
    def _emu(self) -> Assign:
        if self._assigned is None:
            raise ProtocolError(f"slot {self._slot} has no unit yet")
        return self._assigned

    @property
    def _lead(self) -> bool:
        plan = self._emu.plan
        return plan.of(POLICY_TRAINING)[0].slots[0] == self._slot

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._compute, copy_context().run, work)

    async def _assign(self, assign: Assign) -> None:
        began = perf_counter()
        self._assigned = assign
        self._control.advance(assign.plan.epoch)
        await self._links.update(assign.peers)
        self._links.advance(assign.plan.epoch)

        def build() -> int:
            self._backend.assign(assign.emu, assign.plan, self._slot, store=assign.store)
            return self._backend.load(Path(assign.source))

        step = await self._run(build)
        ready = Ready(
            assign.emu.id,
            perf_counter() - began,
            self._backend.tensors if self._lead else (),
            self._backend.tied if self._lead else {},
            note=f"step {step}",
        )
        await self._control.send(SUPERVISOR, ready)

    # Plan changes

    async def _lend(self, lend: Lend) -> Message:
        path = self._loans.open(lend.primitive)
        try:
            receipt = await self._run(lambda: self._backend.lend(lend.moves, path))
        except TransitionError as error:
            self._loans.give_back(lend.primitive)
            return Refused(str(error))
        return Lent(str(path), receipt)

    async def _take(self, take: Take) -> Message:
        try:
            await self._run(lambda: self._backend.take(take.replica, take.index, take.loans, Path(take.model)))
        except TransitionError as error:
            return Refused(str(error))
        return Ok()

    async def _commit(self, commit: Commit) -> Message:
        """Train the unit that the plan gives this slot; one whose peers all stay goes on as it is.

        Refused when a peer does not come: what this slot holds stays as it is, for the next plan.
        """
        plan = commit.plan
        await self._links.update(commit.peers)
        self._links.advance(plan.epoch)
        units = plan.of(POLICY_TRAINING)
        emu = next(emu for emu in units if self._slot in emu.slots)
        before, self._assigned = self._assigned, Assign(emu, plan, commit.store, commit.peers)
        if before is not None and before.plan.of(POLICY_TRAINING) == units and not self._apart:
            return Ok()

        def rebuild() -> None:
            self._backend.assign(emu, plan, self._slot, store=commit.store)
            self._backend.adopt()

        self._apart = True
        try:
            await self._run(rebuild)
        except TransitionError as error:
            return Refused(str(error))
        self._apart = False
        return Ok()

    async def _stand(self, describe: bool) -> Message:
        standing = await self._run(self._backend.standing)
        if not describe:
            return standing
        return msgspec.structs.replace(standing, tensors=tuple(self._backend.tensors), tied=self._backend.tied)

    async def _recall(self, step: int) -> Message:
        """Stand before ``step``. A plan follows whose process groups are new for all, also where none has failed."""
        self._apart = True
        try:
            await self._run(lambda: self._backend.recall(step))
        except ValueError as error:
            return Refused(str(error))
        return Ok()

    async def _collect(self, group: Group, delivery: Delivery) -> Message:
        try:
            held = read_group(group, delivery.frames)
        except ProtocolError as error:
            return Refused(str(error))
        if self._collector.accept(held):
            fields = {name: getattr(group, name) for name in GroupAccepted.__struct_fields__ if hasattr(group, name)}
            first = min(sample.version_first for sample in group.samples)
            last = max(sample.version_last for sample in group.samples)
            await self._control.send(SUPERVISOR, GroupAccepted(**fields, version_first=first, version_last=last))
        return Ok()

    async def _train(self, train: Train) -> None:
        if self._apart:
            return  # the supervisor has not heard of it yet
        batch = make_batch(train.step, train.version, self._collector.take(train.groups)) if self._lead else None
        try:
            report = await self._run(lambda: self._backend.train(self._backend.share(batch)))
        except (TransitionError, OutOfMemory) as error:
            self._apart = True
            needed = sum(error.needed_bytes.values()) if isinstance(error, OutOfMemory) else 0
            await self._control.send(SUPERVISOR, StepFailed(train.step, str(error), needed))
            return
        await self._control.send(SUPERVISOR, StepDone(report, self._emu.emu.id))
        version = train.version + 1
        try:
            done = await self._push(version)
        except (NereusError, TimeoutError) as error:
            await self._control.send(SUPERVISOR, PublishFailed(version, str(error)))
            return
        # Training goes on while the relay verifies.
        task = asyncio.create_task(self._hand_over(done), name=f"push-{version}")
        self._pushes.add(task)
        task.add_done_callback(self._push_ended)

    async def _publish_again(self, version: int) -> Message:
        """Push the present weights at the supervisor's request; the answer says whether the relay has them."""
        try:
            await self._deliver(await self._push(version))
        except (NereusError, TimeoutError) as error:
            return Refused(str(error))
        return Ok()

    async def _push(self, version: int) -> PushDone:
        """Write this slot's pieces into the relay's buffer; return what is to be told to the relay."""
        writer = self._control.name
        relay = await self._links.to(RELAY)
        into = await relay.request(RELAY, PushBegin(version, writer), timeout_s=PUSH_TIMEOUT_S)
        if not isinstance(into, PushInto):
            raise ProtocolError(f"{RELAY} answered PushBegin with {type(into).__name__}")
        pieces = tuple(self._backend.publication())
        checksums = await self._run(lambda: self._backend.write(pieces, Path(into.path), into.offsets))
        return PushDone(version, writer, pieces, tuple(checksums))

    async def _deliver(self, done: PushDone) -> None:
        await (await self._links.to(RELAY)).request(RELAY, done, timeout_s=PUSH_TIMEOUT_S)

    async def _hand_over(self, done: PushDone) -> None:
        try:
            await self._deliver(done)
        except (NereusError, TimeoutError) as error:
            await self._control.send(SUPERVISOR, PublishFailed(done.version, str(error)))

    def _push_ended(self, task: asyncio.Task[None]) -> None:
        self._pushes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed.put_nowait(error)

    async def _save(self, save: Save) -> None:
        try:
            manifest = await self._run(lambda: self._backend.save(Path(save.folder), save.step))
        except (CheckpointError, OSError) as error:
            await self._control.send(SUPERVISOR, SaveFailed(save.step, str(error)))
            return
        await self._control.send(SUPERVISOR, Saved(save.step, self._emu.emu.id, manifest))
