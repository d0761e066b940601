"""Which model-stages does an algorithm have, which of them run at the same time, and where may a plan change?

A workflow is *sides* that run side by side; a side is *phases* in sequence; the members of a phase run at the same time
on different slots. Synchronous algorithms have one side; asynchronous ones generate on one side and score and train on
the other. Invariants (tests/core/test_workflow.py): every model-stage is in exactly one phase; model-stages that run at
the same time never share a slot of a valid plan.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from msgspec import Struct

from nereus.core.plan import ModelStage, Plan, SlotId, Stage

Phase = tuple[ModelStage, ...]
Side = tuple[Phase, ...]


class Algorithm(enum.StrEnum):
    """The algorithms whose workflows are known."""

    PPO = "ppo"
    GRPO = "grpo"
    REMAX = "remax"


class Boundary(enum.StrEnum):
    """Where no computation is in flight that a new plan would cut: the only place where a plan changes."""

    RL_STEP = "rl_step"
    WEIGHT_SYNC = "weight_sync"


class Workflow(Struct, frozen=True):
    """The concurrency structure of one algorithm."""

    algorithm: Algorithm
    asynchronous: bool
    sides: tuple[Side, ...]
    responses_per_sample: float = 1.0
    """Responses generated for each one trained on: ReMax adds a greedy baseline for every prompt."""

    @property
    def model_stages(self) -> tuple[ModelStage, ...]:
        """Return all model-stages, generation first."""
        return tuple(sorted(stage for side in self.sides for phase in side for stage in phase))

    @property
    def boundary(self) -> Boundary:
        return Boundary.WEIGHT_SYNC if self.asynchronous else Boundary.RL_STEP

    @property
    def trained(self) -> tuple[str, ...]:
        """Return the models whose weights change."""
        return tuple(stage.model for stage in self.model_stages if stage.stage is Stage.TRAINING)

    def place(self, model_stage: ModelStage) -> tuple[int, int]:
        """Return (side, phase) of a model-stage; ``ValueError`` if the algorithm has no such model-stage."""
        for side_index, side in enumerate(self.sides):
            for phase_index, phase in enumerate(side):
                if model_stage in phase:
                    return side_index, phase_index
        known = ", ".join(map(str, self.model_stages))
        raise ValueError(f"{self.algorithm} has no model-stage {model_stage}; it has {known}")

    def concurrent(self, one: ModelStage, other: ModelStage) -> bool:
        """Return whether two model-stages may run at the same time and so need slots of their own."""
        (side, phase), (other_side, other_phase) = self.place(one), self.place(other)
        return side != other_side or phase == other_phase

    def concurrency_groups(self) -> Iterator[Phase]:
        """Yield the largest sets of model-stages that run at the same time: one phase of every side."""
        chosen: list[Phase] = [()]
        for side in self.sides:
            chosen = [before + phase for before in chosen for phase in side]
        yield from chosen

    def conflicts(self, plan: Plan) -> tuple[SlotId, ...]:
        """Return the slots that a plan gives to two units which run at the same time; a valid plan has none."""
        found = {slot for group in self.concurrency_groups() for slot in plan.overlaps(group)}
        return tuple(sorted(found))


def workflow(
    algorithm: Algorithm,
    *,
    asynchronous: bool = False,
    reference: bool = True,
    reward_model: bool = True,
    critic: bool | None = None,
    group_size: int = 1,
) -> Workflow:
    """Return the workflow of an algorithm.

    ``critic`` is by default what the algorithm defines (PPO has one). ``reference`` is the frozen model of the KL term;
    ``reward_model`` a scoring model on slots, in contrast to a reward function on CPUs, which is no model-stage.
    """
    has_critic = algorithm is Algorithm.PPO if critic is None else critic
    scoring = [
        ModelStage(Stage.INFERENCE, model)
        for model, present in (("critic", has_critic), ("reference", reference), ("reward", reward_model))
        if present
    ]
    training = [ModelStage(Stage.TRAINING, model) for model in ("critic", "policy") if model == "policy" or has_critic]
    generation: Phase = (ModelStage(Stage.GENERATION),)
    learning: Side = tuple(tuple(sorted(phase)) for phase in (scoring, training) if phase)
    extra = 1.0 / group_size if algorithm is Algorithm.REMAX else 0.0
    sides: tuple[Side, ...] = ((generation,), learning) if asynchronous else ((generation, *learning),)
    return Workflow(algorithm, asynchronous, sides, 1.0 + extra)
