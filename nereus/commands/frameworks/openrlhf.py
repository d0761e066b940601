"""Which options make OpenRLHF run a plan?

Names of OpenRLHF 0.11.0 (2026-08-13): ``openrlhf/cli/train_ppo_ray.py``. Models train by ZeRO data parallelism with one
tensor degree for all of them; engines are vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence

from nereus.commands.frameworks.facts import Emission, Facts, beside, device_remarks, model_remarks, plan_line
from nereus.commands.planfile import PlanReport
from nereus.core.plan import Stage
from nereus.core.workflow import Algorithm


def write(report: PlanReport) -> Emission:
    """Write for OpenRLHF: ZeRO data parallelism with one tensor degree for all DeepSpeed models, vLLM engines."""
    facts = Facts(report)
    asynchronous = report.asynchronous
    tp = facts.training.layout.tp
    learning = facts.learning_slots if asynchronous else facts.all_slots
    nodes, each = facts.machines(learning)
    engines = facts.generation.slots // facts.generation.layout.tp
    if not asynchronous:
        engines = nodes * each // facts.generation.layout.tp
    most = max(1, facts.workload.samples // (nodes * each // tp))
    scoring = min(most, *(one.micro_batch for one in facts.others)) if facts.others else 1
    critic, reference = facts.of(Stage.TRAINING, "critic"), facts.of(Stage.INFERENCE, "reference")
    scorer = facts.of(Stage.INFERENCE, "reward")
    roles = ["actor", *(["critic"] if critic else []), *(["ref"] if reference else []), *(["reward"] if scorer else [])]
    flags = [(f"--{role}.{what}", str(n)) for role in roles for what, n in _machine_flags(nodes, each)]
    flags += [
        ("--actor.model_name_or_path", report.model),
        ("--vllm.num_engines", str(engines)),
        ("--vllm.tensor_parallel_size", str(facts.generation.layout.tp)),
        ("--vllm.gpu_memory_utilization", facts.utilization(shared=not asynchronous)),
        ("--ds.tensor_parallel_size", str(tp)),
        ("--ds.zero_stage", "2"),
        ("--ds.param_dtype", "bf16"),
        ("--train.colocate_all", ""),
        ("--train.batch_size", str(facts.workload.samples_per_minibatch)),
        ("--train.micro_batch_size", str(facts.micro_batch(learning // tp))),
        ("--train.max_epochs", str(facts.workload.epochs)),
        ("--rollout.batch_size", str(facts.workload.groups)),
        ("--rollout.n_samples_per_prompt", str(facts.workload.group_size)),
        ("--rollout.micro_batch_size", str(scoring)),
        ("--rollout.max_new_tokens", str(facts.workload.responses.longest)),
        ("--data.max_len", str(facts.workload.longest)),
        ("--algo.advantage.estimator", _estimator(report)),
        ("--algo.kl.init_coef", "0.01" if reference else "0"),
    ]
    if scorer:
        flags.append(("--reward.model_name_or_path", "REWARD_MODEL"))
    if facts.training.recompute:
        flags.append(("--actor.gradient_checkpointing_enable", ""))
    if asynchronous:
        flags += [("--train.async_enable", ""), ("--train.async_queue_size", str(max(1, report.max_staleness)))]
    else:
        flags += [("--vllm.enable_sleep", ""), ("--ds.enable_sleep", "")]
    remarks = [f"OpenRLHF 0.11.0 for: {plan_line(report)}", *model_remarks(report)]
    remarks += [
        f"{one.model_stage}: pipeline degree {one.layout.pp} cannot be expressed; ZeRO replicas take its place"
        for one in (facts.generation, facts.training, *facts.others)
        if one.layout.pp > 1
    ]
    remarks += [
        f"{one.model_stage}: tensor degree {one.layout.tp}; OpenRLHF has one, {tp}, for all that DeepSpeed runs"
        for one in facts.others
        if one.layout.tp != tp
    ]
    if not scorer:
        remarks.append("name where rewards come from: --reward.remote_url, or --train.agent_func_path")
    if report.algorithm == Algorithm.REMAX:
        remarks.append("OpenRLHF has no ReMax; reinforce_baseline is the nearest, with several samples a prompt")
    remarks += [f"generation decodes {facts.generation.micro_batch} sequences at once: vLLM's own limit cannot be set"]
    remarks += list(beside(report))
    devices = nodes * each + (engines * facts.generation.layout.tp if asynchronous else 0)
    remarks += device_remarks(devices, facts)
    return Emission("python3 -m openrlhf.cli.train_ppo_ray", tuple(flags), tuple(remarks), devices, " ")


def _estimator(report: PlanReport) -> str:
    return {"ppo": "gae", "grpo": "group_norm", "remax": "reinforce_baseline"}[report.algorithm]


def _machine_flags(nodes: int, each: int) -> Sequence[tuple[str, int]]:
    return (("num_nodes", nodes), ("num_gpus_per_node", each))
