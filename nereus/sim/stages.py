"""How long do the model-stages of a synchronous step really take, and what moves between them?

The world's truth of every model of a workflow, put together by plan: what each model-stage takes with its units, how
full its slots become beside what else lies on them, how long new weights travel from training to the other stages, and
how long each primitive of a transition takes with the links as busy as they are. The planner sees none of this.

Invariants (tests/sim/test_stages.py): generation at once and by waves agree; more slots never take longer; a slot that
needs more memory than it has is an ``OutOfMemory`` that names the model-stage.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct

from nereus.bus.messages import GroupSpec
from nereus.control.estimate import StepFacts
from nereus.core.plan import Emu, Layout, ModelStage, Plan, SlotId, Stage
from nereus.errors import OutOfMemory
from nereus.sim.devices import Batch, step_of
from nereus.sim.engine import Drawn, Engine, Speed, all_at_once
from nereus.sim.job import SynchronousJob
from nereus.sim.links import Links, communicators_s
from nereus.sim.noise import Noise
from nereus.sim.trace import Trace
from nereus.sim.truth import WORKSPACE_BYTES, Truth
from nereus.transition.primitive import Destroy, Extend, Merge, Park, Primitive, Replica, Split, Unpark

_Made = TypeVar("_Made")

MOST_LIVE = 1024
"""Sequences that an engine decodes at once."""

REFIT_S = 0.5
"""Ours: around a weight sync: gathering, casting, and telling the engines."""

RELEASE_S = 0.05
"""Ours: freeing a unit's memory and leaving its communicators."""


class Took(Struct, frozen=True):
    """What one model-stage of one step was like."""

    seconds: float
    peak_bytes: int
    """Of its fullest slot, with what else lies there."""
    operations: dict[str, float] = {}


class Sampled(Struct, frozen=True):
    """The prompts of one step and what will be answered: a world's secret until generation ends."""

    groups: tuple[tuple[int, tuple[int, ...]], ...]
    """(tokens of the prompt, tokens of each response)"""
    trained: tuple[tuple[int, int], ...]
    """(prompt, response) tokens of every sample that is trained on."""

    def facts(self, took: dict[ModelStage, Took]) -> StepFacts:
        """Return what a run may know of the step afterwards."""
        training = took.get(ModelStage(Stage.TRAINING), Took(0.0, 0))
        return StepFacts(
            tuple(prompt for prompt, _ in self.trained),
            tuple(response for _, response in self.trained),
            {stage: one.seconds for stage, one in took.items()},
            training.operations,
            training.peak_bytes,
        )


def sample_of(job: SynchronousJob, trace: Trace, seed: int, step: int) -> Sampled:
    """Draw prompts and responses of a step: by seed and step, whatever the plan."""
    extra = round((job.workflow.responses_per_sample - 1.0) * job.group_size)
    """ReMax generates a greedy response besides, which is not trained on."""
    count = job.group_size + extra
    drawn = job.lengths(trace, step).sample((seed, step), job.prompts * count, job.longest_response)
    shares = np.random.default_rng((seed, step, 1)).uniform(0.25, 0.75, job.prompts)
    prompts = [max(1, round(share * job.longest_prompt)) for share in shares.tolist()]
    groups = tuple((prompt, drawn[place * count : (place + 1) * count]) for place, prompt in enumerate(prompts))
    trained = tuple((prompt, length) for prompt, lengths in groups for length in lengths[: job.group_size])
    return Sampled(groups, trained)


