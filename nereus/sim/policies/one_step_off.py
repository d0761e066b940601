"""What if the next batch is generated while this one is trained, and nothing overlaps more than that?

One-step-off-policy pipelines (verl ``recipe/one_step_off_policy``; "Asynchronous RLHF", arXiv 2410.18252): a whole
batch is generated under the weights of the step before, beside training; both sides meet, weights are synchronized, and
the next batch begins. So staleness is 1, no sequence sees two versions, and a step takes the
longer of a batch with its tail and of training. The split of the slots is fixed, swept once for the first steps.

The runtime's messages grant groups as the bound allows; the barrier is modelled in the units (``InBatches``): a group
begins when all groups of earlier batches are out, and weights are taken when nothing is in flight anywhere. In its
favour: weights come through our relays, so training does not wait for rollouts to receive them.

Invariants (tests/sim/test_async_baselines.py): every sequence has one version; batches do not overlap.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from msgspec.structs import replace

from nereus.config import JobConfig
from nereus.core.plan import Replication
from nereus.sim.engine import Drawn
from nereus.sim.policies.sweep import batch_s, groups_of, pull_s, swept, with_layouts
from nereus.sim.policy import AsStated, Known
from nereus.sim.serving import Serving, Unit


class InBatches(Serving):
    """All units together go from batch to batch."""

    def __init__(self, groups_per_step: int) -> None:
        self._size = groups_per_step
        self._units: list[Unit] = []
        self._asking = False

    def joined(self, unit: Unit) -> None:
        if unit not in self._units:
            self._units.append(unit)

    def left(self, unit: Unit) -> None:
        if unit in self._units:
            self._units.remove(unit)
            self._ask_all()

    def may_pull(self, unit: Unit) -> bool:
        """All take new weights together: when nothing is in flight under those of this unit, or older ones."""
        version = unit.engine.version
        return not any(other.begun and other.engine.version <= version for other in self._units)

    def to_begin(self, unit: Unit) -> Sequence[Drawn]:
        now = min((batch for other in self._units if (batch := self._oldest(other)) is not None), default=None)
        return [group for group in unit.waiting if self._batch(group) == now]

    def changed(self, unit: Unit) -> None:
        if not unit.begun:
            self._ask_all()

    def _ask_all(self) -> None:
        """Let every unit look whether it may go on, now that one has less to do."""
        if self._asking or any(other.begun for other in self._units):
            return
        self._asking = True
        for unit in tuple(self._units):
            unit.proceed()
        self._asking = False

    def _oldest(self, unit: Unit) -> int | None:
        """Return the batch of its oldest group that is not out."""
        return min((group // self._size for group in unit.groups), default=None)

    def _batch(self, group: Drawn) -> int:
        return group.spec.group // self._size


class OneStepOff(AsStated, frozen=True):
    """A fixed split and a batch of lead."""

    name: str = "one_step_off"
    source: str = "verl recipe one_step_off_policy; arXiv 2410.18252"

    def job(self, config: JobConfig, slots: int, known: Known) -> JobConfig:
        groups = groups_of(config, known)

        @functools.cache
        def generate_s(one: Replication) -> float:
            return batch_s(config, known, one, groups) + pull_s(known, one.layout)

        (pair,) = swept(config, slots, known, lambda one, train_s: max(generate_s(one), train_s))
        config = replace(config, async_=replace(config.async_, staleness=1))
        return with_layouts(config, pair)

    def serving(self, config: JobConfig) -> Serving:
        return InBatches(config.train.groups_per_step)
