"""What if generation never stops for training, within a bound of staleness, on slots that never change hands?

AReaL (arXiv 2505.24298; ``inclusionAI/AReaL``, ``async_rl`` and its staleness manager): a group starts while accepted +
running < (eta + version + 1) * batch; sequences in flight go on under new weights. That is our own pacing, so the job
file's bound and our units serve; what is fixed is the split of the slots, swept once for the first steps of the trace.
In its favour: the cache of what is in flight need not be computed anew under new weights, as it is there.

Invariants (tests/sim/test_async_baselines.py): layouts never change but for losses; the bound holds.
"""

from __future__ import annotations

import functools

from msgspec.structs import replace

from nereus.config import JobConfig
from nereus.core.plan import Replication
from nereus.sim.policies.sweep import Flow, flow, groups_of, swept, with_layouts
from nereus.sim.policies.trial import best, tried
from nereus.sim.policy import AsStated, Known

TRIED = 4
"""So many of the pairs that should be fastest are tried."""


class FullyAsync(AsStated, frozen=True):
    """A fixed split, generation paced by staleness."""

    name: str = "fully_async"
    source: str = "AReaL, arXiv 2505.24298"

    def job(self, config: JobConfig, slots: int, known: Known) -> JobConfig:
        bound = max(1, config.async_.staleness)
        groups = groups_of(config, known)
        in_flight = (bound + 1) * len(groups)

        @functools.cache
        def flowing(one: Replication) -> Flow:
            return flow(config, known, one, groups, in_flight)

        pairs = swept(config, slots, known, lambda one, train_s: flowing(one).paced_s(train_s, bound), TRIED)
        config = replace(config, async_=replace(config.async_, staleness=bound))
        jobs = [with_layouts(config, pair) for pair in pairs]
        return best(tried(job, slots, known, self.serving(job)) for job in jobs).config
