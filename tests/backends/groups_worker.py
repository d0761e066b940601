"""What happens to process groups when a member dies? ``python groups_worker.py FOLDER STORE`` forks three slots.

Slots 3, 5 and 9 form a group; 9 is killed; the others leave it as soon as an operation fails, and form a new one.
Each slot writes ``FOLDER/<slot>.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from forking import run_slots

from nereus.backends.torch.groups import connect_store, join_world, leave_group, make_group
from nereus.errors import TransitionError

SLOTS = (3, 5, 9)
VICTIM = 9


def raises(operation: object, kind: type[Exception]) -> str:
    try:
        operation()  # type: ignore[operator]
    except kind as error:
        return str(error)
    return ""


def live(folder: Path, slot: int, address: str) -> None:
    join_world(slot)
    join_world(slot)
    found: dict[str, object] = {"other_slot": raises(lambda: join_world(slot + 1), ValueError)}
    found["default_world"] = raises(lambda: dist.all_reduce(torch.ones(1)), RuntimeError)
    store = connect_store(address, timeout_s=60)
    group = make_group(store, "1/all", SLOTS, slot, backend="gloo", timeout_s=60)
    value = torch.tensor([float(slot)])
    dist.all_reduce(value, group=group)
    found["sum"] = value.item()
    dist.broadcast(value.fill_(slot), 5, group=group)
    found["from_5"] = value.item()
    if slot == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        while True:
            dist.all_reduce(value, group=group)
    except RuntimeError as error:
        found["error"] = str(error)[:200]
        traceback.clear_frames(error.__traceback__)
    leave_group(group)
    leave_group(group)
    del group
    found["freed_s"] = time.monotonic() - began
    group = make_group(store, "2/survivors", (5, 3), slot, backend="gloo", timeout_s=60)
    value = torch.tensor([float(slot)])
    dist.all_reduce(value, group=group)
    found["survivors_sum"] = value.item()
    began = time.monotonic()
    alone = lambda: make_group(store, f"3/{slot}", (slot, 77), slot, backend="gloo", timeout_s=2)  # noqa: E731
    found["absent_member"] = raises(alone, TransitionError)
    found["absent_s"] = time.monotonic() - began
    (folder / f"{slot}.json").write_text(json.dumps(found))


def main() -> None:
    run_slots(SLOTS, lambda slot: live(Path(sys.argv[1]), slot, sys.argv[2]), modules=())


if __name__ == "__main__":
    main()
