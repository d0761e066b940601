"""What are the processes of a run called on the bus?

A worker's name is bound to its key. Slots keep theirs whatever unit they host.
"""

from __future__ import annotations

from nereus.core.plan import SlotId

SUPERVISOR = "supervisor"
RELAY = "weights-0"
REWARD = "reward-0"
OPERATOR = "operator"
"""Whoever asks a running job for something from the command line."""


def slot_worker(slot: SlotId) -> str:
    """Return the name of the worker process that stands for ``slot``."""
    return f"slot-{slot}"


def slot_of(worker: str) -> SlotId | None:
    """Return the slot that ``worker`` stands for, or None for the relay and the reward service."""
    kind, _, number = worker.rpartition("-")
    return int(number) if kind == "slot" and number.isdigit() else None
