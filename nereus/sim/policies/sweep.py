"""Which fixed layouts would somebody choose who had tried them all?

Used for systems whose layouts never change: they get the pair of layouts that is fastest for the first steps of the
trace, found with the world's truth where their users would have to try. Invariants (tests/sim/test_sweep.py): what is
chosen fits the slots and their memory; no pair that was tried is faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from nereus.config import JobConfig
from nereus.control.candidates import Space, layouts
from nereus.core.plan import POLICY_TRAINING, Emu, Layout, Replication, SlotId
from nereus.sim.devices import Batch, step_of
from nereus.sim.engine import Drawn, Engine, Speed
from nereus.sim.policy import Known

LOOKED_AT = 2
"""So many units of equal ones are followed sequence by sequence."""

DEEPEST = 8
"""Pipeline ranks of layouts that are tried."""

EVERY_DP = 16
"""Up to so many replicas each number is tried, above only powers of two and the most."""

StepTime = Callable[[Replication, float], float]
"""Seconds of a step with these generation units, where training takes so many seconds; no less if it takes more."""


class Pair(Struct, frozen=True):
    """Layouts for training and generation, and what a step takes under them."""

    train: Replication
    rollout: Replication
    step_s: float


def swept(config: JobConfig, slots: int, known: Known, step_s: StepTime, most: int = 1, step: int = 0) -> list[Pair]:
    """Return the fastest pairs for ``step`` on ``slots`` slots, the fastest first; ``ValueError`` if none fits.

    Rollouts get the slots after the trainers', so pairs that would cut a tensor-parallel group of theirs are none.
    """
    groups = groups_of(config, known, step)
    best: list[Pair] = []
    for train in _trainers(known, slots - 1):
        rollouts = tuple(one for one in _rollouts(known, slots - train.slots) if not train.slots % one.layout.tp)
        limit = best[-1].step_s if len(best) == most else math.inf
        if min((step_s(one, 0.0) for one in rollouts), default=math.inf) >= limit:
            continue
        train_s = training_s(config, known, train, groups, step)
        found = [Pair(train, rollout, step_s(rollout, train_s)) for rollout in rollouts] if train_s < math.inf else []
        best = sorted((*best, *found), key=lambda pair: pair.step_s)[:most]
    if not best:
        raise ValueError(f"no layouts of the model fit on {slots} slots of the cluster")
    return best


def with_layouts(config: JobConfig, pair: Pair) -> JobConfig:
    """Return the job with these layouts."""
    train, rollout = replace(config.train, layout=str(pair.train)), replace(config.rollout, layout=str(pair.rollout))
    return replace(config, train=train, rollout=rollout)


def groups_of(config: JobConfig, known: Known, step: int = 0) -> list[Drawn]:
    """Return the groups of a step, in the order of samples."""
    size = config.train.groups_per_step
    return [known.draw(group) for group in range(step * size, (step + 1) * size)]


def training_s(config: JobConfig, known: Known, train: Replication, groups: Sequence[Drawn], step: int = 0) -> float:
    """Return what training on ``groups`` takes; infinite where it does not fit."""
    limit = known.cluster.device.memory_bytes
    if known.truth.resident_bytes(train.layout) > limit:
        return math.inf
    size = train.layout.slots
    units = [
        Emu(POLICY_TRAINING, index, train.layout, tuple(range(index * size, (index + 1) * size)))
        for index in range(train.dp)
    ]
    batch = Batch(tuple((group.prompt_tokens, tokens) for group in groups for tokens in group.lengths))
    stated = config.train
    budget, recompute = stated.micro_batch_tokens, stated.recompute
    took = step_of(known.truth, units, batch, step, budget, recompute, stated.minibatches)
    return took.seconds if took.peak_bytes <= limit else math.inf


def batch_s(config: JobConfig, known: Known, rollout: Replication, groups: Sequence[Drawn]) -> float:
    """Return when units that begin all ``groups`` at once, evenly shared, have finished the last one.

    The first ones stand for all.
    """
    longest = 0.0
    for first in range(min(rollout.dp, len(groups), LOOKED_AT)):
        engine = _engine(config, known, rollout.layout)
        for group in groups[first :: rollout.dp]:
            engine.add(replace(group), 0.0)
        at = 0.0
        while (end := engine.next_end()) < math.inf:
            at = end
            engine.advance(at)
        longest = max(longest, at)
    return longest


class Flow(Struct, frozen=True):
    """Generation that never stops."""

    step_s: float
    """For one step's groups."""
    latency_s: float
    """From the beginning of a step's groups until the longest sequence of them has ended."""

    def paced_s(self, train_s: float, bound: int) -> float:
        """Return what a step takes beside training if groups start within a bound of staleness.

        A group that starts under one version is due ``bound`` steps later, and the next ones start when it is taken:
        ``bound + 1`` steps take at least as long as generating and training one of them.
        """
        return max(self.step_s, train_s, (self.latency_s + train_s) / (bound + 1))


