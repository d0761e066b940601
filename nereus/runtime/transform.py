"""How is a plan change carried out on live workers?

Owner: the supervisor, which begins a transition at a weight-sync point and commits it when the state of every unit of
the new plan is where it belongs. ``execute`` runs the ready primitives of any transition as concurrent coroutines;
``StateMoves`` performs one primitive by messages: the senders lend what is missing, each receiver takes it and checks
it. Until the commit every source keeps what it has, so a failure costs time and nothing else; and so a replica that is
made only to be made into another need not exist: what it would hold goes straight to where it ends.

Invariants (tests/runtime/test_transform.py, tests/virtual/test_transitions.py): no primitive starts before those it
waits for; when one fails its siblings are cancelled; every wait is bounded; lent memory is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from nereus.actors.names import slot_worker
from nereus.bus.endpoint import Endpoint
from nereus.bus.messages import Lend, Lent, Loan, Message, Return, Take, Vacate
from nereus.core.plan import SlotId, Stage
from nereus.errors import NereusError, TransitionError
from nereus.transition.primitive import (
    Destroy,
    Extend,
    Merge,
    Primitive,
    PrimitiveId,
    Replica,
    Split,
    model_stage_of,
    slots_of,
)
from nereus.transition.reshard import Move, TensorSpec, held_to_train, moves
from nereus.transition.run import TransitionRun


def _unwatched(_done: int, _running: tuple[PrimitiveId, ...]) -> None:
    """Nobody looks on."""


async def execute(
    run: TransitionRun,
    perform: Callable[[Primitive], Coroutine[Any, Any, None]],
    watch: Callable[[int, tuple[PrimitiveId, ...]], None] = _unwatched,
) -> None:
    """Perform the primitives of ``run``, each as soon as it may start; the first failure cancels the others.

    ``watch`` is told how many are done and which are in flight whenever that has changed.
    """
    running: dict[asyncio.Task[None], Primitive] = {}
    count = 0
    try:
        while not run.finished:
            for primitive in run.ready():
                running[asyncio.create_task(perform(primitive), name=primitive.id)] = primitive
            watch(count, tuple(primitive.id for primitive in running.values()))
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                primitive = running.pop(task)
                task.result()
                run.done(primitive.id)
                count += 1
        watch(count, ())
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def takers(primitive: Primitive) -> tuple[Replica, ...]:
    """Return the replicas whose slots hold more or other state after ``primitive``."""
    match primitive:
        case Split(parts=parts):
            return parts
        case Merge(target=target) | Extend(target=target):
            return (target,)
        case Destroy():
            return ()
        case _:
            raise TransitionError(f"{primitive.id}: live slots cannot park state in host memory yet")


def givers(primitive: Primitive) -> tuple[Replica, ...]:
    """Return the replicas that ``primitive`` starts from; all but those of an ``Extend`` are gone after it."""
    match primitive:
        case Split(source=source):
            return (source,)
        case Merge(parts=parts):
            return parts
        case Extend(sources=sources):
            return sources
        case Destroy(replica=replica):
            return (replica,)
        case _:
            raise TransitionError(f"{primitive.id}: live slots cannot park state in host memory yet")


class StateMoves:
    """Performs primitives on the workers of a run.

    A generating unit has no state of its own: its weights come from the relay after the commit, so only its slots are
    given up here.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        specs: Sequence[TensorSpec],
        tied: Mapping[str, str],
        model: Path,
        primitives: Sequence[Primitive],
        *,
        hosts: Mapping[SlotId, str],
        timeout_s: float,
    ) -> None:
        self._endpoint = endpoint
        self._hosts = hosts
        self._specs = tuple(specs)
        self._held = held_to_train(frozenset(tied.values()))
        self._layers = 1 + max((spec.layer for spec in specs if spec.layer is not None), default=-1)
        self._model = str(model)
        self._timeout_s = timeout_s
        self._ends = Ends.of(primitives)
        self.moved_bytes = 0
        """What has been lent so far: parameters and moments."""
        self.vacated: list[SlotId] = []

    async def perform(self, primitive: Primitive) -> None:
        """Carry out one primitive; ``TransitionError`` says what could not be done."""
        stage = model_stage_of(primitive).stage
        if stage is Stage.TRAINING:
            await self._move(primitive)
        elif stage is Stage.GENERATION and isinstance(primitive, Destroy):
            self.vacated += slots_of(primitive)
            await self._ask_all((slot, Vacate()) for slot in slots_of(primitive))

    async def _move(self, primitive: Primitive) -> None:
        targets = [replica for replica in takers(primitive) if replica in self._ends.targets]
        by_lender: dict[SlotId, list[Move]] = defaultdict(list)
        units = ([replica.unit for replica in replicas] for replicas in (self._ends.origins, targets))
        for move in moves(self._specs, self._layers, *units, held=self._held, node_of=self._hosts):
            by_lender[move.from_slot].append(move)
        lenders = sorted(by_lender)
        try:
            answers = await self._ask_all((slot, Lend(primitive.id, tuple(by_lender[slot]))) for slot in lenders)
            loans = []
            for slot, answer in zip(lenders, answers, strict=True):
                if not isinstance(answer, Lent):
                    raise TransitionError(f"{slot_worker(slot)} answered Lend with {type(answer).__name__}")
                self.moved_bytes += answer.receipt.size_bytes
                loans.append(Loan(slot, tuple(by_lender[slot]), answer.path, answer.receipt))
            await self._ask_all(
                (slot, Take(primitive.id, replica, index, self._model, _for(slot, loans)))
                for replica in targets
                for index, slot in enumerate(replica.slots)
            )
        finally:
            with contextlib.suppress(NereusError, TimeoutError):  # a lender that is gone has nothing to be given back
                await self._ask_all((slot, Return(primitive.id)) for slot in lenders)

    async def _ask_all(self, orders: Iterable[tuple[SlotId, Message]]) -> list[Message]:
        """Make requests of several slots at once; the first that fails cancels the others."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._ask(slot, message)) for slot, message in orders]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _ask(self, slot: SlotId, message: Message) -> Message:
        return await self._endpoint.request(slot_worker(slot), message, timeout_s=self._timeout_s)


class Ends(msgspec.Struct, frozen=True):
    """Where the state of the units that train is before a transition, and the replicas that are new after it."""

    origins: tuple[Replica, ...]
    """They have it until the commit."""
    targets: frozenset[Replica]

    @classmethod
    def of(cls, primitives: Iterable[Primitive]) -> Ends:
        """Return the ends of a transition; what is made only to be made into something else is neither."""
        given: dict[Replica, None] = {}
        made: set[Replica] = set()
        gone: set[Replica] = set()
        for primitive in primitives:
            if not isinstance(primitive, Split | Merge | Extend | Destroy):
                continue  # refused when it is performed
            if model_stage_of(primitive).stage is Stage.TRAINING:
                given |= dict.fromkeys(givers(primitive))
                made.update(takers(primitive))
                gone.update(() if isinstance(primitive, Extend) else givers(primitive))
        return cls(tuple(replica for replica in given if replica not in made), frozenset(made - gone))


def _for(slot: SlotId, loans: Iterable[Loan]) -> tuple[Loan, ...]:
    """Return what concerns ``slot``; every loan of a kind of state names its moves in the file's order."""
    return tuple(loan for loan in loans if any(move.to_slot == slot for move in loan.moves))
