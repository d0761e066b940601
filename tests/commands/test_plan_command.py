"""Does ``nereus plan`` print what the planner found, and one helpful line for what cannot be asked?"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from nereus.cli import execute
from nereus.commands.plan import make_report
from nereus.commands.planfile import PlanReport
from nereus.commands.question import Options
from nereus.commands.render import ranges, render_plan
from nereus.core.units import format_seconds

ROOT = Path(__file__).parents[2]
WORDS = ["plan", "--model", "llama-3.1-8b", "--cluster", "a100-64g", "--slots", "32"]
PPO = [*WORDS, "--algorithm", "ppo", "--lengths", "2048"]


def test_the_phases_add_up_to_the_step(ppo32: PlanReport) -> None:
    assert sum(phase.seconds for phase in ppo32.phases) + ppo32.weight_sync_s == pytest.approx(ppo32.step_s)
    for phase in ppo32.phases:
        members = [stage for stage in ppo32.stages if stage.model_stage.endswith(phase.name)]
        assert phase.seconds == max(stage.seconds for stage in members)


def test_seconds_and_bytes_of_a_stage_add_up(ppo32: PlanReport) -> None:
    for stage, chosen in zip(ppo32.stages, sorted(ppo32.candidates, key=lambda one: one.model_stage), strict=True):
        assert stage.model_stage == str(chosen.model_stage)
        assert sum(stage.seconds_by_class.values()) == pytest.approx(stage.seconds)
        predicted = chosen.resident_bytes + chosen.transient_bytes
        assert sum(stage.memory_bytes.values()) == pytest.approx(predicted, abs=8)


def test_the_fullest_slot_fits_and_is_the_fullest(ppo32: PlanReport) -> None:
    memory = ppo32.memory
    assert memory.predicted_bytes <= memory.usable_bytes < memory.capacity_bytes
    assert memory.predicted_bytes == sum(memory.resident_bytes.values()) + max(memory.transient_bytes.values())
    for slot in ppo32.plan.slots():
        there = {ppo32.candidate(emu.model_stage) for emu in ppo32.plan.on(slot)}
        assert (
            sum(one.resident_bytes for one in there) + max(one.transient_bytes for one in there)
            <= memory.predicted_bytes
        )


def test_an_asynchronous_step_is_as_long_as_its_slower_side() -> None:
    report = make_report(Options("llama-3.1-8b", "h100-dgx", slots=16, asynchronous=True, lengths="512+512"))
    sides = [sum(phase.seconds for phase in report.phases if phase.side == side) for side in (0, 1)]
    assert report.step_s == pytest.approx(max(sides) + report.weight_sync_s)
    generation, learning = report.stages[0].units, [unit for stage in report.stages[1:] for unit in stage.units]
    assert not {slot for unit in generation for slot in unit} & {slot for unit in learning for slot in unit}
    assert "beside the other" in render_plan(report)


def test_the_text_shows_the_report(ppo32: PlanReport, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(PPO) == 0
    text, errors = capsys.readouterr()
    assert errors == "" and text == render_plan(ppo32)
    assert f"predicted step time {format_seconds(ppo32.step_s)}" in text
    for stage in ppo32.stages:
        assert re.search(rf"{stage.model_stage} +{stage.layout} +{stage.slots} ", text), text
    assert "why the runners-up lost" in text and "slower" in text
    assert "policy.training: t1p1" in text and "fit on no slot" in text


def test_json_is_one_object_and_out_writes_it(
    ppo32: PlanReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert execute([*PPO, "--json", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    assert json.loads(text)["step_s"] == ppo32.step_s
    assert out.read_text() == text
    assert msgspec.json.decode(text, type=PlanReport) == ppo32


def test_runners_up_are_slower_or_do_not_fit(ppo32: PlanReport) -> None:
    assert ppo32.runners_up
    for lost in ppo32.runners_up:
        if lost.latency_s is None:
            assert "does not fit" in lost.because
        else:
            assert lost.latency_s >= ppo32.step_s and "slower" in lost.because


def test_a_pinned_layout_is_taken_and_is_no_faster(ppo32: PlanReport) -> None:
    options = Options("llama-3.1-8b", "a100-64g", slots=32, algorithm="ppo", fix=("policy.training=d4t4p1",))
    report = make_report(options)
    assert next(stage for stage in report.stages if stage.model_stage == "policy.training").layout == "d4t4p1"
    assert report.step_s >= ppo32.step_s


def test_a_model_folder_and_a_cluster_file_do_as_well(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
    sizes |= {"intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 512}
    (model / "config.json").write_text(json.dumps(sizes))
    cluster = tmp_path / "own.toml"
    cluster.write_text((ROOT / "profiles" / "clusters" / "cpu.toml").read_text())
    report = make_report(Options(str(model), str(cluster), slots=4, lengths="64+64", batch=8, response_mean=40))
    assert report.cluster == "own" and report.basis.shapes["policy"].layers == 4


WRONG: list[tuple[list[str], tuple[str, ...]]] = [
    (["plan"], ("--model", "llama-3.1-8b")),
    (["plan", "--model", "llama-3.1-8b"], ("--cluster", "a100-64g-256")),
    ([*WORDS[:5], "--slots", "0"], ("--slots", "0 slots", "at least 1")),
    ([*WORDS[:5], "--slots", "many"], ("--slots", "many")),
    ([*WORDS[:5], "--slots", "1000000"], ("--slots", "at most")),
    ([*WORDS, "--tp", "16"], ("tensor degree 16", "8 key-value heads")),
    ([*WORDS, "--tp", "8"], ("tensor degree 8", "4 slots of a node")),
    ([*WORDS, "--pp", "64"], ("pipeline degree 64", "32 layers")),
    ([*WORDS, "--tp", "0"], ("--tp", "0 is no degree")),
    ([*WORDS, "--fix", "policy.training=q4"], ("'q4' is not a layout",)),
    ([*WORDS, "--fix", "critic.training=t2"], ("critic.training", "policy.training")),
    ([*WORDS, "--fix", "policy.training=d64t4"], ("256 slots are needed",)),
    (["plan", "--model", "llama-3.1-9b", "--cluster", "cpu"], ("'llama-3.1-9b'", "did you mean llama-3.1-8b")),
    (["plan", "--model", "llama-3.1-8b", "--cluster", "b200"], ("'b200'", "h200-64")),
    ([*WORDS, "--lengths", "200000"], ("200000 tokens", "131072 positions")),
    ([*WORDS, "--lengths", "long"], ("'long' gives no lengths", "512+1536")),
    ([*WORDS, "--response-p95", "9"], ("--response-p95", "--response-mean")),
    ([*WORDS, "--response-mean", "9000"], ("--response-mean", "above the longest")),
    ([*WORDS, "--batch", "0"], ("--batch",)),
    ([*WORDS, "--minibatches", "3"], ("--minibatches", "128")),
    ([*WORDS, "--algorithm", "dpo"], ("'dpo'", "ppo, grpo, remax")),
    ([*WORDS, "--emit", "deepspeed"], ("'deepspeed'", "verl, openrlhf, trl")),
    ([*WORDS, "--out", "/nowhere/plan.json"], ("--out", "/nowhere/plan.json")),
    (["plan", "--model", "llama-3.1-70b", "--cluster", "a100-64g", "--slots", "8"], ("constraint memory", "GiB short")),
    ([*WORDS[:5], "--slots", "1"], ("1 slot of", "constraint memory", "policy.training", "GiB short")),
    ([*WORDS, "--fix", "policy.training=t1"], ("constraint memory", "t1p1", "GiB short")),
    ([*WORDS[:5], "--slots", "4", "--async", "--no-reference"], ("constraint slots", "add at least 1 slot")),
]


@pytest.mark.parametrize(("words", "parts"), WRONG)
def test_nonsense_is_one_line_and_code_2(
    words: list[str], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(words) == 2
    text, errors = capsys.readouterr()
    assert text == ""
    assert errors.count("\n") == 1 and errors.startswith("nereus: ")
    for part in parts:
        assert part in errors


def test_planning_loads_neither_torch_nor_sockets_nor_the_run_time() -> None:
    code = (
        "import sys; from nereus.cli import execute; code = execute(sys.argv[1:]); "
        "heavy = {'torch', 'zmq', 'asyncio', 'structlog', 'transformers', 'nereus.runtime.supervisor'}; "
        "sys.exit(code or bool(print(sorted(heavy & set(sys.modules)), file=sys.stderr)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *PPO], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(("slots", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 8], "0-2,8"), ([5, 4], "5,4")])
def test_ranges(slots: list[int], text: str) -> None:
    assert ranges(slots) == text
