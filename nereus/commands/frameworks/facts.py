"""What is any framework told of a plan, and what does its command line look like?

Invariant (tests/commands/test_emit.py): the fragment is one shell command; what it asks for is counted in ``devices``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct

from nereus.commands.planfile import PlanReport
from nereus.control.problem import Candidate
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, ModelStage, Stage
from nereus.core.profiles import profile_names

MOST_UTILIZATION = 0.95
"""No engine is told to take more of a device than this."""


class Emission(Struct, frozen=True):
    """A command line of another framework."""

    program: str
    flags: tuple[tuple[str, str], ...]
    """(name, value); an empty value is a switch."""
    remarks: tuple[str, ...]
    """What the framework cannot express, or does otherwise."""
    devices: int
    """How many devices the flags ask for, all together."""
    assigned: str = "="
    """What stands between name and value."""

    def render(self) -> str:
        lines = [f"# {remark}" for remark in self.remarks]
        words = [f"{name}{self.assigned}{value}" if value else name for name, value in self.flags]
        return "\n".join([*lines, " \\\n    ".join([self.program, *words])]) + "\n"


class Facts:
    """What all frameworks are told."""

    def __init__(self, report: PlanReport) -> None:
        self.report = report
        self.workload = report.basis.workload
        self.generation = report.candidate(POLICY_GENERATION)
        self.training = report.candidate(POLICY_TRAINING)
        self.others = tuple(
            one for one in report.candidates if one.model_stage not in (POLICY_GENERATION, POLICY_TRAINING)
        )
        self.per_node = report.basis.cluster.slots_per_node

    def of(self, stage: Stage, model: str) -> Candidate | None:
        return next((one for one in self.others if one.model_stage == ModelStage(stage, model)), None)

    def side(self, *stages: Stage) -> int:
        """Count the slots that the model-stages of these stages use together."""
        plan = self.report.plan
        return len({slot for emu in plan.emus if emu.model_stage.stage in stages for slot in emu.slots})

    def micro_batch(self, replicas: int) -> int:
        """Return the plan's micro-batch of training, or the share of a replica where there are more of them."""
        return min(self.training.micro_batch, max(1, self.workload.samples_per_minibatch // replicas))

    @property
    def learning_slots(self) -> int:
        return self.side(Stage.INFERENCE, Stage.TRAINING)

    @property
    def all_slots(self) -> int:
        return len(self.report.plan.slots())

    def utilization(self, *, shared: bool) -> str:
        """Return the share of a device that an engine may take: weights, cache and workspace.

        ``shared``: beside what other model-stages leave resident.
        """
        capacity = self.report.basis.cluster.device.memory_bytes
        own = self.generation.resident_bytes + self.generation.transient_bytes
        wanted = own * 1.10 / capacity if shared else MOST_UTILIZATION
        return f"{min(MOST_UTILIZATION, math.ceil(wanted * 100) / 100):.2f}"

    def machines(self, slots: int) -> tuple[int, int]:
        """Return (nodes, devices of each) whose product is ``slots`` or the next larger possible number."""
        if slots <= self.per_node:
            return 1, slots
        return math.ceil(slots / self.per_node), self.per_node


def beside(report: PlanReport) -> Iterator[str]:
    for side in report.basis.workflow.sides:
        for phase in side:
            if len(phase) > 1:
                yield f"the plan runs {', '.join(map(str, phase))} beside each other; the framework may take turns"


def device_remarks(devices: int, facts: Facts) -> Iterator[str]:
    if devices != facts.all_slots:
        yield f"these flags ask for {devices} devices, the plan uses {facts.all_slots}: whole nodes are counted"


def model_remarks(report: PlanReport) -> Iterator[str]:
    """Say that a profile's name is no model that a framework could load."""
    if report.model in profile_names("models"):
        yield f"{report.model} is a profile of Nereus: put the model's folder or hub name in its place"


def plan_line(report: PlanReport) -> str:
    """Return the plan in one line."""
    return ", ".join(f"{stage.model_stage} {stage.layout}" for stage in report.stages) + f" on {report.slots} slots"
