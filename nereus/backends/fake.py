"""What stands in for devices when only the orchestration is of interest?

Backends that keep the contracts of ``api.py`` without torch: the policy is one vector whose elements all equal the
policy version, a completion takes loop time per token, and training adds one. They run in the real actors, on real or
virtual time. Owner: tests and the simulator.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from nereus.algo.sampler import SampleOrder
from nereus.backends.api import (
    STATE_KINDS,
    Completion,
    Interrupt,
    SampleRequest,
    TrainBatch,
)
from nereus.backends.holdings import Holdings, within
from nereus.backends.manifest import MANIFEST, SlotFile, StoredPiece, read_manifest
from nereus.bus.endpoint import Delivery, PeerGone
from nereus.bus.messages import (
    Commit,
    Loan,
    Message,
    Ok,
    PullFrom,
    Receipt,
    Refused,
    Score,
    Scored,
    Standing,
    StepReport,
)
from nereus.core.plan import POLICY_TRAINING, Emu, Layout, Plan, SlotId
from nereus.errors import CheckpointError, TransitionError
from nereus.transition.checksum import piece_checksum, tensors_checksum
from nereus.transition.primitive import Replica
from nereus.transition.reshard import Move, Piece, TensorSpec, held_to_train, publication

SPECS = (
    TensorSpec("embed", (8, 4), "float32", split=0, layer=-1),
    TensorSpec("layers.0.weight", (8, 4), "float32", split=0, layer=0),
    TensorSpec("layers.1.weight", (8, 4), "float32", split=1, layer=1),
    TensorSpec("norm", (4,), "float32"),
)
LAYERS = 2
TIED = {"lm_head": "embed"}


class Pace(Struct, frozen=True):
    """How long things take, in seconds."""

    token_s: float = 0.01
    train_s: float = 0.5
    agree_s: float = 0.005
    """Between one slot's learning that a step is complete and the next one's."""
    switch_s: float = 0.02
    longest_tokens: int = 32


def length_of(seed: tuple[int, int, int], longest: int) -> int:
    """Return the length of the completion of a sample stream: 1 to ``longest`` tokens."""
    run, group, index = seed
    return 1 + SampleOrder(longest, run, shuffle=True).row((group * 31 + index) % (1 << 30))


class FakeRollout:
    """A ``RolloutBackend`` that produces tokens by the clock."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._version = -1
        self._open = asyncio.Condition()
        self._live = 0
        self._switching = False

    async def start(self, model: Path, *, emu: Emu, slot: SlotId) -> None:
        await asyncio.sleep(self._pace.switch_s)

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: SampleRequest) -> Completion:
        async with self._open:
            await self._open.wait_for(lambda: self._version >= 0 and not self._switching)
            self._live += 1
        try:
            count = min(request.max_new_tokens, length_of(request.seed, self._pace.longest_tokens))
            versions = []
            for _ in range(count):
                versions.append(self._version)
                await asyncio.sleep(self._pace.token_s)
        finally:
            self._live -= 1
            async with self._open:
                self._open.notify_all()
        return Completion(
            request.id,
            np.full(count, 3, np.int32),
            np.full(count, -0.5, np.float32),
            np.array(versions, np.int32),
            "stop",
        )

    async def switch(self, source: PullFrom, *, interrupt: Interrupt) -> int:
        interrupted = self._live
        if interrupt == "wait":
            self._switching = True
            async with self._open:
                await self._open.wait_for(lambda: self._live == 0)
        await asyncio.sleep(self._pace.switch_s)
        values = self._read(source)
        if set(values.tolist()) != {float(source.version)}:
            raise TransitionError(f"version {source.version} holds {set(values.tolist())}")
        self._version, self._switching = source.version, False
        async with self._open:
            self._open.notify_all()
        return interrupted

    def stats(self) -> dict[str, float]:
        return {"live": self._live}

    async def close(self) -> None:
        """Nothing to free."""

    def _read(self, source: PullFrom) -> NDArray[np.float32]:
        try:
            with Path(source.path).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
                if tensors_checksum(memoryview(memory), source.tensors, source.offsets) != source.checksum:
                    raise TransitionError(f"version {source.version} does not have the checksum {source.checksum}")
                parts = [
                    np.frombuffer(
                        memory[source.offsets[spec.name] :][: 4 * int(np.prod(spec.shape))], np.float32
                    ).copy()
                    for spec in source.tensors
                ]
        except OSError as error:
            raise TransitionError(f"version {source.version} cannot be read from {source.path}: {error}") from error
        return np.concatenate(parts)


