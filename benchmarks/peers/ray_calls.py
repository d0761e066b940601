"""How long does a call of a Ray actor take? Runs in Ray's own environment; used by benchmarks/bus.py.

    ray_calls.py SECONDS BYTES

Prints one JSON line: the seconds that each call took, after a quarter of that time to warm up.
"""

from __future__ import annotations

import json
import sys
import time

import ray


@ray.remote
class Echo:
    """Gives back what it gets."""

    def call(self, value: bytes) -> bytes:
        return value


def main() -> None:
    seconds, size = float(sys.argv[1]), int(sys.argv[2])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    echo = Echo.remote()
    times: list[float] = []
    for length_s in (seconds / 4, seconds):
        times.clear()
        end = time.perf_counter() + length_s
        while (start := time.perf_counter()) < end:
            ray.get(echo.call.remote(bytes(size)))
            times.append(time.perf_counter() - start)
    ray.shutdown()
    print(json.dumps(times))


if __name__ == "__main__":
    main()
