"""Is a better plan worth the way to it? From the numbers to a verdict with its sentence.

Owner of the admission rule. Invariants (tests/control/test_admission.py): nothing infeasible is admitted, urgent or
not; an opportunistic transition has paid for itself within ``gamma`` times the horizon; a smaller gain, a longer way or
a nearer horizon never turns a refusal into an admission.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

from msgspec import Struct

from nereus.control.problem import gib

GAMMA = 0.5
"""Share of the horizon within which a transition must have paid for itself; 0 admits urgent ones only."""

WITHIN = 0.10
"""How much slower than the best plan a next-best one may be."""


LEAST_GAIN = 1e-9
"""Of a step: what sums of the same seconds differ by when they are added in another order."""


class Offer(Struct, frozen=True):
    """One plan on offer: every number that the decision needs."""

    trigger: str
    latency_now_s: float
    """Predicted step time if nothing changes; infinite where the current plan cannot go on."""
    latency_new_s: float
    transition_s: float
    """Critical path of the transition's DAG."""
    horizon_steps: float
    peak_bytes: int
    """The fullest slot over the target plan and every state on the way."""
    usable_bytes: int
    urgent: bool = False
    stuck: str = ""
    """Why the DAG cannot be ordered, if it cannot."""


class Verdict(Struct, frozen=True):
    """The decision, with the numbers that made it."""

    admitted: bool
    path: Literal["opportunistic", "urgent", "stay"]
    because: str
    gain_s: float
    """Seconds saved in every step."""
    payback_steps: float
    allowed_steps: float


class Admission(Protocol):
    """Decides about one plan on offer."""

    def __call__(self, offer: Offer, *, gamma: float) -> Verdict: ...


def admit(offer: Offer, *, gamma: float = GAMMA) -> Verdict:
    """Decide: feasible first; then urgent goes, and the rest must pay for itself in time."""
    gain = offer.latency_now_s - offer.latency_new_s
    if abs(gain) <= LEAST_GAIN * offer.latency_new_s:
        gain = 0.0
    payback = offer.transition_s / gain if gain > 0 else math.inf
    allowed = gamma * offer.horizon_steps

    def verdict(path: Literal["opportunistic", "urgent", "stay"], because: str) -> Verdict:
        return Verdict(path != "stay", path, f"{offer.trigger}: {because}", gain, payback, allowed)

    if offer.stuck:
        return verdict("stay", f"no order of the transition exists: {offer.stuck}")
    if offer.peak_bytes > offer.usable_bytes:
        peak, usable = gib(offer.peak_bytes), gib(offer.usable_bytes)
        return verdict("stay", f"a slot would need {peak} on the way or after, {usable} may be used")
    if not math.isfinite(offer.latency_new_s) or not math.isfinite(offer.transition_s):
        return verdict("stay", "the plan or the way to it has no finite price")
    if offer.urgent:
        return verdict("urgent", f"the current plan cannot go on; {offer.transition_s:.3g} s to one that fits")
    if gamma <= 0:
        return verdict("stay", "only urgent transitions are allowed (gamma is 0)")
    if gain <= 0:
        return verdict("stay", f"the best plan on offer saves nothing ({gain:.3g} s a step)")
    saved = f"saves {gain:.3g} s a step" if math.isfinite(gain) else "the plan that runs would not be chosen"
    price = f"{saved}, costs {offer.transition_s:.3g} s, pays back in {payback:.3g} steps"
    if payback > allowed:
        return verdict("stay", f"{price}; only {allowed:.3g} are allowed")
    return verdict("opportunistic", f"{price} of {allowed:.3g} allowed")
