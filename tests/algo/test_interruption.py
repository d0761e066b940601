"""Is every group that a plan change finds in flight counted once, for what became of it?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nereus.algo.interruption import interruptions

TRAINER = {"model_stage": {"stage": 2, "model": "policy"}, "ordinal": 0, "slots": [0]}


def rollout(ordinal: int, slot: int) -> dict[str, Any]:
    return {"model_stage": {"stage": 0, "model": "policy"}, "ordinal": ordinal, "slots": [slot]}


def plan(epoch: int, *units: dict[str, Any]) -> dict[str, Any]:
    return {"epoch": epoch, "emus": [TRAINER, *units]}


def committed(epoch: int, *units: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "plan_committed", "plan": plan(epoch, *units), "why": ""}


def begun(epoch: int, *units: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "transition_begun", "plan": plan(epoch, *units)}


def ended(epoch: int, *, ok: bool = True) -> dict[str, Any]:
    return {"kind": "transition_ended", "epoch": epoch, "ok": ok, "seconds": 1.5}


def granted(slot: int, *groups: int, attempt: int = 0) -> dict[str, Any]:
    refs = [{"group": group, "attempt": attempt} for group in groups]
    return {"kind": "granted", "owner": f"slot-{slot}", "groups": refs}


def accepted(group: int, attempt: int = 0) -> dict[str, Any]:
    return {"kind": "accepted", "group": group, "attempt": attempt}


def reissued(group: int) -> dict[str, Any]:
    return {"kind": "reissued", "group": group, "attempt": 1}


def history() -> Iterator[dict[str, Any]]:
    """Slot 1 generates all along, slot 2 until the change, slot 3 from then on."""
    stays, goes, comes = rollout(0, 1), rollout(1, 2), rollout(2, 3)
    yield committed(0, stays, goes)
    yield from (granted(1, 0, 1, 2), granted(2, 3, 4), accepted(0))
    yield begun(1, stays, comes)
    yield from (accepted(1), accepted(3), reissued(4))
    yield committed(1, stays, comes)
    yield ended(1)
    yield from (granted(3, 4, attempt=1), accepted(2), accepted(4, attempt=1))


def test_each_group_in_flight_counts_for_what_became_of_it() -> None:
    (change,) = interruptions(history())
    assert (change.epoch, change.seconds, change.accepted_meanwhile) == (1, 1.5, 2)
    assert (change.kept, change.lost) == ({1, 2}, set())
    assert (change.finished, change.reissued) == ({3}, {4})
    assert not change.open


def test_an_untouched_rollout_that_loses_a_group_is_found() -> None:
    records = [reissued(2) if record == accepted(2) else record for record in history()]
    (change,) = interruptions(records)
    assert (change.kept, change.lost) == ({1}, {2})


def test_a_change_that_was_given_up_and_groups_of_an_earlier_attempt_do_not_count() -> None:
    records = list(history())
    assert not interruptions([ended(1, ok=False) if record == ended(1) else record for record in records])
    records.insert(records.index(begun(1, rollout(0, 1), rollout(2, 3))), {"kind": "run_started"})
    (change,) = interruptions(records)
    assert not (change.kept or change.lost or change.finished or change.reissued)


def test_a_long_group_counts_for_every_change_that_finds_it_in_flight() -> None:
    stays = rollout(0, 1)
    records = [committed(0, stays), granted(1, 0)]
    for epoch in (1, 2):
        records += [begun(epoch, stays, rollout(epoch, 2)), committed(epoch, stays, rollout(epoch, 2)), ended(epoch)]
    first, second = interruptions([*records, accepted(0)])
    assert first.kept == second.kept == {0}


def test_what_a_later_change_takes_from_a_rollout_is_not_charged_to_an_earlier_one() -> None:
    first, second = rollout(0, 1), rollout(1, 2)
    records = [committed(0, first, second), granted(1, 0), granted(2, 1)]
    records += [begun(1, first, second, rollout(2, 3)), committed(1, first, second, rollout(2, 3)), ended(1)]
    records += [begun(2, first, rollout(2, 3)), reissued(1), committed(2, first, rollout(2, 3)), ended(2)]
    earlier, later = interruptions([*records, accepted(0), granted(1, 1, attempt=1), accepted(1, attempt=1)])
    assert (earlier.kept, earlier.lost, earlier.open) == ({0, 1}, set(), {})
    assert (later.kept, later.reissued, later.open) == ({0}, {1}, {})
