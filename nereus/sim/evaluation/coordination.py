"""How many transitions arrive when model-stages trade slots? The paper's table 5.

Random transitions with one kind of overlap (``sim/coordination.py``): in our graph, and with every model-stage moving
by itself, in two readings of what that leaves open.
"""

from __future__ import annotations

from nereus.sim.coordination import coordination
from nereus.sim.evaluation.figures import Figure, Section, paper

TRIALS, TRIALS_QUICK = 100, 20
KINDS = (
    ("SM-CS", "same model, cross stage", 32),
    ("CM-SS", "cross model, same stage", 48),
    ("CM-CS", "cross model, cross stage", 48),
)

_ASSUMES = (
    "Random pairs of plans of PPO and GRPO, synchronous and asynchronous, that have the overlap at least once; random "
    "finishing order, books checked at every primitive. The paper's pairs are not published, so shares depend on ours. "
    "Per component, strict: each makes its new replicas in the order of its plan and holds slots while it waits; "
    "lenient: it goes on with any replica whose slots are free (what the sources leave open, in its favour)."
)


def section(*, quick: bool) -> Section:
    """Return the shares of transitions that arrive; ``quick`` tries fewer."""
    trials = TRIALS_QUICK if quick else TRIALS
    figures: list[Figure] = []
    for short, kind, slots in KINDS:
        found = coordination(kind, slots, trials)
        theirs = paper("coordination", "dynarl_style", "success", short)
        for system, published, arrived in (
            ("nereus", paper("coordination", "nereus", "success", short), found.arrived),
            ("per component, strict", theirs, found.one_by_one),
            ("per component, lenient", theirs, found.side_by_side),
        ):
            figures.append(
                Figure(
                    what=f"{short} ({kind}), {slots} slots, {system}",
                    paper=published,
                    ours=100 * arrived / found.trials,
                    unit="%",
                    note=f"{arrived} of {found.trials}",
                )
            )
        figures.append(
            Figure(
                what=f"{short}, nereus, time",
                paper=paper("coordination", "nereus", "time", short),
                unit="s",
                note="not yet measured: sizes of state are random here",
            )
        )
    return Section(title="Coordination of model-stages", figures=tuple(figures), assumes=_ASSUMES)
