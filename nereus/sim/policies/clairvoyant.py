"""What could be reached by one who knows the trace and the world's truth? For the asynchronous world.

Dynamic programming over steps and plans with the cost of changes between them: candidates are the fastest pairs of
layouts of steps all over the trace, each step is priced with its own lengths, slots and drift, and the cheapest course
is followed in the world like any other policy's. Two figures come of it: what following it takes (``clairvoyant`` in
tables), and ``Course.bound_s``.

What makes ``bound_s`` a bound for runs within the job's staleness: a step takes at least the longer of training and of
generating its groups with as much in flight as staleness allows at every moment; nobody waits for tails, for versions
or for a batch to be complete, and changes cost nothing. What it ignores: plans outside the candidates, micro-batches
other than the job's, and noise, which may be lucky. Where slots come and go by time, and not by steps, it counts on the
most that there ever are.

Invariants (tests/sim/test_clairvoyant.py): no single plan is faster than the course in its own terms; changes that cost
more than they save are not made; the bound lies below what any policy reaches on average.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from nereus.config import JobConfig
from nereus.core.plan import Replication
from nereus.sim.links import communicators_s
from nereus.sim.policies.sweep import Flow, flow, groups_of, swept, training_s
from nereus.sim.policy import AsStated, Known
from nereus.sim.slots import STATE_BYTES

LOOKS = 5
"""In so many steps, evenly over the run, candidates are looked for, besides those before which slots change."""

EACH = 3
"""So many candidates of each."""

PRICED_EVERY = 50
"""At most so many steps are priced apart; lengths between them are taken to be those of the one before."""

Choice = tuple[Replication, Replication]


class Course(Struct, frozen=True):
    """What is best, step by step."""

    choices: tuple[Choice, ...]
    seconds: float
    """Of all steps and changes, as expected."""
    bound_s: float

    def changes(self) -> list[tuple[int, Choice]]:
        """Return the choices from the second on, each with the steps that are done before it."""
        pairs = zip(self.choices, self.choices[1:], strict=False)
        return [(index + 1, after) for index, (before, after) in enumerate(pairs) if before != after]


class _Prices:
    """What steps take under the truth."""

    def __init__(self, config: JobConfig, known: Known) -> None:
        self._config = config
        self._known = known
        self._bound = config.async_.staleness
        self._in_flight = (self._bound + 1) * config.train.groups_per_step
        self.flow = functools.cache(self._flow)
        self.train_s = functools.cache(self._train_s)

    def slots(self, step: int) -> int:
        trace, most = self._known.trace, self._known.cluster.size
        if trace.supply:
            return min(most, max(one.slots for one in trace.supply))
        return min(most, trace.slots_at(step, 0.0) or most)

    def expected_s(self, choice: Choice, step: int) -> float:
        train_s = self.train_s(choice[0], step)
        return self.flow(choice[1], step).paced_s(train_s, self._bound) if train_s < math.inf else math.inf

    def least_s(self, choice: Choice, step: int) -> float:
        return max(self.train_s(choice[0], step), self.flow(choice[1], step).step_s)

    def candidates(self, step: int) -> list[Choice]:
        def step_s(rollout: Replication, train_s: float) -> float:
            return self.flow(rollout, step).paced_s(train_s, self._bound)

        pairs = swept(self._config, self.slots(step), self._known, step_s, EACH, step)
        return [(pair.train, pair.rollout) for pair in pairs]

    def change_s(self, before: Choice, after: Choice) -> float:
        """Return the cost of a change: process groups, and trained state over the slots' links where it moves."""
        if before == after:
            return 0.0
        seconds = communicators_s(after[0].slots)
        if before[0] != after[0]:
            state = STATE_BYTES * self._known.shape.parameters / after[0].layout.slots
            seconds += state / self._known.cluster.cross_node.bytes_per_s
        return seconds

    def _flow(self, rollout: Replication, step: int) -> Flow:
        groups = groups_of(self._config, self._known, step)
        return flow(self._config, self._known, rollout, groups, self._in_flight, step)

    def _train_s(self, train: Replication, step: int) -> float:
        return training_s(self._config, self._known, train, groups_of(self._config, self._known, step), step)


def course(config: JobConfig, known: Known) -> Course:
    """Return the cheapest course through all steps of the job."""
    steps, prices = config.run.steps, _Prices(config, known)
    looks = {steps * look // LOOKS for look in range(min(LOOKS, steps))}
    looks |= {one.at_step for one in known.trace.step_supply if one.at_step < steps}
    choices = sorted({choice for step in looks for choice in prices.candidates(step)})
    every = math.ceil(steps / PRICED_EVERY)
    costs, bound = list[list[float]](), 0.0
    for step in range(steps):
        priced, slots = step - step % every, prices.slots(step)
        fitting = [choice[0].slots + choice[1].slots <= slots for choice in choices]
        costs.append(
            [
                prices.expected_s(choice, priced) if fits else math.inf
                for choice, fits in zip(choices, fitting, strict=True)
            ]
        )
        bound += min(prices.least_s(choice, priced) for choice, fits in zip(choices, fitting, strict=True) if fits)
    seconds, path = cheapest(costs, lambda step, before, after: prices.change_s(choices[before], choices[after]))
    return Course(tuple(choices[index] for index in path), seconds, bound)


def cheapest(
    costs: Sequence[Sequence[float]], price: Callable[[int, int, int], float]
) -> tuple[float, tuple[int, ...]]:
    """Return the seconds and the choices, one a step, of the cheapest course.

    ``costs[step][choice]`` in seconds, infinite where a choice is not possible; ``price(step, before, after)`` is what
    it takes to change before ``step``.
    """
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for step, row in enumerate(costs):
        reached, best = [one for one in best if one[0] < math.inf], []
        for choice, cost in enumerate(row):
            arrivals = [
                (seconds + (price(step, path[-1], choice) if path and path[-1] != choice else 0.0), path)
                for seconds, path in (reached if cost < math.inf else ())
            ]
            seconds, path = min(arrivals, default=(math.inf, ()))
            best.append((seconds + cost, (*path, choice)))
    return min(best)


class Clairvoyant(AsStated, frozen=True):
    """Follows the cheapest course."""

    name: str = "clairvoyant"
    source: str = "dynamic programming over the trace with the world's truth"

    def job(self, config: JobConfig, slots: int, known: Known) -> JobConfig:
        found = course(config, known)
        train, rollout = found.choices[0]
        at = "; ".join(f"{step} {one} {other}" for step, (one, other) in found.changes())
        return replace(
            config,
            train=replace(config.train, layout=str(train)),
            rollout=replace(config.rollout, layout=str(rollout)),
            adapt=replace(config.adapt, at=at),
        )
