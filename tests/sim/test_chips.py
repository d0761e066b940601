"""The simulated devices behave as public tables of single operators say."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nereus.core.cluster import Device
from nereus.sim.chips import CHIPS, all_reduce_s, attention_s, chip_of, product_s

DATA = Path(__file__).parents[2] / "benchmarks" / "data"

DEVICES = {
    "a100_sxm": (Device("A100", 80e9, 312e12, 2039e9), 300e9),
    "h100_sxm": (Device("H100", 80e9, 989e12, 3350e9), 450e9),
    "h200_sxm": (Device("H200", 141e9, 989e12, 4800e9), 450e9),
}


def _rows(name: str, hardware: str) -> Iterator[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8") as file:
        yield from (row for row in csv.DictReader(file) if row["hardware"] == hardware)


def _mean_error(pairs: list[tuple[float, float]]) -> float:
    return float(np.mean([abs(ours / measured - 1) for ours, measured in pairs]))


@pytest.mark.parametrize("hardware", DEVICES)
def test_matrix_products_take_what_the_table_says(hardware: str) -> None:
    device, _ = DEVICES[hardware]
    chip = chip_of(device)
    pairs = []
    for row in _rows("op_gemm_aiconfigurator.csv", hardware):
        if row["dtype"] == "bfloat16":
            m, n, k = (float(row[name]) for name in "mnk")
            ours = float(product_s(chip, device, np.array([m]), n, k)[0]) + chip.start_s
            pairs.append((ours, float(row["latency_ms"]) / 1e3))
    assert len(pairs) > 300
    assert _mean_error(pairs) < 0.15


@pytest.mark.parametrize("hardware", DEVICES)
def test_attention_takes_about_what_the_table_says(hardware: str) -> None:
    device, _ = DEVICES[hardware]
    chip = chip_of(device)
    pairs = []
    for row in _rows("op_attention_aiconfigurator.csv", hardware):
        if row["phase"] == "context" and row["attn_dtype"] == row["kv_dtype"] == "bfloat16":
            batch, new, heads, width = (float(row[name]) for name in ("batch_size", "isl", "num_heads", "head_dim"))
            tokens, square = np.array([batch * new]), np.array([batch * new * new])
            ours = float(attention_s(chip, device, tokens, square, heads, width)[0]) + 1e-5
            pairs.append((ours, float(row["latency_ms"]) / 1e3))
    assert len(pairs) > 100
    assert _mean_error(pairs) < 0.35


@pytest.mark.parametrize("hardware", DEVICES)
def test_large_all_reduces_take_about_what_the_table_says(hardware: str) -> None:
    device, link = DEVICES[hardware]
    chip = chip_of(device)
    pairs = []
    for row in _rows("collectives.csv", hardware):
        members, size = int(row["num_gpus"]), float(row["size_bytes"])
        if row["op"] == "all_reduce" and members <= int(row["devices_per_node"]) and size >= 1e6:
            ours = float(all_reduce_s(chip, link, 9e-6, members, np.array([size]))[0])
            pairs.append((ours, float(row["time_ms"]) / 1e3))
    assert len(pairs) > 20
    assert _mean_error(pairs) < 0.35


@pytest.mark.parametrize("name", CHIPS)
def test_more_work_never_takes_less_time(name: str) -> None:
    device = Device(name, 80e9, 300e12, 2e12)
    rows = np.array([128.0, 256.0, 1024.0, 4096.0, 16384.0])
    assert np.all(np.diff(product_s(CHIPS[name], device, rows, 4096, 4096)) > 0)
    sizes = np.array([1e3, 1e5, 1e7, 1e9])
    assert np.all(np.diff(all_reduce_s(CHIPS[name], 300e9, 9e-6, 8, sizes)) > 0)
    assert float(all_reduce_s(CHIPS[name], 300e9, 9e-6, 1, sizes).sum()) == 0.0
