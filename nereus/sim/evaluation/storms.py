"""How much of a day is useful while slots fail, and is anything lost, repeated or stuck?

Useful: steps that were done, at what a step takes in calm, over the time that passed.
"""

from __future__ import annotations

from nereus.sim.evaluation.figures import Figure, Section
from nereus.sim.policies.named import named
from nereus.sim.storm import storm, storm_job

DAY_S = 24 * 3600.0
MTBF_S = (1800.0, 7200.0, 21600.0)
RESTARTING = "checkpoint_restart"
CALM_STEPS = 12

_ASSUMES = (
    "Exponential failures of the whole pool, a tenth of them silent, under asynchronous GRPO of 8B. Checkpoints every "
    "10 steps cost nothing, a restart takes 60 s, a new process 20 s; all are ours. What a step takes in calm is "
    "that of the first plan, so a better plan can bring the share above 100 %. The paper gives no such figures."
)


def section(*, quick: bool) -> Section:
    """Return useful shares and counts of what went wrong; ``quick`` is a smaller pool for less time and fewer seeds."""
    slots, hours = (64, 1.0) if quick else (512, 24.0)
    figures = [_useful(name, slots, hours, mtbf_s) for mtbf_s in MTBF_S for name in ("nereus", RESTARTING)]
    counted = ((16, 10),) if quick else ((512, 30), (16, 1000))
    figures += [_wrong(*one) for one in counted]
    short = f" Quick: {slots} slots and {hours:g} h in the place of 512 and 24 h, fewer seeds." if quick else ""
    return Section(title="Fault storms", figures=tuple(figures), assumes=_ASSUMES + short)


def _useful(name: str, slots: int, hours: float, mtbf_s: float) -> Figure:
    what = f"useful share of {hours:g} h on {slots} slots, a failure every {mtbf_s / 3600:g} h, {name}"
    calm = storm(storm_job(slots, CALM_STEPS), 0, 0.0, policy=named("given"))
    step_s = calm.virtual_s / calm.steps
    until_s = hours * 3600.0
    config = storm_job(slots, 2 * int(until_s / step_s))
    found = storm(config, 0, mtbf_s, policy=named(name), until_s=until_s)
    note = f"{found.steps} steps, {found.lost} losses, {found.changes} changes, {found.restores} restores"
    return Figure(
        what=what,
        ours=100 * found.steps * step_s / found.virtual_s,
        unit="%",
        note=f"{note}; {found.wrong}" if found.wrong else note,
    )


def _wrong(slots: int, seeds: int) -> Figure:
    found = [storm(storm_job(slots, 20), seed, 200.0) for seed in range(seeds)]
    wrong = [one.wrong for one in found if one.wrong]
    lost = sum(one.lost for one in found)
    return Figure(
        what=f"storms on {slots} slots in which a sample was lost or repeated, or all waited for ever",
        ours=len(wrong),
        unit="count",
        note=f"of {seeds} seeds of 20 steps, {lost} losses" + (f"; first: {wrong[0][:80]}" if wrong else ""),
    )