def flow(
    config: JobConfig, known: Known, rollout: Replication, groups: Sequence[Drawn], in_flight: int, step: int = 0
) -> Flow:
    """Return what generation is like where ``in_flight`` groups that may differ in age are in flight.

    Sequences end before the longest of their group; those alive are, in the mean, as far as a sequence is that is met
    at a random moment.
    """
    lengths = [tokens for group in groups for tokens in group.lengths]
    mean = sum(lengths) / len(lengths)
    tail = sum(max(group.lengths) for group in groups) / len(groups) / mean
    prompt = sum(group.prompt_tokens for group in groups) / len(groups)
    context = prompt + sum(tokens * tokens for tokens in lengths) / (2 * mean * len(lengths))
    size, truth = config.rollout.group_size, known.truth
    room = truth.cache_tokens(rollout.layout) / (prompt + mean)
    live = max(1.0, min(config.rollout.max_live, room, in_flight * size / tail / rollout.dp))
    slots = tuple(range(rollout.layout.slots))
    decode_s = truth.decode_s(rollout.layout, slots, round(live), step)
    decode_s += truth.cached_s(rollout.layout, step) * live * context
    prefill_s = truth.prefill_s(rollout.layout, round(prompt)) / size
    step_s = len(lengths) / rollout.dp * (mean * decode_s / live + prefill_s)
    return Flow(step_s, max(lengths) * decode_s)


def pull_s(known: Known, layout: Layout) -> float:
    """Return how long a unit takes to pull new weights from its host, at the links' full speed."""
    return 2.0 * known.shape.parameters / layout.slots / known.cluster.host_bytes_per_s


def _engine(config: JobConfig, known: Known, layout: Layout) -> Engine:
    truth = known.truth
    slots: tuple[SlotId, ...] = tuple(range(layout.slots))
    engine = Engine(config.rollout.max_live, truth.cache_tokens(layout))
    engine.prefill_s = lambda tokens: truth.prefill_s(layout, int(tokens))
    engine.restart(0.0)
    engine.switch(0, Speed(lambda live: truth.decode_s(layout, slots, live, 0), truth.cached_s(layout, 0)), 0.0, 0.0)
    return engine


def _rollouts(known: Known, slots: int) -> Iterable[Replication]:
    """Yield the ways to generate on at most ``slots`` slots: as many units of one layout as there is room for."""
    for layout in layouts(known.shape, known.cluster, Space(largest_pp=1)):
        if layout.slots <= slots and known.truth.cache_tokens(layout) > 1:
            yield Replication(slots // layout.slots, layout)


def _trainers(known: Known, slots: int) -> Iterable[Replication]:
    """Yield the ways to train on at most ``slots`` slots."""
    for layout in layouts(known.shape, known.cluster, Space(largest_pp=DEEPEST)):
        most = slots // layout.slots
        powers = {1 << exponent for exponent in range(most.bit_length())}
        for dp in sorted({*range(1, min(most, EVERY_DP) + 1), *powers, most} - {0}):
            if dp <= most:
                yield Replication(dp, layout)
