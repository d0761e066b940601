"""What runs where? Model-stages, layouts, elastic model units and the plan that holds them.

Values only. Invariants (tests/core/test_plan.py): a layout's text form round-trips; an EMU has exactly
``tp * pp`` distinct slots; units of one model-stage share one layout.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator

import msgspec

SlotId = int
"""A slot's number, stable for the life of a run; it is also the rank in the (null) default process group."""

PlanEpoch = int
"""Monotone counter of plans; fences messages."""

PolicyVersion = int
"""Monotone counter of published policy weights; measures staleness."""


class Stage(enum.IntEnum):
    """The three stages of RL post-training, in the tie-break order of the transition DAG."""

    GENERATION = 0
    INFERENCE = 1
    TRAINING = 2
    WEIGHTS = 3
    """The weight-sync relays: not a stage of the algorithm, ordered last."""


class ModelStage(msgspec.Struct, frozen=True, order=True):
    """One model in one stage, such as ``policy.training``."""

    stage: Stage
    model: str = "policy"

    def __str__(self) -> str:
        return f"{self.model}.{self.stage.name.lower()}"

    @classmethod
    def parse(cls, text: str) -> ModelStage:
        """Read ``model.stage``; ``ValueError`` names the text and the known stages."""
        model, _, stage = text.rpartition(".")
        if not model or stage.upper() not in Stage.__members__:
            known = ", ".join(name.lower() for name in Stage.__members__)
            raise ValueError(f"{text!r} is not a model-stage; write MODEL.STAGE with a stage out of {known}")
        return cls(Stage[stage.upper()], model)


POLICY_GENERATION = ModelStage(Stage.GENERATION)
POLICY_TRAINING = ModelStage(Stage.TRAINING)
POLICY_WEIGHTS = ModelStage(Stage.WEIGHTS)
REFERENCE_INFERENCE = ModelStage(Stage.INFERENCE, "reference")

_LAYOUT = re.compile(r"(?:d(?P<dp>[1-9]\d*))?(?:t(?P<tp>[1-9]\d*))?(?:p(?P<pp>[1-9]\d*))?")


class Layout(msgspec.Struct, frozen=True, order=True):
    """The degrees inside one elastic model unit: tensor parallel x pipeline parallel."""

    tp: int = 1
    pp: int = 1

    @property
    def slots(self) -> int:
        """How many slots one unit of this layout occupies."""
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"t{self.tp}p{self.pp}"

    def coordinates(self, index: int) -> tuple[int, int]:
        """Return ``(pp_rank, tp_rank)`` of the unit's slot number ``index``: tp ranks are adjacent."""
        return divmod(index, self.tp)


class Replication(msgspec.Struct, frozen=True, order=True):
    """A layout and how many replicas (elastic model units) of it: ``d2t2p1``."""

    dp: int = 1
    layout: Layout = Layout()

    @property
    def slots(self) -> int:
        return self.dp * self.layout.slots

    def __str__(self) -> str:
        return f"d{self.dp}{self.layout}"

    @classmethod
    def parse(cls, text: str) -> Replication:
        """Read ``d2t2p1``; missing degrees are 1; ``ValueError`` says what is expected."""
        match = _LAYOUT.fullmatch(text.strip())
        if not match or not text.strip():
            raise ValueError(f"{text!r} is not a layout; write it like d2t2p1 (replicas, tensor, pipeline degrees)")
        dp, tp, pp = (int(match[name] or 1) for name in ("dp", "tp", "pp"))
        return cls(dp, Layout(tp, pp))


class Emu(msgspec.Struct, frozen=True, order=True):
    """An elastic model unit: one whole replica of one model-stage.

    ``slots[i]`` holds ``(pp_rank, tp_rank) = layout.coordinates(i)``. ``ordinal`` is never reused within a run.
    """

    model_stage: ModelStage
    ordinal: int
    layout: Layout
    slots: tuple[SlotId, ...]

    def __post_init__(self) -> None:
        if len(self.slots) != self.layout.slots or len(set(self.slots)) != len(self.slots):
            raise ValueError(
                f"{self.id} with layout {self.layout} needs {self.layout.slots} distinct slots, got {self.slots}"
            )

    @property
    def id(self) -> str:
        return f"{self.model_stage}/{self.ordinal}"

    def __str__(self) -> str:
        return f"{self.id} {self.layout} on {','.join(map(str, self.slots))}"


class Plan(msgspec.Struct, frozen=True):
    """All elastic model units of one plan epoch."""

    epoch: PlanEpoch
    emus: tuple[Emu, ...]
    recomputed: tuple[ModelStage, ...] = ()
    """Trained model-stages that keep no activations of a layer for the backward pass and compute them again."""

    def __post_init__(self) -> None:
        for model_stage in self.model_stages():
            layouts = {emu.layout for emu in self.of(model_stage)}
            if len(layouts) > 1:
                raise ValueError(f"units of {model_stage} must share one layout, got {sorted(map(str, layouts))}")
        ids = [emu.id for emu in self.emus]
        if len(set(ids)) != len(ids):
            raise ValueError(f"unit ids repeat in plan {self.epoch}: {ids}")

    def model_stages(self) -> tuple[ModelStage, ...]:
        return tuple(sorted({emu.model_stage for emu in self.emus}))

    def of(self, model_stage: ModelStage) -> tuple[Emu, ...]:
        """Return the replicas of ``model_stage`` in order of their ordinals."""
        return tuple(sorted(emu for emu in self.emus if emu.model_stage == model_stage))

    def replication(self, model_stage: ModelStage) -> Replication | None:
        """Return layout and number of the units of ``model_stage``; None if there are none."""
        units = self.of(model_stage)
        return Replication(len(units), units[0].layout) if units else None

    def on(self, slot: SlotId) -> Iterator[Emu]:
        """Yield the units that use ``slot``."""
        return (emu for emu in self.emus if slot in emu.slots)

    def slots(self) -> frozenset[SlotId]:
        return frozenset(slot for emu in self.emus for slot in emu.slots)

    def equals(self, other: Plan) -> bool:
        """Say whether both are the same but for their epochs."""
        return frozenset(self.emus) == frozenset(other.emus) and self.recomputed == other.recomputed

    def overlaps(self, concurrent: Iterable[ModelStage]) -> tuple[SlotId, ...]:
        """Return the slots that more than one unit of the given, concurrently running model-stages uses."""
        seen: set[SlotId] = set()
        twice: list[SlotId] = []
        for model_stage in concurrent:
            for emu in self.of(model_stage):
                twice += [slot for slot in emu.slots if slot in seen]
                seen.update(emu.slots)
        return tuple(sorted(twice))
