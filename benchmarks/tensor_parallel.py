"""What do tensor ranks pay for computing with DTensor, the published plan's usual way, instead of with plain tensors?

    python benchmarks/tensor_parallel.py [--json]

Two processes, joined by gloo, run forward and backward passes of the same small Llama model as t2p1: as the trainer
does it, and with torch's ``ColwiseParallel`` and ``RowwiseParallel``, both in this run. Micro-batches have shapes that
were seen before or are new, as they are when samples differ in length. DTensor keeps a decision for each shape of each
operation: what a new shape adds to the process's memory is told too. Sums are what ranks add up, forward and backward,
over four layers and the embedding. One thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SEEN, NEW = 20, 60
"""Micro-batches of one shape, and of a shape of their own each."""

ROWS = 2
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
WAYS = ("plain", "dtensor")


def plain(group: Any, rank: int) -> Any:
    """Return a function from token ids to the sum of squares of the last hidden states, as the trainer computes it."""
    import torch
    from transformers import LlamaConfig

    from nereus.backends.torch.model import build_meta, lay_out, materialize, tensor_specs
    from nereus.core.plan import Layout

    model, layout = build_meta(LlamaConfig(**SIZES), "sdpa", torch.float32), Layout(2, 1)
    entries, elements = lay_out(model, tensor_specs(model, layout, "float32"), layout, rank)
    flat = torch.randn(elements, generator=torch.Generator().manual_seed(1)) * 0.02
    stage, _ = materialize(model, entries, flat, layout, rank, tp_group=group, recompute=False)
    return lambda ids: stage(ids).square().sum()


def dtensor(group: Any, _rank: int) -> Any:
    """Return the same, by torch's own styles on transformers' model."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from transformers import AutoModelForCausalLM, LlamaConfig

    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), attn_implementation="sdpa").train().model
    kinds = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    styles: dict[str, Any] = {"embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    for path, style in model.config.base_model_tp_plan.items():
        if style in kinds:
            for layer in range(SIZES["num_hidden_layers"]):
                styles[path.replace("*", str(layer))] = kinds[style]()
    parallelize_module(model, DeviceMesh.from_group(group, "cpu"), styles)
    return lambda ids: model(input_ids=ids, use_cache=False).last_hidden_state.square().sum()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def work(way: str, rank: int, store: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    compute = globals()[way](dist.group.WORLD, rank)
    sizes: dict[str, list[float]] = {"seen": [], "new": []}

    def run(width: int) -> float:
        ids = torch.randint(0, SIZES["vocab_size"], (ROWS, width), generator=torch.Generator().manual_seed(width))
        began = time.perf_counter()
        compute(ids).backward()
        return time.perf_counter() - began

    for _ in range(3):
        run(128)
    sizes["seen"] = [run(128) for _ in range(SEEN)]
    before = resident_bytes()
    sizes["new"] = [run(128 + number - NEW // 2) for number in range(NEW)]
    grown = resident_bytes() - before
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run(128)
    sums = sum(event.count for event in seen.key_averages() if event.key == "gloo:all_reduce")
    again = [run(128 + number - NEW // 2) for number in range(NEW)]
    if rank == 0:
        found = {
            "seen_ms": 1e3 * sorted(sizes["seen"])[SEEN // 2],
            "new_ms": 1e3 * sorted(sizes["new"])[NEW // 2],
            "again_ms": 1e3 * sorted(again)[NEW // 2],
            "kb_a_shape": grown / NEW / 1e3,
            "sums": sums,
        }
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def measure(way: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--way", way, "--rank", str(rank), "--store", f"{folder}/store"],
                stdout=subprocess.PIPE,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                text=True,
            )
            for rank in range(2)
        ]
        outputs = [process.communicate(timeout=300)[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise SystemExit(f"{way}: a rank failed with code {[process.returncode for process in ranks]}")
    found: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON on the last line too")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        work(given.way, given.rank, given.store)
        return
    result: dict[str, Any] = {way: measure(way) for way in WAYS}
    print(f"{'':36}{'plain':>10}{'DTensor':>10}{'ratio':>8}")
    rows = {
        "seen_ms": "a shape, all the time [ms]",
        "new_ms": "a shape never seen [ms]",
        "again_ms": "all shapes seen before [ms]",
        "kb_a_shape": "memory a new shape [KB]",
        "sums": "sums over the ranks a micro-batch",
    }
    for key, name in rows.items():
        ours, theirs = (result[way][key] for way in WAYS)
        print(f"{name:36}{ours:10.1f}{theirs:10.1f}{theirs / ours:8.1f}")
    if given.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
