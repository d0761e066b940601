"""What does a row of a public training table say, in the cost model's terms?

Rows are read as their sources state them; what a source leaves open is filled by the rules below, the same for all
rows, and counted. A row that cannot be predicted says why.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from nereus.control.cost import COMPUTE_BYTES, STATE_BYTES, Passes, Recompute, Setups, Sharding, pass_work
from nereus.control.efficiency import Work
from nereus.core.cluster import Cluster, Device, Link, uniform_nodes
from nereus.core.plan import Layout
from nereus.core.shape import ModelShape

DATA = Path(__file__).parents[1] / "data"

UNGATED = ("gpt", "bloom", "mpt", "megatron", "nemotron", "starcoder", "opt", "falcon")
GATED = ("llama", "qwen", "mistral")
"""Parts of model names whose feed-forward has two matrices, unless the name has one of the others; all else has a gate.
"""


UNFUSED = (
    ("bigscience", ""),
    ("amp-trials", ""),
    ("megatron-sc21", ""),
    ("korthikanti-2022", ""),
    ("sailor-validation", ""),
    ("jax-toolbox-pax", "BF16"),
)
"""Sources older than fused attention or built without it, with the precision text that says so ("" for all)."""

SPLIT_ONLY = ("bigscience-tr11", "bigscience-v100", "amp-trials", "sailor-validation", "megatron-sc21")
"""Sources whose tensor-parallel ranks each keep whole norms and residuals: no sequence parallelism."""

WINDOW = {"mistral-7b": 4096}
"""Tokens that attention looks back, by the start of the model's name."""

MESHED = ("ascend", "cdna3", "cdna4")
"""Architectures without a switch in the node: a slot has a part of its bandwidth to each of the others."""

TR11_HEADS = {14400: 96}
"""bigscience-tr11 states the heads of this width once, at the head of a section (lines 390 and 428 of its file)."""


class Row(NamedTuple):
    """One measured training configuration."""

    row_id: str
    source: str
    gpu: str
    arch: str
    model: str
    gpus: int
    precision: str
    layout: str
    configuration: tuple[str, ...]
    sweep: tuple[str, ...]
    measured_s: float
    out_of_memory: bool
    memory_gb: float
    flops: float
    """Model FLOPs of a step per GPU: 6 N + causal attention."""
    peak: float
    work: Work
    shape: ModelShape
    setups: Setups
    seq_len: int
    gbs: int
    sequence_parallel: bool
    fused_attention: bool
    gradient_bytes: float
    framework: str
    cluster: Cluster
    testbed: str
    """One revision of the software, with its stated options, on one kind of machine."""


class Skipped(NamedTuple):
    row_id: str
    why: str


def number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return float("nan")


def whole(text: str | None, default: int) -> int:
    value = number(text)
    return int(value) if value == value and value >= 1 else default


