"""Which device is a slot's?

Slots of a node are numbered one after the other, as its devices are: slot ``n`` has the device of number ``n`` modulo
how many its process sees. Owner: the backends, once for each process. Not yet run with more than one GPU.
"""

from __future__ import annotations

import torch

from nereus.core.plan import SlotId


def device_of(kind: str, slot: SlotId) -> torch.device:
    """Return the device of ``slot`` and make it the one that this process's kernels and collectives use."""
    if kind != "cuda" or not torch.cuda.is_available():
        return torch.device(kind)
    device = torch.device(kind, slot % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
