"""Which plan changes does a job ask for, and when; and how many slots does it have?

Values only, and the one grammar of ``adapt.at`` and ``emulate.slots``. Invariants (tests/core/test_change.py): what is
read is written the same way; steps increase.
"""

from __future__ import annotations

from msgspec import Struct

from nereus.core.plan import Replication


class Change(Struct, frozen=True):
    """After ``step`` steps, train and generate like this."""

    step: int
    train: Replication
    rollout: Replication

    def __str__(self) -> str:
        return f"{self.step} {self.train} {self.rollout}"

    @classmethod
    def parse(cls, text: str) -> Change:
        """Read ``20 d1t2p1 d2t1p1``; ``ValueError`` names the text."""
        words = text.split()
        try:
            if len(words) != 3 or not words[0].isdecimal():
                raise ValueError(text)
            return cls(int(words[0]), Replication.parse(words[1]), Replication.parse(words[2]))
        except ValueError:
            raise ValueError(f"{text.strip()!r} is not a plan change") from None


class Supply(Struct, frozen=True):
    """From ``step`` steps on there are ``slots`` slots."""

    step: int
    slots: int

    def __str__(self) -> str:
        return f"{self.step} {self.slots}"

    @classmethod
    def parse(cls, text: str) -> Supply:
        """Read ``12 4``; ``ValueError`` names the text."""
        words = text.split()
        if len(words) != 2 or not all(word.isdecimal() for word in words) or not int(words[1]):
            raise ValueError(f"{text.strip()!r} does not say how many slots there are after how many steps")
        return cls(int(words[0]), int(words[1]))


def parse_supply(text: str) -> tuple[Supply, ...]:
    """Read the slots of a pool over time, separated by semicolons; ``ValueError`` if steps do not increase."""
    found = tuple(Supply.parse(part) for part in text.split(";") if part.strip())
    before = 0
    for supply in found:
        if supply.step <= before:
            raise ValueError(f"'{supply}' is not after step {before}")
        before = supply.step
    return found


def parse_changes(text: str) -> tuple[Change, ...]:
    """Read plan changes separated by semicolons; ``ValueError`` if a step is not later than the one before, or 0."""
    changes = tuple(Change.parse(part) for part in text.split(";") if part.strip())
    before = 0
    for change in changes:
        if change.step <= before:
            raise ValueError(f"'{change}' is not after step {before}")
        before = change.step
    return changes
