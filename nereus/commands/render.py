"""How does a chosen plan look to people?

Text only; every figure comes from the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from nereus.commands.planfile import PlanReport, StageFigures
from nereus.control.problem import gib
from nereus.core.units import format_seconds

_CLASSES_SHOWN = 4


def render_plan(report: PlanReport) -> str:
    """Return the report as lines for people."""
    lines = [*_title(report), "", *_stages(report), "", *_time(report), "", *_memory(report)]
    if report.runners_up:
        lines += ["", "why the runners-up lost", *(f"  {lost.choice}: {lost.because}" for lost in report.runners_up)]
    if report.notes:
        lines += ["", "notes", *(f"  {note}" for note in report.notes)]
    return "\n".join(lines) + "\n"


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return rows as lines with columns of equal width, numbers to the right."""
    table = [tuple(header), *map(tuple, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    right = [
        all(not (bare := row[column].lstrip("+-–")) or bare[0].isdigit() for row in table[1:]) and len(table) > 1
        for column in range(len(header))
    ]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in table
    ]


def ranges(slots: Sequence[int]) -> str:
    """Write numbers that follow each other as ranges: ``0-3,8``; the order is kept."""
    parts = list[list[int]]()
    for slot in slots:
        if parts and parts[-1][1] == slot - 1:
            parts[-1][1] = slot
        else:
            parts.append([slot, slot])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)


def _title(report: PlanReport) -> Iterator[str]:
    workload, cluster = report.basis.workload, report.basis.cluster
    kind = "asynchronous" if report.asynchronous else "synchronous"
    yield (
        f"{report.model} on {report.slots} slots of {report.cluster} "
        f"({len(cluster.nodes)} nodes of up to {cluster.slots_per_node} x {cluster.device.name}), "
        f"{kind} {report.algorithm}"
    )
    yield (
        f"a step: {workload.groups} prompts x {workload.group_size} responses, "
        f"{workload.prompts.mean:.0f} + {workload.responses.mean:.0f} tokens in the mean, "
        f"{workload.longest} at the longest, {workload.minibatches * workload.epochs} optimizer "
        f"update{'s' if workload.minibatches * workload.epochs > 1 else ''}"
    )
    yield f"predicted step time {format_seconds(report.step_s)}"


def _stages(report: PlanReport) -> list[str]:
    rows = [
        (
            stage.model_stage,
            stage.layout,
            str(stage.slots),
            ranges(sorted(slot for unit in stage.units for slot in unit)),
            str(stage.nodes),
            str(stage.micro_batch) if ".generation" not in stage.model_stage else f"{stage.micro_batch} live",
            "yes" if stage.recompute else "no",
            format_seconds(stage.seconds),
        )
        for stage in report.stages
    ]
    header = ("model-stage", "layout", "slots", "which", "nodes", "micro-batch", "recompute", "time")
    return ["the plan", *columns(header, rows)]


def _time(report: PlanReport) -> Iterator[str]:
    yield "where the time goes"
    for side in sorted({phase.side for phase in report.phases}):
        phases = [phase for phase in report.phases if phase.side == side]
        if report.asynchronous:
            total = sum(phase.seconds for phase in phases)
            yield f"  side {side + 1}, beside the other: {format_seconds(total)}"
        for phase in phases:
            share = phase.seconds / report.step_s
            yield f"  {phase.name}: {format_seconds(phase.seconds)} ({share:.0%}), as long as {phase.slowest}"
    yield f"  weight sync: {format_seconds(report.weight_sync_s)} ({report.weight_sync_s / report.step_s:.0%})"
    for stage in report.stages:
        yield f"    {stage.model_stage}: {_classes(stage)}"


def _classes(stage: StageFigures) -> str:
    ordered = sorted(stage.seconds_by_class.items(), key=lambda item: -item[1])
    shown = [f"{name} {seconds / stage.seconds:.0%}" for name, seconds in ordered[:_CLASSES_SHOWN]]
    return ", ".join(shown + (["..."] if len(ordered) > _CLASSES_SHOWN else []))


def _memory(report: PlanReport) -> Iterator[str]:
    memory = report.memory
    yield (
        f"memory of the fullest slot ({memory.slot}): {gib(memory.predicted_bytes)} of {gib(memory.usable_bytes)} "
        f"that may be used (capacity {gib(memory.capacity_bytes)} / 1.10)"
    )
    rows = [(name, "all the time", gib(size)) for name, size in memory.resident_bytes.items()]
    peak = max(memory.transient_bytes.values())
    rows += [
        (name, "while it runs" + (", counts" if size == peak else ""), gib(size))
        for name, size in memory.transient_bytes.items()
    ]
    yield from columns(("model-stage", "when", "bytes"), rows)
    for stage in report.stages:
        terms = ", ".join(f"{name} {gib(size)}" for name, size in stage.memory_bytes.items())
        yield f"    {stage.model_stage}: {terms}"
