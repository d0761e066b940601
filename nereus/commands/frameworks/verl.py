"""Which overrides make verl run a plan?

Names of verl 0.8.0.dev (2026-01-29): ``verl/trainer/config/_generated_ppo_megatron_trainer.yaml`` and, asynchronous,
``verl/experimental/fully_async_policy/config/fully_async_ppo_megatron_trainer.yaml``. Every role gets all devices of
its pool, one after the other, and as many replicas as that gives.
"""

from __future__ import annotations

from collections.abc import Iterator

from nereus.commands.frameworks.facts import Emission, Facts, beside, device_remarks, model_remarks, plan_line
from nereus.commands.planfile import PlanReport
from nereus.control.problem import Candidate
from nereus.core.plan import Stage
from nereus.core.workflow import Algorithm


def write(report: PlanReport) -> Emission:
    """Write for verl with Megatron workers: every role gets all devices of its pool, one after the other."""
    facts = Facts(report)
    policy = "actor_rollout_ref"
    asynchronous = report.asynchronous
    learning = facts.learning_slots if asynchronous else facts.all_slots
    nodes, each = facts.machines(learning)
    prompts = facts.workload.samples_per_minibatch // facts.workload.group_size
    flags = [
        ("algorithm.adv_estimator", _verl_estimator(report)),
        ("data.train_batch_size", "0" if asynchronous else str(facts.workload.groups)),
        ("data.max_prompt_length", str(facts.workload.prompts.longest)),
        ("data.max_response_length", str(facts.workload.responses.longest)),
        (f"{policy}.model.path", report.model),
        (f"{policy}.rollout.name", "vllm"),
        (f"{policy}.rollout.n", str(facts.workload.group_size)),
        (f"{policy}.rollout.tensor_model_parallel_size", str(facts.generation.layout.tp)),
        (f"{policy}.rollout.pipeline_model_parallel_size", str(facts.generation.layout.pp)),
        (f"{policy}.rollout.max_num_seqs", str(facts.generation.micro_batch)),
        (f"{policy}.rollout.gpu_memory_utilization", facts.utilization(shared=not asynchronous)),
        (f"{policy}.actor.ppo_mini_batch_size", str(prompts)),
        (
            f"{policy}.actor.ppo_micro_batch_size_per_gpu",
            str(facts.micro_batch(learning // facts.training.layout.slots)),
        ),
        (f"{policy}.actor.ppo_epochs", str(facts.workload.epochs)),
        *_megatron(f"{policy}.actor", facts.training),
    ]
    reference, scorer = facts.of(Stage.INFERENCE, "reference"), facts.of(Stage.INFERENCE, "reward")
    critic, valuing = facts.of(Stage.TRAINING, "critic"), facts.of(Stage.INFERENCE, "critic")
    log_probs = reference.micro_batch if reference else facts.training.micro_batch
    flags.append((f"{policy}.rollout.log_prob_micro_batch_size_per_gpu", str(log_probs)))
    if reference:
        flags += [
            (f"{policy}.actor.use_kl_loss", "True"),
            (f"{policy}.ref.log_prob_micro_batch_size_per_gpu", str(reference.micro_batch)),
            *_megatron(f"{policy}.ref", reference),
        ]
    if critic:
        flags += [
            ("critic.model.path", report.model),
            ("critic.ppo_micro_batch_size_per_gpu", str(critic.micro_batch)),
            *_megatron("critic", critic),
        ]
    if scorer:
        flags += [("reward_model.enable", "True"), ("reward_model.model.path", "REWARD_MODEL")]
        flags += [
            ("reward_model.micro_batch_size_per_gpu", str(scorer.micro_batch)),
            *_megatron("reward_model", scorer),
        ]
    flags += [("trainer.nnodes", str(nodes)), ("trainer.n_gpus_per_node", str(each))]
    devices = nodes * each
    remarks = [
        f"verl 0.8.0.dev for: {plan_line(report)}",
        *model_remarks(report),
        "verl derives data-parallel degrees: devices of the pool / (tensor x pipeline degree)",
        *_other_replicas(facts, learning),
        *beside(report),
    ]
    if valuing and critic and valuing.layout != critic.layout:
        remarks.append(f"verl scores with the critic as it is trained ({critic.layout}); the plan has {valuing.layout}")
    if asynchronous:
        rollout_nodes, rollout_each = facts.machines(facts.generation.slots)
        devices += rollout_nodes * rollout_each
        remarks.append("verl's staleness_threshold is the share of samples that may be stale, not a number of versions")
        flags += [
            (f"{policy}.hybrid_engine", "False"),
            (f"{policy}.rollout.mode", "async"),
            (f"{policy}.rollout.calculate_log_probs", "True"),
            ("rollout.nnodes", str(rollout_nodes)),
            ("rollout.n_gpus_per_node", str(rollout_each)),
            ("async_training.require_batches", str(facts.workload.minibatches)),
            ("async_training.trigger_parameter_sync_step", "1"),
            ("async_training.staleness_threshold", str(report.max_staleness)),
        ]
    remarks += device_remarks(devices, facts)
    program = (
        "python -m verl.experimental.fully_async_policy.fully_async_main "
        "--config-path=config --config-name=fully_async_ppo_megatron_trainer"
        if asynchronous
        else "python3 -m verl.trainer.main_ppo --config-path=config --config-name=ppo_megatron_trainer"
    )
    return Emission(program, tuple(flags), tuple(remarks), devices)


def _verl_estimator(report: PlanReport) -> str:
    return {Algorithm.PPO: "gae", Algorithm.GRPO: "grpo", Algorithm.REMAX: "remax"}[Algorithm(report.algorithm)]


def _megatron(role: str, chosen: Candidate) -> Iterator[tuple[str, str]]:
    yield f"{role}.megatron.tensor_model_parallel_size", str(chosen.layout.tp)
    yield f"{role}.megatron.pipeline_model_parallel_size", str(chosen.layout.pp)
    if chosen.recompute:
        transformer = f"+{role}.megatron.override_transformer_config"
        yield f"{transformer}.recompute_method", "uniform"
        yield f"{transformer}.recompute_granularity", "full"
        yield f"{transformer}.recompute_num_layers", "1"


def _other_replicas(facts: Facts, pool: int) -> Iterator[str]:
    """Say where a pool divided by a layout gives another number of replicas than the plan has."""
    for one in (facts.training, *facts.others):
        derived = pool // one.layout.slots
        if derived != one.dp:
            yield f"{one.model_stage}: the plan has {one.dp} replicas of {one.layout}, verl makes {derived}"
