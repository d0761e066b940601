"""Which options make TRL run a plan?

Names of TRL 1.10.0.dev0 (2026-07-24): ``trl/trainer/grpo_config.py``, ``trl/scripts/vllm_serve.py``. Models train by
data parallelism through accelerate; vLLM runs in the trainers or as a server of its own.
"""

from __future__ import annotations

import math

from nereus.commands.frameworks.facts import Emission, Facts, device_remarks, model_remarks, plan_line
from nereus.commands.planfile import PlanReport
from nereus.core.plan import Stage
from nereus.core.workflow import Algorithm
from nereus.errors import ConfigError


def write(report: PlanReport) -> Emission:
    """Write for TRL's GRPO: data parallelism by accelerate, vLLM in the trainers or as a server of its own."""
    facts = Facts(report)
    if facts.of(Stage.TRAINING, "critic"):
        raise ConfigError(
            f"TRL's command line has no trainer with a critic for {report.algorithm}",
            where="--emit trl",
            remedy="plan with --algorithm grpo, or write for verl or openrlhf",
        )
    asynchronous = report.asynchronous
    processes = facts.learning_slots if asynchronous else facts.all_slots
    micro = facts.micro_batch(processes)
    accumulation = max(1, math.ceil(facts.workload.samples_per_minibatch / (processes * micro)))
    reference = facts.of(Stage.INFERENCE, "reference")
    tp = facts.generation.layout.tp
    flags = [
        ("--num_processes", str(processes)),
        ("--model_name_or_path", report.model),
        ("--num_generations", str(facts.workload.group_size)),
        ("--per_device_train_batch_size", str(micro)),
        ("--gradient_accumulation_steps", str(accumulation)),
        ("--steps_per_generation", str(accumulation * facts.workload.minibatches)),
        ("--num_iterations", str(facts.workload.epochs)),
        ("--max_completion_length", str(facts.workload.responses.longest)),
        ("--gradient_checkpointing", "true" if facts.training.recompute else "false"),
        ("--bf16", "true"),
        ("--beta", "0.001" if reference else "0.0"),
        ("--use_vllm", "true"),
        ("--vllm_mode", "server" if asynchronous else "colocate"),
    ]
    remarks = [f"TRL 1.10.0.dev0 for: {plan_line(report)}", *model_remarks(report)]
    if asynchronous:
        server = f"--tensor-parallel-size {tp} --gpu-memory-utilization {facts.utilization(shared=False)}"
        remarks.append(f"start {facts.generation.dp} server(s) first, on devices of their own:")
        remarks.append(f"  trl vllm-serve --model {report.model} {server} --max-model-len {facts.workload.longest}")
        if facts.generation.dp > 1:
            remarks.append("one server takes one --vllm_server_base_url; put a balancer in front of several")
        remarks.append("TRL waits for generation: the sides of this plan would take turns")
    else:
        flags += [
            ("--vllm_tensor_parallel_size", str(tp)),
            ("--vllm_gpu_memory_utilization", facts.utilization(shared=True)),
            ("--vllm_max_model_length", str(facts.workload.longest)),
        ]
    remarks += [
        f"{one.model_stage}: {one.layout} cannot be expressed; TRL replicates or shards (ZeRO, FSDP) over all processes"
        for one in (facts.training, *facts.others)
        if one.layout.slots > 1
    ]
    if facts.generation.layout.pp > 1:
        remarks.append(f"policy.generation: pipeline degree {facts.generation.layout.pp} cannot be expressed")
    batch = processes * micro * accumulation
    if batch != facts.workload.samples_per_minibatch:
        remarks.append(f"TRL's update sees {batch} samples, the plan's {facts.workload.samples_per_minibatch}")
    if report.algorithm != Algorithm.GRPO:
        remarks.append(f"TRL's command line has no {report.algorithm}; these are the flags of its GRPO")
    remarks.append("add --reward_funcs, --dataset_name and an accelerate config (--config_file) with ZeRO or FSDP")
    devices = processes + (facts.generation.slots if asynchronous else 0)
    return Emission("trl grpo", tuple(flags), (*remarks, *device_remarks(devices, facts)), devices, " ")
