"""Under which settings does the model show the facts that motivate changing parallelism at all?

The paper states, for Llama-3.1-8B training on 16 A100-64GB: d4t2p2 is faster than d4t4p1 at 2K tokens and runs out of
memory at 4K, where d4t4p1 fits; and the best degrees differ between 32 and 256 slots. It does not state micro-batch,
recomputation or what else is on the slots. So all of these are tried, with nothing adjusted to the outcome.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from nereus.control.candidates import Space, layouts
from nereus.control.cost import Passes, Recompute, Setups, pass_work
from nereus.control.efficiency import Efficiencies
from nereus.control.memory import MARGIN, MemoryCalibration, training_memory, weights_per_slot
from nereus.core.plan import Layout
from nereus.core.profiles import load_cluster, load_model

PLANS = (Layout(2, 2), Layout(4, 1))
BATCH = 128
COMPANY = {"nothing": 0.0, "generation": 2.0, "generation, reference": 4.0, "critic training": 18.0}
"""What else is resident on the slots, in bytes a parameter of the same layout."""


def priced(tokens: int, micro: int, again: Recompute, company: str, efficiencies: Efficiencies) -> dict[str, Any]:
    """Return seconds and bytes of d4t2p2 and d4t4p1."""
    shape, cluster = load_model("llama-3.1-8b"), load_cluster("a100-64g", 16)
    setups = Setups.grid([(layout, 4, micro, again) for layout in PLANS])
    work = pass_work(shape, cluster, setups, Passes(BATCH, float(BATCH * tokens), float(BATCH * tokens**2)))
    batches = BATCH / setups.dp / micro
    memory = training_memory(shape, setups, micro * tokens, batches)
    total = memory.resident_bytes() + memory.transient_bytes(MemoryCalibration())
    total = total + COMPANY[company] * weights_per_slot(shape, setups)
    return {
        "seconds": work.seconds(efficiencies).tolist(),
        "bytes": total.tolist(),
        "fits": (total * MARGIN <= cluster.device.memory_bytes).tolist(),
    }


def length_facts(efficiencies: Efficiencies) -> list[dict[str, Any]]:
    rows = list[dict[str, Any]]()
    for company, micro, again in itertools.product(COMPANY, (1, 2, 4), (Recompute.NONE, Recompute.FULL)):
        short, long = (priced(tokens, micro, again, company, efficiencies) for tokens in (2048, 4096))
        rows.append(
            {
                "also_resident": company,
                "micro_batch": micro,
                "recompute": again.name.lower(),
                "short": short,
                "long": long,
                "faster_at_2k": all(short["fits"]) and short["seconds"][0] < short["seconds"][1],
                "only_t4_fits_at_4k": long["fits"] == [False, True],
            }
        )
    return rows


def scale_facts(efficiencies: Efficiencies) -> list[dict[str, Any]]:
    """Return the fastest degrees that fit at 32 and 256 slots, for several batches and lengths."""
    shape = load_model("llama-3.1-8b")
    rows = list[dict[str, Any]]()
    for batch, tokens, again in itertools.product((256, 512, 1024), (2048, 4096), (Recompute.NONE, Recompute.FULL)):
        best = dict[int, str]()
        for slots in (32, 256):
            cluster = load_cluster("a100-64g", slots)
            plans = [
                (layout, slots // layout.slots, micro, again)
                for layout in layouts(shape, cluster, Space())
                for micro in (1, 2, 4, 8)
                if batch % (slots // layout.slots * micro) == 0
            ]
            if not plans:
                best[slots] = "none"
                continue
            setups = Setups.grid(plans)
            work = pass_work(shape, cluster, setups, Passes(batch, float(batch * tokens), float(batch * tokens**2)))
            memory = training_memory(shape, setups, setups.micro_batch * tokens, batch / setups.dp / setups.micro_batch)
            total = memory.resident_bytes() + memory.transient_bytes(MemoryCalibration())
            seconds = np.where(total * MARGIN <= cluster.device.memory_bytes, work.seconds(efficiencies), np.inf)
            layout, dp, micro, _ = plans[int(np.argmin(seconds))]
            best[slots] = f"d{dp}{layout} x{micro}" if np.isfinite(seconds).any() else "none"
        differ = best[32].split("t", 1)[-1].split(" ")[0] != best[256].split("t", 1)[-1].split(" ")[0]
        rows.append(
            {"batch": batch, "tokens": tokens, "recompute": again.name.lower(), "best": best, "differs": differ}
        )
    return rows


def show(name: str, efficiencies: Efficiencies) -> dict[str, Any]:
    """Print both tables and return them."""
    lengths, scales = length_facts(efficiencies), scale_facts(efficiencies)
    print(
        f"\nLlama-3.1-8B training, 16 A100-64GB, batch {BATCH}, {name} efficiencies; seconds and GB of d4t2p2 | d4t4p1"
    )
    print(f"{'also on the slots':22s}{'micro':>6}{'recompute':>10}{'2K':>34}{'4K':>34}  t2p2 wins 2K, only t4 fits 4K")
    for row in lengths:
        cells = [
            " | ".join(
                f"{seconds:5.2f} s {size / 1e9:5.1f}{' ' if fits else '!'}"
                for seconds, size, fits in zip(part["seconds"], part["bytes"], part["fits"], strict=True)
            )
            for part in (row["short"], row["long"])
        ]
        verdict = f"{'yes' if row['faster_at_2k'] else 'no'}, {'yes' if row['only_t4_fits_at_4k'] else 'no'}"
        setting = f"{row['also_resident']:22s}{row['micro_batch']:6d}{row['recompute']:>10}"
        print(f"{setting}{cells[0]:>34}{cells[1]:>34}  {verdict}")
    print("\nfastest degrees that fit (x micro-batch), policy training alone")
    for row in scales:
        setting = f"batch {row['batch']:5d} tokens {row['tokens']:5d} recompute {row['recompute']:5s}"
        verdict = "differs" if row["differs"] else "same"
        print(f"{setting}  32 slots {row['best'][32]:14s} 256 slots {row['best'][256]:14s} {verdict}")
    return {"lengths": lengths, "scales": scales}
