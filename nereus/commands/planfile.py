"""What does a PLAN file hold, and how is one read?

The JSON object that ``nereus plan --json`` prints and ``--out`` writes. It carries the figures for people and programs,
and ``basis`` and ``plan``, which are all that a transition needs, so that two files can be compared anywhere.
Invariants (tests/commands/test_planfile.py): reading gives back what was written; a damaged file is one ``ConfigError``
that names the file and the place in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from nereus.control.breakdown import Pricing
from nereus.control.choose import replications
from nereus.control.problem import Candidate, RunnerUp
from nereus.core.plan import ModelStage, Plan, Replication, SlotId
from nereus.errors import ConfigError

LARGEST_BYTES = 64 << 20


class StageFigures(Struct, frozen=True, forbid_unknown_fields=True):
    """One model-stage of the chosen plan."""

    model_stage: str
    layout: str
    """With replicas in front: ``d2t4p1``."""
    slots: int
    nodes: int
    units: tuple[tuple[SlotId, ...], ...]
    micro_batch: int
    """Sequences in a micro-batch; for generation, sequences decoded at once by a unit."""
    recompute: bool
    seconds: float
    seconds_by_class: dict[str, float]
    memory_bytes: dict[str, int]
    """By purpose, of the unit's fullest slot."""


class PhaseFigures(Struct, frozen=True, forbid_unknown_fields=True):
    """One phase of the step; its slowest model-stage counts."""

    name: str
    side: int
    """Sides run at the same time in an asynchronous plan."""
    seconds: float
    slowest: str


class SlotMemory(Struct, frozen=True, forbid_unknown_fields=True):
    """The fullest slot against what it may hold."""

    slot: SlotId
    predicted_bytes: int
    usable_bytes: int
    """Capacity / 1.10."""
    capacity_bytes: int
    resident_bytes: dict[str, int]
    """By model-stage, all the time."""
    transient_bytes: dict[str, int]
    """By model-stage, while it runs; the largest counts, for they take turns."""


class PlanReport(Struct, frozen=True, forbid_unknown_fields=True):
    """A chosen plan, what it is expected to do, and why it won."""

    format: Literal["nereus-plan-1"]
    model: str
    cluster: str
    slots: int
    algorithm: str
    asynchronous: bool
    step_s: float
    weight_sync_s: float
    phases: tuple[PhaseFigures, ...]
    stages: tuple[StageFigures, ...]
    memory: SlotMemory
    runners_up: tuple[RunnerUp, ...]
    max_staleness: int
    """Asked for, not priced; 0 for a synchronous plan."""
    notes: tuple[str, ...]
    basis: Pricing
    plan: Plan
    candidates: tuple[Candidate, ...]

    def candidate(self, stage: ModelStage) -> Candidate:
        return next(one for one in self.candidates if one.model_stage == stage)

    def replication(self, stage: ModelStage) -> Replication:
        one = self.candidate(stage)
        return Replication(one.dp, one.layout)


def to_json(report: PlanReport) -> bytes:
    """Return the report as one JSON object on one line."""
    return msgspec.json.encode(report)


def read_plan(path: Path, *, where: str) -> PlanReport:
    """Read a PLAN file; ``ConfigError`` if there is none, or if it is damaged or contradicts itself."""
    remedy = "name a file that nereus plan --out has written"
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise ConfigError(f"{path} is too large for a plan", where=where, remedy=remedy)
        report = msgspec.json.decode(path.read_bytes(), type=PlanReport)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})", where=where, remedy=remedy) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no plan: {error}", where=where, remedy=remedy) from None
    for contradiction in _contradictions(report):
        raise ConfigError(f"{path} contradicts itself: {contradiction}", where=where, remedy=remedy)
    return report


def _contradictions(report: PlanReport) -> list[str]:
    """Return what is wrong with a plan that is well formed."""
    pool = {slot for node in report.basis.cluster.nodes for slot in node.slots}
    strangers = sorted(report.plan.slots() - pool)
    unknown = set(report.plan.model_stages()) ^ set(report.basis.workflow.model_stages)
    found = list[str]()
    if "policy" not in report.basis.shapes:
        found.append("it has no sizes of the policy")
    if strangers:
        found.append(f"slot {strangers[0]} is not in the cluster")
    if unknown:
        found.append(f"plan and algorithm disagree on {min(map(str, unknown))}")
        return found
    if twice := report.basis.workflow.conflicts(report.plan):
        found.append(f"slot {twice[0]} belongs to two units that run at the same time")
    chosen = {one.model_stage: Replication(one.dp, one.layout) for one in report.candidates}
    if chosen != replications(report.plan):
        found.append("its candidates are not those of its plan")
    return found
