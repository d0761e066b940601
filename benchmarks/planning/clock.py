"""How fast is this machine? One figure beside each table of milliseconds, so that tables of two machines compare."""

from __future__ import annotations

import time


def calibration_s(repeats: int = 5) -> float:
    """Return the least seconds of ``sum(range(10**7))``; about 0.2 on a present desktop core."""
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        sum(range(10**7))
        taken.append(time.perf_counter() - began)
    return min(taken)


def calibrated(seconds: float) -> str:
    return f"calibration: sum(range(10**7)) takes {seconds:.2f} s here; divide by it to compare machines"
