"""How fast does the built-in engine generate, beside vLLM's CPU build and plain torch loops?

    python benchmarks/generate.py [--json] [--threads N] [--models 0.8M,19M,135M] [--batches 16,64] [--repeats R]

Random Llama models that this script makes; prompts of 32 tokens, all different, and 128 new tokens each, drawn at
temperature 1 with log-probabilities, in float32, with the same number of threads for all. Contestants:

nereus     the built-in engine (nereus/backends/torch/generate.py), through its public methods
loop       a KV-cached torch loop with fused projections, all sequences in lockstep: what one writes in an hour
hf         transformers' own ``model.generate``
vllm       vLLM's CPU build, in process, eager, in its own environment: benchmarks/peers/vllm.sh makes it

Each runs once to warm up and then R times; contestants take turns, so that noise hits all. The median counts. The
floor is what the FLOPs of a token take at 130 GFLOP/s, the measured matmul peak of two cores of the reference machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from nereus.backends.api import SampleRequest
from nereus.backends.torch.decode_model import DecoderWeights, read_shape
from nereus.backends.torch.generate import GenerateEngine

ROOT = Path(__file__).resolve().parents[1]
VLLM_PYTHON = ROOT / ".venv-peers/vllm/bin/python"
VLLM_TIMEOUT_S = 1800
PROMPT_TOKENS, NEW_TOKENS = 32, 128
PEAK_FLOPS = 130e9
MODELS = {
    "0.8M": {"num_hidden_layers": 4, "hidden_size": 128, "heads": 4, "kv": 2, "vocab_size": 512},
    "19M": {"num_hidden_layers": 8, "hidden_size": 448, "heads": 14, "kv": 7, "vocab_size": 2048},
    "135M": {"num_hidden_layers": 30, "hidden_size": 576, "heads": 9, "kv": 3, "vocab_size": 49152},
}
TARGETS = {"0.8M": 1.5, "19M": 1.0}
"""Tokens/s of nereus over tokens/s of vLLM, at each batch size."""

Contestant = Callable[[int, int], None]
"""Draws NEW_TOKENS for each of ``batch`` prompts; the second argument numbers the round."""


def make_model(name: str, folder: Path) -> LlamaConfig:
    """Make the random model in ``folder`` unless it is there; return its configuration."""
    sizes = MODELS[name]
    hidden = sizes["hidden_size"]
    config = LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=hidden,
        intermediate_size=int(hidden * 8 / 3) // 32 * 32,
        num_hidden_layers=sizes["num_hidden_layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv"],
        max_position_embeddings=1024,
        tie_word_embeddings=name == "135M",
        bos_token_id=1,
        eos_token_id=2,
    )
    if not (folder / "model.safetensors").is_file():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return config


def prompts(batch: int, vocabulary: int, turn: int) -> np.ndarray:
    return np.random.default_rng((batch, turn)).integers(5, vocabulary, (batch, PROMPT_TOKENS)).astype(np.int32)


def nereus(folder: Path, config: LlamaConfig, batches: list[int]) -> Contestant:
    shape, cpu = read_shape(folder), torch.device("cpu")
    weights = DecoderWeights(shape, load_file(folder / "model.safetensors"), cpu, torch.float32)
    capacity = PROMPT_TOKENS + NEW_TOKENS
    engine = GenerateEngine(shape, slots=max(batches), capacity=capacity, device=cpu, dtype=torch.float32)
    engine.offer(weights, 0, "keep")

    def run(batch: int, turn: int) -> None:
        for index, prompt in enumerate(prompts(batch, config.vocab_size, turn)):
            engine.submit(SampleRequest(str(index), prompt, (0, turn, index), NEW_TOKENS))
        drawn = 0
        while not engine.idle:
            drawn += sum(len(completion.tokens) for completion in engine.step())
        assert drawn == batch * NEW_TOKENS

    return run


def loop(folder: Path, config: LlamaConfig, batches: list[int]) -> Contestant:
    stored = load_file(folder / "model.safetensors")
    heads, kv, hidden = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
    head_dim, epsilon = hidden // heads, config.rms_norm_eps
    layers = []
    for number in range(config.num_hidden_layers):
        prefix = f"model.layers.{number}."
        names = [f"self_attn.{part}_proj" for part in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]
        qkv, gate_up = (torch.cat([stored[f"{prefix}{name}.weight"] for name in group]) for group in names)
        rest = ("self_attn.o_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")
        layers.append((qkv, gate_up, *(stored[f"{prefix}{name}.weight"] for name in rest)))
    embedding = stored["model.embed_tokens.weight"]
    head = stored.get("lm_head.weight", embedding)
    norm = stored["model.norm.weight"]
    total = PROMPT_TOKENS + NEW_TOKENS
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(total)[:, None] * torch.cat((frequencies, frequencies))
    cos, sin = angles.cos(), angles.sin()

    def rotate(x: Tensor, start: int, stop: int) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * cos[start:stop] + torch.cat((-high, low), -1) * sin[start:stop]

    def forward(ids: Tensor, cache: list[tuple[Tensor, Tensor]], start: int) -> Tensor:
        batch, width = ids.shape
        stop = start + width
        x = F.embedding(ids, embedding)
        for (qkv, gate_up, out, down, norm_1, norm_2), (keys, values) in zip(layers, cache, strict=True):
            projected = F.linear(F.rms_norm(x, (hidden,), norm_1, epsilon), qkv).view(batch, width, -1, head_dim)
            q, k, v = projected.transpose(1, 2).split((heads, kv, kv), 1)
            keys[:, :, start:stop] = rotate(k, start, stop)
            values[:, :, start:stop] = v
            attended = F.scaled_dot_product_attention(
                rotate(q, start, stop), keys[:, :, :stop], values[:, :, :stop], is_causal=width > 1, enable_gqa=True
            )
            x = x + F.linear(attended.transpose(1, 2).reshape(batch, width, hidden), out)
            gate, up = F.linear(F.rms_norm(x, (hidden,), norm_2, epsilon), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.linear(F.rms_norm(x[:, -1], (hidden,), norm, epsilon), head)

    @torch.inference_mode()
    def run(batch: int, turn: int) -> None:
        ids = torch.from_numpy(prompts(batch, config.vocab_size, turn)).long()
        cache = [(torch.zeros(batch, kv, total, head_dim), torch.zeros(batch, kv, total, head_dim)) for _ in layers]
        start, tokens, logprobs = 0, [], []
        for _ in range(NEW_TOKENS):
            scores = torch.log_softmax(forward(ids, cache, start), -1)
            start += ids.shape[1]
            ids = torch.multinomial(scores.exp(), 1)
            tokens.append(ids)
            logprobs.append(scores.gather(1, ids))
        torch.cat(tokens, 1), torch.cat(logprobs, 1)

    return run


def hf(folder: Path, config: LlamaConfig, batches: list[int]) -> Contestant:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(batch: int, turn: int) -> None:
        ids = torch.from_numpy(prompts(batch, config.vocab_size, turn)).long()
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        model.compute_transition_scores(generated.sequences, generated.scores, normalize_logits=True)

    return run


@dataclass(frozen=True)
class Row:
    """One contestant's tokens/s on one model at one batch size; None: it did not run, ``note`` says why."""

    model: str
    batch: int
    engine: str
    tokens_per_s: float | None
    floor_tokens_per_s: float
    note: str = ""


