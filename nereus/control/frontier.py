"""How fast can one phase be, for each number of slots and each limit on memory?

A table of one concurrency group, made once per pricing: it depends neither on the pool nor on a slot's capacity, so it
serves every question about the same prices. Exact: the axes are the values that occur. Memory comes in few classes (it
follows layout, micro-batch and recomputation, hardly the number of replicas), so the table is small; where it would
not be, ``fits`` is false and the search does without.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Columns = tuple[Array, Array, Array, Array]
"""Slots, seconds, resident bytes, transient bytes of one member's candidates."""

MOST_CELLS = 4_000_000


class Points(NamedTuple):
    """The choices of a phase that no other beats in seconds, resident and transient bytes at once."""

    seconds: Array
    resident: Array
    transient: Array


class PhaseTable:
    """Least seconds by member, slots, resident and transient limit; and the best partition of slots among members."""

    def __init__(self, columns: tuple[Columns, ...]) -> None:
        self.columns = columns
        self.residents: Array = np.unique(np.concatenate([resident for _, _, resident, _ in columns]))
        self.transients: Array = np.unique(np.concatenate([transient for *_, transient in columns]))
        self.levels: list[Array] = [np.unique(slots) for slots, *_ in columns]
        widths = [len(levels) for levels in self.levels]
        corners = len(self.residents) * len(self.transients)
        self.fits = max(math.prod(widths[:-1]), sum(widths)) * corners <= MOST_CELLS
        self._points: dict[int, Points] = {}

    @cached_property
    def members(self) -> list[Array]:
        """Least seconds within limits, one array (slot level, resident level, transient level) for each member."""
        found = list[Array]()
        for (slots, seconds, resident, transient), levels in zip(self.columns, self.levels, strict=True):
            shape = (len(levels), len(self.residents), len(self.transients))
            cells = np.full(shape, np.inf)
            at = (levels.searchsorted(slots), self.residents.searchsorted(resident))
            np.minimum.at(cells, (*at, self.transients.searchsorted(transient)), seconds)
            for axis in range(3):
                np.minimum.accumulate(cells, axis=axis, out=cells)
            found.append(cells)
        return found

    @cached_property
    def _splits(self) -> tuple[Array, list[Array]]:
        """Return, for each combination of slot levels of all members but the last, their sum and each one's level."""
        first = self.levels[:-1]
        grids = np.meshgrid(*(np.arange(len(levels)) for levels in first), indexing="ij")
        chosen = [grid.ravel() for grid in grids]
        sums = [levels[at] for levels, at in zip(first, chosen, strict=True)]
        total = np.zeros(chosen[0].size if chosen else 1, np.int64)
        for level in sums:
            total += level
        return total, list(chosen)

    def _fastest(self, slots: int) -> Array:
        """Return the phase's least seconds (resident level, transient level) when its members share ``slots``."""
        *first, last = self.members
        sums, chosen = self._splits
        left = slots - sums
        possible = np.flatnonzero(left >= self.levels[-1][0])
        if not len(possible):
            return np.full(last.shape[1:], np.inf)
        rest = self.levels[-1].searchsorted(left[possible], side="right") - 1
        if not first:
            alone: Array = last[rest[0]]
            return alone
        slowest = last[rest]
        for cells, at in zip(first, chosen, strict=True):
            np.maximum(slowest, cells[at[possible]], out=slowest)
        fastest: Array = slowest.min(axis=0)
        return fastest

    def forget(self) -> None:
        """Drop the answers to single questions, keep the table: for measurements."""
        self._points.clear()

    def points(self, slots: int) -> Points:
        """Return the undominated choices with ``slots``: corners where both a tighter limit and less time differ."""
        if slots not in self._points:
            fastest = self._fastest(slots)
            corner = np.isfinite(fastest)
            corner[1:] &= fastest[1:] < fastest[:-1]
            corner[:, 1:] &= fastest[:, 1:] < fastest[:, :-1]
            rows, columns = np.nonzero(corner)
            self._points[slots] = Points(fastest[rows, columns], self.residents[rows], self.transients[columns])
        return self._points[slots]

    def spread(self, slots: int, resident: int, transient: int) -> tuple[int, ...]:
        """Return candidate numbers by member: the slowest member as fast as can be, then the next slowest, and so on.

        A member with slack gets more of it that way: predictions are never perfect. The limits must be reachable.
        """
        row = int(self.residents.searchsorted(resident, side="right")) - 1
        column = int(self.transients.searchsorted(transient, side="right")) - 1
        curves = [
            list(zip(levels.tolist(), cells[:, row, column].tolist(), strict=True))
            for levels, cells in zip(self.levels, self.members, strict=True)
        ]
        chosen: dict[int, int] = {}
        left = slots
        while len(chosen) < len(curves):
            rest = [member for member in range(len(curves)) if member not in chosen]
            member, level, seconds = _bottleneck({member: curves[member] for member in rest}, left)
            chosen[member] = self._number(member, level, seconds, resident, transient)
            left -= level
        return tuple(chosen[member] for member in range(len(curves)))

    def _number(self, member: int, level: int, time: float, resident: int, transient: int) -> int:
        """Return the first candidate of ``member`` with this price within the limits."""
        slots, seconds, kept, passing = self.columns[member]
        return int(np.argmax((seconds == time) & (slots == level) & (kept <= resident) & (passing <= transient)))


def _bottleneck(curves: dict[int, list[tuple[int, float]]], slots: int) -> tuple[int, int, float]:
    """Return the member that is slowest when all are as fast as ``slots`` allow, with its slots and seconds.

    All begin with the fewest slots; the slowest gets more until it cannot be helped.
    """
    at = {member: next(i for i, (_, time) in enumerate(curve) if time < math.inf) for member, curve in curves.items()}
    left = slots - sum(curves[member][level][0] for member, level in at.items())
    while True:
        slowest = max(at, key=lambda member: curves[member][at[member]][1])
        level, seconds = curves[slowest][at[slowest]]
        better = next((i for i, (_, time) in enumerate(curves[slowest]) if time < seconds), None)
        if better is None or curves[slowest][better][0] - level > left:
            return slowest, level, seconds
        left -= curves[slowest][better][0] - level
        at[slowest] = better
