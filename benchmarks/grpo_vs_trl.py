"""How many GRPO steps a second, beside TRL's GRPOTrainer, on the same tiny model and the same two cores?

    python benchmarks/grpo_vs_trl.py [--json] [--steps N]

A random Llama (4 layers, hidden 128, vocabulary 512) that this script makes; 8 prompts x 8 completions of exactly 64
tokens a step; float32; the same reward. TRL runs in its own environment (benchmarks/peers/trl.sh makes it), generation
and training in turn, on two threads. Nereus runs the whole of itself: supervisor, one rollout unit, one trainer,
relay, reward service, each slot with one thread. The median of the steps after the first five counts. TRL's
experimental AsyncGRPOTrainer is no contestant: it streams weights to a vLLM server over NCCL. With stand-ins for both
on two such cores it took 3 s a step, three times as long as GRPOTrainer: the faster of the two is the one to beat.

The floor is arithmetic alone: 2 FLOPs a parameter and token to generate, 6 to train, at the machine's own matmul peak,
which is measured here. What is above it is overhead; the two parts are given apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nereus.runtime.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
TRL_PYTHON = ROOT / ".venv-peers/trl/bin/python"
PROMPTS, GROUP, NEW_TOKENS = 8, 8, 64
WARM_UP = 5
TIMEOUT_S = 900

JOB = """
[run]
name = "versus"
steps = {steps}
[cluster]
slots = 3
[model]
path = "{model}"
[data]
source = "{data}"
[reward]
function = "{reward}:digits"
[rollout]
layout = "d1t1p1"
group_size = {group}
max_prompt_tokens = 32
max_new_tokens = {new_tokens}
max_live = 64
[train]
layout = "d2t1p1"
groups_per_step = {prompts}
micro_batch_tokens = 8192
learning_rate = 1e-3
[checkpoint]
every = 0
[track]
tensorboard = false
report = false
"""

REWARD = """
def digits(completions, **columns):
    return [sum(char.isdigit() for char in text) / max(1, len(text)) for text in completions]
"""


def make_model(folder: Path, *, eos: bool) -> int:
    """Write the random model and a BPE tokenizer, return its size; without ``eos`` no completion ends early."""
    corpus = [f"{a} + {b} = {a + b}. the answer is {a + b} ." for a in range(0, 200, 3) for b in range(0, 200, 7)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<s>", "</s>"]
    tokenizer.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet)
    )
    ends = {"eos_token": "</s>"} if eos else {}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", **ends).save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2 if eos else None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def run_nereus(folder: Path, steps: int) -> dict[str, float]:
    """Run the job; return the median step and where its time went, in seconds."""
    model, data, reward = folder / "model", folder / "rows.jsonl", folder / "reward.py"
    make_model(model, eos=False)
    rows = [json.dumps({"prompt": f"{a} + {b} = ", "answer": ""}) for a in range(20) for b in range(20)]
    data.write_text("\n".join(rows) + "\n")
    reward.write_text(REWARD)
    job = folder / "job.toml"
    sizes = {"group": GROUP, "new_tokens": NEW_TOKENS, "prompts": PROMPTS}
    job.write_text(JOB.format(steps=steps, model=model, data=data, reward=reward, **sizes))
    run = folder / "run"
    command = [sys.executable, "-m", "nereus", "run", str(job), "--run-dir", str(run)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"the Nereus run failed: {done.stderr[-2000:]}{done.stdout[-2000:]}")
    rows_of_metrics = read_metrics(run / "metrics.jsonl")[WARM_UP:]
    lengths = {row["response_length/min"] for row in rows_of_metrics}
    if lengths != {float(NEW_TOKENS)}:
        raise SystemExit(f"completions were not all of {NEW_TOKENS} tokens: {sorted(lengths)}")
    names = ("step", "train", "forward_backward", "optimizer", "wait_for_batch", "generate")
    return {name: statistics.median(row[f"timing_s/{name}"] for row in rows_of_metrics) for name in names}


def run_trl(folder: Path, steps: int) -> float | None:
    """Run TRL on the same job; return the median step in seconds, or None if it is not installed."""
    if not TRL_PYTHON.exists():
        return None
    model = folder / "trl-model"
    make_model(model, eos=True)
    script = ROOT / "benchmarks/peers/trl_grpo.py"
    command = [str(TRL_PYTHON), str(script), str(model), *map(str, (steps, PROMPTS, GROUP, NEW_TOKENS))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"the TRL run failed: {done.stderr[-2000:]}")
    seconds: list[float] = json.loads(done.stdout.strip().splitlines()[-1])["step_s"]
    return statistics.median(seconds[WARM_UP - 1 :])


def matmul_peak() -> float:
    """Return the FLOP/s of a large float32 matmul on two threads."""
    torch.set_num_threads(2)
    a = torch.randn(1536, 1536)
    best = 0.0
    for _ in range(8):
        began = time.perf_counter()
        a @ a
        best = max(best, 2 * 1536**3 / (time.perf_counter() - began))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line")
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = make_model(folder / "size", eos=True)
        peak = matmul_peak()
        nereus = run_nereus(folder, given.steps)
        trl = run_trl(folder, given.steps)
    completions = PROMPTS * GROUP
    generated = completions * NEW_TOKENS
    floor_generate = 2 * parameters * generated / peak
    floor_train = 6 * parameters * (generated + completions * 8) / peak
    print(f"{completions} completions of {NEW_TOKENS} tokens a step, {parameters / 1e6:.2f} M parameters, two cores")
    print(f"{'':24}{'steps/s':>10}{'step s':>10}{'tokens/s':>12}")
    for title, step_s in (("Nereus", nereus["step"]), ("TRL GRPOTrainer", trl)):
        if step_s is None:
            print(f"{title:24}{'not installed: benchmarks/peers/trl.sh':>32}")
        else:
            print(f"{title:24}{1 / step_s:>10.2f}{step_s:>10.3f}{generated / step_s:>12,.0f}")
    ratio = trl / nereus["step"] if trl else None
    if ratio:
        print(f"{'ratio':24}{ratio:>10.2f}   (target 1.5, aim 2)")
    print(
        f"\nfloor at {peak / 1e9:.0f} GFLOP/s on both cores: generate {floor_generate:.3f} s, train {floor_train:.3f} s"
    )
    print(f"forward and backward {nereus['forward_backward']:.3f} s, optimizer {nereus['optimizer']:.3f} s (one core)")
    print(
        f"a group takes {nereus['generate']:.3f} s from grant to text; training waits {nereus['wait_for_batch']:.3f} s"
    )
    if given.json:
        figures = {
            "nereus": nereus,
            "trl_step_s": trl,
            "ratio": ratio,
            "parameters": parameters,
            "peak_flops": peak,
            "floor_generate_s": floor_generate,
            "floor_train_s": floor_train,
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