def hardware_table() -> list[dict[str, str]]:
    with (DATA / "hardware.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cluster_of(gpu: str, gpus: int, table: list[dict[str, str]]) -> tuple[Cluster, str] | None:
    """Return the cluster that stands behind a row's GPU name, and its architecture."""
    for entry in table:
        if entry["match"] in gpu:
            numbers = {name: float(entry[name]) for name in entry if name not in ("match", "arch", "source")}
            device = Device(
                gpu, numbers["memory_gb"] * 1e9, numbers["peak_tflops"] * 1e12, numbers["memory_gb_s"] * 1e9
            )
            in_node, cross = numbers["in_node_gb_s"] * 1e9, numbers["cross_node_gb_s"] * 1e9
            nodes = uniform_nodes(gpus, int(numbers["slots_per_node"]))
            return Cluster(entry["match"], device, nodes, Link(9e-6, in_node), Link(20e-6, cross)), entry["arch"]
    return None


def precision_class(text: str, source: str) -> str:
    """Return what matrix products are computed in; MLPerf submissions mostly use 8 bits, also where logs do not say."""
    lowered = text.lower()
    if not lowered and source.startswith("mlperf"):
        return "unstated"
    if "fp4" in lowered:
        return "fp4"
    if "fp8" in lowered or "float8" in lowered:
        return "fp8"
    return "16-bit" if "16" in lowered or not lowered else "32-bit"


def recompute_of(text: str, source: str) -> Recompute:
    lowered = text.lower()
    if "selective" in lowered and source == "torchtitan":
        return Recompute.ALTERNATE
    if "selective" in lowered or "minimal" in lowered:
        return Recompute.ATTENTION
    return Recompute.FULL if lowered in ("full", "recompute", "offload") else Recompute.NONE


def sharding_of(text: str) -> Sharding:
    lowered = text.lower()
    if lowered.endswith(("x1", " fsdp1")) or ("zero1 group" in lowered and not lowered.endswith("-1")):
        return Sharding.NONE  # shared by nobody, or by the slots of one node, which gather at little cost
    if any(part in lowered for part in ("fsdp", "full_shard", "hsdp", "zero (no pp)")):
        return Sharding.PARAMETERS  # 52B of ZeRO without tensor or pipeline degrees fit on 32 GB in no other way
    if "stage2" in lowered or "grad_op" in lowered:
        return Sharding.GRADIENTS
    if any(part in lowered for part in ("zero-1", "zero1", "dist-opt", "stage1")):
        return Sharding.OPTIMIZER
    return Sharding.NONE


def state_of(source: str, framework: str, stated: Sharding) -> tuple[Sharding, float]:
    """Return what replicas share and the bytes of a gradient, by the habits of the software that a source names.

    FlagScale's and Megatron's recipes in flagperf share the optimizer without saying so: 7B on eight slots of 80 GB fit
    in no other way. Paddle's fp16 level O2 keeps 16-bit gradients.
    """
    if source == "flagperf" and framework.startswith(("flagscale", "megatron")) and stated is Sharding.NONE:
        return Sharding.OPTIMIZER, STATE_BYTES
    return stated, COMPUTE_BYTES if framework.startswith("paddle") else STATE_BYTES


def attended(seq_len: int, window: int) -> float:
    """Return the square of the length with equal causal attention, when each token sees ``window`` tokens at most."""
    return float(seq_len**2 if seq_len <= window else 2 * window * seq_len - window**2)


def shape_of(row: dict[str, str]) -> ModelShape | None:
    """Return the model's sizes: 128-wide heads, a feed-forward of 4 hidden and 51,200 tokens where not stated."""
    layers, hidden = whole(row["layers"], 0), whole(row["hidden"], 0)
    if not layers or not hidden:
        return None
    heads = whole(row["heads"], TR11_HEADS.get(hidden, max(1, hidden // 128)))
    name = row["model"].lower()
    gated = any(part in name for part in GATED) or not any(part in name for part in UNGATED)
    ffn = whole(row["ffn"], 4 * hidden if not gated else int(8 * hidden / 3))
    vocab = whole(row["vocab"], 51200)
    return ModelShape(layers, hidden, heads, whole(row["kv_heads"], heads), hidden // heads, ffn, vocab, 0, gated=gated)


def read(path: Path) -> tuple[list[Row], list[Skipped]]:
    """Read a table of the format of ``train_layouts.csv``."""
    hardware = hardware_table()
    rows, skipped = list[Row](), list[Skipped]()
    with path.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            read_row = parse(line, hardware)
            if isinstance(read_row, Row):
                rows.append(read_row)
            else:
                skipped.append(Skipped(line.get("row_id", "?"), read_row))
    return rows, skipped


def parse(line: dict[str, str], hardware: list[dict[str, str]]) -> Row | str:
    """Return the row, or why it cannot be predicted."""
    flags = line.get("flags", "") or ""
    memory = line.get("mem_gb", "") or ""
    out_of_memory = memory == "OOM" or "oom" in flags
    if line.get("dense", "1") == "0":
        return "not dense"
    if flags and not out_of_memory:
        return f"suspicious: {flags}"
    if line.get("task", "") not in ("", "pretrain", "sft", "sft full"):
        return f"task {line['task']}"
    if "het" in line["gpu"] or "+" in line["gpu"]:
        return "mixed hardware"
    if "transgan" in line["model"]:
        return "not a language model"
    step = number(line["step_time_s"])
    if not step > 0 and not out_of_memory:
        return "no step time"
    if f"grad all-reduce part {line['step_time_s']};" in line.get("note", ""):
        return "suspicious: the step is its own gradient sum"
    tp, pp = whole(line["tp"], 0), whole(line["pp"], 0)
    cp, gpus = whole(line["cp"], 1), whole(line["gpus"], 0)
    if not tp or not pp or not gpus:
        return "layout not stated"
    shape = shape_of(line)
    found = cluster_of(line["gpu"], gpus, hardware)
    if shape is None:
        return "model sizes not stated"
    if found is None:
        return f"unknown hardware {line['gpu']}"
    cluster, arch = found
    if arch in MESHED and tp > 1:
        part = (min(tp, cluster.slots_per_node) - 1) / (cluster.slots_per_node - 1)
        link = Link(cluster.in_node.latency_s, cluster.in_node.bytes_per_s * part)
        cluster = structs.replace(cluster, in_node=link)
    dp = whole(line["dp"], max(1, gpus // (tp * pp * cp)))
    seq_len, gbs = whole(line["seq_len"], 0), whole(line["gbs"], 0)
    if not seq_len or not gbs:
        return "workload not stated"
    micro_batch = min(whole(line["mbs"], 1), max(1, gbs // dp))
    if line["source"] == "torchtitan" and pp > 1:
        micro_batch = 1  # the source states the batch of a replica, which its pipeline cuts into single sequences
    framework = line.get("framework", "") or ""
    shared, gradient_bytes = state_of(line["source"], framework, sharding_of(line["sharding"]))
    setups = Setups.grid(
        [(Layout(tp, pp), dp, micro_batch, recompute_of(line["recompute"], line["source"]))],
        sharding=shared,
        cp=cp,
        vp=whole(line["vp"], 1),
    )
    sequence_parallel = tp > 1 and line["source"] not in SPLIT_ONLY
    window = next((size for name, size in WINDOW.items() if line["model"].lower().startswith(name)), seq_len)
    fused = not any(line["source"].startswith(name) and text in ("", line["precision"]) for name, text in UNFUSED)
    work = pass_work(
        shape,
        cluster,
        setups,
        Passes(gbs, float(gbs) * seq_len, float(gbs) * attended(seq_len, window)),
        pipeline_outermost=True,
        sequence_parallel=sequence_parallel,
        fused_attention=fused,
    )
    tokens = float(gbs) * seq_len
    attention = 6.0 * shape.layers * seq_len * shape.heads * shape.head_dim
    flops = tokens * (6.0 * (shape.layers * shape.active_matrix_parameters + shape.embedding_parameters) + attention)
    same = ("gpu", "gpus", "layers", "hidden", "ffn", "seq_len", "gbs", "mbs", "tp", "pp", "dp", "cp", "vp")
    kept = tuple(str(whole(line[k], 1)) if k != "gpu" else line[k] for k in same)
    sweep = tuple(str(line[k]) for k in ("source", "gpu", "gpus", "model", "layers", "hidden", "seq_len", "gbs"))
    return Row(
        line["row_id"],
        line["source"],
        line["gpu"],
        arch,
        line["model"],
        gpus,
        precision_class(line["precision"], line["source"]),
        f"d{dp}t{tp}p{pp}" + (f"c{cp}" if cp > 1 else ""),
        (*kept, precision_class(line["precision"], line["source"]), line["sharding"], line["recompute"]),
        sweep,
        step,
        out_of_memory,
        number(memory),
        flops / gpus,
        cluster.device.flops_per_s,
        work,
        shape,
        setups,
        seq_len,
        gbs,
        sequence_parallel,
        fused,
        gradient_bytes,
        framework,
        cluster,
        " ".join(line.get(name, "") or "" for name in ("source", "framework", "commit", "precision", "gpu")),
    )
