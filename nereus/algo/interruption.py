"""What did each plan change interrupt? Groups in flight on rollouts that it touched, and on those that it did not.

Owner: tests and benchmarks; a pure function of journal records, like ``history.py``. A rollout is touched if its unit
is not the same, on the same slots, in the plan before and after. Invariants (tests/algo/test_interruption.py): a group
counts once for each change that finds it in flight; what an untouched rollout had begun is accepted in the same
attempt, is still at work when a later change touches its rollout, or is counted as lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_GENERATION = 0
"""``Stage.GENERATION`` as the journal writes it."""


@dataclass
class Interruption:
    """One plan change that came into force, and the groups in flight when it began."""

    epoch: int
    seconds: float = 0.0
    """From the boundary to the new plan in force."""
    kept: set[int] = field(default_factory=set)
    """On untouched rollouts, accepted later in the same attempt, or so far unharmed when a later change touched its
    rollout: this change lost no token of it."""
    lost: set[int] = field(default_factory=set)
    """On untouched rollouts, issued again."""
    finished: set[int] = field(default_factory=set)
    """On touched rollouts, accepted in the same attempt all the same."""
    reissued: set[int] = field(default_factory=set)
    """On touched rollouts, issued again."""
    accepted_meanwhile: int = 0
    """Groups that were accepted while the change went on."""
    open: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """Attempt of each group whose end is not known, and whether its rollout was touched."""

    def settle(self, group: int, attempt: int | None) -> None:
        """Note that ``attempt`` of a group was accepted; None: the one in flight was given up."""
        if group not in self.open:
            return
        began, touched = self.open.pop(group)
        whole = attempt == began
        (self.finished if touched and whole else self.kept if whole else self.reissued if touched else self.lost).add(
            group
        )


def interruptions(records: Iterable[Mapping[str, Any]]) -> list[Interruption]:
    """Return what each plan change of a run interrupted, oldest first; changes that were given up are left out.

    ``records`` are plain dictionaries with ``kind``, oldest first, as ``runtime/journal.py: plain`` yields them.
    """
    follower = _Follower()
    for record in records:
        follow = getattr(follower, f"on_{record['kind']}", None)
        if follow is not None:
            follow(record)
    return follower.found


class _Follower:
    """Who has which group in flight, and the changes so far."""

    def __init__(self) -> None:
        self.found: list[Interruption] = []
        self._units: list[Mapping[str, Any]] = []
        self._held: dict[int, tuple[int, str]] = {}
        """(attempt, rollout) of each group in flight."""
        self._running: Interruption | None = None

    def on_run_started(self, record: Mapping[str, Any]) -> None:
        self._held.clear()

    def on_plan_committed(self, record: Mapping[str, Any]) -> None:
        self._units = list(record["plan"]["emus"])

    def on_transition_begun(self, record: Mapping[str, Any]) -> None:
        target = record["plan"]["emus"]
        untouched = {
            f"slot-{slot}"
            for unit in self._units
            if unit in target and unit["model_stage"]["stage"] == _GENERATION
            for slot in unit["slots"]
        }
        # What becomes of a group whose rollout this change touches is this change's doing, not that of earlier ones.
        for group, (attempt, owner) in self._held.items():
            if owner not in untouched:
                for change in self.found:
                    change.settle(group, attempt)
        self._running = Interruption(record["plan"]["epoch"])
        self._running.open = {
            group: (attempt, owner not in untouched) for group, (attempt, owner) in self._held.items()
        }

    def on_transition_ended(self, record: Mapping[str, Any]) -> None:
        if self._running is not None and record["ok"]:
            self._running.seconds = record["seconds"]
            self.found.append(self._running)
        self._running = None

    def on_granted(self, record: Mapping[str, Any]) -> None:
        self._held |= {ref["group"]: (ref["attempt"], record["owner"]) for ref in record["groups"]}

    def on_accepted(self, record: Mapping[str, Any]) -> None:
        if self._running is not None:
            self._running.accepted_meanwhile += 1
        self._settle(record["group"], record["attempt"])

    def on_reissued(self, record: Mapping[str, Any]) -> None:
        self._settle(record["group"], None)

    def on_dropped(self, record: Mapping[str, Any]) -> None:
        self._settle(record["group"], None)

    def _settle(self, group: int, attempt: int | None) -> None:
        self._held.pop(group, None)
        for change in (*self.found, *([self._running] if self._running else [])):
            change.settle(group, attempt)
