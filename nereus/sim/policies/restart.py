"""What does it cost other systems to change the layout or the number of replicas of a training job?

Structural models after the systems' publications, beside ``control/move.py`` for ours: which bytes go through which
pipe, in which order. UCP (Universal Checkpointing, arXiv 2406.18820): save, convert to per-parameter atoms, restart,
load, all through storage. MCP (Megatron-Core distributed checkpoints, ``fully_reshardable``): save, restart, load.
Tenplex (SOSP 2024, arXiv 2312.05181): a tensor store in each host's memory; slices that differ cross the network.
Gemini (SOSP 2023): replicas of checkpoints in peers' host memory; restart and fetch. Oobleck (SOSP 2023, arXiv
2309.08125): missing layers are copied from replicas and pipelines are built anew.

What a system does besides moving bytes (stopping, starting, building groups) is one number for each, ``fixed_s``: set
so that the model meets one published figure, it makes the others predictions. Where a source is silent the choice
favours the system: nodes save, load and fetch at once, nothing is sent twice to a node, conversion reads and writes
once. Invariants (tests/sim/test_restart.py): more state or slower pipes never make a system faster; fitting meets the
figure unless moving alone takes longer.
"""

from __future__ import annotations

import enum

from msgspec import Struct

BYTES_PER_PARAMETER = 14
"""Of a training state: weights in 16 bits, a master and two moments in 32."""


class System(enum.StrEnum):
    """A published way to reconfigure."""

    UCP = "ucp"
    MCP = "mcp"
    TENPLEX = "tenplex"
    GEMINI = "gemini"
    OOBLECK = "oobleck"


class Pipes(Struct, frozen=True):
    """What bytes go through, in bytes/s."""

    node_storage: float = 2e9
    """A node to shared storage. Public logs of full training states: 2.4 GB/s a node (BigScience gpt-25B, 0.35 TB in
    18.0 s on 8 nodes), 2.3 (Qwen3-32B, 0.46 TB in 25 s on 8 nodes), 1.2 (BLOOM-176B, 2.3 TB in 40 s on 48 nodes)."""
    conversion: float = 0.8e9
    """To atoms, on one CPU node: BLOOM-176B, 2.3 TB in 2,875 s (bigscience-workshop/bigscience)."""
    node_network: float = 25e9
    """All adapters of a node in one direction."""
    node_host: float = 256e9
    """All slots of a node to its host's memory together."""


class Growth(Struct, frozen=True):
    """From ``nodes_before`` nodes to ``nodes_after``, each with ``node_bytes`` of state on its slots once it runs."""

    nodes_before: int
    nodes_after: int
    state_bytes: float
    """One copy of everything that is trained."""
    node_bytes: float
    """On the slots of one node, at most."""
    moves_all: bool = False
    """A change of layout: every node's state is another one; else only new nodes need state."""


def moving_s(system: System, growth: Growth, pipes: Pipes) -> float:
    """Return the seconds that ``system`` spends on bytes."""
    save = growth.state_bytes / (pipes.node_storage * growth.nodes_before)
    load = growth.node_bytes / pipes.node_storage
    needs_network = growth.moves_all or growth.nodes_after > growth.nodes_before
    fetch = growth.node_bytes / pipes.node_network if needs_network else 0.0
    host = growth.node_bytes / pipes.node_host
    match system:
        case System.UCP:
            return save + growth.state_bytes / pipes.conversion + load
        case System.MCP:
            return save + load
        case System.TENPLEX:
            return host + fetch + host
        case System.GEMINI:
            return fetch + host
        case System.OOBLECK:
            return fetch if fetch else growth.node_bytes / 2 / pipes.node_host


def fixed_s(system: System, growth: Growth, pipes: Pipes, published_s: float) -> float:
    """Return what ``system`` does besides moving bytes, if the published figure is to be met; at least 0."""
    return max(0.0, published_s - moving_s(system, growth, pipes))
