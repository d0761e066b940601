"""Do the details of a candidate add up to it, and are they those of the list it was taken from?"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nereus.control.breakdown import Pricing, as_replicated, breakdown, fits_by_layout, leanest, ways
from nereus.control.candidates import candidates
from nereus.control.efficiency import Efficiencies
from nereus.core.plan import POLICY_TRAINING, Layout, ModelStage, Replication
from nereus.core.profiles import load_cluster, load_model
from nereus.core.workflow import Algorithm, workflow
from nereus.core.workload import Lengths, Workload

PRICING = Pricing(
    load_cluster("a100-64g", 16),
    {"policy": load_model("llama-3.1-8b")},
    workflow(Algorithm.PPO),
    Workload(Lengths.fixed(512), Lengths.fixed(512), groups=32),
    Efficiencies.prior(),
)
STAGES = PRICING.workflow.model_stages


@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_details_add_up_and_the_lists_agree(stage: ModelStage) -> None:
    listed = candidates(
        stage, PRICING.shape_of(stage), PRICING.workload, PRICING.workflow, PRICING.cluster, PRICING.efficiencies
    )
    everything = ways(PRICING, stage, lambda layout, dp: True)
    assert set(listed) <= set(everything)
    for one in listed[::5]:
        detail = breakdown(PRICING, one)
        assert sum(detail.seconds.values()) + detail.weight_sync_s == pytest.approx(one.seconds)
        assert sum(detail.memory_bytes.values()) == pytest.approx(one.resident_bytes + one.transient_bytes, abs=4)


def test_every_way_that_is_left_out_is_beaten() -> None:
    listed = set(
        candidates(
            POLICY_TRAINING,
            PRICING.shape_of(POLICY_TRAINING),
            PRICING.workload,
            PRICING.workflow,
            PRICING.cluster,
            PRICING.efficiencies,
        )
    )
    for one in set(ways(PRICING, POLICY_TRAINING, lambda layout, dp: True)) - listed:
        assert any(
            other.slots == one.slots
            and other.seconds <= one.seconds
            and other.resident_bytes <= one.resident_bytes
            and other.transient_bytes <= one.transient_bytes
            for other in listed
        )


def test_what_runs_is_priced_as_the_list_prices_it_and_beyond() -> None:
    replication = Replication(2, Layout(4, 2))
    exact = as_replicated(PRICING, POLICY_TRAINING, replication)
    listed = ways(PRICING, POLICY_TRAINING, lambda layout, dp: Replication(dp, layout) == replication)
    same = {(one.micro_batch, one.recompute): one for one in exact}
    for one in listed:
        priced = same[one.micro_batch, one.recompute]
        assert priced.seconds == pytest.approx(one.seconds, rel=1e-12)  # sums over longer lists are rounded otherwise
        assert replace(priced, seconds=one.seconds) == one
    uneven = as_replicated(PRICING, POLICY_TRAINING, Replication(3, Layout(4, 1)))
    assert uneven and all((one.dp, one.layout) == (3, Layout(4, 1)) for one in uneven)
    assert not ways(PRICING, POLICY_TRAINING, lambda layout, dp: dp == 3)


def test_the_leanest_and_the_layouts_that_fit() -> None:
    fits = fits_by_layout(PRICING, POLICY_TRAINING)
    assert not fits[Layout(1, 1)] and fits[Layout(4, 4)]
    lean = leanest(PRICING, POLICY_TRAINING)
    assert lean is not None and lean.short_bytes < 0
    small = Pricing(
        load_cluster("a100-64g", 1), PRICING.shapes, PRICING.workflow, PRICING.workload, PRICING.efficiencies
    )
    lean = leanest(small, POLICY_TRAINING)
    assert lean is not None and lean.candidate.recompute
    assert lean.short_bytes == pytest.approx(
        (lean.candidate.resident_bytes + lean.candidate.transient_bytes) * 1.1 - 64e9, abs=2
    )


def test_a_stranger_is_refused() -> None:
    large = ways(PRICING, POLICY_TRAINING, lambda layout, dp: layout.slots == 16)[0]
    with pytest.raises(ValueError, match="price list"):
        breakdown(replace(PRICING, cluster=load_cluster("a100-64g", 4)), large)
