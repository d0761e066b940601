"""Do single operators, measured by others, behave as the cost model's classes say?

Each operator is work of the same classes as a training step: products, memory traffic, kernel starts, links. The same
robust regression finds the classes' efficiencies on one half of a machine's rows and predicts the other half. What it
finds is the ceiling of each class: whole steps reach less. Rows are thinned copies of public tables.
"""

from __future__ import annotations

import csv
import hashlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from public_tables.training import DATA, cluster_of, hardware_table

from nereus.control.collectives import all_reduce_share
from nereus.control.cost import COMPUTE_BYTES, KERNEL_START_S
from nereus.control.efficiency import CLASSES, Efficiencies, OperationClass, Work, regress
from nereus.core.cluster import Cluster

Array = npt.NDArray[np.float64]
Line = dict[str, str]

SPREAD = 1.0
"""Prior standard deviation of a class on one machine: the tables decide."""


def product(line: Line, cluster: Cluster) -> Work:
    """Return a matrix product: FLOPs, the traffic of its three matrices, one kernel."""
    m, n, k = (float(line[name]) for name in "mnk")
    work, device = Work.none(1), cluster.device
    work.add(OperationClass.GEMM, 2.0 * m * n * k / device.flops_per_s)
    work.add(OperationClass.MEMORY, COMPUTE_BYTES * (m * n + n * k + m * k) / device.bytes_per_s)
    work.add(OperationClass.LAUNCH, KERNEL_START_S)
    return work


def attention(line: Line, cluster: Cluster) -> Work:
    """Return one layer's attention: of whole prompts, or of one new token after ``step`` cached ones."""
    batch, new, heads, kv_heads, width, cached = (
        float(line[name]) for name in ("batch_size", "isl", "num_heads", "num_kv_heads", "head_dim", "step")
    )
    work, device = Work.none(1), cluster.device
    work.add(OperationClass.LAUNCH, KERNEL_START_S)
    if line["phase"] == "context":
        work.add(OperationClass.ATTENTION, 2.0 * batch * new**2 * heads * width / device.flops_per_s)
        moved = COMPUTE_BYTES * batch * new * width * 2.0 * (heads + kv_heads)
        work.add(OperationClass.MEMORY, moved / device.bytes_per_s)
    else:
        cache = COMPUTE_BYTES * batch * (cached + new) * width * 2.0 * kv_heads
        work.add(OperationClass.CACHE, cache / device.bytes_per_s)
    return work


def collective(line: Line, cluster: Cluster) -> Work:
    """Return an all-reduce or a message over the links of its span."""
    count, size = float(line["num_gpus"]), float(line["size_bytes"])
    inside = count <= float(line["devices_per_node"])
    link = cluster.in_node if inside else cluster.cross_node
    work = Work.none(1)
    work.add(OperationClass.LATENCY, link.latency_s * np.ceil(np.log2(count)))
    reduces = line["op"] == "all_reduce"
    kind = "allreduce" if reduces else "p2p"
    wire = size * (float(all_reduce_share(count)) if reduces else 1.0)
    work.add(OperationClass(f"{kind}/{'in_node' if inside else 'cross_node'}"), wire / link.bytes_per_s)
    return work


TABLES: tuple[tuple[str, str, str, Callable[[Line, Cluster], Work]], ...] = (
    ("matrix product", "op_gemm_aiconfigurator.csv", "latency_ms", product),
    ("attention", "op_attention_aiconfigurator.csv", "latency_ms", attention),
    ("collective", "collectives.csv", "time_ms", collective),
)


def half(line: Line) -> int:
    return hashlib.sha256(repr(sorted(line.items())).encode()).digest()[0] % 2


def figures(least: int = 20) -> dict[str, Any]:
    """Return errors on the half never seen, and the efficiencies that all rows show, by operator and machine."""
    table, hardware = dict[str, Any](), hardware_table()
    for title, name, column, work_of in TABLES:
        with (DATA / name).open(encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
        by_machine: dict[str, list[tuple[Line, Work]]] = defaultdict(list)
        for line in lines:
            found = cluster_of(line["hardware"].upper(), 8, hardware)
            if found is not None and float(line[column]) > 0:
                kind = line.get("phase") or line.get("op") or ""
                machine = " ".join(f"{title} {kind} {line['hardware']}".split())
                by_machine[machine].append((line, work_of(line, found[0])))
        for machine, pairs in sorted(by_machine.items()):
            if len(pairs) >= least:
                table[machine] = _figures([line for line, _ in pairs], [work for _, work in pairs], column)
    return table


def _figures(lines: list[Line], works: list[Work], column: str) -> dict[str, Any]:
    unit_s = np.concatenate([work.unit_s for work in works])
    measured_s = np.array([float(line[column]) / 1e3 for line in lines])
    side = np.array([half(line) for line in lines])
    error = np.zeros(len(lines))
    for seen in (0, 1):
        known, unseen = side == seen, side != seen
        if known.any() and unseen.any():
            predicted = (unit_s[unseen] / efficiencies(unit_s[known], measured_s[known])).sum(axis=1)
            error[unseen] = np.abs(predicted / measured_s[unseen] - 1) * 100
    found = efficiencies(unit_s, measured_s)
    busy = [index for index in range(len(CLASSES)) if unit_s[:, index].any()]
    return {
        "n": len(lines),
        "mape": float(error.mean()),
        "median": float(np.median(error)),
        "efficiencies": {str(CLASSES[index]): float(found[index]) for index in busy},
    }


def efficiencies(unit_s: Array, measured_s: Array) -> Array:
    prior = np.log(np.array(Efficiencies.prior().values))
    spread = np.full((1, len(CLASSES) + 1), SPREAD)
    spread[0, -1] = 0.0
    offsets = regress(unit_s, np.zeros(len(measured_s)), measured_s, prior, spread)[0, :-1]
    found: Array = np.exp(prior + offsets)
    return found
