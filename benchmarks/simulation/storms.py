"""Does a run survive whatever fails, without losing or repeating a sample?

    make storms                                  # 100 seeds at 16 slots
    python benchmarks/simulation/storms.py --slots 512 --seeds 30 --mtbf-s 1800 --steps 100

Many storms of ``nereus/sim/storm.py``. Prints one line per seed that went wrong and the sums over all; exits with 1 if
any did.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter

import msgspec
import structlog

from nereus.sim.storm import storm, storm_job


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mtbf-s", type=float, default=200.0, help="mean seconds between failures of the pool")
    parser.add_argument("--json", action="store_true", help="also print one JSON object on the last line")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    config = storm_job(given.slots, given.steps)
    kinds, total, began = Counter[str](), Counter[str](), time.process_time()
    for seed in range(given.first, given.first + given.seeds):
        figures = msgspec.to_builtins(storm(config, seed, given.mtbf_s))
        wrong = figures.pop("wrong")
        total.update(figures)
        if wrong:
            kinds[wrong.partition(":")[0]] += 1
            print(f"seed {seed}: {wrong[:300]}", flush=True)
    result = {
        "slots": given.slots,
        "seeds": given.seeds,
        "mtbf_s": given.mtbf_s,
        "wrong": dict(kinds),
        **{name: round(value, 1) for name, value in total.items()},
        "cpu_s": round(time.process_time() - began, 1),
    }
    for name, value in result.items():
        print(f"{name:<12} {value}")
    if given.json:
        print(json.dumps(result))
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
