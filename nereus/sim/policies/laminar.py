"""What if every rollout goes its own way, and long tails are packed together?

Laminar (EuroSys 2026, arXiv 2510.12633): the split of the slots is fixed. Trainers push new weights to relays and go
on; a rollout takes a batch of prompts, finishes it under one version, pulls the newest weights whenever it is done, and
takes the next batch. No bound of staleness: the paper saw usually less than 3, at most 4. Repack, every 5 s and after
each update: a rollout whose cache use has gone down since the last look and lies below ``C_max``, with fewer than ``B``
requests, is a source; its requests go to the fullest rollout of the same version (best fit) that stays below both. A
repack took 0.69 s, and emptied rollouts go on with new weights and new prompts.

Relays are ours. What no message of ours says is modelled in the units (``Repacking``): batches of prompts, and groups
that are finished elsewhere than where they were granted; should their host be lost, their own unit begins them anew.
Chosen in its favour: the split, and how many prompts are in flight, are the fastest of several that are tried in the
world itself (``trial.py``), preselected with the published gain of repacking (26 %); ``C_max`` is all the cache.

Invariants (tests/sim/test_async_baselines.py): every sequence has one version; what is repacked is as far as it was; no
group is lost or made twice with a unit; a rollout that was emptied takes new weights.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from nereus.config import JobConfig
from nereus.core.plan import Layout, Replication
from nereus.sim.engine import Drawn
from nereus.sim.policies.sweep import StepTime, batch_s, groups_of, pull_s, swept, with_layouts
from nereus.sim.policies.trial import best, tried
from nereus.sim.policy import AsStated, Known
from nereus.sim.serving import Finishing, Serving, Unit

REPACK_EVERY_S = 5.0
REPACK_S = 0.69
"""Published: from the decision until the requests go on elsewhere."""

REPACK_GAIN = 1.26
"""Published: generation throughput with repacking over that without."""

MOST_STALENESS = 4
"""Published: the most that was seen. Ways of running the job that exceed it in a trial are not taken."""

NO_BOUND = 16
"""Of staleness; far above what comes about."""

IN_FLIGHT = (1.0, 2.0, 3.0)
"""Batches in flight that are tried."""

TRIED = 2
"""So many of the pairs of layouts that should be fastest are tried with each."""


class _Lodged(Struct):
    """A group that is finished elsewhere."""

    group: Drawn
    home: Unit
    host: Unit


class Repacking(Finishing):
    """Units go from batch to batch on their own; long tails are packed together."""

    def __init__(self) -> None:
        self._units: list[Unit] = []
        self._cached: dict[int, float] = {}
        """By unit: cached tokens at the last look."""
        self._lodged: dict[int, _Lodged] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.repacks = 0

    def to_begin(self, unit: Unit) -> Sequence[Drawn]:
        """A batch of prompts begins when the last one is out."""
        return unit.waiting if unit.engine.idle and not unit.offered else ()

    def changed(self, unit: Unit) -> None:
        if unit.engine.idle:
            unit.proceed()

    def offered(self, unit: Unit) -> None:
        """An update: look at once, when all units have heard of it."""
        if unit is self._units[-1]:
            self._repack()

    def joined(self, unit: Unit) -> None:
        self._units.append(unit)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(REPACK_EVERY_S, self._look)

    def left(self, unit: Unit) -> None:
        """Its guests begin anew at home; its own groups are nobody's any more."""
        if unit in self._units:
            self._units.remove(unit)
        self._cached.pop(unit.slot, None)
        if not self._units and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        mine = {number: one for number, one in self._lodged.items() if unit in (one.home, one.host)}
        for number, one in mine.items():
            del self._lodged[number]
            if one.host is unit:
                one.home.again(one.group)
            else:
                one.host.finished(one.host.engine.drop(number, asyncio.get_running_loop().time()))
                one.host.reschedule()

    def home(self, unit: Unit, group: Drawn) -> Unit:
        lodged = self._lodged.pop(group.spec.group, None)
        return lodged.home if lodged else unit

    def host(self, unit: Unit, group: int) -> Unit:
        lodged = self._lodged.pop(group, None)
        return lodged.host if lodged else unit

    def _look(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(REPACK_EVERY_S, self._look)
        self._repack()

    def _repack(self) -> None:
        """Empty those that can be emptied, the least busy first."""
        now = asyncio.get_running_loop().time()
        for unit in self._units:
            unit.finished(unit.engine.advance(now))
        before, self._cached = self._cached, {unit.slot: unit.engine.cached_tokens for unit in self._units}
        sources = [
            unit
            for unit in self._units
            if not unit.engine.idle
            and not unit.engine.waiting
            and unit.engine.cached_tokens < before.get(unit.slot, 0.0)
        ]
        sources.sort(key=lambda unit: (unit.engine.cached_tokens, unit.slot))
        for unit in sources:
            if (host := self._best_fit(unit)) is not None:
                self._move(unit, host, now)
        for unit in self._units:
            unit.reschedule()

    def _best_fit(self, source: Unit) -> Unit | None:
        """Return the fullest unit of the same version that has room for all that ``source`` is doing."""
        fitting = [
            unit
            for unit in self._units
            if unit is not source
            and not unit.engine.idle
            and unit.engine.version == source.engine.version
            and unit.engine.has_room(source.engine)
        ]
        return max(fitting, key=lambda unit: (unit.engine.cached_tokens, -unit.slot), default=None)

    def _move(self, source: Unit, host: Unit, now: float) -> None:
        lifted = source.engine.lift()
        for group in {one.group.spec.group: one.group for one in lifted}.values():
            lodged = self._lodged.pop(group.spec.group, None)
            home = lodged.home if lodged else source
            if home is not host:
                self._lodged[group.spec.group] = _Lodged(group, home, host)
        host.finished(host.engine.lodge(lifted, now))
        host.engine.stall(REPACK_S)
        self.repacks += 1
        source.proceed()


class Laminar(AsStated, frozen=True):
    """A fixed split, units on their own."""

    name: str = "laminar"
    source: str = "Laminar, EuroSys 2026, arXiv 2510.12633"

    def job(self, config: JobConfig, slots: int, known: Known) -> JobConfig:
        """Try several numbers of prompts in flight, each with the layouts that should be fastest for it."""
        config = replace(config, async_=replace(config.async_, staleness=NO_BOUND))
        trials = []
        for batches in IN_FLIGHT:
            for pair in swept(config, slots, known, _in_turns(config, known, batches), TRIED):
                job = with_layouts(config, pair)
                live = _prompts(config, pair.rollout.dp, batches) * config.rollout.group_size
                job = replace(job, rollout=replace(job.rollout, max_live=live))
                trial = tried(job, slots, known, self.serving(job))
                if trial is not None and trial.staleness <= MOST_STALENESS:
                    trials.append(trial)
        return best(trials).config

    def serving(self, config: JobConfig) -> Serving:
        return Repacking()


def _prompts(config: JobConfig, dp: int, batches: float) -> int:
    """Return how many prompts each of ``dp`` units takes, if all have so many batches in flight."""
    most = config.rollout.max_live // config.rollout.group_size
    return max(1, min(most, round(batches * config.train.groups_per_step / dp)))


def _in_turns(config: JobConfig, known: Known, batches: float) -> StepTime:
    """Return the time of steps where every unit takes a batch of prompts of its own over and over."""
    groups = groups_of(config, known)

    @functools.cache
    def cycle_s(layout: Layout, each: int) -> float:
        taken = [groups[index % len(groups)] for index in range(each)]
        return batch_s(config, known, Replication(1, layout), taken) / REPACK_GAIN + pull_s(known, layout)

    def step_s(one: Replication, train_s: float) -> float:
        each = _prompts(config, one.dp, batches)
        return max(train_s, cycle_s(one.layout, each) * len(groups) / one.dp / each)

    return step_s
