"""Has the world changed enough to think again? Signals, their references, and the triggers.

Owner of the drift rule: a signal triggers when it is farther than its tolerance from the value at the last replan.
Invariants (tests/control/test_controller.py): noise within the tolerance never triggers; one odd step does not either;
a signal triggers once, then not again until the references are reset; references are reset by every replan, also by
one that ended in staying.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Protocol

from msgspec import Struct

from nereus.control.problem import usable_bytes

LENGTH_TOLERANCE = 0.30
EFFICIENCY_TOLERANCE = 0.20
MEMORY_TOLERANCE = 0.02
"""How much a peak may grow that was found to be bearable."""

WINDOW = 3
"""A signal's value is the median of so many steps, so that a lone outlier moves nothing."""

EFFICIENCY = "efficiency/"
MEAN_LENGTH = "length/mean"
P95_LENGTH = "length/p95"
MEMORY = "memory"


class Signals(Struct, frozen=True):
    """What one step told about demand and achievement."""

    mean_tokens: float
    """Prompt and response, over the sequences of the step."""
    p95_tokens: float
    efficiency: Mapping[str, float] = {}
    """Achieved share of the peak by operation class."""
    peak_bytes: int = 0
    """Of the fullest slot."""

    def values(self) -> dict[str, float]:
        named = {f"{EFFICIENCY}{name}": value for name, value in self.efficiency.items()}
        return {MEAN_LENGTH: self.mean_tokens, P95_LENGTH: self.p95_tokens, **named}


class Trigger(Struct, frozen=True):
    """One reason to replan."""

    signal: str
    because: str
    urgent: bool = False
    bearable: bool = False
    """Urgent, but the job can go on under its plan if there is no better one."""


class Monitoring(Protocol):
    """Says when there is reason to think again: a value, replaced at every step."""

    def observe(self, signals: Signals) -> tuple[Monitoring, tuple[Trigger, ...]]:
        """Take in one step."""

    def rebased(self, *, bearing: bool = False) -> Monitoring:
        """Return it after a replan; ``bearing``: memory is short, and nothing was found against it."""


def tolerance(signal: str) -> float:
    """Return the relative change of ``signal`` that is drift."""
    return EFFICIENCY_TOLERANCE if signal.startswith(EFFICIENCY) else LENGTH_TOLERANCE


class Monitor(Struct, frozen=True):
    """References and recent values: a value, replaced at every step."""

    capacity_bytes: int
    references: dict[str, float] = {}
    recent: dict[str, tuple[float, ...]] = {}
    reported: frozenset[str] = frozenset()
    """Signals that triggered since the references were set."""
    peak_bytes: int = 0
    """Of the newest step."""
    borne_bytes: int = 0
    """A peak above what may be used that nothing could be done about, or what it has come down to since."""

    def observe(self, signals: Signals) -> tuple[Monitor, tuple[Trigger, ...]]:
        """Take in one step; a signal's first value becomes its reference. What is not finite is left out."""
        values = {name: value for name, value in signals.values().items() if math.isfinite(value)}
        recent = {**self.recent, **{name: (*self.recent.get(name, ()), v)[-WINDOW:] for name, v in values.items()}}
        references = {**values, **self.references}
        triggers = [
            trigger
            for name in values
            if name not in self.reported and (trigger := _drift(name, references[name], recent[name]))
        ]
        usable = usable_bytes(self.capacity_bytes)
        peak, borne = signals.peak_bytes, min(self.borne_bytes, signals.peak_bytes)
        limit = max(usable, borne * (1 + MEMORY_TOLERANCE)) if borne > usable else usable
        if peak > limit and MEMORY not in self.reported:
            over = f"the fullest slot peaked at {peak} bytes, {usable} may be used"
            triggers.append(Trigger(MEMORY, over, urgent=True, bearable=True))
        reported = self.reported | {trigger.signal for trigger in triggers}
        return Monitor(self.capacity_bytes, references, recent, reported, peak, borne), tuple(triggers)

    def rebased(self, *, bearing: bool = False) -> Monitor:
        """Return the monitor after a replan: what is now is the reference."""
        now = {name: median(values) for name, values in self.recent.items()}
        return Monitor(
            self.capacity_bytes,
            {**self.references, **now},
            self.recent,
            peak_bytes=self.peak_bytes,
            borne_bytes=self.peak_bytes if bearing else 0,
        )


def _drift(name: str, reference: float, recent: tuple[float, ...]) -> Trigger | None:
    value = median(recent)
    # A half-filled window is too little to tell noise from drift.
    if len(recent) < WINDOW or reference <= 0:
        return None
    change = (value - reference) / reference
    if abs(change) <= tolerance(name):
        return None
    return Trigger(name, f"{name} changed by {change:+.0%} from {reference:.4g} to {value:.4g}")
