"""Which flags make another framework run the chosen plan? ``nereus plan --emit verl|openrlhf|trl``.

Each module of ``frameworks`` knows one release of one framework and names it. What a framework cannot express is
said in a comment line, never left out in silence. Invariants (tests/commands/test_emit.py): the
devices that the flags ask for are those of the plan, or a comment says by how many they differ; every flag is one that
the release knows.
"""

from __future__ import annotations

from collections.abc import Callable

from nereus.commands.frameworks import openrlhf, trl, verl
from nereus.commands.frameworks.facts import Emission
from nereus.commands.planfile import PlanReport
from nereus.errors import ConfigError

WRITERS: dict[str, Callable[[PlanReport], Emission]] = {
    "verl": verl.write,
    "openrlhf": openrlhf.write,
    "trl": trl.write,
}


def emit(report: PlanReport, target: str) -> Emission:
    """Return the flags of ``target`` for a plan; ``ConfigError`` for a framework that is not known."""
    check_framework(target)
    return WRITERS[target](report)


def check_framework(target: str) -> None:
    """Refuse a framework that is not known."""
    if target not in WRITERS:
        known = ", ".join(WRITERS)
        raise ConfigError(f"there is no framework {target!r} to write for", where="--emit", remedy=f"known: {known}")
