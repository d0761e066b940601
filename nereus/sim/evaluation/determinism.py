"""Do equal seeds give equal runs, and does a journal say enough to decide again as it was decided?"""

from __future__ import annotations

import tempfile
from pathlib import Path

from nereus.core.profiles import load_model
from nereus.runtime.journal import read_journal
from nereus.runtime.pool import cluster_of
from nereus.runtime.replaying import replay_decisions
from nereus.sim.comparing import run_under
from nereus.sim.course import Failures
from nereus.sim.evaluation.figures import Figure, Section
from nereus.sim.evaluation.jobs import base_job, sized
from nereus.sim.policies.named import named
from nereus.sim.trace import load_trace

MTBF_S = 120.0

_ASSUMES = (
    "Asynchronous GRPO of 8B on 16 A100 with slots that fail every two minutes in the mean, so that there is something "
    "to decide. The paper gives no such figures. Journals of live runs are replayed by the same code."
)


def section(*, quick: bool) -> Section:
    """Return bytes that differ between equal runs, and decisions that a fresh controller does not reproduce."""
    config = sized(
        base_job(), profile="a100-64g-256", slots=16, train="d2t2p2", rollout="d4t2p1", steps=5 if quick else 20
    )
    journals: list[bytes] = []
    with tempfile.TemporaryDirectory() as made:
        for number, seed in enumerate((0, 0, 1)):
            path = Path(made) / str(number) / "run"
            run_under(
                config,
                load_model(config.model.path),
                load_trace("h20-grpo"),
                named("nereus"),
                seed,
                path,
                failures=Failures(MTBF_S),
            )
            journals.append((path / "journal.jsonl").read_bytes())
        entries = read_journal(Path(made) / "0" / "run" / "journal.jsonl").entries
    capacity = int(cluster_of(config).device.memory_bytes)
    found = replay_decisions(entries, gamma=config.adapt.gamma, capacity_bytes=capacity)
    once, again, other = journals
    figures = (
        Figure(what="bytes of journals that differ, equal seeds", ours=_apart(once, again), unit="bytes"),
        Figure(
            what="bytes that differ, another seed",
            ours=_apart(once, other),
            unit="bytes",
            note="for comparison: the check can fail",
        ),
        Figure(
            what="decisions that a replay does not reproduce",
            ours=len(found.differences),
            unit="count",
            note=f"of {found.decisions} decisions after {found.events} events",
        ),
    )
    return Section(title="Determinism and replay", figures=figures, assumes=_ASSUMES)


def _apart(one: bytes, other: bytes) -> float:
    return sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))
