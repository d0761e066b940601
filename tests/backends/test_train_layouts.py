"""Does every layout compute what one process computes?

The reference is a plain transformers model in float64 and a loop over samples, one at a time, unpadded, written here
independently. Real processes, real gloo groups; every loss, gradient, moment and parameter over five updates is
compared.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from nereus.core.plan import Replication
from nereus.runtime.checkpoints import CheckpointStore

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]

WORKER = Path(__file__).with_name("train_worker.py")
ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-9
STEPS = 5
TEMPERATURE = 0.8

FAMILIES = {
    "llama": (LlamaConfig, {"tie_word_embeddings": False, "attention_bias": False}),
    "llama_tied": (LlamaConfig, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama_padded": (LlamaConfig, {"tie_word_embeddings": True, "pad_token_id": 3}),
    "llama_odd": (LlamaConfig, {"tie_word_embeddings": True, "vocab_size": 97}),
    "qwen2_tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": False, "head_dim": 8}),
    "qwen3_tied": (Qwen3Config, {"tie_word_embeddings": True, "head_dim": 8}),
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "attention_dropout": 0.1,  # the trainer must switch it off
}
TRAIN = {
    "micro_batch_tokens": 40,
    "learning_rate": 1e-3,
    "schedule": "cosine",
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.05,
    "loss": {"normalize": "token", "correction": "decoupled", "kl_coefficient": 0.0},
}


def job(layout: str, **train: Any) -> dict[str, Any]:
    loss = TRAIN["loss"] | train.pop("loss", {})  # type: ignore[operator]
    return {
        "run": {"steps": 8},
        "cluster": {"group_timeout_s": 60.0},
        "model": {"dtype": "float64"},
        "rollout": {"temperature": TEMPERATURE},
        "train": TRAIN | train | {"layout": layout, "loss": loss},
    }


def make_model(folder: Path, family: str) -> Any:
    kind, options = FAMILIES[family]
    config = kind(**(SIZES | options))
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
    with torch.no_grad():
        for parameter in model.parameters():  # no zero biases, no norms of exactly one
            parameter.add_(torch.randn_like(parameter) * 0.05)
    folder.mkdir()
    config.save_pretrained(folder)
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, folder / "model.safetensors")
    return model.eval()


def make_batches(folder: Path, vocabulary: int, groups: int = 4, size: int = 3) -> list[dict[str, np.ndarray]]:
    folder.mkdir()
    random = np.random.default_rng(3)
    batches = []
    for step in range(STEPS):
        prompts = np.repeat(random.integers(1, 6, groups), size).astype(np.int32)
        lengths = random.integers(1, 14, groups * size).astype(np.int32)
        drawn = int(lengths.sum())
        rewards = random.random(groups * size)
        rewards[1] = np.nan
        batch = {
            "step": np.array([step]),
            "version": np.array([step]),
            "prompt_lengths": prompts,
            "lengths": lengths,
            "group_of": np.repeat(np.arange(groups), size).astype(np.int32),
            "rewards": rewards,
            "tokens": random.integers(0, vocabulary, int(prompts.sum() + lengths.sum())).astype(np.int32),
            "logprobs": (-np.log(vocabulary) + random.normal(0, 0.4, drawn)).astype(np.float32),
            "versions": np.full(drawn, max(0, step - 1), np.int32),
        }
        save_arrays(batch, folder / f"{step}.safetensors")
        batches.append(batch)
    return batches


# The reference


def advantages(batch: dict[str, np.ndarray]) -> np.ndarray:
    result = np.zeros(len(batch["rewards"]))
    for group in np.unique(batch["group_of"]):
        members = np.flatnonzero((batch["group_of"] == group) & ~np.isnan(batch["rewards"]))
        rewards = batch["rewards"][members]
        result[members] = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    return result


def sample_log_probabilities(model: Any, batch: dict[str, np.ndarray], sample: int) -> torch.Tensor:
    fed = batch["prompt_lengths"] + batch["lengths"]
    start, prompt = int(fed[:sample].sum()), int(batch["prompt_lengths"][sample])
    ids = torch.from_numpy(batch["tokens"][start : start + int(fed[sample])].astype(np.int64))
    logits = model(ids[None]).logits[0, prompt - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, ids[prompt:, None])[:, 0]


def clipped_loss(now: torch.Tensor, prox: torch.Tensor, behaviour: torch.Tensor, advantage: float) -> torch.Tensor:
    ratio = (now - prox).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    return loss * (prox - behaviour).exp().clamp(max=2.0)


def reference(model: Any, batches: list[dict[str, np.ndarray]], config: dict[str, Any]) -> list[dict[str, Any]]:
    train = config["train"]
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    frozen = AutoModelForCausalLM.from_config(model.config).double().eval()
    frozen.load_state_dict(initial)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False
    )
    count = train.get("minibatches", 1)
    results: list[dict[str, Any]] = []
    update = 0
    for batch in batches:
        ends = np.cumsum(batch["lengths"])
        scored = [i for i in range(len(ends)) if not np.isnan(batch["rewards"][i])]
        behaviour = {
            i: torch.from_numpy(batch["logprobs"][ends[i] - batch["lengths"][i] : ends[i]]).double() for i in scored
        }
        with torch.no_grad():
            prox = {i: sample_log_probabilities(model, batch, i) for i in scored if count > 1}
            ref = {i: sample_log_probabilities(frozen, batch, i) for i in scored if train["loss"]["kl_coefficient"]}
        advantage = advantages(batch)
        losses = []
        groups = np.array_split(np.unique(batch["group_of"]), count)
        for part in groups:
            members = [i for i in scored if batch["group_of"][i] in part]
            tokens = sum(int(batch["lengths"][i]) for i in members)
            total = torch.zeros((), dtype=torch.float64)
            for i in members:
                now = sample_log_probabilities(model, batch, i)
                per_token = clipped_loss(now, prox.get(i, now.detach()), behaviour[i], advantage[i])
                if train["loss"]["kl_coefficient"]:
                    gap = ref[i] - now
                    per_token = per_token + train["loss"]["kl_coefficient"] * (gap.exp() - gap - 1)
                total = total + (per_token.sum() if train["loss"]["normalize"] == "token" else per_token.mean())
            loss = total / (tokens if train["loss"]["normalize"] == "token" else len(members))
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), train["max_grad_norm"])
            span = config["run"]["steps"] * count
            rate = 1e-3 * min(1.0, (update + 1) / 2)
            if update >= 2:
                rate = 1e-3 * (1 + np.cos(np.pi * (update - 2) / (span - 2))) / 2
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            losses.append(loss.item())
            update += 1
        named = dict(model.named_parameters())
        results.append(
            {
                "loss": sum(losses) / count,
                "norm": norm.item(),
                "gradient": {n: p.grad.clone() for n, p in named.items()},
                "parameter": {n: p.detach().clone() for n, p in named.items()},
                "exp_avg": {n: optimizer.state[p]["exp_avg"].clone() for n, p in named.items()},
                "exp_avg_sq": {n: optimizer.state[p]["exp_avg_sq"].clone() for n, p in named.items()},
            }
        )
    model.load_state_dict(initial)
    return results


# Real processes


@contextmanager
def rendezvous() -> Iterator[str]:
    command = [sys.executable, "-m", "nereus.backends.torch.store", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        where = json.loads(process.stdout.readline())
        yield f"{where['host']}:{where['port']}"
        process.terminate()


def run_cases(folder: Path, cases: list[dict[str, Any]], slots: int, timeout_s: float = 500) -> list[int]:
    (folder / "cases.json").write_text(json.dumps([case | {"epoch": i + 1} for i, case in enumerate(cases)]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with rendezvous() as store:
        command = [sys.executable, WORKER, folder, str(slots), store]
        with subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
        ) as workers:
            try:
                output, _ = workers.communicate(timeout=timeout_s)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(workers.pid, signal.SIGKILL)
            return json.loads(output.splitlines()[-1])


def compare(folder: Path, case: dict[str, Any], expected: list[dict[str, Any]]) -> None:
    """Compare every piece of every slot with the reference, and check that slots cover each tensor."""
    slots = Replication.parse(case["layout"]).slots
    covered: dict[str, torch.Tensor] = {}
    for slot in range(slots):
        result = json.loads((folder / f"{case['name']}-{slot}.json").read_text())
        tensors = load_file(folder / f"{case['name']}-{slot}.safetensors")
        first = case.get("first", 0)
        for report, want in zip(result["reports"], expected[first : case["steps"]], strict=True):
            metrics = report["metrics"]
            assert metrics["loss"] == pytest.approx(want["loss"], abs=TOLERANCE)
            if case["config"]["train"].get("minibatches", 1) == 1:
                assert metrics["optim/grad_norm"] == pytest.approx(want["norm"], rel=TOLERANCE)
        for key, value in tensors.items():
            step, kind, name = key.split("/")
            start, stop = result["places"][name]
            box = tuple(slice(low, high) for low, high in zip(start, stop, strict=True))
            whole = expected[int(step)][kind][name]
            error = (value - whole[box]).abs().max().item()
            assert error <= TOLERANCE, f"{case['name']} slot {slot}: {key} is off by {error:.2e}"
            covered.setdefault(name, torch.zeros(whole.shape))[box] = 1
    assert set(covered) == set(expected[0]["parameter"])
    assert all(mask.all() for mask in covered.values())


def check(tmp_path: Path, cases: list[tuple[str, str, dict[str, Any]]], slots: int) -> None:
    prepared, expected, models = [], {}, {}
    for layout, family, train in cases:
        if family not in models:
            model = make_model(tmp_path / family, family)
            models[family] = model, make_batches(tmp_path / f"{family}-batches", model.config.vocab_size)
        config = job(layout, **train)
        key = json.dumps([family, train])
        if key not in expected:
            expected[key] = reference(*models[family], config)
        name = f"{len(prepared)}-{layout}-{family}"
        prepared.append(
            {
                "name": name,
                "layout": layout,
                "model": family,
                "batches": f"{family}-batches",
                "steps": STEPS,
                "config": config,
                "key": key,
            }
        )
    assert run_cases(tmp_path, prepared, slots) == [0] * slots
    for case in prepared:
        compare(tmp_path, case, expected[case["key"]])


def test_one_and_two_slots_equal_one_process(tmp_path: Path) -> None:
    check(
        tmp_path,
        [
            ("t1p1", "llama", {}),
            ("t1p1", "qwen3_tied", {"minibatches": 2, "loss": {"normalize": "sequence", "kl_coefficient": 0.05}}),
            ("t1p1", "llama_tied", {"recompute": True}),
            ("d2t1p1", "qwen2_tied", {}),
            ("t2p1", "llama", {}),
            ("t2p1", "llama_tied", {"minibatches": 2, "loss": {"normalize": "sequence", "kl_coefficient": 0.05}}),
            ("t2p1", "llama_odd", {}),
            ("t2p1", "llama_padded", {}),
            ("t2p1", "qwen2_tied", {"recompute": True}),
            ("t2p1", "qwen3", {}),
            ("t1p2", "llama", {}),
            ("t1p2", "llama_tied", {"minibatches": 2, "loss": {"normalize": "sequence", "kl_coefficient": 0.05}}),
            ("t1p2", "qwen2_tied", {}),
            ("t1p2", "qwen3_tied", {"micro_batch_tokens": 4096}),
        ],
        slots=2,
    )


def test_three_and_four_slots_equal_one_process(tmp_path: Path) -> None:
    check(
        tmp_path,
        [
            ("d3t1p1", "llama_tied", {}),
            ("d3t1p1", "qwen3", {"micro_batch_tokens": 4096, "minibatches": 4}),
            ("t1p3", "llama_tied", {}),
            ("t2p2", "llama_tied", {}),
            ("t2p2", "llama_odd", {}),
            ("t2p2", "qwen3_tied", {"minibatches": 2, "loss": {"normalize": "sequence", "kl_coefficient": 0.05}}),
            ("d2t2p1", "llama_tied", {}),
            ("d2t2p1", "qwen2_tied", {}),
            ("d2t2p1", "qwen3_tied", {}),
            ("d2t1p2", "llama_tied", {}),
        ],
        slots=4,
    )


@pytest.mark.slow
def test_eight_slots_equal_one_process(tmp_path: Path) -> None:
    check(tmp_path, [("d2t2p2", "llama_tied", {}), ("d2t2p2", "qwen3_tied", {})], slots=8)


@pytest.mark.parametrize(("saved", "resumed"), [("t2p2", "d2t1p1"), ("d2t1p1", "t1p2"), ("t1p2", "d2t2p1")])
def test_a_run_resumed_on_another_layout_continues_as_if_nothing_had_happened(
    tmp_path: Path, saved: str, resumed: str
) -> None:
    model = make_model(tmp_path / "qwen3_tied", "qwen3_tied")
    batches = make_batches(tmp_path / "batches", model.config.vocab_size)
    expected = reference(model, batches, job(saved))
    checkpoints = CheckpointStore(tmp_path / "checkpoints", 1)
    temporary = checkpoints.begin(3)
    common = {"batches": "batches"}
    before = common | {"name": "before", "layout": saved, "model": "qwen3_tied", "steps": 3, "config": job(saved)}
    before["save"] = str(temporary)
    slots = Replication.parse(saved).slots
    assert run_cases(tmp_path, [before], slots) == [0] * slots
    compare(tmp_path, before, expected)
    entries = [(tmp_path / f"before-{slot}.entry").read_bytes() for slot in range(slots)]
    committed = checkpoints.commit(3, entries, {}, model=tmp_path / "qwen3_tied")
    after = common | {"name": "after", "layout": resumed, "model": str(committed), "steps": STEPS, "first": 3}
    after["config"] = job(resumed)
    slots = Replication.parse(resumed).slots
    assert run_cases(tmp_path, [after], slots) == [0] * slots
    compare(tmp_path, after, expected)


@pytest.mark.parametrize("layout", ["d3t1p1", "t1p3", "t2p2"])
def test_a_peer_that_is_killed_ends_the_step_in_bounded_time(tmp_path: Path, layout: str) -> None:
    model = make_model(tmp_path / "llama_tied", "llama_tied")
    make_batches(tmp_path / "batches", model.config.vocab_size)
    case = {
        "name": "death",
        "layout": layout,
        "model": "llama_tied",
        "batches": "batches",
        "steps": STEPS,
        "config": job(layout),
        "die_at": 1,
        "victim": 1,
    }
    slots = Replication.parse(layout).slots
    assert run_cases(tmp_path, [case], slots) == [0, -signal.SIGKILL, *[0] * (slots - 2)]
    for slot in {0, *range(2, slots)}:
        found = json.loads((tmp_path / f"death-{slot}.json").read_text())
        assert f"on slot {slot} lost a peer" in found["lost"]
        assert found["seconds"] < 20, "well below the time-out of its groups, 60 s"


def test_a_slot_without_memory_ends_the_step_everywhere(tmp_path: Path) -> None:
    layouts = ("d2t1p1", "t2p1", "t1p2", "t2p2")
    cases = _cases_on_one_model(tmp_path, {layout: job(layout) for layout in layouts})
    for case in cases:
        case["small"] = Replication.parse(case["layout"]).slots - 1
    assert run_cases(tmp_path, cases, 4) == [0] * 4
    for case in cases:
        last = case["small"]
        found = [json.loads((tmp_path / f"{case['name']}-{slot}.json").read_text()) for slot in range(last + 1)]
        assert "needs" in found[-1]["exhausted"] and f"on slot {last}" in found[-1]["exhausted"]
        assert all("lost a peer" in other["lost"] for other in found[:-1])
        assert all(slot["seconds"] < 45 for slot in found), "below the time-out of its groups, 60 s"


def test_emulated_links_are_paid_by_the_layouts_that_use_them(tmp_path: Path) -> None:
    classes = {
        "d2t1p1": {"gradients/in_node"},
        "t2p1": {"allreduce/in_node"},
        "t1p2": {"p2p/in_node"},
        "d2t2p1": {"gradients/in_node", "allreduce/in_node"},
    }
    slow = {"gflops": 0.02, "link_gb_s": 0.0005}
    cases = _cases_on_one_model(tmp_path, {layout: job(layout) | {"emulate": slow} for layout in classes})
    assert run_cases(tmp_path, cases, 4) == [0] * 4
    for case in cases:
        for slot in range(Replication.parse(case["layout"]).slots):
            for report in json.loads((tmp_path / f"{case['name']}-{slot}.json").read_text())["reports"]:
                links = {name: seconds for name, seconds in report["operations"].items() if name.endswith("/in_node")}
                assert links.keys() == classes[case["layout"]]
                assert 0 < sum(links.values()) <= report["seconds"]


def _cases_on_one_model(folder: Path, jobs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    model = make_model(folder / "llama_tied", "llama_tied")
    make_batches(folder / "batches", model.config.vocab_size)
    common = {"model": "llama_tied", "batches": "batches", "steps": 2}
    return [{"name": layout, "layout": layout, "config": config} | common for layout, config in jobs.items()]
