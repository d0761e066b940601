"""How fast can phases on the same slots be where memory comes in too many classes for a table?

Branch and bound: an interval of memory for each phase's largest resident bytes and one for the largest transient bytes.
A box of intervals is bounded by its upper corner; the box with the least bound comes first; if its choice fits, it is
optimal. Exact like the table (``frontier``), which is faster where it fits. Owner: ``search``.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from nereus.control.frontier import NEVER, Array
from nereus.control.problem import Phase, Side


class _Pick(NamedTuple):
    """The fastest choice of one phase within its caps: positions in the phase's sorted columns, by member."""

    seconds: float
    positions: tuple[int, ...]
    resident: int
    transient: int


class Fit(NamedTuple):
    """The fastest choice of a side: its latency, each phase's largest resident bytes, the largest transient bytes."""

    seconds: float
    residents: tuple[int, ...]
    transient: int


class _Sweep:
    """One phase: its candidates sorted by seconds, and its frontier under any caps."""

    def __init__(self, phase: Phase) -> None:
        columns = [member.columns for member in phase.members]
        counts = [len(member.candidates) for member in phase.members]
        slots, seconds, resident, transient = map(np.concatenate, zip(*columns, strict=True))
        order = np.argsort(seconds, kind="stable")
        self.members = len(counts)
        self.starts = np.cumsum([0, *counts[:-1]]).tolist()
        self.order = order
        self.seconds: Array = seconds[order]
        self.slots: Array = slots[order]
        self.resident: Array = resident[order]
        self.transient: Array = transient[order]
        self.least_slots = sum(int(column[0].min()) for column in columns)
        self.least_resident = max(int(column[2].min()) for column in columns)
        self.least_transient = max(int(column[3].min()) for column in columns)
        self.most_resident = int(resident.max())
        self.most_transient = int(transient.max())
        owner = np.repeat(np.arange(self.members), counts)[order]
        self.needs: Array = np.where(owner == np.arange(self.members)[:, None], self.slots, NEVER)
        self._frontiers: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._picks: dict[tuple[int, int, int], _Pick | None] = {}

    def pick(self, slots: int, resident: int, transient: int) -> _Pick | None:
        """Return the fastest choice with at most ``slots`` and candidates within the caps."""
        resident, transient = min(resident, self.most_resident), min(transient, self.most_transient)
        key = (slots, resident, transient)
        if key not in self._picks:
            self._picks[key] = self._pick(*key)
        return self._picks[key]

    def _pick(self, slots: int, resident: int, transient: int) -> _Pick | None:
        fewest, falling = self._frontier(resident, transient)
        end = int(falling.searchsorted(-slots))
        if end == len(falling):
            return None
        if self.members == 1:
            return _Pick(float(self.seconds[end]), (end,), int(self.resident[end]), int(self.transient[end]))
        # The first position that reaches a member's running minimum is its fastest candidate with so few slots.
        positions = tuple(int((-row).searchsorted(-row[end])) for row in fewest[:, : end + 1])
        at = list(positions)
        return _Pick(float(self.seconds[end]), positions, int(self.resident[at].max()), int(self.transient[at].max()))

    def _frontier(self, resident: int, transient: int) -> tuple[Array, Array]:
        """Return fewest slots by member, and minus their sum, within each prefix of the sorted candidates."""
        key = (resident, transient)
        if key not in self._frontiers:
            needs = self.needs
            if resident < self.most_resident or transient < self.most_transient:
                needs = np.where((self.resident <= resident) & (self.transient <= transient), needs, NEVER)
            fewest = np.minimum.accumulate(needs, axis=1)
            falling = -(fewest[0] if self.members == 1 else fewest.sum(axis=0))
            self._frontiers[key] = fewest, falling
        return self._frontiers[key]


class _Box(NamedTuple):
    """Intervals of memory: one for each phase's largest resident bytes, the last for the largest transient bytes."""

    low: tuple[int, ...]
    high: tuple[int, ...]


class Boxes:
    """Branch and bound over the phases of a side, for memory of many classes."""

    def __init__(self, side: Side, usable: int) -> None:
        self.sweeps = [_Sweep(phase) for phase in side]
        self.usable = usable

    def fit(self, slots: int) -> Fit | None:
        """Look into the most promising box until a choice fits; split the box at what it uses too much of."""
        low = (
            *(sweep.least_resident for sweep in self.sweeps),
            max(sweep.least_transient for sweep in self.sweeps),
        )
        heap = list[tuple[float, int, _Box, tuple[_Pick, ...]]]()
        made = 0

        def push(box: _Box) -> None:
            nonlocal made
            tight = self._tighten(box)
            picks = tight and self._picks(slots, tight)
            if tight and picks:
                heapq.heappush(heap, (sum(pick.seconds for pick in picks), made, tight, picks))
                made += 1

        push(_Box(low, (self.usable,) * len(low)))
        while heap:
            seconds, _, box, picks = heapq.heappop(heap)
            residents, transient = tuple(pick.resident for pick in picks), max(pick.transient for pick in picks)
            if sum(residents) + transient <= self.usable:
                return Fit(seconds, residents, transient)
            for half in _halves(box, (*residents, transient)):
                push(half)
        return None

    def _tighten(self, box: _Box) -> _Box | None:
        """Lower each upper end to what the others' lower ends leave; None where nothing is left."""
        spare = self.usable - sum(box.low)
        if spare < 0:
            return None
        high = tuple(min(top, bottom + spare) for bottom, top in zip(box.low, box.high, strict=True))
        return _Box(box.low, high)

    def _picks(self, slots: int, box: _Box) -> tuple[_Pick, ...] | None:
        picks = list[_Pick]()
        for sweep, resident in zip(self.sweeps, box.high[:-1], strict=True):
            pick = sweep.pick(slots, resident, box.high[-1])
            if pick is None:
                return None
            picks.append(pick)
        return tuple(picks)


def _halves(box: _Box, used: tuple[int, ...]) -> Iterator[_Box]:
    """Split the box along the dimension that is used farthest above its lower end.

    The lower half excludes the present choice; the upper half counts at least what lies above the cut, so that the
    other dimensions lose as much.
    """
    at = max(range(len(used)), key=lambda dimension: used[dimension] - box.low[dimension])
    cut = (used[at] + box.low[at]) // 2
    yield _Box(box.low, (*box.high[:at], cut, *box.high[at + 1 :]))
    yield _Box((*box.low[:at], cut + 1, *box.low[at + 1 :]), box.high)
