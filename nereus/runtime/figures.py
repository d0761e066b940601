"""What can the supervisor tell of a step that no trainer knows: lags, waits, where the time went?"""

from __future__ import annotations

from collections.abc import Sequence

from nereus.bus.messages import GroupAccepted, StepReport
from nereus.control.estimate import Decoded, StepFacts
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, PolicyVersion


def group_figures(held: Sequence[GroupAccepted], version: PolicyVersion) -> dict[str, float]:
    """Return the figures of the groups that the step on ``version`` trained, under the names of metrics.jsonl."""
    lags = [version - group.version_first for group in held]
    samples = [sample for group in held for sample in group.samples]
    figures: dict[str, float] = {
        "staleness/mean": sum(lags) / len(lags),
        "staleness/max": max(lags),
        "response_length/clip_ratio": sum(sample.finish != "stop" for sample in samples) / len(samples),
        "timing_s/generate": sum(group.generate_s for group in held) / len(held),
        "timing_s/reward": sum(group.reward_s for group in held) / len(held),
    }
    for group in held:
        for kind, count in group.reward_failures.items():
            figures[f"reward/{kind}"] = figures.get(f"reward/{kind}", 0) + count
    return figures


def step_facts(
    held: Sequence[GroupAccepted], report: StepReport, generation_s: float, decoded: Decoded | None = None
) -> StepFacts:
    """Return what the planner learns from a step; seconds of 0 were not measured."""
    samples = [(group.prompt_tokens, sample.tokens) for group in held for sample in group.samples]
    return StepFacts(
        tuple(prompt for prompt, _ in samples),
        tuple(response for _, response in samples),
        {POLICY_TRAINING: report.seconds, POLICY_GENERATION: generation_s},
        report.operations,
        report.peak_bytes,
        decoded,
    )
