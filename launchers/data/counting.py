"""Write the two files of the counting task: prompts whose answers grow, and demonstrations of all lengths.

``counting.jsonl`` is a curriculum, to be read in order (``data.shuffle = false``): first answers of about 8 numbers,
then more, at last of about 60. One prompt of each step is of any length, lest the policy forget, while all is short,
how long counts begin. ``counting_demonstrations.jsonl`` has an answer of every length, three times over, in
any order: a warm-start recipe teaches the form with it. Both are about the same problems, for there are no more.

Run by hand: ``python launchers/data/counting.py`` writes both beside itself; the same seeds give the same files.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

SHORTEST, SHORT, LONG, LONGEST = 6, 8, 60, 70
"""Numbers in an answer: the least, on average at first and at last, the most."""
STEPS, PER_STEP = 64, 12
"""Training steps of launchers/adaptive_quickstart.toml, and a few more; prompts of one."""
FLAT_STEPS, GROWING_STEPS = 20, 32
"""Steps with short answers, then steps in which they grow by the same factor each; then they stay long."""
SPREAD = 0.15
"""Answers of a step are up to this much shorter or longer than its mean."""
REPEATS = 3


def mean_length(step: int) -> float:
    """Return how many numbers an answer of ``step`` (from 0) has on average."""
    grown = min(1.0, max(0.0, (step - FLAT_STEPS) / GROWING_STEPS))
    return float(SHORT * (LONG / SHORT) ** grown)


def curriculum() -> list[int]:
    """Return the lengths of the answers of all steps, in order."""
    draws = random.Random(0)
    lengths = []
    for step in range(STEPS):
        around = (mean_length(step) * draws.uniform(1 - SPREAD, 1 + SPREAD) for _ in range(PER_STEP - 1))
        lengths += [*map(round, around), draws.randint(SHORTEST, LONGEST)]
    return lengths


def demonstrations() -> list[int]:
    """Return all lengths, mixed."""
    lengths = list(range(SHORTEST, LONGEST + 1)) * REPEATS
    random.Random(1).shuffle(lengths)
    return lengths


def row(length: int) -> str:
    """Return one line of a file."""
    answer = " ".join(map(str, range(length - 1, -1, -1)))
    return json.dumps({"prompt": f"Count down from {length - 1}:", "answer": answer}) + "\n"


def write(folder: Path) -> None:
    """Write both files into ``folder``."""
    for name, lengths in (("counting", curriculum()), ("counting_demonstrations", demonstrations())):
        (folder / f"{name}.jsonl").write_text("".join(map(row, lengths)), encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).parent)
