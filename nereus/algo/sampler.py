"""Which data row does a group complete, and how far has the run come in the sample order?

Owner: the supervisor. The position of a group in the global sample order is its id, 0, 1, 2, ... without end; nothing
about it depends on the plan, on time, or on which groups finished first.

Invariants (tests/algo/test_sampler.py): every epoch of ``rows`` consecutive groups visits every row once; the order of
one epoch says nothing about the next; a cursor counts what was trained (or dropped with a reason), never what was
merely started, so a resumed run neither skips nor repeats a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

_MASK = (1 << 64) - 1
_ROUNDS = 6


class SampleOrder(Struct, frozen=True):
    """The order in which data rows are visited: an endless sequence of epochs, each a permutation of the rows.

    A shuffled epoch is a Feistel permutation keyed by (seed, epoch): one row costs a few hashes and no memory, so any
    position can be looked up at once, also after a resume in the middle of epoch 1,000.
    """

    rows: int
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"a sample order needs at least one row, got {self.rows}")

    def row(self, group: int) -> int:
        """Return the data row of ``group``."""
        if group < 0:
            raise ValueError(f"groups count from 0, got {group}")
        epoch, position = divmod(group, self.rows)
        if not self.shuffle or self.rows == 1:
            return position
        half = (max(1, (self.rows - 1).bit_length()) + 1) // 2
        key = _mix(_mix(self.seed) ^ epoch)
        while (
            True
        ):  # Walking the cycle until it is back among the rows keeps the permutation; 4 turns at most on average.
            position = _feistel(position, half, key)
            if position < self.rows:
                return position


def _feistel(value: int, half: int, key: int) -> int:
    """Permute the numbers of ``2 * half`` bits."""
    low_mask = (1 << half) - 1
    left, right = value >> half, value & low_mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (_mix(key ^ _mix((turn << 48) + right)) & low_mask)
    return left << half | right


def _mix(value: int) -> int:
    """Scatter the bits of a 64-bit number (the finalizer of SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Cursor(Struct, frozen=True, forbid_unknown_fields=True):
    """Which groups are finished for good: all below ``frontier``, and those of ``trained_beyond`` (ascending).

    JSON-able; it goes into the checkpoint. A dropped group counts as finished.
    """

    frontier: int = 0
    trained_beyond: tuple[int, ...] = ()

    def __contains__(self, group: int) -> bool:
        return group < self.frontier or group in self.trained_beyond

    def advance(self, groups: Iterable[int]) -> Cursor:
        """Return the cursor after ``groups`` were finished too; ``ValueError`` if one of them already was."""
        beyond = set(self.trained_beyond)
        for group in groups:
            if group < self.frontier or group in beyond:
                raise ValueError(f"group {group} is finished already (frontier {self.frontier})")
            beyond.add(group)
        frontier = self.frontier
        while frontier in beyond:
            beyond.remove(frontier)
            frontier += 1
        return Cursor(frontier, tuple(sorted(beyond)))

    def unfinished(self) -> Iterator[int]:
        """Yield, without end, the groups that are still to be done, in order."""
        beyond = set(self.trained_beyond)
        group = self.frontier
        while True:
            if group not in beyond:
                yield group
            group += 1
