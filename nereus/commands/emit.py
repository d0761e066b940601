"""Which flags make another framework run the chosen plan? ``nereus plan --emit verl|openrlhf|trl``.

Names are those of these releases' own sources: verl 0.8.0.dev (2026-01-29, ``verl/trainer/config`` and
``verl/experimental/fully_async_policy``), OpenRLHF 0.11.0 (2026-08-13, ``openrlhf/cli/train_ppo_ray.py``), TRL
1.10.0.dev0 (2026-07-24, ``trl/trainer/grpo_config.py``, ``trl/scripts/vllm_serve.py``). What a framework cannot
express is said in a comment line, never left out in silence. The text is a shell fragment: comments, then one option a
line with a backslash. Invariants (tests/commands/test_emit.py): the devices that the flags ask for are those of the
plan, or a comment says by how many they differ; every flag is one that the release knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from nereus.commands.planfile import PlanReport
from nereus.control.problem import Candidate
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, ModelStage, Stage
from nereus.core.workflow import Algorithm
from nereus.errors import ConfigError

_UTILIZATION = 0.95
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


def emit(report: PlanReport, target: str) -> Emission:
    """Return the flags of ``target`` for a plan; ``ConfigError`` for a framework that is not known."""
    check_framework(target)
    return WRITERS[target](report)


def check_framework(target: str) -> None:
    """Refuse a framework that is not known."""
    if target not in WRITERS:
        known = ", ".join(WRITERS)
        raise ConfigError(f"there is no framework {target!r} to write for", where="--emit", remedy=f"known: {known}")


class _Facts:
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
        wanted = own * 1.10 / capacity if shared else _UTILIZATION
        return f"{min(_UTILIZATION, math.ceil(wanted * 100) / 100):.2f}"

    def machines(self, slots: int) -> tuple[int, int]:
        """Return (nodes, devices of each) whose product is ``slots`` or the next larger possible number."""
        if slots <= self.per_node:
            return 1, slots
        return math.ceil(slots / self.per_node), self.per_node


def _verl(report: PlanReport) -> Emission:
    """Write for verl with Megatron workers: every role gets all devices of its pool, one after the other."""
    facts = _Facts(report)
    policy = "actor_rollout_ref"
    asynchronous = report.asynchronous
    learning = facts.learning_slots if asynchronous else facts.all_slots
    nodes, each = facts.machines(learning)
    sequences = facts.workload.samples_per_minibatch // facts.workload.group_size
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
        (f"{policy}.actor.ppo_mini_batch_size", str(sequences)),
        (f"{policy}.actor.ppo_micro_batch_size_per_gpu", str(facts.training.micro_batch)),
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
        f"verl 0.8.0.dev for: {_plan_line(report)}",
        "verl derives data-parallel degrees: devices of the pool / (tensor x pipeline degree)",
        *_other_replicas(facts, learning),
        *_beside(report),
    ]
    if valuing and critic and valuing.layout != critic.layout:
        remarks.append(f"verl scores with the critic as it is trained ({critic.layout}); the plan has {valuing.layout}")
    if asynchronous:
        rollout_nodes, rollout_each = facts.machines(facts.generation.slots)
        devices += rollout_nodes * rollout_each
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
    remarks += _device_remarks(devices, facts)
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


def _other_replicas(facts: _Facts, pool: int) -> Iterator[str]:
    """Say where a pool divided by a layout gives another number of replicas than the plan has."""
    for one in (facts.training, *facts.others):
        derived = pool // one.layout.slots
        if derived != one.dp:
            yield f"{one.model_stage}: the plan has {one.dp} replicas of {one.layout}, verl makes {derived}"


def _beside(report: PlanReport) -> Iterator[str]:
    for side in report.basis.workflow.sides:
        for phase in side:
            if len(phase) > 1:
                yield f"the plan runs {', '.join(map(str, phase))} beside each other; the framework may take turns"


def _device_remarks(devices: int, facts: _Facts) -> Iterator[str]:
    if devices != facts.all_slots:
        yield f"these flags ask for {devices} devices, the plan uses {facts.all_slots}: whole nodes are counted"


def _openrlhf(report: PlanReport) -> Emission:
    """Write for OpenRLHF: ZeRO data parallelism with one tensor degree for all DeepSpeed models, vLLM engines."""
    facts = _Facts(report)
    asynchronous = report.asynchronous
    tp = facts.training.layout.tp
    learning = facts.learning_slots if asynchronous else facts.all_slots
    nodes, each = facts.machines(learning)
    engines = facts.generation.slots // facts.generation.layout.tp
    if not asynchronous:
        engines = nodes * each // facts.generation.layout.tp
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
        ("--train.micro_batch_size", str(facts.training.micro_batch)),
        ("--train.max_epochs", str(facts.workload.epochs)),
        ("--rollout.batch_size", str(facts.workload.groups)),
        ("--rollout.n_samples_per_prompt", str(facts.workload.group_size)),
        ("--rollout.micro_batch_size", str(min((one.micro_batch for one in facts.others), default=1))),
        ("--rollout.max_new_tokens", str(facts.workload.responses.longest)),
        ("--data.max_len", str(facts.workload.longest)),
        ("--algo.advantage.estimator", _openrlhf_estimator(report)),
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
    remarks = [f"OpenRLHF 0.11.0 for: {_plan_line(report)}"]
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
    remarks += list(_beside(report))
    devices = nodes * each + (engines * facts.generation.layout.tp if asynchronous else 0)
    remarks += _device_remarks(devices, facts)
    return Emission("python3 -m openrlhf.cli.train_ppo_ray", tuple(flags), tuple(remarks), devices, " ")


def _openrlhf_estimator(report: PlanReport) -> str:
    return {"ppo": "gae", "grpo": "group_norm", "remax": "reinforce_baseline"}[report.algorithm]


def _machine_flags(nodes: int, each: int) -> Sequence[tuple[str, int]]:
    return (("num_nodes", nodes), ("num_gpus_per_node", each))


def _trl(report: PlanReport) -> Emission:
    """Write for TRL's GRPO: data parallelism by accelerate, vLLM in the trainers or as a server of its own."""
    facts = _Facts(report)
    if facts.of(Stage.TRAINING, "critic"):
        raise ConfigError(
            f"TRL's command line has no trainer with a critic for {report.algorithm}",
            where="--emit trl",
            remedy="plan with --algorithm grpo, or write for verl or openrlhf",
        )
    asynchronous = report.asynchronous
    processes = facts.learning_slots if asynchronous else facts.all_slots
    micro = facts.training.micro_batch
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
    remarks = [f"TRL 1.10.0.dev0 for: {_plan_line(report)}"]
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
    if report.algorithm != Algorithm.GRPO:
        remarks.append(f"TRL's command line has no {report.algorithm}; these are the flags of its GRPO")
    remarks.append("add --reward_funcs, --dataset_name and an accelerate config (--config_file) with ZeRO or FSDP")
    devices = processes + (facts.generation.slots if asynchronous else 0)
    return Emission("trl grpo", tuple(flags), (*remarks, *_device_remarks(devices, facts)), devices, " ")


def _plan_line(report: PlanReport) -> str:
    return ", ".join(f"{stage.model_stage} {stage.layout}" for stage in report.stages) + f" on {report.slots} slots"


WRITERS: dict[str, Callable[[PlanReport], Emission]] = {"verl": _verl, "openrlhf": _openrlhf, "trl": _trl}
