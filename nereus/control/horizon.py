"""How long will what was seen last? The expected number of steps until a signal crosses again.

Invariants (tests/control/test_horizon.py): 1 before the first interval; changed by crossings only; between the shortest
and the longest interval seen; several signals at once: the smallest.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

WEIGHT = 0.5
"""Of the newest interval in the exponential moving average."""


class Horizon(Struct, frozen=True):
    """What is known of each signal's crossings: a value, replaced at every crossing."""

    expected: dict[str, float] = {}
    last_step: dict[str, int] = {}

    def crossed(self, signal: str, step: int) -> Horizon:
        """Return the horizon after ``signal`` crossed at ``step``; a crossing in the same step counts once."""
        before = self.last_step.get(signal)
        if before is not None and step < before:
            raise ValueError(f"signal {signal} crossed at step {step}, after a crossing at step {before}")
        expected = self.expected
        if before is not None and step > before:
            old = expected.get(signal, step - before)
            expected = {**expected, signal: (1 - WEIGHT) * old + WEIGHT * (step - before)}
        return Horizon(expected, {**self.last_step, signal: step})

    def steps(self, signals: Iterable[str]) -> float:
        """Return the smallest expectation of the signals that triggered; 1 for one never seen twice."""
        return min((self.expected.get(signal, 1.0) for signal in signals), default=1.0)
