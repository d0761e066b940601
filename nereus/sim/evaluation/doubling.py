"""What does doubling the replicas and changing the layout take, for us and for models of other systems?

The paper's table 4 and figure 12. Ours is the planner's own price with full link speeds, the others' are structural
models (``sim/policies/restart.py``), each with one constant fitted on one published figure, which is said in its row:
that row agrees because it was made to, the others are predictions.
"""

from __future__ import annotations

from nereus.core.plan import Layout
from nereus.core.profiles import load_cluster, load_model
from nereus.sim.doubling import FULL_LINKS, Change, doubling, resharding
from nereus.sim.evaluation.figures import Figure, Section, paper
from nereus.sim.policies.restart import Pipes, System, fixed_s, moving_s

SIZES = (4, 8, 16, 32)
FITTED = 8
"""The doubling from so many slots sets each system's constant: the smallest with a network in it."""
SYSTEMS = (System.UCP, System.TENPLEX, System.GEMINI, System.OOBLECK)
RESHARDED = (8, 16, 32, 64)

_ASSUMES = (
    "Llama-3.1-8B, actor and critic, on nodes of 8 H200 with 25 GB/s between nodes; 14 bytes of state a parameter. "
    "Ours is the price that the planner's cost model gives the transition, with links at full speed (a lower bound of "
    "what the same code would take; the paper's figures are measured). Other systems: bytes through published pipes, "
    "plus one constant for stopping, starting and building groups. That constant is fitted on one figure of the paper "
    "for each system (the doubling from 8 to 16; for MCP its longest resharding), so that row agrees by construction."
)


def section(*, quick: bool) -> Section:
    """Return ours and the models' seconds beside the paper's; ``quick`` changes nothing here."""
    cluster, model = load_cluster("h200-64"), load_model("llama-3.1-8b")
    changes = {slots: doubling(cluster, model, slots, FULL_LINKS) for slots in SIZES}
    fixed = {
        system: fixed_s(system, changes[FITTED].growth, Pipes(), _paper_s(system.value, FITTED)) for system in SYSTEMS
    }
    figures = [_ours(slots, change) for slots, change in changes.items()]
    figures += [
        _theirs(system, slots, change, fixed[system]) for system in SYSTEMS for slots, change in changes.items()
    ]
    figures += _resharding(fixed[System.TENPLEX])
    figures += _large(fixed[System.UCP])
    return Section(title="Doubling the slots, and resharding", figures=tuple(figures), assumes=_ASSUMES)


def _paper_s(system: str, slots: int) -> float:
    return paper("doubling", system, "time", f" {slots}->{2 * slots}")


def _ours(slots: int, change: Change) -> Figure:
    note = "predicted, not measured"
    what = f"nereus, {slots} to {2 * slots} slots"
    return Figure(what=what, paper=_paper_s("nereus", slots), ours=change.seconds, unit="s", note=note)


def _theirs(system: System, slots: int, change: Change, fixed: float) -> Figure:
    return Figure(
        what=f"{system.value}, {slots} to {2 * slots} slots",
        paper=_paper_s(system.value, slots),
        ours=moving_s(system, change.growth, Pipes()) + fixed,
        unit="s",
        note=f"fitted here: {fixed:.1f} s besides moving bytes" if slots == FITTED else "predicted",
    )


def _resharding(tenplex_s: float) -> list[Figure]:
    """Return the range over 8 to 64 slots of a change of layout, and how much less ours takes at 70B."""
    cluster, model = load_cluster("h200-64"), load_model("llama-3.1-8b")
    changes = [resharding(cluster, model, slots, Layout(4), Layout(2), FULL_LINKS) for slots in RESHARDED]
    mcp_s = fixed_s(System.MCP, changes[0].growth, Pipes(), paper("reshard", "mcp", "time_max"))
    note = "layouts are ours (t4p1 to t2p1): the paper does not state them"
    ours = [change.seconds for change in changes]
    tenplex = [moving_s(System.TENPLEX, change.growth, Pipes()) + tenplex_s for change in changes]
    mcp = [moving_s(System.MCP, change.growth, Pipes()) + mcp_s for change in changes]
    figures = [
        Figure(
            what=f"{name}, resharding 8B on 8 to 64 slots, {which}",
            paper=paper("reshard", name, f"time_{end}"),
            ours=pick(seconds),
            unit="s",
            note=told,
        )
        for name, seconds, told in (
            ("nereus", ours, note),
            ("tenplex", tenplex, "predicted with the constant of its doubling"),
            ("mcp", mcp, f"fitted on its longest: {mcp_s:.1f} s besides moving bytes"),
        )
        for which, end, pick in (("shortest", "min", min), ("longest", "max", max))
    ]
    large = resharding(cluster, load_model("llama-3.1-70b"), 64, Layout(8, 2), Layout(8, 4), FULL_LINKS)
    for system, constant in ((System.MCP, mcp_s), (System.TENPLEX, tenplex_s)):
        theirs = moving_s(system, large.growth, Pipes()) + constant
        figures.append(
            Figure(
                what=f"resharding 70B on 64 slots, less than {system.value} by",
                paper=paper("reshard", f"nereus vs {system.value}", "reduction"),
                ours=100 * (1 - large.seconds / theirs),
                unit="%",
                note="t8p2 to t8p4 are ours; both predicted",
            )
        )
    return figures


def _large(ucp_s: float) -> list[Figure]:
    """Return the doubling to 1,024 slots."""
    change = doubling(load_cluster("mi250x-1024"), load_model("llama-3.1-8b"), 512, FULL_LINKS)
    ucp = moving_s(System.UCP, change.growth, Pipes()) + ucp_s
    return [
        Figure(
            what="nereus, 512 to 1,024 MI250X",
            paper=paper("long_run", "nereus", "transition_largest"),
            ours=change.seconds,
            unit="s",
            note="predicted; the paper's is a whole plan change of its long run, ours actor and critic alone",
        ),
        Figure(
            what="ucp, 512 to 1,024 MI250X",
            paper=paper("long_run", "ucp", "transition"),
            ours=ucp,
            unit="s",
            note="predicted with the constant of 8 to 16 slots; restarting a thousand processes is not modelled",
        ),
    ]
