"""What does a row of the public generation table say, in the cost model's terms?

Static batches of dense 16-bit models (a batch of equal prompts is computed, then equal responses are decoded), and
whole runs of single requests whose lengths differ.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from public_tables.training import Row, Skipped, cluster_of, hardware_table, number, whole

from nereus.control.cost import COMPUTE_BYTES, STATE_BYTES, Recompute, Setups
from nereus.control.efficiency import COLUMN, Array, OperationClass, Work
from nereus.control.generation import generation_work, peak_context
from nereus.core.cluster import Cluster
from nereus.core.plan import Layout
from nereus.core.shape import ModelShape
from nereus.core.workload import Lengths, Workload

SHAPES = {
    "Meta-Llama-3-8B": ModelShape(32, 4096, 32, 8, 128, 14336, 128256, 8192),
    "Llama-3.1-8B": ModelShape(32, 4096, 32, 8, 128, 14336, 128256, 131072),
    "Qwen3-32B": ModelShape(64, 5120, 64, 8, 128, 25600, 151936, 40960, qk_norm=True),
    "Llama 3.1 8B": ModelShape(32, 4096, 32, 8, 128, 14336, 128256, 131072),
    "Llama-2-7b-hf": ModelShape(32, 4096, 32, 32, 128, 11008, 32000, 4096),
    "llama2-7b": ModelShape(32, 4096, 32, 32, 128, 11008, 32000, 4096),
    "llama-7b": ModelShape(32, 4096, 32, 32, 128, 11008, 32000, 2048),
    "Qwen2-7B": ModelShape(28, 3584, 28, 4, 128, 18944, 152064, 131072, qkv_bias=True),
    "Mistral-7B-v0.1": ModelShape(32, 4096, 32, 8, 128, 14336, 32000, 32768),
    "Llama-2-70b-hf": ModelShape(80, 8192, 64, 8, 128, 28672, 32000, 4096),
    "llama2-70b": ModelShape(80, 8192, 64, 8, 128, 28672, 32000, 4096),
    "Meta-Llama-3-70B": ModelShape(80, 8192, 64, 8, 128, 28672, 128256, 8192),
    "Qwen2-72B": ModelShape(80, 8192, 64, 8, 128, 29568, 152064, 131072, qkv_bias=True),
    "bloom-176b": ModelShape(70, 14336, 112, 112, 128, 57344, 250880, 2048, tied=True, gated=False),
    "bloom-7b1": ModelShape(30, 4096, 32, 32, 128, 16384, 250880, 2048, tied=True, gated=False),
}
"""Sizes from the models' published configurations, by the end of the name."""


def read(path: Path) -> tuple[list[Row], list[Skipped]]:
    hardware = hardware_table()
    rows, skipped = list[Row](), list[Skipped]()
    with path.open(encoding="utf-8") as file:
        for count, line in enumerate(csv.DictReader(file)):
            found = parse(line, hardware, f"G{count:05d}")
            if isinstance(found, Row):
                rows.append(found)
            else:
                skipped.append(Skipped(f"G{count:05d}", found))
    return rows, skipped


