"""What could a model-stage run as, and what would each way cost?

Lists layouts, replicas and micro-batches that fit the model, the batch and the pool, prices them all in one pass of the
cost and memory models, and drops what fits on no slot even alone. ``problem`` puts the lists of a whole workflow into
the planner's terms. Invariants (tests/control/test_candidates.py): the batch splits exactly; no candidate is over the
pool; tensor parallelism stays inside a node; equal inputs give equal lists.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from nereus.control.cost import COMPUTE_BYTES, STATE_BYTES, Passes, Recompute, Setups, pass_work
from nereus.control.efficiency import Array, Efficiencies, Work
from nereus.control.generation import generation_work, peak_context
from nereus.control.memory import (
    MARGIN,
    Memory,
    MemoryCalibration,
    generation_memory,
    scoring_memory,
    training_memory,
)
from nereus.control.problem import Candidate, Member, Phase, Problem
from nereus.control.weight_sync import sync_seconds
from nereus.core.cluster import Cluster
from nereus.core.plan import Layout, ModelStage, Stage
from nereus.core.shape import ModelShape
from nereus.core.workflow import Workflow
from nereus.core.workload import Workload

Counts = npt.NDArray[np.int64]

LARGEST_MICRO_BATCH = 16
LARGEST_LIVE = 1024
"""Sequences an engine decodes at once; more gains nothing on present devices."""

PREFILL_TOKENS = 8192
"""Prompt tokens that an engine computes in one step."""


class Space(Struct, frozen=True):
    """Which alternatives are considered."""

    largest_tp: int = 8
    largest_pp: int = 64
    tp_across_nodes: bool = False
    uneven: bool = False
    """Also replica counts by which the batch does not divide (losses are normalized by global token counts)."""
    recompute: tuple[bool, ...] = (False, True)
    generation_pp: bool = True
    micro_batch_tokens: int = 0
    """What trainers pack into a micro-batch, where that is given; 0: any number of sequences up to the largest."""
    max_live: int = 0
    """Sequences that an engine has room for, where that is given; 0: any number."""
    compute_bytes: float = COMPUTE_BYTES
    """Of a weight or activation. A 32-bit or wider model is its own master."""

    @property
    def state_bytes(self) -> float:
        """Bytes of a master, a moment or a gradient."""
        return max(self.compute_bytes, STATE_BYTES)


class Priced(Struct, frozen=True, eq=False):
    """Alternatives of one model-stage with their work and memory: efficiencies may change without a new listing."""

    setups: Setups
    work: Work
    memory: Memory


def layouts(shape: ModelShape, cluster: Cluster, space: Space) -> list[Layout]:
    """Return the layouts that hold the model: powers of two, tensor groups inside a node unless allowed to cross."""
    pool = cluster.size
    widest = pool if space.tp_across_nodes else min(cluster.slots_per_node, pool)
    found = list[Layout]()
    for tp in _powers(min(space.largest_tp, widest)):
        for pp in _powers(min(space.largest_pp, shape.layers, pool // tp)):
            layout = Layout(tp, pp)
            if not any(shape.misfits(layout)):
                found.append(layout)
    return found


def candidates(
    stage: ModelStage,
    shape: ModelShape,
    workload: Workload,
    workflow: Workflow,
    cluster: Cluster,
    efficiencies: Efficiencies,
    *,
    space: Space | None = None,
    calibration: MemoryCalibration | None = None,
) -> Sequence[Candidate]:
    """Return the ways to run ``stage``, fastest of each (layout, replicas) first where memory makes a difference.

    Of alternatives with equal slots, one that is no faster and needs no less memory than another is left out.
    """
    learned, space = calibration or MemoryCalibration(), space or Space()
    priced = price(stage, shape, workload, workflow.responses_per_sample, cluster, space)
    seconds = priced.work.seconds(efficiencies)
    seconds += sync_seconds(stage, shape, workflow, cluster, priced.setups, space.compute_bytes)
    count = len(priced.setups)
    resident = np.broadcast_to(priced.memory.resident_bytes(), (count,))
    transient = np.broadcast_to(priced.memory.transient_bytes(learned), (count,))
    fits = (resident + transient) * MARGIN <= cluster.device.memory_bytes
    slots = (priced.setups.tp * priced.setups.pp * priced.setups.dp).astype(np.int64)
    kept = _undominated(slots, seconds, resident, transient, np.flatnonzero(fits).astype(np.int64))
    training = stage.stage is Stage.TRAINING
    columns = zip(
        *(
            column[kept].tolist()
            for column in (
                priced.setups.tp.astype(int),
                priced.setups.pp.astype(int),
                priced.setups.dp.astype(int),
                priced.setups.micro_batch.astype(int),
                priced.setups.recompute,
                seconds,
                np.ceil(resident).astype(np.int64),
                np.ceil(transient).astype(np.int64),
            )
        ),
        strict=True,
    )
    return [
        Candidate(stage, Layout(tp, pp), dp, took, stays, extra, micro, training and again == Recompute.FULL)
        for tp, pp, dp, micro, again, took, stays, extra in columns
    ]


@functools.lru_cache(maxsize=64)
def price(
    stage: ModelStage,
    shape: ModelShape,
    workload: Workload,
    responses_per_sample: float,
    cluster: Cluster,
    space: Space,
) -> Priced:
    """List and price the alternatives of one model-stage; cached, as efficiencies do not enter."""
    if stage.stage is Stage.GENERATION:
        return _price_generation(shape, workload, responses_per_sample, cluster, space)
    return _price_passes(stage, shape, workload, cluster, space)


def _price_passes(stage: ModelStage, shape: ModelShape, workload: Workload, cluster: Cluster, space: Space) -> Priced:
    training = stage.stage is Stage.TRAINING
    samples = workload.samples_per_minibatch if training else workload.samples
    recompute = (
        [Recompute.FULL if again else Recompute.NONE for again in space.recompute] if training else [Recompute.NONE]
    )
    pool = cluster.size
    rows = [
        (layout, dp, micro, again)
        for layout in layouts(shape, cluster, space)
        for dp in _replicas(samples, pool // layout.slots, space.uneven)
        for micro in _micro_batches(samples // dp, workload, space)
        if space.uneven or samples % (dp * micro) == 0
        for again in recompute
    ]
    setups = Setups.grid(rows)
    updates = workload.minibatches * workload.epochs if training else 1
    passes = Passes(
        samples, samples * workload.mean_tokens, samples * workload.mean_square_tokens, updates, backward=training
    )
    head = stage.model in ("policy", "reference")
    work = pass_work(shape, cluster, setups, passes, head=head)
    share = samples * workload.mean_tokens / setups.dp
    packed = np.minimum(space.micro_batch_tokens, share) if space.micro_batch_tokens else 0.0
    tokens = np.maximum(workload.longest, np.maximum(packed, setups.micro_batch * workload.mean_tokens))
    """Micro-batches are packed by tokens, and the longest sequence must fit into one."""
    if not training:
        memory = scoring_memory(shape, setups, tokens, compute_bytes=space.compute_bytes, head=head)
        return Priced(setups, work, memory)
    micro_batches = np.ceil(samples / (setups.dp * setups.micro_batch))
    memory = training_memory(
        shape,
        setups,
        tokens,
        micro_batches,
        compute_bytes=space.compute_bytes,
        state_bytes=space.state_bytes,
        gradient_bytes=space.state_bytes,
        head=head,
    )
    return Priced(setups, work, memory)


def _micro_batches(most: int, workload: Workload, space: Space) -> list[int]:
    """Return how many sequences a micro-batch may hold."""
    if space.micro_batch_tokens:
        return [max(1, min(most, round(space.micro_batch_tokens / workload.mean_tokens)))]
    return _powers(min(LARGEST_MICRO_BATCH, max(1, most)))


def _price_generation(
    shape: ModelShape, workload: Workload, responses_per_sample: float, cluster: Cluster, space: Space
) -> Priced:
    """List generation; the micro-batch is how many sequences a replica decodes at once."""
    sequences, pool = math.ceil(workload.samples * responses_per_sample), cluster.size
    rows = [
        (layout, dp, live, Recompute.NONE)
        for layout in layouts(shape, cluster, space)
        if space.generation_pp or layout.pp == 1
        for dp in _replicas(workload.groups, pool // layout.slots, space.uneven)
        for live in ([space.max_live] if space.max_live else _live(math.ceil(sequences / dp)))
    ]
    setups = Setups.grid(rows)
    live = setups.micro_batch
    work = generation_work(shape, cluster, setups, workload, live, responses_per_sample=responses_per_sample)
    cached = live * (workload.longest if space.max_live else peak_context(workload)) + workload.longest
    prefill = np.minimum(PREFILL_TOKENS, live * workload.prompts.mean)
    memory = generation_memory(shape, setups, live, cached, prefill, compute_bytes=space.compute_bytes)
    return Priced(setups, work, memory)


def problem(
    shapes: Mapping[str, ModelShape],
    workload: Workload,
    workflow: Workflow,
    cluster: Cluster,
    efficiencies: Efficiencies,
    *,
    space: Space | None = None,
    calibration: MemoryCalibration | None = None,
    exposed_s: float | None = None,
    host_s: float = 0.0,
) -> Problem:
    """State the planner's problem for a workflow; ``shapes`` names each model's shape, ``policy`` for those not named.

    ``exposed_s`` is what the weight sync adds whatever the layouts are; by default, the time in which an asynchronous
    workflow writes one slot's share of the policy's weights over the slowest link, and nothing in a synchronous one,
    where each layout has its price (``weight_sync``). ``host_s`` is the CPU-side processing of a step
    (``host_seconds``); asynchronous workflows hide it behind generation.
    """

    def member(stage: ModelStage) -> Member:
        shape = shapes.get(stage.model, shapes["policy"])
        listed = candidates(
            stage, shape, workload, workflow, cluster, efficiencies, space=space, calibration=calibration
        )
        return Member(stage, tuple(listed))

    sides = tuple(
        tuple(Phase(phase[0].stage.name.lower(), tuple(map(member, phase))) for phase in side)
        for side in workflow.sides
    )
    written = 2.0 * shapes["policy"].parameters / cluster.slots_per_node / cluster.cross_node.bytes_per_s
    sync = written if workflow.asynchronous else 0.0
    return Problem(
        sides,
        cluster.size,
        int(cluster.device.memory_bytes),
        concurrent=workflow.asynchronous,
        exposed_s=(sync if exposed_s is None else exposed_s) + (0.0 if workflow.asynchronous else host_s),
    )


def host_seconds(workload: Workload, seconds_per_sample: float, workers: int) -> float:
    """Return the time of scoring, tokenizing and packing a step's samples on ``workers`` CPU processes."""
    if workers < 1:
        raise ValueError(f"samples need at least one worker, got {workers}")
    return math.ceil(workload.samples / workers) * seconds_per_sample


