"""Does every transition that is admitted fit, and pay for itself in time?"""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nereus.control.admission import LEAST_GAIN, Offer, admit

seconds = st.floats(0, 1e4)
offers = st.builds(
    Offer,
    trigger=st.just("length changed"),
    latency_now_s=seconds,
    latency_new_s=seconds,
    transition_s=seconds,
    horizon_steps=st.floats(1, 1000),
    peak_bytes=st.integers(0, 200),
    usable_bytes=st.integers(50, 150),
    urgent=st.booleans(),
    stuck=st.sampled_from(["", "", "", "a waits for b"]),
)
OFFER = Offer("length changed", 10.0, 8.0, 3.0, 4.0, 10, 20)


@given(offers, st.floats(0, 2))
def test_the_rule(offer: Offer, gamma: float) -> None:
    verdict = admit(offer, gamma=gamma)
    feasible = offer.peak_bytes <= offer.usable_bytes and not offer.stuck
    gain = offer.latency_now_s - offer.latency_new_s
    pays = (
        gamma > 0
        and gain > LEAST_GAIN * offer.latency_new_s
        and offer.transition_s / gain <= gamma * offer.horizon_steps
    )
    assert verdict.admitted == (feasible and (offer.urgent or pays))
    assert verdict.admitted == (verdict.path != "stay")
    assert verdict.because.startswith("length changed: ")


@given(offers, seconds)
def test_a_worse_offer_is_never_admitted_in_place_of_a_better_one(offer: Offer, worse: float) -> None:
    for poorer in (
        replace(offer, transition_s=offer.transition_s + worse),
        replace(offer, latency_new_s=offer.latency_new_s + worse),
        replace(offer, horizon_steps=offer.horizon_steps / (1 + worse)),
        replace(offer, peak_bytes=offer.peak_bytes + int(worse)),
    ):
        assert admit(offer).admitted or not admit(poorer).admitted


def test_the_sentence_has_the_numbers() -> None:
    yes, no = admit(OFFER), admit(replace(OFFER, horizon_steps=2.0))
    assert yes.because == "length changed: saves 2 s a step, costs 3 s, pays back in 1.5 steps of 2 allowed"
    assert no.because == "length changed: saves 2 s a step, costs 3 s, pays back in 1.5 steps; only 1 are allowed"


def test_gamma_zero_admits_urgent_transitions_only() -> None:
    assert not admit(OFFER, gamma=0).admitted
    assert not admit(replace(OFFER, transition_s=0.0), gamma=0).admitted
    assert admit(replace(OFFER, urgent=True), gamma=0).path == "urgent"


def test_a_plan_that_cannot_go_on_is_left_at_any_price() -> None:
    lost = replace(OFFER, latency_now_s=float("inf"), transition_s=1e6, urgent=True)
    assert admit(lost).admitted
    assert not admit(replace(lost, peak_bytes=21)).admitted


def test_a_gain_that_is_the_order_of_additions_is_none() -> None:
    offer = Offer("lengths grew", 2.96 + 4.4e-16, 2.96, 0.0, 10.0, 1, 2)
    verdict = admit(offer)
    assert (verdict.path, verdict.gain_s) == ("stay", 0.0)


def test_a_plan_without_a_price_is_said_to_be_one() -> None:
    verdict = admit(Offer("lengths grew", math.inf, 2.0, 1.0, 10.0, 1, 2))
    assert verdict.admitted
    assert "inf" not in verdict.because