def parse(line: dict[str, str], hardware: list[dict[str, str]], row_id: str) -> Row | str:
    """Return the row, or why it cannot be predicted."""
    if not line["mode"].startswith("static"):
        return f"mode {line['mode'][:20]}"
    if "16" not in line["precision"]:
        return f"precision {line['precision']}"
    shape = SHAPES.get(line["model"].rpartition("/")[2])
    if shape is None:
        return f"model {line['model']}"
    gpus, tp, pp = whole(line["num_gpus"], 1), whole(line["tp"], 0), whole(line["pp"], 1)
    gpu = line["hardware"].upper().replace("-80GB", "")
    if line["hardware"] == "NVIDIA A100 GPU":
        gpu = "A100-40G"  # ours, the table does not say: 70B on four slows down as if the cache had run out of room
    found = cluster_of(gpu, gpus, hardware)
    if found is None:
        return f"hardware {line['hardware']}"
    prompt, response, batch = (whole(line[name], 0) for name in ("isl", "osl", "batch_or_concurrency"))
    if not (tp and prompt and response and batch):
        return "workload not stated"
    seconds = number(line["e2e_latency_s"])
    if not seconds > 0:
        seconds = batch * response / number(line["out_tok_per_s"])
    if not seconds > 0:
        return "no time"
    cluster, arch = found
    dp = max(1, gpus // (tp * pp))
    setups = Setups.grid([(Layout(tp, pp), dp, batch, Recompute.NONE)])
    workload = Workload(Lengths.fixed(prompt), Lengths.fixed(response), groups=batch)
    work = generation_work(shape, cluster, setups, workload, live_of(batch, shape, cluster, setups, workload))
    decode = float(work.unit_s[0, COLUMN[OperationClass.DECODE]])
    if seconds < decode:
        return "faster than reading the weights at peak bandwidth"
    engine = line["framework"].split(" (")[0]
    where = (engine, line["hardware"], str(gpus), line["model"], "", "", str(prompt), str(response))
    mean = prompt + response
    return row_of(row_id, engine, gpu, arch, line["model"], cluster, shape, setups, work, seconds, mean, batch, where)


def live_of(most: int, shape: ModelShape, cluster: Cluster, setups: Setups, workload: Workload) -> Array:
    """Return how many sequences a replica serves at once: nine tenths of its memory hold weights and their cache."""
    slots = setups.tp * setups.pp
    room = 0.9 * cluster.device.memory_bytes * slots - COMPUTE_BYTES * shape.parameters
    cached = COMPUTE_BYTES * shape.layers * shape.kv_values_per_token * peak_context(workload)
    return np.clip(room / cached, 1.0, float(most))


def row_of(
    row_id: str,
    engine: str,
    gpu: str,
    arch: str,
    model: str,
    cluster: Cluster,
    shape: ModelShape,
    setups: Setups,
    work: Work,
    seconds: float,
    mean_tokens: int,
    sequences: int,
    where: tuple[str, ...],
) -> Row:
    tp, pp, dp = (int(values[0]) for values in (setups.tp, setups.pp, setups.dp))
    weights = shape.layers * shape.active_matrix_parameters + shape.embedding_parameters
    return Row(
        row_id=row_id,
        source=engine,
        gpu=gpu,
        arch=arch,
        model=model,
        gpus=cluster.size,
        precision="16-bit",
        layout=f"d{dp}t{tp}p{pp}",
        configuration=(*where, str(tp), str(pp), str(sequences)),
        sweep=where,
        measured_s=seconds,
        out_of_memory=False,
        memory_gb=float("nan"),
        flops=2.0 * sequences * mean_tokens * weights / cluster.size,
        peak=cluster.device.flops_per_s,
        work=work,
        shape=shape,
        setups=setups,
        seq_len=mean_tokens,
        gbs=sequences,
        sequence_parallel=False,
        fused_attention=True,
        gradient_bytes=STATE_BYTES,
        framework=engine,
        cluster=cluster,
        testbed=f"{engine} {gpu}",
    )


def request_runs(path: Path) -> list[Row]:
    """Return the runs of a table of single requests: from the first arrival to the last answer, lengths as they were.

    Requests arrive faster than a run answers them, so that each counts as one batch.
    """
    runs: dict[str, list[dict[str, str]]] = {}
    with path.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            runs.setdefault(line["bench"], []).append(line)
    rows, hardware = list[Row](), hardware_table()
    for name, lines in runs.items():
        first = lines[0]
        shape = SHAPES.get(first["model"].rpartition("/")[2])
        found = cluster_of(first["gpu"], int(first["num_gpus"]), hardware)
        if shape is None or found is None:
            continue  # the fourth run is of a model with experts
        cluster, arch = found
        tp, dp = int(first["tp"]), int(first["dp"])
        prompts, responses = (Lengths.of([float(line[key]) for line in lines]) for key in ("in_tokens", "out_tokens"))
        workload = Workload(prompts, responses, groups=len(lines))
        setups = Setups.grid([(Layout(tp, 1), dp, 1, Recompute.NONE)])
        live = live_of(int(first["max_num_seqs"]), shape, cluster, setups, workload)
        work = generation_work(shape, cluster, setups, workload, live)
        seconds = max(float(line["arrival_s"]) + float(line["e2e_s"]) for line in lines)
        mean, count = round(prompts.mean + responses.mean), len(lines)
        where = ("vLLM", first["gpu"], first["num_gpus"], first["model"], "requests", "", "", "")
        rows.append(
            row_of(name, "vLLM", first["gpu"], arch, name, cluster, shape, setups, work, seconds, mean, count, where)
        )
    return rows
