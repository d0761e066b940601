"""How fast do processes of this host send to each other over gloo, with nothing else to do?

    python raw_gloo.py BYTES PAIRS

PAIRS senders and as many receivers move BYTES together, each pair its part, with torch.distributed's send and recv over
loopback, out of and into memory that is there: once to warm up, then again. Prints one JSON object: seconds of the
slowest pair, at best. Nothing is summed, unlike in our state moves.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

AGAIN = 3
TIMEOUT = timedelta(seconds=300)


def member(rank: int, pairs: int, elements: int, store: str, answers: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2 * pairs, timeout=TIMEOUT)
    content = torch.ones(elements)
    slowest = []
    for _ in range(1 + AGAIN):
        dist.barrier()
        began = time.perf_counter()
        if rank < pairs:
            dist.send(content, rank + pairs)
        else:
            dist.recv(content, rank - pairs)
        took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        slowest.append(float(took))
    if rank == 0:
        Path(answers).write_text(json.dumps({"again_s": min(slowest[1:])}))
    dist.destroy_process_group()


def main() -> None:
    size, pairs = int(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="nereus-bench-") as folder:
        store, answers = str(Path(folder) / "store"), str(Path(folder) / "answer")
        mp.spawn(member, (pairs, size // pairs // 4, store, answers), nprocs=2 * pairs)
        sys.stdout.write(Path(answers).read_text() + "\n")


if __name__ == "__main__":
    main()