class Stages:
    """All model-stages of one job on one cluster."""

    def __init__(self, job: SynchronousJob, noise: Noise, trace: Trace, *, sharded: bool = False) -> None:
        """``sharded``: trainers' replicas share their state (ZeRO, stage 3)."""
        self.job = job
        self.links = Links(job.cluster)
        self.node_of = job.cluster.node_of()
        models = {stage.model for stage in job.workflow.model_stages}
        self._truths = {
            model: Truth(
                job.shape_of(model),
                job.cluster,
                noise,
                trace,
                head=model in ("policy", "reference"),
                sharded=sharded,
            )
            for model in sorted(models)
        }
        self._noise = noise
        self._capacity = job.cluster.device.memory_bytes
        self._asked: tuple[Sampled | None, int] = (None, 0)
        self._kept: dict[tuple[object, ...], Any] = {}
        """What was asked of that step: sweeps of placements ask for the same model-stages again and again."""

    def truth(self, model: str) -> Truth:
        """Return the truth of one model."""
        return self._truths[model]

    # A step

    def took(self, plan: Plan, stage: ModelStage, sampled: Sampled, step: int) -> Took:
        """Return what ``stage`` takes in ``step``; ``OutOfMemory`` where a slot has not enough."""
        units, truth = plan.of(stage), self._truths[stage.model]
        beside, again = self._beside(plan, stage), stage in plan.recomputed
        budget, minibatches = self.job.micro_batch_tokens, self.job.minibatches
        self._renew(sampled, step)
        match stage.stage:
            case Stage.GENERATION:
                return self._generate(units, sampled, step, beside)
            case Stage.INFERENCE:
                scored = self._once((units,), lambda: truth.score(units, sampled.trained, step, budget))
                found = Took(scored.seconds, round(scored.peak_bytes + beside))
            case _:
                batch = Batch(sampled.trained)
                trained = self._once(
                    (units, again), lambda: step_of(truth, units, batch, step, budget, again, minibatches)
                )
                found = Took(trained.seconds, round(trained.peak_bytes + beside), trained.operations)
        if found.peak_bytes > self._capacity:
            own = found.peak_bytes - round(beside)
            needed = {"its own": own, "others on its slots": round(beside)}
            raise OutOfMemory(f"{stage} of step {step}", needed, round(self._capacity))
        return found

    def step_s(self, plan: Plan, sampled: Sampled, step: int, below: float = math.inf) -> float:
        """Return the seconds of a whole step by itself; infinite where it does not fit.

        What takes ``below`` or longer is not followed to its end and may be infinite as well.
        """
        seconds = 0.0
        try:
            for phase in (phase for side in self.job.workflow.sides for phase in side):
                ends: list[tuple[frozenset[SlotId], float]] = []
                for stage in phase:
                    slots = frozenset(slot for unit in plan.of(stage) for slot in unit.slots)
                    begins = max((end for others, end in ends if not slots.isdisjoint(others)), default=0.0)
                    ends.append((slots, begins + self.took(plan, stage, sampled, step).seconds))
                seconds += max(end for _, end in ends)
                if seconds >= below:
                    return math.inf
        except OutOfMemory:
            return math.inf
        return seconds + self.weight_sync_s(plan)

    def _renew(self, sampled: Sampled, step: int) -> None:
        """Forget what was asked of another step."""
        if self._asked[0] is not sampled or self._asked[1] != step:
            self._asked = sampled, step
            self._kept.clear()

    def _once(self, key: tuple[object, ...], make: Callable[[], _Made]) -> _Made:
        """Return what ``make`` makes, made once for all that a model-stage's time depends on within one step."""
        if key not in self._kept:
            self._kept[key] = make()
        found: _Made = self._kept[key]
        return found

    def _generate(self, units: tuple[Emu, ...], sampled: Sampled, step: int, beside: float) -> Took:
        layout, truth = units[0].layout, self._truths[units[0].model_stage.model]
        room = truth.cache_tokens(layout, beside)
        longest = max(prompt + max(lengths) for prompt, lengths in sampled.groups)
        if room < longest:
            weights = round(truth.weights_bytes(layout) + WORKSPACE_BYTES)
            needed = {"weights": weights, "others on its slots": round(beside), "the longest sequence": longest}
            raise OutOfMemory(f"{units[0].model_stage} of step {step}", needed, round(self._capacity))
        dp = len(units)
        seconds = self._once(
            (units, room),
            lambda: max(self._unit_s(unit, sampled.groups[at::dp], step, room) for at, unit in enumerate(units)),
        )
        return Took(seconds, round(self._capacity * 0.92))

    def _unit_s(self, unit: Emu, groups: Sequence[tuple[int, tuple[int, ...]]], step: int, room: int) -> float:
        """Return how long one engine takes for its prompts."""
        if not groups:
            return 0.0
        truth = self._truths[unit.model_stage.model]
        decode = functools.partial(_decode_s, truth, unit, step)
        speed = Speed(decode, truth.cached_s(unit.layout, step))
        prefill = functools.partial(truth.prefill_s, unit.layout)
        count = sum(len(lengths) for _, lengths in groups)
        whole = sum(prompt * len(lengths) + sum(lengths) for prompt, lengths in groups)
        if count <= MOST_LIVE and whole <= room:
            seconds = all_at_once(groups, speed, prefill)
        else:
            seconds = _by_waves(groups, speed, prefill, room)
        slow = self._noise.slowest(unit.slots, step) * self._noise.jitter(unit.id, step)
        return seconds * slow

    def weight_sync_s(self, plan: Plan) -> float:
        """Return the seconds until the trained weights are where the other stages of their models run.

        A broadcast through all nodes at once, as NCCL and relays do: into each node comes once what nobody there has,
        with the network of all its slots; inside, each slot takes what it lacks from its neighbours.
        """
        into, within = defaultdict[str, float](float), defaultdict[SlotId, float](float)
        for stage in plan.model_stages():
            trainers = plan.of(ModelStage(Stage.TRAINING, stage.model))
            if stage.stage is not Stage.TRAINING and trainers:
                self._add_lacking(plan.of(stage), trainers, into, within)
        nodes_s = self.links.into_node_s(max(into.values(), default=0.0))
        return REFIT_S + nodes_s + self.links.in_node_s(max(within.values(), default=0.0))

    def _add_lacking(
        self, units: Sequence[Emu], trainers: Sequence[Emu], into: dict[str, float], within: dict[SlotId, float]
    ) -> None:
        """Add the bytes of weights that come into each node and to each slot."""
        truth = self._truths[units[0].model_stage.model]
        layout, trained = units[0].layout, trainers[0].layout
        held, needed = self._places(trainers), self._places(units)
        for node, places in needed.items():
            share = len(places) / layout.slots - len(held.get(node, ())) / trained.slots
            into[node] += max(0.0, share) * truth.weights_bytes(Layout())
        sources = {slot for trainer in trainers for slot in trainer.slots}
        for slot in (slot for unit in units for slot in unit.slots):
            own = min(1.0, layout.slots / trained.slots) if slot in sources else 0.0
            within[slot] += truth.weights_bytes(layout) * (1.0 - own)

    def _places(self, units: Sequence[Emu]) -> dict[str, set[int]]:
        """Return which parts of a unit's state are on each node."""
        found = defaultdict[str, set[int]](set)
        for unit in units:
            for place, slot in enumerate(unit.slots):
                found[self.node_of[slot]].add(place)
        return found

    # Memory between steps

    def state_bytes(self, stage: ModelStage, layout: Layout, dp: int = 1) -> float:
        """Return what a slot of a unit holds between steps."""
        truth = self._truths[stage.model]
        if stage.stage is Stage.TRAINING:
            return truth.resident_bytes(layout, dp) - WORKSPACE_BYTES
        if stage.stage is Stage.INFERENCE:
            return truth.shared_weights_bytes(layout, dp)
        return truth.weights_bytes(layout)

    def _beside(self, plan: Plan, stage: ModelStage) -> float:
        """Return what other model-stages hold on the fullest slot of ``stage``."""
        held = {slot: 0.0 for unit in plan.of(stage) for slot in unit.slots}
        for other in plan.model_stages():
            units = plan.of(other) if other != stage else ()
            for unit in units:
                size = self.state_bytes(other, unit.layout, len(units))
                for slot in unit.slots:
                    if slot in held:
                        held[slot] += size
        return max(held.values())

    # Transitions

    def primitive_s(self, primitive: Primitive, now: float) -> float:
        """Return the seconds of a primitive that begins ``now``, on links that carry what was begun before."""
        match primitive:
            case Destroy():
                return RELEASE_S
            case Extend(sources=sources, target=target):
                size = self._share(target) / len(sources)
                ways = [(_same(one, target, i), slot) for one in sources for i, slot in enumerate(target.slots)]
                return communicators_s(2 * len(target.slots)) + self._sent_s(ways, size, now)
            case Split(source=source, parts=parts):
                lacking = max(0.0, self._share(parts[0]) - self._share(source))
                return communicators_s(len(source.slots)) + self._sent_s(_ring(source.slots), lacking, now)
            case Merge(target=target, aligned=aligned):
                size = 0.0 if aligned else self._share(target)
                return communicators_s(len(target.slots)) + self._sent_s(_ring(target.slots), size, now)
            case Park(replica=replica):
                return RELEASE_S + self.links.from_host_s(self._share(replica))
            case Unpark(target=target):
                return communicators_s(len(target.slots)) + self.links.from_host_s(self._share(target))

    def restored_s(self, unit: Emu) -> float:
        """Return the seconds of loading a unit of which no copy is left from its host."""
        return communicators_s(len(unit.slots)) + self.links.from_host_s(
            self.state_bytes(unit.model_stage, unit.layout)
        )

    def _share(self, replica: Replica) -> float:
        return self.state_bytes(replica.model_stage, replica.layout)

    def _sent_s(self, ways: Sequence[tuple[SlotId, SlotId]], size_bytes: float, now: float) -> float:
        if not size_bytes:
            return 0.0
        return (
            max(
                (self.links.transfer(source, target, size_bytes, now) for source, target in ways if source != target),
                default=now,
            )
            - now
        )


def _decode_s(truth: Truth, unit: Emu, step: int, live: int) -> float:
    return truth.decode_s(unit.layout, unit.slots, live, step)


def _same(source: Replica, target: Replica, place: int) -> SlotId:
    """Return the slot of ``source`` that holds what ``place`` of ``target`` needs, most of it where they differ."""
    return source.slots[place * len(source.slots) // len(target.slots)]


def _ring(slots: Sequence[SlotId]) -> list[tuple[SlotId, SlotId]]:
    return [(slots[place - 1], slot) for place, slot in enumerate(slots)]


def _by_waves(
    groups: Sequence[tuple[int, tuple[int, ...]]], speed: Speed, prefill: functools.partial[float], room: int
) -> float:
    """Return when an engine that has not room for all at once is through."""
    engine = Engine(MOST_LIVE, room)
    engine.prefill_s = prefill
    engine.switch(0, speed, 0.0, 0.0)
    for number, (prompt, lengths) in enumerate(groups):
        engine.add(Drawn(GroupSpec(number, 0, 0, b"null", b"{}"), prompt, lengths), 0.0)
    ended = 0.0
    while engine.live:
        ended = engine.next_end()
        engine.advance(ended)
    return ended