class ArrayMemory:
    """Numpy arrays are in the memory of the host already."""

    itemsize = 4

    def empty(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return np.empty(shape, np.float32)

    def export(self, array: NDArray[np.float32]) -> NDArray[Any]:
        return array

    def locate(self, array: NDArray[np.float32]) -> None:
        """No other process can look into these arrays."""

    def fill(self, array: NDArray[np.float32], read: Callable[[NDArray[Any]], None]) -> None:
        landing = np.ascontiguousarray(array)
        read(landing)
        array[...] = landing


class ArrayRoom:
    """One slot's share of the fake model as numpy arrays."""

    def __init__(self, layout: Layout, index: int) -> None:
        held = held_to_train(frozenset(TIED.values()))
        found = {spec.name: held(spec, LAYERS, layout, index) for spec in SPECS}
        self.pieces: Mapping[str, Piece] = {name: piece for name, piece in found.items() if piece is not None}
        self._arrays: dict[tuple[str, str], NDArray[np.float32]] = {}

    def view(self, kind: str, name: str) -> NDArray[np.float32]:
        if (kind, name) not in self._arrays:
            shape = [stop - start for start, stop in zip(*self._bounds(name), strict=True)]
            self._arrays[kind, name] = np.full(shape, np.nan, np.float32)
        return self._arrays[kind, name]

    def release(self, kind: str) -> None:
        self._arrays = {key: array for key, array in self._arrays.items() if key[0] != kind}

    def add(self, amount: float) -> None:
        """Add to every element."""
        for kind in STATE_KINDS:
            for name in self.pieces:
                self.view(kind, name)[...] += amount

    def expect(self, value: float) -> dict[tuple[str, str], NDArray[np.float32]]:
        """Return what the share must be after ``value`` updates: moments tell elements apart, parameters do not."""
        result = {}
        for number, kind in enumerate(STATE_KINDS):
            for spec in SPECS:
                if spec.name in self.pieces:
                    codes = np.arange(np.prod(spec.shape), dtype=np.float32).reshape(spec.shape) * number
                    box = tuple(map(slice, *self._bounds(spec.name)))
                    result[kind, spec.name] = codes[box] + np.float32(value)
        return result

    def _bounds(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.pieces[name].start, self.pieces[name].stop


class FakeCollectives:
    """The process groups of all trainer slots: a step needs everybody, and a death breaks it for the others.

    As in reality, nobody applies a step's update before everybody has it ready, and those that have not applied it when
    a member dies find that out a little later. Others wait ``timeout_s`` for one that hangs.
    """

    def __init__(
        self, pace: Pace, step_s: Callable[[FakeTrainer], float] | None = None, *, timeout_s: float = 1800.0
    ) -> None:
        self._pace = pace
        self._timeout_s = timeout_s
        self._step_s = step_s or (lambda trainer: pace.train_s)
        self._steps: dict[tuple[int, int], dict[SlotId, tuple[FakeTrainer, asyncio.Future[StepReport]]]] = {}
        self._dead: set[SlotId] = set()
        self._hung: set[SlotId] = set()

    def joined(self, slot: SlotId) -> None:
        self._dead.discard(slot)
        self._hung.discard(slot)

    def hung(self, slot: SlotId) -> None:
        """Let ``slot`` do nothing more in a step; others notice when it is gone, or when their time is up."""
        self._hung.add(slot)

    @property
    def hanging(self) -> bool:
        """Whether any slot hangs."""
        return bool(self._hung)

    def gone(self, slot: SlotId) -> None:
        """Break the steps that ``slot`` is in or was expected in."""
        self._dead.add(slot)
        self._hung.discard(slot)
        for key, waiting in self._steps.items():
            if any(slot in trainer.members for trainer, _ in waiting.values()):
                self._break(key, slot)

    def step(self, trainer: FakeTrainer, report: StepReport) -> asyncio.Future[StepReport]:
        """Enter a step; the future ends when the update is applied, or with ``TransitionError``."""
        loop = asyncio.get_running_loop()
        key = (trainer.epoch, report.step)
        waiting = self._steps.setdefault(key, {})
        future: asyncio.Future[StepReport] = loop.create_future()
        waiting[trainer.slot] = (trainer, future)
        loop.call_later(self._timeout_s, self._give_up, trainer.slot, future)
        dead = self._dead & set(trainer.members)
        if dead:
            self._break(key, min(dead))
        elif len(waiting) == len(trainer.members):
            loop.call_later(self._step_s(self._lead(key)), self._agree, key)
        return future

    def _agree(self, key: tuple[int, int]) -> None:
        """Everybody has the update ready; one after the other learns it."""
        if self._hung & self._steps[key].keys():
            return
        loop = asyncio.get_running_loop()
        for position, slot in enumerate(sorted(self._steps[key])):
            trainer, future = self._steps[key][slot]
            if not future.done():
                trainer.ready = True
                loop.call_later(self._pace.agree_s * (1 + position), self._apply, key, slot)

    def _apply(self, key: tuple[int, int], slot: SlotId) -> None:
        trainer, future = self._steps[key][slot]
        if not future.done() and slot not in self._hung:
            trainer.apply()
            seconds = self._step_s(self._lead(key))
            future.set_result(StepReport(key[1], key[1], seconds, trainer.tokens, trainer.metrics))

    def _lead(self, key: tuple[int, int]) -> FakeTrainer:
        """Return the trainer that knows the batch."""
        return max((trainer for trainer, _ in self._steps[key].values()), key=lambda trainer: trainer.tokens)

    def _give_up(self, slot: SlotId, future: asyncio.Future[StepReport]) -> None:
        if not future.done() and slot not in self._hung:
            future.set_exception(TransitionError(f"slot {slot} has waited for {self._timeout_s:g} s"))

    def _break(self, key: tuple[int, int], slot: SlotId) -> None:
        for member, (_, future) in self._steps[key].items():
            if not future.done() and member != slot and member not in self._hung:
                future.set_exception(TransitionError(f"step {key[1]} lost slot {slot}"))


class FakeTrainer:
    """A ``TrainerBackend`` whose policy counts its updates; its state is small and real, so moves can be checked."""

    def __init__(self, pace: Pace, collectives: FakeCollectives | None = None) -> None:
        self._pace = pace
        self._collectives = collectives
        self.members: tuple[SlotId, ...] = ()
        self.epoch = 0
        self.ready = False
        self.tokens = 0
        self.metrics: dict[str, float] = {}
        self._step = 0
        self._value = 0
        self._pieces: tuple[Piece, ...] = ()
        self._slot = -1
        self._emu: Emu | None = None
        self._room: ArrayRoom | None = None
        self._holdings: Holdings[ArrayRoom] = Holdings(ArrayMemory())

    def assign(self, emu: Emu, plan: Plan, slot: SlotId, *, store: str) -> None:
        units = plan.of(POLICY_TRAINING)
        self._slot, self._emu = slot, emu
        self.members, self.epoch = tuple(slot for unit in units for slot in unit.slots), plan.epoch
        self._pieces = publication(SPECS, LAYERS, emu.layout, emu.slots.index(slot), units.index(emu), len(units))

    def load(self, source: Path) -> int:
        if (source / MANIFEST).exists():
            manifest = read_manifest(source)
            files = [load_file(source / slot.file) for slot in manifest.slots]
            values = {float(value) for arrays in files for array in arrays.values() for value in array.flat}
            if len(values) != 1:
                raise CheckpointError(f"{source} mixes the versions {sorted(values)}")
            self._value, self._step = int(values.pop()), manifest.step
        emu = self._unit
        self._room = ArrayRoom(emu.layout, emu.slots.index(self._slot))
        for (kind, name), array in self._room.expect(self._value).items():
            self._room.view(kind, name)[...] = array
        self._holdings.commit(Replica.of(emu), self._room, self._counters)
        return self._step

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return SPECS

    @property
    def tied(self) -> dict[str, str]:
        return TIED

    def share(self, batch: TrainBatch | None) -> TrainBatch:
        if batch is not None:
            return batch
        none, ints = np.zeros(0), np.zeros(0, np.int32)
        return TrainBatch(self._step, self._step, ints, ints, ints, none, ints, none.astype(np.float32), ints)

    def train(self, batch: TrainBatch) -> StepReport:
        """Make a step; together with others it takes (virtual) time, and a future stands for the report."""
        self.metrics = {"reward/mean": float(np.nanmean(batch.rewards)), "loss": 0.0} if len(batch.rewards) else {}
        self.tokens = int(batch.lengths.sum() + batch.prompt_lengths.sum())
        self.ready = False
        report = StepReport(batch.step, batch.version, self._pace.train_s, self.tokens, self.metrics)
        if self._collectives is not None:
            return self._collectives.step(self, report)  # type: ignore[return-value]
        self.apply()
        return report

    def apply(self) -> None:
        """Apply the update of the present step."""
        self._share.add(1.0)
        self._value += 1
        self._step += 1
        self.ready = False

    def standing(self) -> Standing:
        return Standing(self._step, self.ready, False, self._holdings.replicas)

    def recall(self, step: int) -> None:
        if self.ready and step == self._step + 1:
            self.apply()
        elif step != self._step:
            raise ValueError(f"this slot stands before step {self._step} and cannot come to step {step}")
        self.ready = False

    @property
    def slot(self) -> SlotId:
        return self._slot

    @property
    def layout(self) -> Layout:
        return self._unit.layout

    def publication(self) -> Sequence[Piece]:
        return self._pieces

    def write(self, pieces: Sequence[Piece], path: Path, offsets: dict[str, int]) -> list[str]:
        shapes = {spec.name: spec.shape for spec in SPECS}
        checksums = []
        for piece in pieces:
            target = np.memmap(path, np.float32, "r+", offsets[piece.name], shapes[piece.name])
            box = tuple(slice(start, stop) for start, stop in zip(piece.start, piece.stop, strict=True))
            target[box] = self._parameter(piece)
            checksums.append(piece_checksum(np.ascontiguousarray(target[box])))
        return checksums

    def save(self, folder: Path, step: int) -> bytes:
        stored, arrays = [], {}
        for piece in self._pieces:
            array = np.ascontiguousarray(self._parameter(piece))
            stored.append(
                StoredPiece("parameter", piece.name, piece.start, piece.stop, "float32", piece_checksum(array))
            )
            arrays[stored[-1].key] = array
        path = folder / f"slot-{self._slot}.safetensors"
        save_file(arrays, path)
        return msgspec.json.encode(SlotFile(path.name, path.stat().st_size, step, {"updates": step}, tuple(stored)))

    def lend(self, moves: Sequence[Move], path: Path) -> Receipt:
        self._count()
        return self._holdings.lend(moves, path)

    def take(self, replica: Replica, index: int, loans: Sequence[Loan], model: Path) -> int:
        self._count()
        return self._holdings.take(replica, index, loans, lambda: ArrayRoom(replica.layout, index))

    def drop(self, replica: Replica) -> None:
        self._count()
        if replica == self._holdings.committed:
            self._room = None
        self._holdings.drop(replica)

    def adopt(self) -> int:
        """Also check every element: ``TransitionError`` names a tensor that is not what training has made of it."""
        replica = Replica.of(self._unit)
        self._holdings.require(replica)
        self._count()
        counters = self._holdings.counters
        room = self._holdings.settle(replica)
        for (kind, name), array in room.expect(counters["updates"]).items():
            if not np.array_equal(room.view(kind, name), array):
                raise TransitionError(f"{kind} of {name} on slot {self._slot} is not that of {counters}")
        self._room, self._step, self._value = room, counters["step"], counters["updates"]
        return self._step

    def abandon(self) -> None:
        self._holdings.abandon()

    def close(self) -> None:
        """Nothing to leave."""

    @property
    def _unit(self) -> Emu:
        if self._emu is None:
            raise ValueError("this slot is not assigned to a unit yet")
        return self._emu

    @property
    def _share(self) -> ArrayRoom:
        if self._room is None:
            raise ValueError("this slot has not loaded a model yet")
        return self._room

    @property
    def _counters(self) -> dict[str, int]:
        return {"step": self._step, "updates": self._value, "self_checked": 0}

    def _count(self) -> None:
        if self._room is not None:
            self._holdings.count(self._counters)

    def _parameter(self, piece: Piece) -> NDArray[np.float32]:
        share = self._share
        return share.view("parameter", piece.name)[within(piece, share.pieces[piece.name])]


class FakeReward:
    """An actor that scores a completion by its place in the group."""

    async def handle(self, delivery: Delivery) -> Message | None:
        match delivery.message:
            case Score(completions=completions):
                count = len(completions)
                return Scored(tuple(index / max(1, count - 1) for index in range(count)))
            case Commit():
                return Ok()
            case other:
                return Refused(f"the fake reward service does not understand {type(other).__name__}")

    async def peer_gone(self, event: PeerGone) -> None:
        """Nothing is kept for a peer."""

    async def background(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Nothing to close."""


class FakeText:
    """A ``TextCodec`` for which every prompt is as many tokens as it has characters."""

    stop_token_ids = (0,)

    def encode(self, prompt: object) -> NDArray[np.int32]:
        return np.arange(1, 1 + len(str(prompt)), dtype=np.int32)

    def decode(self, tokens: NDArray[np.int32]) -> str:
        return " ".join(map(str, tokens.tolist()))
