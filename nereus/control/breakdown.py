"""Where do the seconds and the bytes of a way to run a model-stage go, and which ways are there of one shape?

Reads the price lists of ``candidates`` row by row, those included that the planner leaves out because others beat them:
what runs now, what an operator asks for, and what lost must be priced too. Invariants
(tests/control/test_breakdown.py): the seconds by class and those of the weight sync add up to the candidate's, the
bytes by purpose to its resident and transient bytes; what is read here equals what ``candidates`` lists.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nereus.control.candidates import Priced, Space, price
from nereus.control.cost import Recompute
from nereus.control.efficiency import Array, Efficiencies, Flags
from nereus.control.memory import MARGIN, MemoryCalibration
from nereus.control.problem import Candidate
from nereus.control.weight_sync import sync_seconds
from nereus.core.cluster import Cluster
from nereus.core.plan import Layout, ModelStage, Replication, Stage
from nereus.core.shape import ModelShape
from nereus.core.workflow import Workflow
from nereus.core.workload import Workload


class Overheads(Struct, frozen=True):
    """What a move costs beside bytes over links. Ours, cautious, until runs have measured them."""

    communicator_s: float = 0.2
    communicator_rank_s: float = 0.002
    release_s: float = 0.01
    pause_s: float = 0.5


class Pricing(Struct, frozen=True):
    """What prices depend on, the model-stage aside."""

    cluster: Cluster
    shapes: dict[str, ModelShape]
    """By model; ``policy`` stands for those not named."""
    workflow: Workflow
    workload: Workload
    efficiencies: Efficiencies
    calibration: MemoryCalibration = MemoryCalibration()
    space: Space = Space()
    overheads: Overheads = Overheads()

    def shape_of(self, stage: ModelStage) -> ModelShape:
        return self.shapes.get(stage.model, self.shapes["policy"])

    def list_of(self, stage: ModelStage, cluster: Cluster | None = None, space: Space | None = None) -> Priced:
        """Return every alternative of a model-stage; the cache of ``price`` makes asking again free."""
        responses = self.workflow.responses_per_sample
        shape = self.shape_of(stage)
        return price(stage, shape, self.workload, responses, cluster or self.cluster, space or self.space)


class Breakdown(Struct, frozen=True):
    """One candidate in detail."""

    seconds: dict[str, float]
    """By operation class, ``fixed`` for what no class owns."""
    memory_bytes: dict[str, float]
    """By purpose, of the fullest slot; ``workspace`` is what libraries hold."""
    weight_sync_s: float
    """What the layout adds to the weight sync."""


class Leanest(Struct, frozen=True):
    """The alternative of a model-stage that needs least memory, whether it fits or not."""

    candidate: Candidate
    short_bytes: int
    """How many bytes of capacity it lacks, margin included; 0 or less where it fits."""


def breakdown(pricing: Pricing, candidate: Candidate) -> Breakdown:
    """Return where the seconds and the bytes of ``candidate`` go; ``ValueError`` if it is not on the price list."""
    priced = pricing.list_of(candidate.model_stage)
    rows = [row for row in _rows(priced, candidate.layout, candidate.dp) if _same(priced, row, candidate)]
    if not rows:
        raise ValueError(f"{candidate} is not on the price list of this pool")
    row = rows[0]
    factor = pricing.calibration.transient_factor
    sizes = {
        name: size * (1.0 if name in priced.memory.resident else factor)
        for name, size in priced.memory.table(row).items()
    }
    workspace = {"workspace": pricing.calibration.workspace_bytes}
    sync = float(_sync_seconds(pricing, candidate.model_stage, priced)[row])
    return Breakdown(priced.work.split(pricing.efficiencies, row), sizes | workspace, sync)


def ways(
    pricing: Pricing, stage: ModelStage, wanted: Callable[[Layout, int], bool], *, fitting: bool = True
) -> tuple[Candidate, ...]:
    """Return all alternatives of ``stage`` whose (layout, replicas) are ``wanted``, beaten ones included."""
    return _listed(pricing, stage, pricing.list_of(stage), wanted, fitting)


def list_of_units(pricing: Pricing, stage: ModelStage, replication: Replication, space: Space) -> Priced:
    """Return the price list of a pool of just these units' slots; degrees beyond theirs are left out."""
    enough = replace(
        space,
        largest_tp=replication.layout.tp,
        largest_pp=replication.layout.pp,
        tp_across_nodes=True,
        uneven=True,
    )
    return pricing.list_of(stage, pricing.cluster.resized(replication.slots), enough)


