"""What would this job run? The resolved configuration, the first plan, its memory and its processes, as text.

Pure: starts and writes nothing. The text is itself a valid job file: all but the settings are comments.
"""

from __future__ import annotations

from collections.abc import Iterator

from nereus.actors.names import RELAY, REWARD, SUPERVISOR, slot_worker
from nereus.configuration.job import LoadedJob
from nereus.configuration.render import to_toml
from nereus.configuration.rules import notes
from nereus.core.memory import relay_memory, rollout_memory, training_memory
from nereus.core.plan import Emu, Plan, Stage
from nereus.core.shape import ModelShape
from nereus.runtime.placement import initial_plan
from nereus.transition.reshard import layer_range

MIB = 1024 * 1024


def describe(job: LoadedJob, shape: ModelShape, *, local_workers: bool) -> str:
    """Return the whole dry run as text."""
    plan = initial_plan(job.config)
    comments = [
        *_section("warnings", notes(job)),
        *_section(f"plan, epoch {plan.epoch}", map(str, plan.emus)),
        *_section("memory (arithmetic, not measured; without interpreter and libraries)", _memory(job, shape, plan)),
        *_section("processes", _processes(job, plan, local_workers)),
    ]
    return to_toml(job, provenance=True) + "".join(f"# {line}".rstrip() + "\n" for line in comments)


def unit_memory(job: LoadedJob, shape: ModelShape, emu: Emu) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield (slot, bytes by purpose) for every slot of ``emu``."""
    config = job.config
    for index, slot in enumerate(emu.slots):
        pp_rank, _ = emu.layout.coordinates(index)
        match emu.model_stage.stage:
            case Stage.TRAINING:
                yield (
                    slot,
                    training_memory(
                        shape,
                        emu.layout,
                        pp_rank,
                        layers=len(layer_range(shape.layers, emu.layout.pp, pp_rank)),
                        dtype=config.model.dtype,
                        micro_batch_tokens=config.train.micro_batch_tokens,
                        recompute=config.train.recompute,
                    ),
                )
            case Stage.WEIGHTS:
                yield slot, relay_memory(shape, dtype=config.model.dtype)
            case _:
                yield (
                    slot,
                    rollout_memory(
                        shape,
                        emu.layout,
                        dtype=config.model.dtype,
                        max_live=config.rollout.max_live,
                        max_tokens=config.rollout.max_prompt_tokens + config.rollout.max_new_tokens,
                    ),
                )


def _section(title: str, lines: Iterator[str]) -> list[str]:
    body = [f"  {line}" for line in lines]
    return ["", f"{title}:", *body] if body else []


def _memory(job: LoadedJob, shape: ModelShape, plan: Plan) -> Iterator[str]:
    yield f"the model has {shape.parameters:,} parameters"
    for emu in plan.emus:
        for slot, parts in unit_memory(job, shape, emu):
            terms = ", ".join(f"{name} {size / MIB:.1f}" for name, size in parts.items() if size)
            yield f"slot {slot} ({emu.id}): {sum(parts.values()) / MIB:.1f} MiB = {terms}"


def _processes(job: LoadedJob, plan: Plan, local_workers: bool) -> Iterator[str]:
    yield f"{SUPERVISOR}: this process"
    where = "started by the supervisor" if local_workers else "must be started elsewhere"
    for emu in plan.emus:
        if emu.model_stage.stage is Stage.WEIGHTS:
            yield f"{RELAY}: weight-sync relay, {where}"
        else:
            yield from (f"{slot_worker(slot)}: {emu.id}, {where}" for slot in emu.slots)
    workers = job.config.reward.workers
    yield f"{REWARD}: reward service with {workers} scoring process{'es' if workers > 1 else ''}, {where}"