def floor_tokens_per_s(config: LlamaConfig) -> float:
    """Return the tokens/s at the matmul peak: two FLOPs per weight that is multiplied; attention at the mean length."""
    heads, kv, hidden = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
    projections = hidden * (2 * hidden + 2 * hidden * kv // heads + 3 * config.intermediate_size)
    attention = 2 * hidden * (PROMPT_TOKENS + NEW_TOKENS // 2)
    weights = config.num_hidden_layers * (projections + attention) + hidden * config.vocab_size
    return PEAK_FLOPS / (2 * weights)


def measure(name: str, folder: Path, config: LlamaConfig, batches: list[int], repeats: int) -> list[Row]:
    """Run the contestants of this process in turns."""
    made = {maker.__name__: maker(folder, config, batches) for maker in (nereus, loop, hf)}
    floor = floor_tokens_per_s(config)
    rows = []
    for batch in batches:
        seconds: dict[str, list[float]] = {engine: [] for engine in made}
        for turn in range(repeats + 1):
            for engine, run in made.items():
                began = time.perf_counter()
                run(batch, turn)
                seconds[engine].append(time.perf_counter() - began)
        for engine, taken in seconds.items():
            rows.append(Row(name, batch, engine, batch * NEW_TOKENS / statistics.median(taken[1:]), floor))
    return rows


def measure_vllm(name: str, folder: Path, floor: float, batches: list[int], repeats: int, threads: int) -> list[Row]:
    """Run vLLM in its own environment, or say that it is not there."""

    def failed(note: str) -> list[Row]:
        return [Row(name, batch, "vllm", None, floor, note) for batch in batches]

    site_packages = VLLM_PYTHON.parent.parent / "lib/python3.11/site-packages"
    if not (site_packages / "vllm").is_dir():
        return failed("not installed (benchmarks/peers/vllm.sh)")
    script = ROOT / "benchmarks/peers/vllm_generate.py"
    sizes = ",".join(map(str, batches))
    command = [str(VLLM_PYTHON), str(script), str(folder), sizes, str(repeats), str(PROMPT_TOKENS), str(NEW_TOKENS)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=VLLM_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return failed(f"no result in {VLLM_TIMEOUT_S} s")
    if done.returncode:
        return failed(f"failed: {(done.stderr.strip() or 'no message').splitlines()[-1][:100]}")
    figures = json.loads(done.stdout.splitlines()[-1])
    return [Row(name, batch, "vllm", figures[str(batch)], floor) for batch in batches]


def table(rows: list[Row], threads: int) -> str:
    rates = {(row.model, row.batch, row.engine): row.tokens_per_s for row in rows}
    lines = [f"tokens/s: prompt {PROMPT_TOKENS}, {NEW_TOKENS} new tokens, float32, {threads} threads"]
    lines.append(f"{'model':>6} {'batch':>5} {'engine':<7} {'tok/s':>8} {'x vllm':>7} {'floor':>9} {'gap':>7}")
    for row in rows:
        base = rates.get((row.model, row.batch, "vllm"))
        rate, ratio, gap = row.note or "-", "-", "-"
        if row.tokens_per_s is not None:
            rate = f"{row.tokens_per_s:.0f}"
            ratio = f"{row.tokens_per_s / base:.2f}" if base else "-"
            gap = f"{row.floor_tokens_per_s / row.tokens_per_s:.1f}x"
        floor = f"{row.floor_tokens_per_s:.0f}"
        lines.append(f"{row.model:>6} {row.batch:>5} {row.engine:<7} {rate:>8} {ratio:>7} {floor:>9} {gap:>7}")
    return "\n".join(lines)


def targets(rows: list[Row]) -> dict[str, bool | None]:
    """Say of each target whether it is met; None if vLLM did not run."""
    rates = {(row.model, row.batch, row.engine): row.tokens_per_s for row in rows}
    met: dict[str, bool | None] = {}
    for model, batch in sorted({(row.model, row.batch) for row in rows if row.model in TARGETS}):
        ours, theirs = rates[model, batch, "nereus"], rates[model, batch, "vllm"]
        wanted = TARGETS[model]
        met[f"{model} batch {batch}: >= {wanted} x vllm"] = None if not ours or not theirs else ours >= wanted * theirs
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default="16,64")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    names, batches = arguments.models.split(","), [int(batch) for batch in arguments.batches.split(",")]
    if unknown := set(names) - MODELS.keys():
        parser.error(f"unknown models {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    torch.set_num_threads(arguments.threads)
    rows: list[Row] = []
    for name in names:
        folder = ROOT / ".cache/benchmarks" / name
        config = make_model(name, folder)
        print(f"{name} ...", file=sys.stderr, flush=True)
        ours = measure(name, folder, config, batches, arguments.repeats)
        floor = floor_tokens_per_s(config)
        theirs = measure_vllm(name, folder, floor, batches, arguments.repeats, arguments.threads)
        rows += sorted(ours + theirs, key=lambda row: row.batch)
    print(table(rows, arguments.threads))
    for target, met in targets(rows).items():
        print(f"{'?' if met is None else 'met' if met else 'MISSED':>6}  {target}")
    if arguments.json:
        figures = {"threads": arguments.threads, "rows": [vars(row) for row in rows], "targets": targets(rows)}
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
