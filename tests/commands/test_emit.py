"""Do the flags for other frameworks ask for the plan's devices, under names that those releases know?"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

import pytest

from nereus.cli import execute
from nereus.commands.emit import WRITERS, emit
from nereus.commands.frameworks.facts import Emission
from nereus.commands.plan import make_report
from nereus.commands.planfile import PlanReport
from nereus.commands.question import Options
from nereus.errors import ConfigError

_NAMES = {
    "verl": """
        algorithm.adv_estimator data.train_batch_size data.max_prompt_length data.max_response_length
        actor_rollout_ref.hybrid_engine actor_rollout_ref.model.path
        actor_rollout_ref.rollout.name actor_rollout_ref.rollout.n actor_rollout_ref.rollout.mode
        actor_rollout_ref.rollout.tensor_model_parallel_size actor_rollout_ref.rollout.pipeline_model_parallel_size
        actor_rollout_ref.rollout.max_num_seqs actor_rollout_ref.rollout.gpu_memory_utilization
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu actor_rollout_ref.rollout.calculate_log_probs
        actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
        actor_rollout_ref.actor.ppo_epochs actor_rollout_ref.actor.use_kl_loss
        actor_rollout_ref.actor.megatron.tensor_model_parallel_size
        actor_rollout_ref.actor.megatron.pipeline_model_parallel_size
        actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method
        actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity
        actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers
        actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu
        actor_rollout_ref.ref.megatron.tensor_model_parallel_size
        actor_rollout_ref.ref.megatron.pipeline_model_parallel_size
        critic.model.path critic.ppo_micro_batch_size_per_gpu
        critic.megatron.tensor_model_parallel_size critic.megatron.pipeline_model_parallel_size
        critic.megatron.override_transformer_config.recompute_method
        critic.megatron.override_transformer_config.recompute_granularity
        critic.megatron.override_transformer_config.recompute_num_layers
        reward_model.enable reward_model.model.path reward_model.micro_batch_size_per_gpu
        reward_model.megatron.tensor_model_parallel_size reward_model.megatron.pipeline_model_parallel_size
        trainer.nnodes trainer.n_gpus_per_node rollout.nnodes rollout.n_gpus_per_node
        async_training.require_batches async_training.trigger_parameter_sync_step async_training.staleness_threshold
        """,
    "openrlhf": """
        --actor.num_nodes --actor.num_gpus_per_node --critic.num_nodes --critic.num_gpus_per_node
        --ref.num_nodes --ref.num_gpus_per_node --reward.num_nodes --reward.num_gpus_per_node
        --actor.model_name_or_path --reward.model_name_or_path --vllm.num_engines --vllm.tensor_parallel_size
        --vllm.gpu_memory_utilization --vllm.enable_sleep --ds.tensor_parallel_size --ds.zero_stage --ds.param_dtype
        --ds.enable_sleep --train.colocate_all --train.batch_size --train.micro_batch_size --train.max_epochs
        --train.async_enable --train.async_queue_size --rollout.batch_size --rollout.n_samples_per_prompt
        --rollout.micro_batch_size --rollout.max_new_tokens --data.max_len --algo.advantage.estimator
        --algo.kl.init_coef --actor.gradient_checkpointing_enable
        """,
    "trl": """
        --num_processes --model_name_or_path --num_generations --per_device_train_batch_size
        --gradient_accumulation_steps --steps_per_generation --num_iterations --max_completion_length
        --gradient_checkpointing --bf16 --beta --use_vllm --vllm_mode --vllm_tensor_parallel_size
        --vllm_gpu_memory_utilization --vllm_max_model_length
        """,
}
KNOWN = {framework: frozenset(names.split()) for framework, names in _NAMES.items()}
"""Options found in the sources of the releases that the writers name."""

JOBS = {
    "ppo": Options("llama-3.1-8b", "a100-64g", slots=32, algorithm="ppo"),
    "grpo": Options("llama-3.1-8b", "a100-64g", slots=32),
    "grpo async": Options("llama-3.1-8b", "h100-dgx", slots=24, asynchronous=True, max_staleness=2),
    "remax": Options("qwen3-14b", "h200-64", slots=16, algorithm="remax"),
    "grpo long": Options("llama-3.1-8b", "a100-64g", slots=16, lengths="16384", reference=False, batch=16),
}


@pytest.fixture(scope="module")
def reports() -> dict[str, PlanReport]:
    return {name: make_report(options) for name, options in JOBS.items()}


def written(reports: Mapping[str, PlanReport]) -> list[tuple[str, str, Emission]]:
    """Return every (job, framework, emission) that can be written."""
    found = []
    for job, report in reports.items():
        for framework in WRITERS:
            try:
                found.append((job, framework, emit(report, framework)))
            except ConfigError as error:
                assert (job, framework) == ("ppo", "trl") and "critic" in str(error)
    return found


def test_every_flag_is_known_to_the_release(reports: dict[str, PlanReport]) -> None:
    for job, framework, emission in written(reports):
        names = [name.removeprefix("+") for name, _ in emission.flags]
        assert not set(names) - KNOWN[framework], (job, framework)
        assert len(set(names)) == len(names), (job, framework)


def devices(framework: str, flags: Mapping[str, str], asynchronous: bool) -> int:
    """Count the devices that a framework would take for these flags, as its own code does."""

    def product(first: str, second: str) -> int:
        return int(flags[first]) * int(flags[second])

    match framework:
        case "verl":
            count = product("trainer.nnodes", "trainer.n_gpus_per_node")
            return count + (product("rollout.nnodes", "rollout.n_gpus_per_node") if asynchronous else 0)
        case "openrlhf":
            count = product("--actor.num_nodes", "--actor.num_gpus_per_node")
            engines = product("--vllm.num_engines", "--vllm.tensor_parallel_size")
            # OpenRLHF refuses colocated engines that do not take exactly the trainers' devices.
            assert asynchronous or engines == count
            return count + (engines if asynchronous else 0)
    return int(flags["--num_processes"])


def test_world_sizes_are_the_plans(reports: dict[str, PlanReport]) -> None:
    for job, framework, emission in written(reports):
        report = reports[job]
        asked = devices(framework, dict(emission.flags), report.asynchronous)
        if framework == "trl" and report.asynchronous:
            asked += report.stages[0].slots  # the server's
        assert asked == emission.devices, (job, framework)
        said = any("these flags ask for" in remark for remark in emission.remarks)
        assert said == (asked != len(report.plan.slots())), (job, framework)


def test_verl_is_told_every_layout(reports: dict[str, PlanReport]) -> None:
    report = reports["ppo"]
    flags = dict(emit(report, "verl").flags)
    roles = {"actor_rollout_ref.actor": "policy", "critic": "critic"}
    for role, model in roles.items():
        chosen = next(one for one in report.candidates if str(one.model_stage) == f"{model}.training")
        assert flags[f"{role}.megatron.tensor_model_parallel_size"] == str(chosen.layout.tp)
        assert flags[f"{role}.megatron.pipeline_model_parallel_size"] == str(chosen.layout.pp)
        pool = int(flags["trainer.nnodes"]) * int(flags["trainer.n_gpus_per_node"])
        derived = pool // chosen.layout.slots
        said = any(f"{model}.training: the plan has" in remark for remark in emit(report, "verl").remarks)
        assert said == (derived != chosen.dp)


def test_the_batch_is_the_plans(reports: dict[str, PlanReport]) -> None:
    for _, framework, emission in written({"grpo": reports["grpo"]}):
        flags, samples = dict(emission.flags), reports["grpo"].basis.workload.samples
        match framework:
            case "verl":
                assert int(flags["data.train_batch_size"]) * int(flags["actor_rollout_ref.rollout.n"]) == samples
            case "openrlhf":
                assert int(flags["--rollout.batch_size"]) * int(flags["--rollout.n_samples_per_prompt"]) == samples
            case "trl":
                names = ("--num_processes", "--per_device_train_batch_size", "--gradient_accumulation_steps")
                one, two, three = (int(flags[name]) for name in names)
                assert one * two * three == samples


def test_what_cannot_be_expressed_is_said(reports: dict[str, PlanReport]) -> None:
    for job, framework, emission in written(reports):
        text = "\n".join(emission.remarks)
        for stage in reports[job].stages:
            pipelined = not stage.layout.endswith("p1")
            if framework != "verl" and pipelined:
                assert stage.model_stage in text, (job, framework)
        if framework == "trl" and job == "remax":
            assert "has no remax" in text


def test_the_text_is_comments_and_one_shell_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "llama-3.1-8b", "--cluster", "a100-64g", "--slots", "16", "--emit", "verl"]
    assert execute(words) == 0
    text = capsys.readouterr().out
    comments, _, command = text.partition("python3")
    assert all(line.startswith("# ") for line in comments.splitlines())
    split = shlex.split("python3" + command.replace("\\\n", " "))
    assert split[:3] == ["python3", "-m", "verl.trainer.main_ppo"]
    assert "trainer.nnodes=4" in split
    assert execute([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"] == 16
