"""Which plan changes does a job ask for, and when?

Values only, and the one grammar of ``adapt.at``. Invariants (tests/core/test_change.py): what is read is written the
same way; steps increase.
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


def parse_changes(text: str) -> tuple[Change, ...]:
    """Read plan changes separated by semicolons; ``ValueError`` if a step is not later than the one before, or 0."""
    changes = tuple(Change.parse(part) for part in text.split(";") if part.strip())
    before = 0
    for change in changes:
        if change.step <= before:
            raise ValueError(f"'{change}' is not after step {before}")
        before = change.step
    return changes
