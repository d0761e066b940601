"""What if the job had to be restarted from a checkpoint for every change of plan?

The same monitor, planner and admission as ours; only the way between plans is another one, priced and carried out as
state saved, processes restarted and state loaded (``restart.py``), with everything stopped meanwhile: no step, no
token, and what was in flight begins anew. A restart besides bytes takes ``RESTART_S`` (Sia, SOSP 2023, charges 30 s).
``System.MCP`` (Megatron-Core's ``fully_reshardable`` checkpoints) by default, ``System.UCP`` with its conversion to
atoms. In its favour: the checkpoint is taken exactly where it is needed, groups in flight keep their grants, and
nothing is repeated that was trained.

Not modelled: changes for which ours has no way are none here either.

Invariants (tests/sim/test_async_baselines.py): a change costs at least what it is priced at; no sample is lost.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from nereus.config import JobConfig
from nereus.core.cluster import Cluster
from nereus.core.plan import POLICY_TRAINING, Plan
from nereus.core.shape import ModelShape
from nereus.runtime.adaptation import Adaptation
from nereus.runtime.schedule import Planning
from nereus.runtime.searching import Answered
from nereus.sim.policies.restart import BYTES_PER_PARAMETER, Growth, Pipes, System, moving_s
from nereus.sim.policy import AsStated, Circumstances, Known

RESTART_S = 30.0


class Restarts(Struct, frozen=True):
    """Prices changes of plan as restarts."""

    system: System
    cluster: Cluster
    shape: ModelShape
    pipes: Pipes = Pipes()

    def seconds(self, before: Plan, after: Plan) -> float:
        """Return how long the job stands still for the change."""
        state = BYTES_PER_PARAMETER * float(self.shape.parameters)
        fullest = max(self._units_by_node(after).values())
        growth = Growth(len(self._units_by_node(before)), len(self._units_by_node(after)), state, fullest * state, True)
        return RESTART_S + moving_s(self.system, growth, self.pipes)

    def _units_by_node(self, plan: Plan) -> dict[int, float]:
        """Return how much of a trainer unit, or of several, is on each node."""
        found: dict[int, float] = {}
        for unit in plan.of(POLICY_TRAINING):
            for slot in unit.slots:
                node = slot // self.cluster.slots_per_node
                found[node] = found.get(node, 0.0) + 1 / len(unit.slots)
        return found


class Restarting(Adaptation):
    """Our controller, for a job that is restarted."""

    def __init__(self, now: Circumstances, restarts: Restarts) -> None:
        super().__init__(
            now.config,
            now.plan,
            step=now.step,
            estimate=now.estimate,
            cluster=now.cluster,
            searcher=now.searcher,
            journal=now.journal,
            report=now.report,
        )
        self._restarts = restarts
        self._halt = now.halt

    def answered(self, answered: Answered) -> None:
        """Price what was found as restarts."""
        found = answered.found
        proposals = tuple(
            replace(one, transition_s=self._restarts.seconds(self._plan, one.plan) if one.transition_s else 0.0)
            for one in found.proposals
        )
        super().answered(replace(answered, found=replace(found, proposals=proposals)))

    def began(self, plan: Plan) -> None:
        super().began(plan)
        self._halt(self._restarts.seconds(self._plan, plan))


class CheckpointRestart(AsStated, frozen=True):
    """Our decisions, carried out as restarts."""

    name: str = "checkpoint_restart"
    source: str = "Megatron-Core distributed checkpoints; restart penalty of Pollux and Sia"
    system: System = System.MCP

    def job(self, config: JobConfig, slots: int, known: Known) -> JobConfig:
        """A message of a change may go unanswered for as long as a restart takes."""
        return replace(config, adapt=replace(config.adapt, timeout_s=max(config.adapt.timeout_s, 3600.0)))

    def planning(self, now: Circumstances) -> Planning:
        return Restarting(now, Restarts(self.system, now.cluster, now.known.shape))