def _powers(limit: int) -> list[int]:
    return [1 << exponent for exponent in range(max(1, limit).bit_length())]


def _replicas(samples: int, limit: int, uneven: bool) -> list[int]:
    """Return the replica counts up to ``limit``: divisors of the batch, or powers of two and the limit itself."""
    limit = min(limit, samples)
    if limit < 1:
        return []
    if uneven:
        return sorted({*_powers(limit), limit})
    return [dp for dp in range(1, limit + 1) if samples % dp == 0]


def _live(sequences: int) -> list[int]:
    """Return how many sequences may be alive at once: powers of two from 8 and all of them."""
    most = min(LARGEST_LIVE, sequences)
    return sorted({most, *(live for live in _powers(most) if live >= min(8, most))})


def _undominated(slots: Counts, seconds: Array, resident: Array, transient: Array, rows: Counts) -> Counts:
    """Return the rows that no other row with equal slots beats in time and in both kinds of memory."""
    order = rows[np.lexsort((transient[rows], resident[rows], seconds[rows], slots[rows]))]
    kept = list[int]()
    # What is kept of the present number of slots that nothing kept beats in memory: residents rise, transients fall.
    residents, transients = list[float](), list[float]()
    current = -1
    for row, count, stays, extra in zip(
        order.tolist(), slots[order].tolist(), resident[order].tolist(), transient[order].tolist(), strict=True
    ):
        if count != current:
            current, residents, transients = count, [], []
        at = bisect_right(residents, stays)
        if at and transients[at - 1] <= extra:
            continue
        kept.append(row)
        end = at
        while end < len(transients) and transients[end] >= extra:
            end += 1
        residents[at:end], transients[at:end] = [stays], [extra]
    return np.array(kept, dtype=np.int64)