def as_replicated(pricing: Pricing, stage: ModelStage, replication: Replication) -> tuple[Candidate, ...]:
    """Return the alternatives of exactly these units, also where the planner would not choose so many.

    The list of a pool of just the units' slots, shares of the batch uneven where need be, names their number.
    """
    priced = list_of_units(pricing, stage, replication, pricing.space)

    def wanted(layout: Layout, dp: int) -> bool:
        return (layout, dp) == (replication.layout, replication.dp)

    return _listed(pricing, stage, priced, wanted, True)


def leanest(pricing: Pricing, stage: ModelStage) -> Leanest | None:
    """Return the alternative of ``stage`` that needs least; None where the batch or the pool allows none at all."""
    found = ways(pricing, stage, lambda layout, dp: True, fitting=False)
    if not found:
        return None
    best = min(found, key=lambda one: (one.resident_bytes + one.transient_bytes, one.slots, one.seconds))
    short = (best.resident_bytes + best.transient_bytes) * MARGIN - pricing.cluster.device.memory_bytes
    return Leanest(best, round(short))


def fits_by_layout(pricing: Pricing, stage: ModelStage) -> dict[Layout, bool]:
    """Return for every layout of ``stage`` whether any alternative of it fits a slot even alone."""
    priced = pricing.list_of(stage)
    found: dict[Layout, bool] = {}
    degrees = zip(priced.setups.tp.tolist(), priced.setups.pp.tolist(), strict=True)
    for (tp, pp), fits in zip(degrees, _sizes(pricing, priced)[2].tolist(), strict=True):
        layout = Layout(int(tp), int(pp))
        found[layout] = found.get(layout, False) or fits
    return found


def _sizes(pricing: Pricing, priced: Priced) -> tuple[Array, Array, Flags]:
    """Return resident bytes, transient bytes and whether they fit, row by row."""
    count = len(priced.setups)
    resident = np.ceil(np.broadcast_to(priced.memory.resident_bytes(), (count,)))
    transient = np.ceil(np.broadcast_to(priced.memory.transient_bytes(pricing.calibration), (count,)))
    return resident, transient, (resident + transient) * MARGIN <= pricing.cluster.device.memory_bytes


def _sync_seconds(pricing: Pricing, stage: ModelStage, priced: Priced) -> Array:
    shape, compute_bytes = pricing.shape_of(stage), pricing.space.compute_bytes
    return sync_seconds(stage, shape, pricing.workflow, pricing.cluster, priced.setups, compute_bytes)


def _listed(
    pricing: Pricing, stage: ModelStage, priced: Priced, wanted: Callable[[Layout, int], bool], fitting: bool
) -> tuple[Candidate, ...]:
    setups = priced.setups
    seconds = priced.work.seconds(pricing.efficiencies) + _sync_seconds(pricing, stage, priced)
    resident, transient, fits = _sizes(pricing, priced)
    training = stage.stage is Stage.TRAINING
    found = list[Candidate]()
    for row in np.flatnonzero(fits) if fitting else range(len(setups)):
        layout, dp = Layout(int(setups.tp[row]), int(setups.pp[row])), int(setups.dp[row])
        if wanted(layout, dp):
            found.append(
                Candidate(
                    stage,
                    layout,
                    dp,
                    float(seconds[row]),
                    int(resident[row]),
                    int(transient[row]),
                    int(setups.micro_batch[row]),
                    training and bool(setups.recompute[row] == Recompute.FULL),
                )
            )
    return tuple(found)


def _rows(priced: Priced, layout: Layout, dp: int) -> list[int]:
    setups = priced.setups
    found = np.flatnonzero((setups.tp == layout.tp) & (setups.pp == layout.pp) & (setups.dp == dp))
    return [int(row) for row in found]


def _same(priced: Priced, row: int, candidate: Candidate) -> bool:
    setups = priced.setups
    return bool(
        setups.micro_batch[row] == candidate.micro_batch
        and (setups.recompute[row] == Recompute.FULL) == candidate.recompute
    )
