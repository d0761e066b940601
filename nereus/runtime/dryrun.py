"""What would this job run? The resolved configuration, the first plan, its memory and its processes, as text.

Pure: starts and writes nothing. The text is itself a valid job file: all but the settings are comments.
"""

from __future__ import annotations

from collections.abc import Iterator

from nereus.actors.names import RELAY, REWARD, SUPERVISOR, slot_worker
from nereus.configuration.job import LoadedJob
from nereus.configuration.render import to_toml
from nereus.configuration.rules import notes
from nereus.control.cost import Recompute, Setups
from nereus.control.memory import generation_memory, relay_bytes, training_memory
from nereus.core.plan import Emu, Plan, Stage
from nereus.core.shape import ModelShape
from nereus.runtime.placement import initial_plan

MIB = 1024 * 1024
_BYTES = {"bfloat16": 2.0, "float32": 4.0, "float64": 8.0}


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


def unit_memory(job: LoadedJob, shape: ModelShape, emu: Emu) -> dict[str, float]:
    """Return the bytes by purpose that the fullest slot of ``emu`` needs, by the planner's memory model.

    Masters, moments and gradients are float32 (float64 for a float64 model); a float32 or float64 model is its own
    master. A micro-batch may be full for every pipeline rank.
    """
    config = job.config
    compute = _BYTES[config.model.dtype]
    recompute = Recompute.FULL if config.train.recompute else Recompute.NONE
    setups = Setups.grid([(emu.layout, 1, 1, recompute)])
    match emu.model_stage.stage:
        case Stage.TRAINING:
            tokens, alive = float(config.train.micro_batch_tokens), float(emu.layout.pp)
            state = max(compute, 4.0)
            return training_memory(
                shape, setups, tokens, alive, compute_bytes=compute, state_bytes=state, gradient_bytes=state
            ).table()
        case Stage.WEIGHTS:
            return {"published versions": relay_bytes(shape, compute_bytes=compute)}
    rollout = config.rollout
    cached = rollout.max_live * (rollout.max_prompt_tokens + rollout.max_new_tokens)
    return generation_memory(
        shape, setups, float(rollout.max_live), float(cached), float(rollout.max_prompt_tokens), compute_bytes=compute
    ).table()


def _section(title: str, lines: Iterator[str]) -> list[str]:
    body = [f"  {line}" for line in lines]
    return ["", f"{title}:", *body] if body else []


def _memory(job: LoadedJob, shape: ModelShape, plan: Plan) -> Iterator[str]:
    yield f"the model has {shape.parameters:,} parameters"
    for emu in plan.emus:
        parts = unit_memory(job, shape, emu)
        terms = ", ".join(f"{name} {size / MIB:.1f}" for name, size in parts.items())
        for slot in emu.slots:
            yield f"slot {slot} ({emu.id}): at most {sum(parts.values()) / MIB:.1f} MiB = {terms}"


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
