"""What is random in the simulated world? Everything that is, from one seed.

Each draw has a stream of its own, keyed by what it is for, so that one more draw here changes nothing there and equal
seeds give equal runs. Owner: ``simulation.py``. Invariants (tests/sim/test_noise.py): equal keys give equal draws,
others independent ones; the mean of jitter is 1; a straggler is slow for a while, not for ever.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Collection

from nereus.core.plan import SlotId

JITTER = 0.02
"""Ours: spread of a step's time when nothing changes, in the logarithm."""

SLOT_SPREAD = 0.012
"""Ours: spread between slots of one kind."""

STRAGGLING = 2e-4
"""Ours: probability that a slot begins to straggle in a step."""

STRAGGLE_STEPS = 8
SLOWDOWN = 1.25
"""Ours: a straggler takes this much longer, for so many steps."""


class Noise:
    """Draws by key. ``scale`` 0 makes a world without noise."""

    def __init__(self, seed: int, *, scale: float = 1.0) -> None:
        self._seed = seed
        self._scale = scale
        self._of_slot = functools.lru_cache(maxsize=None)(self._slot_factor)
        self._began = functools.lru_cache(maxsize=65536)(self._begins)

    def stream(self, *key: object) -> random.Random:
        """Return the random stream of ``key``."""
        return random.Random(f"{self._seed}/{'/'.join(map(str, key))}")

    def jitter(self, *key: object) -> float:
        """Return a factor with mean 1."""
        sigma = JITTER * self._scale
        return self.stream("jitter", *key).lognormvariate(-sigma * sigma / 2, sigma) if sigma else 1.0

    def fragments(self, step: int) -> float:
        """Return the factor by which memory is fragmented: a few per cent."""
        return 1.0 + self._scale * self.stream("fragments", step).uniform(0.005, 0.03)

    def slowest(self, slots: Collection[SlotId], step: int) -> float:
        """Return the factor by which the slowest of ``slots`` is slower than a typical one in ``step``."""
        if not self._scale or not slots:
            return 1.0
        lagging = any(self._began(slot, step // STRAGGLE_STEPS) for slot in slots)
        return max(map(self._of_slot, slots)) * (SLOWDOWN if lagging else 1.0)

    def _slot_factor(self, slot: SlotId) -> float:
        return self.stream("slot", slot).lognormvariate(0.0, SLOT_SPREAD * self._scale)

    def _begins(self, slot: SlotId, period: int) -> bool:
        return self.stream("straggler", slot, period).random() < STRAGGLING * STRAGGLE_STEPS
