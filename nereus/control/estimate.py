"""What have the steps so far taught about speed, lengths and memory, and which question do they ask?

Owner of the way from what a run reports to what the planner takes. A value, replaced at every step; pure, so that a
journal replays to the same questions. Invariants (tests/control/test_estimate.py): whatever the prior said, predictions
of the plan that runs come to what was measured; classes that were not measured move only with those that share them;
lengths are those of the newest steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nereus.control.breakdown import Pricing, list_of_units
from nereus.control.candidates import Priced, Space
from nereus.control.choose import Pin, Question
from nereus.control.cost import Recompute, Setups
from nereus.control.efficiency import CLASSES, COLUMN, Calibration, Observation, OperationClass, Work
from nereus.control.generation import add_decoding
from nereus.control.memory import MemoryCalibration
from nereus.control.monitor import Signals
from nereus.control.move import state_terms
from nereus.control.problem import usable_bytes
from nereus.core.cluster import Cluster
from nereus.core.plan import ModelStage, Plan, SlotId, Stage
from nereus.core.workload import Lengths

WINDOW = 3
"""So many of the newest steps tell how long sequences are."""

MOST_PEAKS = 32

LEAST_SHARE = 0.1
"""Ours: a class of operations that takes less of a step is no reason to think again, whatever its speed."""


class Decoded(Struct, frozen=True):
    """What the engines of all units together have done, by their own counters."""

    seconds: float
    steps: int
    tokens: int
    cached_tokens: int
    """For each token drawn, those that it saw."""


class StepFacts(Struct, frozen=True):
    """What one step was like."""

    prompts: tuple[int, ...]
    """Tokens of each sample's prompt."""
    responses: tuple[int, ...]
    seconds: dict[ModelStage, float]
    """What each model-stage took for the samples of one step, waiting for others left out."""
    operations: dict[str, float] = {}
    """Seconds of the trained step by operation class, on its slowest slot, waiting for others left out."""
    peak_bytes: int = 0
    """Of the fullest slot."""
    decoded: Decoded | None = None
    """Of generation, where engines tell: in the place of its seconds, which tell less of speed where units have less to
    do than they could."""


class Estimate(Struct, frozen=True):
    """Prior knowledge and what was learned."""

    pricing: Pricing
    """With the whole pool; lengths and efficiencies as they stand."""
    calibration: Calibration
    pins: tuple[Pin, ...] = ()
    recent: tuple[StepFacts, ...] = ()
    peaks: tuple[tuple[float, float, float], ...] = ()
    """(state, transient, measured peak) bytes of the newest steps."""
    memory: MemoryCalibration = MemoryCalibration()
    """What was believed before the first peak."""

    @classmethod
    def starting(cls, pricing: Pricing, pins: tuple[Pin, ...] = ()) -> Estimate:
        """Begin with what ``pricing`` says."""
        return cls(pricing, Calibration.starting(pricing.efficiencies), pins, memory=pricing.calibration)

    def observed(self, plan: Plan, facts: StepFacts) -> Estimate:
        """Return the estimate with one more step, made under ``plan``, in it."""
        recent = (*self.recent, facts)[-WINDOW:]
        workload = replace(
            self.pricing.workload,
            prompts=Lengths.of([tokens for one in recent for tokens in one.prompts]),
            responses=Lengths.of([tokens for one in recent for tokens in one.responses]),
        )
        pricing = replace(self.pricing, workload=workload)
        calibration = self.calibration.observed(_observations(pricing, plan, facts))
        peaks = (*self.peaks, *_peaks(pricing, plan, facts))[-MOST_PEAKS:]
        memory = _believed(self.memory.refined(peaks), peaks[-WINDOW:])
        pricing = replace(pricing, efficiencies=calibration.efficiencies, calibration=memory)
        return Estimate(pricing, calibration, self.pins, recent, peaks, self.memory)

    def moved(self, predicted_s: float, measured_s: float) -> Estimate:
        """Return the estimate after a transition: what its price lacked, or had too much, counts half from now on."""
        overheads = self.pricing.overheads
        pause = max(0.0, overheads.pause_s + (measured_s - predicted_s) / 2)
        return replace(self, pricing=replace(self.pricing, overheads=replace(overheads, pause_s=pause)))

    def signals(self, plan: Plan) -> Signals:
        """Return what the monitor watches, of the newest step."""
        facts = self.recent[-1]
        lengths = sorted(prompt + response for prompt, response in zip(facts.prompts, facts.responses, strict=True))
        p95 = lengths[min(len(lengths) - 1, math.ceil(0.95 * len(lengths)) - 1)]
        work = _unit_seconds(self.pricing, plan)
        least = LEAST_SHARE * sum(facts.operations.values())
        achieved = {
            name: work[name] / seconds
            for name, seconds in facts.operations.items()
            if work.get(name) and seconds > 0 and seconds >= least
        }
        return Signals(sum(lengths) / len(lengths), float(p95), achieved, facts.peak_bytes)

    def question(
        self, cluster: Cluster, plan: Plan, ordinals: Mapping[ModelStage, int], leaving: Iterable[SlotId] = ()
    ) -> Question:
        """Return the question of the best plan on ``cluster`` when ``plan`` runs, in part perhaps on ``leaving``."""
        used = tuple(sorted(ordinals.items()))
        pricing = replace(self.pricing, cluster=cluster)
        return Question(pricing, plan, used, self.pins, leaving=tuple(sorted(leaving)))


