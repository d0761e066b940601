"""How are the trace files of nereus/sim/traces made?

    python benchmarks/simulation/build_traces.py TABLES [--out FOLDER]

TABLES holds rl_steps.csv, gpu_availability.csv, response_lengths_sample.csv and failures.csv, collected from public
repositories and papers; every trace names the repository, path and commit its numbers come from. What a source does
not state is chosen here, before any plan is made for it, and said in the trace's note.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from nereus.sim.generators import drift_walk, failures, growth, slot_walk
from nereus.sim.public import interruptions_per_slot_s, read_lengths, read_requests, read_supply
from nereus.sim.trace import StepLengths, StepSupply, Trace, write_trace

PAPER = "Nereus paper (arXiv 2609.34645), evaluation under drift and long run"
FIRST, LAST = StepLengths(1147.5, 1339.0), StepLengths(3722.0, 4072.0)
COURSE = "The paper gives the ends of the lengths and the range of slots; the course between them is ours."
H20 = "terrense/qwen3-8b-grpo-dapo-lab, experiments/"
BAMBOO = "uclasystem/bamboo@8080929328, traces/"
PLAY_VERL = "dingxianzhong/play-verl@7716a615fc, logs/"


def paper() -> Iterator[Trace]:
    """Yield the paper's traces and two more like its first one."""
    slots = (StepSupply(0, 8), StepSupply(5, 16), StepSupply(10, 32), StepSupply(18, 24))
    yield Trace("paper-drift-1", PAPER, growth(FIRST, LAST, 25), step_supply=slots, note=COURSE)
    sizes = (8, 16, 24, 32)
    for index, shape in ((2, "sigmoid"), (3, "late")):
        yield Trace(
            f"paper-drift-{index}",
            PAPER,
            growth(FIRST, LAST, 25, shape=shape, noise=0.05, seed=index),  # type: ignore[arg-type]
            step_supply=slot_walk(25, sizes, hold=5, seed=index, start=16),
            held_out=True,
            note=f"{COURSE} Lengths {shape}, 5 % noise, a walk over {sizes} slots, seed {index}.",
        )
    spread = FIRST.p95_tokens / FIRST.mean_tokens
    doubling = tuple(StepSupply(step, 32 << index) for index, step in enumerate((0, 170, 340, 510, 680, 850)))
    yield Trace(
        "paper-growth",
        PAPER,
        growth(StepLengths(500.0, 500.0 * spread), StepLengths(8000.0, 8000.0 * spread), 1000),
        step_supply=doubling,
        note="500 to 8,000 generated tokens over 1,000 steps up to 1,024 slots are the paper's; the linear course, "
        "the spread (that of its first drift trace) and the steps at which the pool doubles are ours.",
    )


def public(tables: Path) -> Iterator[Trace]:
    """Yield traces from the public logs."""
    steps, pools = tables / "rl_steps.csv", tables / "gpu_availability.csv"
    inferred = "p95 is inferred from the logged mean and longest response (nereus/sim/public.py)."
    logs = (
        ("h20-grpo", "h20-qwen3-8b-grpo", 128, 8192, H20 + "R1_grpo_baseline/metrics@cae4bca9a2", False),
        ("h20-drgrpo", "h20-qwen3-8b-drgrpo", 128, 8192, H20 + "E_drgrpo_scaled/metrics@56ec6025ae", False),
        ("h20-dapo", "h20-qwen3-8b-dapo", 128, 8192, H20 + "M20_dapo/metrics@25ba57b415", True),
        ("verl-ppo-7b", "playverl-ppo-7b-min", 512, 1024, PLAY_VERL + "verl_qwen2_7b_min.log", False),
        ("verl-grpo-shrinking", "playverl-grpo-0.5b", 512, 192, PLAY_VERL + "verl_grpo_qwen2.5b_8gpu.log", True),
    )
    for name, run, samples, limit, source, held_out in logs:
        lengths = read_lengths(steps, run, samples=samples, limit=limit)
        yield Trace(name, source, lengths, held_out=held_out, note=inferred)
    grown = growth(FIRST, LAST, 25)
    lengths_note = "Lengths as in paper-drift-1."
    a100 = read_supply(pools, "bamboo-gcp-a100-us-east1b", start_s=0, end_s=36_000, least=8)
    yield Trace("spot-gcp-a100", BAMBOO + "gcloud/a100x1-east1b.txt", grown, a100, note=f"First 10 h. {lengths_note}")
    p3 = read_supply(pools, "bamboo-aws-p3", end_s=36_000, least=8)
    yield Trace("spot-aws-p3", BAMBOO + "p3-trace.csv", grown, p3, held_out=True, note=f"First 10 h. {lengths_note}")
    scarce = read_supply(pools, "parcae-trace_lh_80_90", least=8)
    source = "JF-D/Parcae, aws/traces/gpt-1.5b/trace_lh_80_90.txt"
    yield Trace("spot-aws-scarce", source, grown, scarce, held_out=True, note=f"1 h. {lengths_note}")
    sailor = read_supply(pools, "sailor-a100_trace_original", least=8)
    source = "eth-easl/sailor@cf2c8e3cc5, sailor/Controller/trace_based/a100_trace_original.json"
    yield Trace("spot-gcp-a100-small", source, grown, sailor, note=f"1.45 h. {lengths_note}")
    chat = read_requests(tables / "response_lengths_sample.csv", "azure2023-conv", limit=1024)
    drift = drift_walk(60, ("gemm", "decode", "all"), hold=10, spread=0.3, seed=7)
    source = "Azure/AzurePublicDataset@b469a113ce, AzureLLMInferenceTrace_conv.csv"
    yield Trace("chat-slow-devices", source, (chat,), efficiency=drift, note="Speeds: drift_walk, seed 7.")
    rate = interruptions_per_slot_s(tables / "failures.csv", "llama3-paper")
    every_s = 1 / (rate * 512)
    course = failures(86_400.0 * 7, every_s=every_s, seed=11, kinds=("kill", "kill", "hang", "reclaim"))
    source = "Llama 3 (arXiv 2407.21783) Table 5: 419 unexpected interruptions, 16,384 GPUs, 54 days"
    note = (
        f"A week of 512 slots, one interruption in {every_s / 3600:.0f} h in the mean; kinds 2:1:1 are ours, seed 11."
    )
    yield Trace("failures-512", source, failures=course, note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "nereus" / "sim" / "traces")
    arguments = parser.parse_args()
    for trace in (*paper(), *public(arguments.tables)):
        write_trace(trace, arguments.out / f"{trace.name}.json")
        print(f"{trace.name}: {len(trace.steps)} steps, {len(trace.supply) + len(trace.step_supply)} sizes of the pool")


if __name__ == "__main__":
    main()
