"""How do real devices depart from their data sheets, operation by operation?

The figures are fitted to the public tables of ``benchmarks/data`` (``op_gemm_aiconfigurator.csv``,
``op_attention_aiconfigurator.csv``, ``collectives.csv``); the formulas are ours and finer than the planner's: a matrix
product is cut into tiles that fill the processors in waves, short sums and short sequences reach less, small messages
are all latency. Invariants (tests/sim/test_chips.py): products within 15 % of the tables' in the mean, attention and
all-reduces within 35 %; more work never takes less time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from nereus.core.cluster import Device

Array = npt.NDArray[np.float64]

TILE = 128
SHORT_TILE = 64
LEAST_DEPTH = 512
"""A sum is shared between processors in parts of at least this length."""


class Chip(Struct, frozen=True):
    """One kind of device."""

    processors: int
    gemm: float
    """Share of the peak that a large product reaches."""
    depth: float
    """Length of the sum at which half of that is reached."""
    gemm_bytes: float
    start_s: float
    """Of one kernel."""
    attention: float
    attention_length: float
    """Tokens at which half of ``attention`` is reached."""
    cache: float
    """Share of the memory's bandwidth at which cached keys and values are read."""
    cache_start_s: float
    link: float
    """Share of a link's bandwidth that a large collective reaches."""
    link_half_bytes: float
    """Bytes on the wire at which half of that is reached."""
    link_start_s: float
    """Of a collective, for each doubling of its members."""


CHIPS = {
    "A100": Chip(108, 0.80, 64.0, 0.65, 4e-6, 0.60, 1024.0, 0.70, 12e-6, 0.76, 3e6, 7e-6),
    "H100": Chip(132, 0.90, 256.0, 0.80, 2e-6, 0.60, 1024.0, 0.90, 12e-6, 0.80, 4e6, 4e-6),
    "H200": Chip(132, 0.90, 256.0, 0.80, 2e-6, 0.50, 512.0, 0.80, 12e-6, 0.80, 4e6, 6e-6),
    "MI250X": Chip(110, 0.55, 256.0, 0.60, 8e-6, 0.35, 1024.0, 0.55, 20e-6, 0.60, 6e6, 15e-6),
}
"""By the start of the device's name. No table has the MI250X: its shares are ours, lower all over."""


def chip_of(device: Device) -> Chip:
    """Return the figures of the device whose name matches best; those of the A100 for one that is not known."""
    return next((chip for name, chip in CHIPS.items() if name in device.name), CHIPS["A100"])


def product_s(chip: Chip, device: Device, m: Array, n: float, k: float) -> Array:
    """Return the seconds of products [m, k] x [k, n] in 16 bits, without the start of the kernel."""
    rows = np.where(m <= SHORT_TILE, SHORT_TILE, TILE)
    tiles = np.ceil(m / rows) * np.ceil(n / TILE)
    parts = np.maximum(1.0, np.minimum(np.floor(chip.processors / tiles), k / LEAST_DEPTH))
    waves = np.ceil(tiles / chip.processors) / (tiles / chip.processors)
    idle = np.where(tiles < chip.processors, np.maximum(1.0, chip.processors / (tiles * parts)), waves)
    padded = np.ceil(m / rows) * rows * np.ceil(n / TILE) * TILE
    reached = device.flops_per_s * chip.gemm * k / (k + chip.depth)
    computing = 2.0 * padded * k / reached * np.sqrt(idle)
    moving = 2.0 * (m * n + n * k + m * k) / (device.bytes_per_s * chip.gemm_bytes)
    seconds: Array = (computing**4 + moving**4) ** 0.25
    return seconds


def attention_s(chip: Chip, device: Device, tokens: Array, square: Array, heads: float, width: float) -> Array:
    """Return the seconds of causal attention over ``tokens`` in sequences whose squares sum up to ``square``."""
    mean = square / np.maximum(tokens, 1.0)
    flops = 2.0 * square * heads * width
    seconds: Array = flops / (device.flops_per_s * chip.attention) * (1.0 + chip.attention_length / np.maximum(mean, 1))
    return seconds


def all_reduce_s(chip: Chip, bytes_per_s: float, latency_s: float, members: int, size_bytes: Array) -> Array:
    """Return the seconds of an all-reduce of ``size_bytes`` among ``members``."""
    if members <= 1:
        return np.zeros_like(size_bytes)
    wire = 2.0 * (members - 1) / members * size_bytes
    start = (chip.link_start_s + latency_s / 4) * np.ceil(np.log2(members))
    seconds: Array = start + (wire + chip.link_half_bytes / 4 * wire / (wire + chip.link_half_bytes)) / (
        bytes_per_s * chip.link
    )
    return seconds