def _row(pricing: Pricing, plan: Plan, stage: ModelStage) -> tuple[Priced, int] | None:
    """Return the price list with the units of ``stage`` as they run, and their row in it.

    Where it holds several batches, the largest that fits beside what else is on the units' slots.
    """
    replication = plan.replication(stage)
    if replication is None:
        return None
    space = replace(pricing.space, recompute=(stage in plan.recomputed,))
    priced = list_of_units(pricing, stage, replication, space)
    setups = priced.setups
    same = (setups.tp == replication.layout.tp) & (setups.pp == replication.layout.pp) & (setups.dp == replication.dp)
    rows = np.flatnonzero(same)
    if len(rows) <= 1:
        return (priced, int(rows[0])) if len(rows) else None
    resident, transient = priced.memory.resident_bytes(), priced.memory.transient_bytes(pricing.calibration)
    needed = np.broadcast_to(resident + transient, (len(setups),)) + _beside(pricing, plan, stage)
    fitting = rows[needed[rows] <= usable_bytes(int(pricing.cluster.device.memory_bytes))]
    return priced, int(fitting[-1] if len(fitting) else rows[0])


def _beside(pricing: Pricing, plan: Plan, stage: ModelStage) -> int:
    """Return the bytes that units of other model-stages hold on the fullest slot of ``stage``."""
    mine = {slot for emu in plan.of(stage) for slot in emu.slots}
    held = dict.fromkeys(mine, 0)
    for other in plan.model_stages():
        units = plan.of(other)
        if other == stage or mine.isdisjoint(slot for emu in units for slot in emu.slots):
            continue
        state = sum(state_terms(pricing, other, units[0].layout).values())
        for slot in mine.intersection(slot for emu in units for slot in emu.slots):
            held[slot] += state
    return max(held.values(), default=0)


def _believed(memory: MemoryCalibration, newest: tuple[tuple[float, float, float], ...]) -> MemoryCalibration:
    """Return a calibration that explains no newest peak as smaller than it was: what did not fit is not tried again."""
    for state, transient, peak in newest:
        explained = memory.explaining(transient, peak - state) if transient > 0 else memory
        memory = MemoryCalibration(
            max(memory.transient_factor, explained.transient_factor),
            max(memory.workspace_bytes, explained.workspace_bytes),
        )
    return memory


def _peaks(pricing: Pricing, plan: Plan, facts: StepFacts) -> list[tuple[float, float, float]]:
    listed = _row(pricing, plan, ModelStage(Stage.TRAINING))
    if listed is None or facts.peak_bytes <= 0:
        return []
    priced, row = listed
    transient = sum(
        float(np.broadcast_to(term, (len(priced.setups),))[row]) for term in priced.memory.transient.values()
    )
    state = sum(float(np.broadcast_to(term, (len(priced.setups),))[row]) for term in priced.memory.resident.values())
    state += _beside(pricing, plan, ModelStage(Stage.TRAINING))
    return [(state, transient, float(facts.peak_bytes))]


def _observations(pricing: Pricing, plan: Plan, facts: StepFacts) -> list[Observation]:
    found = list[Observation]()
    for stage, seconds in sorted(facts.seconds.items()):
        listed = _row(pricing, plan, stage)
        if listed is not None and stage.stage is Stage.GENERATION and facts.decoded is not None:
            found.append(_decoding(pricing, plan, stage, facts.decoded))
        elif listed is not None and seconds > 0:
            priced, row = listed
            found.append(Observation.of_step(priced.work, seconds, row))
    for name, unit_s in _unit_seconds(pricing, plan).items():
        if unit_s > 0 and facts.operations.get(name, 0.0) > 0:
            found.append(Observation.of_class(OperationClass(name), unit_s, facts.operations[name]))
    return found


def _decoding(pricing: Pricing, plan: Plan, stage: ModelStage, decoded: Decoded) -> Observation:
    """Return what engines have measured of their own decoding, beside its work at efficiency 1."""
    layout = plan.of(stage)[0].layout
    setup = Setups.grid([(layout, 1, 1, Recompute.NONE)])
    work = Work.none(1)
    steps, tokens, context = (np.array([float(n)]) for n in (decoded.steps, decoded.tokens, decoded.cached_tokens))
    add_decoding(work, pricing.shape_of(stage), pricing.cluster, setup, steps, tokens, context)
    return Observation.of_step(work, decoded.seconds)


def _unit_seconds(pricing: Pricing, plan: Plan) -> dict[str, float]:
    """Return the seconds at efficiency 1 of the trained step by class, as slots are busy with it."""
    stage = ModelStage(Stage.TRAINING)
    listed = _row(pricing, plan, stage)
    if listed is None:
        return {}
    priced, row = listed
    unit = priced.work.busy_s(row)
    return {str(name): float(unit[COLUMN[name]]) for name in CLASSES}


def live_space(*, micro_batch_tokens: int, max_live: int, compute_bytes: float, recompute: bool) -> Space:
    """Return what a running job can choose from: its micro-batches and its engine are what they are.

    Recomputation that was asked for stays; it is chosen otherwise where memory is short.
    """
    return Space(
        uneven=True,
        recompute=(True,) if recompute else (False, True),
        generation_pp=False,
        micro_batch_tokens=micro_batch_tokens,
        max_live=max_live,
        compute_bytes=compute_bytes,
    )
