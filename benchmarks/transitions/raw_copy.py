"""How fast do processes of this host copy out of shared memory, with nothing else to do?

    python raw_copy.py BYTES PROCESSES

PROCESSES copy BYTES together, each its part, out of one shared file into memory of their own: first into new memory,
then again into the same, both times out of a mapping that they have read before; at last out of a mapping that each
copy makes and gives up, as a process must that is told of a file. Prints one JSON object: seconds of the slowest.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from typing import IO

import numpy as np

AGAIN = 3


def copy(handle: int, start: int, size: int, orders: IO[str], answers: IO[str]) -> None:
    def mapped() -> np.ndarray:
        return np.frombuffer(mmap.mmap(handle, 0, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)[start : start + size]

    source = mapped()
    int(source[:: mmap.PAGESIZE].sum())
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    target = np.frombuffer(memory, np.uint8)
    answers.write("ready\n")
    answers.flush()
    for order in orders:
        began = time.perf_counter()
        np.copyto(target, mapped() if order == "map\n" else source)
        answers.write(f"{time.perf_counter() - began}\n")
        answers.flush()


def main() -> None:
    if len(sys.argv) == 4:
        return copy(*map(int, sys.argv[1:]), sys.stdin, sys.stdout)
    total, processes = int(sys.argv[1]), int(sys.argv[2])
    part = max(mmap.PAGESIZE, total // processes // mmap.PAGESIZE * mmap.PAGESIZE)
    handle = os.memfd_create("raw-copy")
    os.ftruncate(handle, part * processes)
    np.frombuffer(mmap.mmap(handle, 0), np.uint8).fill(1)
    children = [
        subprocess.Popen(
            [sys.executable, __file__, str(handle), str(number * part), str(part)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[handle],
        )
        for number in range(processes)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    seconds = []
    for order in ["copy\n"] * (1 + AGAIN) + ["map\n"] * AGAIN:
        for child in children:
            assert child.stdin is not None
            child.stdin.write(order)
            child.stdin.flush()
        seconds.append(max(float(child.stdout.readline()) for child in children if child.stdout))
    for child in children:
        child.communicate("")
    found = {"new_s": seconds[0], "again_s": min(seconds[1 : 1 + AGAIN]), "mapped_s": min(seconds[1 + AGAIN :])}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
