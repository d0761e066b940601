"""Does check_history pass a sound history and name what is wrong with an unsound one?"""

from __future__ import annotations

from typing import Any

import pytest

from nereus.algo.history import check_history

Record = dict[str, Any]


def refs(*groups: int) -> list[Record]:
    return [{"group": group, "attempt": 0} for group in groups]


def started(step: int = 0, version: int = 0) -> Record:
    return {"kind": "run_started", "step": step, "version": version}


def granted(*groups: int, attempt: int = 0) -> Record:
    return {"kind": "granted", "groups": [{"group": g, "attempt": attempt} for g in groups], "owner": "r", "version": 0}


def accepted(group: int, first: int = 0, attempt: int = 0, last: int | None = None) -> Record:
    last = first if last is None else last
    return {"kind": "accepted", "group": group, "attempt": attempt, "version_first": first, "version_last": last}


def trained(step: int, *groups: int) -> Record:
    return {"kind": "trained", "step": step, "version": step, "groups": refs(*groups)}


def ready(version: int, checksum: str = "a") -> Record:
    return {"kind": "version_ready", "version": version, "checksum": checksum}


def live(version: int, checksum: str = "a") -> Record:
    return {"kind": "weights_live", "worker": "slot-0", "version": version, "checksum": checksum}


SOUND = [
    started(),
    ready(0),
    live(0),
    granted(0, 1, 2, 3),
    *map(accepted, (1, 0, 2)),
    trained(0, 0, 1),
    ready(1),
    live(1),
    {"kind": "checkpoint_committed", "step": 1, "cursor": 2},
    accepted(3),
    trained(1, 2, 3),
]


def test_sound_history_has_no_problems() -> None:
    ended = {"kind": "run_ended", "ok": True}
    assert check_history([*SOUND, ended], staleness=1, groups_per_step=2, in_order=True) == []


def test_resume_makes_later_steps_void() -> None:
    again = [started(1, 1), ready(1), live(1), granted(2, 3), accepted(2, 1), accepted(3, 1), trained(1, 3, 2)]
    assert check_history([*SOUND, *again], staleness=1) == []
    assert check_history([*SOUND, *again[1:]], staleness=1) != []


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([*SOUND, accepted(2, 1), trained(2, 2)], "group 2 was trained again (first in step 1)"),
        ([started(), granted(0), trained(0, 0)], "group 0 was trained but not accepted"),
        ([started(4, 4), granted(0), accepted(0, 2), trained(4, 0)], "staleness 2, the bound is 1"),
        ([started(), granted(0), accepted(0), trained(1, 0)], "step 1 on version 1 came where step 0 on 0 belongs"),
        ([started(), accepted(0)], "group 0 attempt 0 was accepted but not granted"),
        ([started(), granted(0), granted(0)], "granted as attempt 0 again"),
        ([started(), granted(0), accepted(0), accepted(0)], "group 0 was accepted twice"),
        ([started(), granted(0), accepted(0, 1)], "claims version 1, which is not made yet"),
        ([started(), granted(0), {"kind": "dropped", "group": 0}, granted(0, attempt=1)], "after it was finished"),
        (
            [started(), granted(0, attempt=1), accepted(0, attempt=1), trained(0, 0)],
            "trained as attempt 0, accepted as 1",
        ),
        ([*SOUND, live(0)], "slot-0 fell back from version 1 to 0"),
        ([*SOUND, live(1, "b")], "serves other weights as version 1"),
        ([*SOUND, ready(0)], "version 0 became ready after version 1"),
        ([started(), ready(2)], "version 2 became ready, but version 0 is still being trained"),
        ([started(), {"kind": "checkpoint_committed", "step": 0, "cursor": 1}], "group 0 lies before cursor 1"),
        ([started(), granted(0, 2), {"kind": "run_ended"}], "group 1 was skipped"),
    ],
)
def test_each_broken_promise_is_named(records: list[Record], problem: str) -> None:
    problems = check_history(records, staleness=1)
    assert any(problem in found for found in problems), problems


def test_batches_are_checked() -> None:
    assert "trained 2 groups instead of 3" in check_history(SOUND, staleness=1, groups_per_step=3)[0]
    swapped = [started(), granted(0, 1), accepted(1), trained(0, 1), accepted(0), trained(1, 0)]
    assert "out of the sample order" in check_history(swapped, staleness=1, in_order=True)[0]
