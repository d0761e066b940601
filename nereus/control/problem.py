"""What is there to choose from? The planner's problem, stated so that any exact method can be given the same one.

Values only; the cost model fills them, ``search`` solves them. A problem is a list of *sides* that partition the pool
of slots. A side is a list of *phases* that run one after the other on the side's slots. A phase is a list of *members*
(model-stages) that run beside each other and partition the slots the phase may use. Each member takes one candidate.

- Latency of a phase: its slowest member. Of a side: the sum of its phases. Of the plan: the slower side where sides
  run concurrently (async), the sum of the sides where they wait for each other (sync on disjoint slots), plus
  ``exposed_s``. Sync with everything colocated is one side.
- Slots: in each phase the candidates' slots sum to at most the side's share; the shares sum to at most the pool.
- Memory, placement-free, per side: the sum over its phases of the largest resident bytes of a member, plus the largest
  transient bytes of any member, is at most ``usable_bytes``. Placement checks the true sum; it can only be lower.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nereus.control.frontier import Columns, PhaseTable
from nereus.core.plan import Layout, ModelStage

MEMORY_MARGIN = (11, 10)
"""Feasible means predicted * 1.10 <= capacity, kept as a ratio of integers so that bytes stay exact."""


def usable_bytes(capacity_bytes: int) -> int:
    """Return the most that may be predicted for a slot of this capacity."""
    above, below = MEMORY_MARGIN
    return capacity_bytes * below // above


class Candidate(Struct, frozen=True):
    """One way to run a model-stage, with its predicted price."""

    model_stage: ModelStage
    layout: Layout
    dp: int
    seconds: float
    """Time of the model-stage within one step."""
    resident_bytes: int
    """What a slot holds all the time (weights, optimizer, kept caches)."""
    transient_bytes: int
    """What a slot needs on top while the model-stage runs (activations, KV cache, workspaces)."""
    micro_batch: int = 1
    recompute: bool = False

    @property
    def slots(self) -> int:
        return self.dp * self.layout.slots

    def __str__(self) -> str:
        return f"{self.model_stage} d{self.dp}{self.layout}"


class Member(Struct, frozen=True, dict=True):
    """A model-stage and what it can choose from. Candidate ``i`` wins over a later one that is equal in all else."""

    model_stage: ModelStage
    candidates: tuple[Candidate, ...]

    @cached_property
    def columns(self) -> Columns:
        """Slots, seconds, resident bytes and transient bytes of the candidates, in their order."""
        rows = self.candidates
        return (
            np.array([row.dp * row.layout.tp * row.layout.pp for row in rows], np.int64),
            np.array([row.seconds for row in rows], np.float64),
            np.array([row.resident_bytes for row in rows], np.int64),
            np.array([row.transient_bytes for row in rows], np.int64),
        )


class Phase(Struct, frozen=True, dict=True):
    """A concurrency group: its members run beside each other on disjoint slots."""

    name: str
    members: tuple[Member, ...]

    @cached_property
    def table(self) -> PhaseTable:
        return PhaseTable(tuple(member.columns for member in self.members))


Side = tuple[Phase, ...]


class Problem(Struct, frozen=True):
    """Choose one candidate for each member so that the step is fastest."""

    sides: tuple[Side, ...]
    pool: int
    """How many slots there are."""
    capacity_bytes: int
    """Memory of one slot."""
    concurrent: bool = False
    """Do the sides run at the same time (async)?"""
    exposed_s: float = 0.0
    """What the weight sync adds to every plan."""

    def __post_init__(self) -> None:
        if not self.sides or not all(side and all(phase.members for phase in side) for side in self.sides):
            raise ValueError("a problem needs at least one side, a side one phase, a phase one member")
        stages = [member.model_stage for member in self.members()]
        if len(set(stages)) != len(stages):
            raise ValueError(f"a model-stage may stand in one phase only, got {sorted(map(str, stages))}")

    @property
    def usable_bytes(self) -> int:
        return usable_bytes(self.capacity_bytes)

    def phases(self) -> Iterator[Phase]:
        return (phase for side in self.sides for phase in side)

    def members(self) -> Iterator[Member]:
        return (member for phase in self.phases() for member in phase.members)

    def restricted(self, choices: dict[ModelStage, tuple[Candidate, ...]]) -> Problem:
        """Return the same problem with fewer candidates for some model-stages."""

        def narrow(member: Member) -> Member:
            chosen = choices.get(member.model_stage)
            return member if chosen is None else Member(member.model_stage, chosen)

        sides = tuple(
            tuple(
                Phase(phase.name, tuple(map(narrow, phase.members)))
                if any(member.model_stage in choices for member in phase.members)
                else phase
                for phase in side
            )
            for side in self.sides
        )
        return replace(self, sides=sides)


def groupings(problem: Problem) -> Iterator[Problem]:
    """Yield the problem with its phases on shared and on separate slots in every way, as it stands first.

    Only phases of one side that stands alone (sync, colocated) may be regrouped: phases that wait for each other lose
    nothing by sharing slots except memory, and sides that run at the same time are separate already.
    """
    if len(problem.sides) > 1:
        yield problem
        return
    yield from (replace(problem, sides=sides) for sides in _partitions(problem.sides[0]))


def _partitions(phases: Side) -> Iterator[tuple[Side, ...]]:
    """Yield every way to divide phases into sides, undivided first; the order of phases is kept within a side."""
    if len(phases) == 1:
        yield (phases,)
        return
    first, rest = phases[:1], phases[1:]
    for sides in _partitions(rest):
        for at, side in enumerate(sides):
            yield (first + side, *sides[:at], *sides[at + 1 :])
        yield (first, *sides)


class RunnerUp(Struct, frozen=True):
    """A choice that lost, and why."""

    choice: str
    because: str
    latency_s: float | None = None
    """None where the choice does not fit at all."""
    candidates: tuple[Candidate, ...] = ()


class Solution(Struct, frozen=True):
    """The fastest feasible choice; candidates stand in the order of ``Problem.members``."""

    candidates: tuple[Candidate, ...]
    latency_s: float
    shares: tuple[int, ...]
    """Slots used by each side."""
    memory_bytes: tuple[int, ...]
    """The placement-free bound for each side."""
    runners_up: tuple[RunnerUp, ...] = ()

    def of(self, model_stage: ModelStage) -> Candidate:
        return next(candidate for candidate in self.candidates if candidate.model_stage == model_stage)


class Infeasible(Struct, frozen=True):
    """No plan fits. ``shortfall`` is how much of what ``constraint`` names would have to be added."""

    constraint: Literal["candidates", "slots", "memory"]
    shortfall: int
    because: str


def evaluate(problem: Problem, chosen: tuple[Candidate, ...]) -> Solution | Infeasible:
    """Return what ``chosen`` (in the order of ``Problem.members``) costs, or the first constraint it breaks.

    The definition of the problem in code: the reference that every solver is held to.
    """
    seconds, shares, memory = list[float](), list[int](), list[int]()
    at = 0
    for side in problem.sides:
        time, slots, resident, transient = 0.0, 0, 0, 0
        for phase in side:
            group = chosen[at : at + len(phase.members)]
            at += len(group)
            time += max([one.seconds for one in group])
            slots = max(slots, sum([one.dp * one.layout.tp * one.layout.pp for one in group]))
            resident += max([one.resident_bytes for one in group])
            transient = max(transient, *[one.transient_bytes for one in group])
        seconds.append(time)
        shares.append(slots)
        memory.append(resident + transient)
    if sum(shares) > problem.pool:
        short = sum(shares) - problem.pool
        return Infeasible("slots", short, f"{sum(shares)} slots are needed and the pool has {problem.pool}")
    over = max(memory) - problem.usable_bytes
    if over > 0:
        return Infeasible("memory", over, f"a slot needs {gib(max(memory))} and may use {gib(problem.usable_bytes)}")
    latency = (max(seconds) if problem.concurrent else sum(seconds)) + problem.exposed_s
    return Solution(chosen, latency, tuple(shares), tuple(memory))


def gib(size: int) -> str:
    """Write bytes for a reader."""
    return f"{size / (1 << 30):.2f} GiB"
