"""Would the controller decide again as it did?

A journal holds what the controller was told (``Happened``) and what it decided (``Decided``). Here a fresh controller
is told the same, and what it says is compared with what was written. Owner: ``nereus replay``. Invariants
(tests/runtime/test_replaying.py): an untouched journal is reproduced, live or simulated; a decision that was changed or
left out is named.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from nereus.control.controller import Controller, Event
from nereus.control.controller import Record as Said
from nereus.control.monitor import Monitor
from nereus.core.plan import Plan
from nereus.runtime import journal as record
from nereus.runtime.journal import Entry


class Replayed(Struct, frozen=True):
    """How much of a journal was reproduced."""

    events: int
    decisions: int
    """That were reproduced."""
    differences: tuple[str, ...] = ()
    """One sentence each, the oldest first."""


def to_plain(event: Event) -> dict[str, Any]:
    """Return an event as JSON can hold it: numbers that are not finite become text."""
    plain = _finite(msgspec.to_builtins(event))
    assert isinstance(plain, dict)
    return plain


def from_plain(plain: object) -> Event:
    """Return the event that ``to_plain`` was given; ``ValueError`` if it is none."""
    event: Event = msgspec.convert(plain, Event, strict=False)
    return event


def _finite(value: object) -> object:
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {key: _finite(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_finite(inner) for inner in value]
        case _:
            return value


def replay_decisions(entries: Iterable[Entry], *, gamma: float, capacity_bytes: int) -> Replayed:
    """Tell a controller what the journal says that it was told, and compare what it says."""
    controller: Controller | None = None
    plan: Plan | None = None
    said: deque[tuple[str, str]] = deque()
    events = decisions = 0
    differences: list[str] = []

    def settle(where: str) -> None:
        differences.extend(f"{where}: {kind} is not in the journal: {because}" for kind, because in said)
        said.clear()

    for entry in entries:
        where = f"record {entry.seq}"
        match entry.record:
            case record.RunStarted():
                settle(where)
                controller = None
            case record.PlanCommitted(plan=committed):
                plan = committed
            case record.Happened(event=event):
                settle(where)
                if plan is None:
                    raise ValueError(f"{where}: something happened before there was a plan")
                if controller is None:
                    controller = Controller(plan, Monitor(capacity_bytes), gamma=gamma)
                if controller.moving is None:
                    controller.plan = plan
                effects = controller.on(from_plain(event))
                said.extend((effect.kind, effect.because) for effect in effects if isinstance(effect, Said))
                events += 1
            case record.Decided(decision=kind, because=because) if controller is not None and said:
                expected = said.popleft()
                if expected == (kind, because):
                    decisions += 1
                else:
                    differences.append(f"{where}: {kind} ({because}), replayed: {expected[0]} ({expected[1]})")
            case record.Decided(decision=kind, because=because, numbers=numbers) if kind != "urgent" or numbers:
                differences.append(f"{where}: {kind} ({because}) is not reproduced")
    settle("the end")
    return Replayed(events, decisions, tuple(differences))
