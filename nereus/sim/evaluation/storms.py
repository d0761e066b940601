"""How much of a day is useful while slots fail, and is anything lost, repeated or stuck?

Useful: the steps that stand at the end, beside those that the same policy makes in the same time when nothing fails.
Lost, repeated or stuck is counted in many short storms (``make storms`` runs more of them).
"""

from __future__ import annotations

from msgspec.structs import replace

from nereus.config import JobConfig
from nereus.sim.evaluation.figures import Figure, Section
from nereus.sim.policies.named import named
from nereus.sim.storm import Stormed, storm, storm_job

MTBF_S = (1800.0, 7200.0, 21600.0)
POLICIES = ("nereus", "whole_restart")
LONGEST = 16384
"""Response tokens at most, half of them in the mean, as reasoning models are trained: steps of minutes."""
EVER = 100_000
"""More steps than there is time for."""
SHORT_STEPS = 20
SHORT_MTBF_S = 200.0

_ASSUMES = (
    "Exponential failures of the whole pool, a tenth of them silent, under asynchronous GRPO of 8B. Useful share: "
    "responses up to 16,384 tokens; steps that stand at the end, over those of the same policy without failures. "
    "whole_restart: the given plan, and everything begins anew from the newest checkpoint whenever a slot is lost "
    "(torchrun). For both, checkpoints every 10 steps cost nothing, a restart takes 60 s and a new process 20 s; all "
    "are ours. Counts: storms of 20 steps of seconds each, a failure every 200 s. The paper gives no such figures."
)


def section(*, quick: bool) -> Section:
    """Return useful shares and counts of what went wrong; ``quick`` is a smaller pool for less time and fewer seeds."""
    slots, hours = (64, 6.0) if quick else (512, 24.0)
    figures = [one for name in POLICIES for one in _useful(name, slots, hours)]
    counted = ((16, 10),) if quick else ((512, 30), (16, 1000))
    figures += [one for slots_, seeds in counted for one in _wrong(slots_, seeds)]
    short = f" Quick: {slots} slots and {hours:g} h in the place of 512 and 24 h, fewer seeds." if quick else ""
    return Section(title="Fault storms", figures=tuple(figures), assumes=_ASSUMES + short)


def _useful(name: str, slots: int, hours: float) -> list[Figure]:
    calm = _hours(name, slots, hours, 0.0)
    return [_share(name, slots, hours, mtbf_s, _hours(name, slots, hours, mtbf_s), calm) for mtbf_s in MTBF_S]


def _hours(name: str, slots: int, hours: float, mtbf_s: float) -> Stormed:
    return storm(_day_job(slots), 0, mtbf_s, policy=named(name), until_s=hours * 3600.0)


def _day_job(slots: int) -> JobConfig:
    config = storm_job(slots, EVER)
    return replace(config, rollout=replace(config.rollout, max_new_tokens=LONGEST))


def _share(name: str, slots: int, hours: float, mtbf_s: float, found: Stormed, calm: Stormed) -> Figure:
    note = (
        f"{found.steps} of {calm.steps} steps, {found.lost} losses, {found.changes} changes, {found.restores} restores"
    )
    return Figure(
        what=f"useful share of {hours:g} h on {slots} slots, a failure every {mtbf_s / 3600:g} h, {name}",
        ours=100 * (found.steps / found.virtual_s) / (calm.steps / calm.virtual_s),
        unit="%",
        note=f"{note}; after {found.virtual_s / 3600:.1f} h {found.wrong[:80]}" if found.wrong else note,
    )


def _wrong(slots: int, seeds: int) -> list[Figure]:
    found = [storm(storm_job(slots, SHORT_STEPS), seed, SHORT_MTBF_S) for seed in range(seeds)]
    given_up = [one.wrong for one in found if one.wrong.startswith("ended")]
    wrong = [one.wrong for one in found if one.wrong and not one.wrong.startswith("ended")]
    lost, restores = sum(one.lost for one in found), sum(one.restores for one in found)
    of = f"of {seeds} seeds of {SHORT_STEPS} steps"
    return [
        Figure(
            what=f"storms on {slots} slots in which a sample was lost or repeated, or all waited for ever",
            ours=len(wrong),
            unit="count",
            note=f"{of}, {lost} losses, {restores} restores" + (f"; first: {wrong[0][:80]}" if wrong else ""),
        ),
        Figure(
            what=f"storms on {slots} slots that ended before the last step, with their reason",
            ours=len(given_up),
            unit="count",
            note=of + (f"; first: {given_up[0][:80]}" if given_up else ""),
        ),
    ]
