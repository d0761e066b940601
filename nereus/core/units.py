"""How are bytes, seconds, rates and long lists written in text, and what do the prefixes stand for?

Values inside the program are plain bytes, seconds, FLOP/s and bytes/s; these names appear where a source states
something else and where people read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

GB: Final = 1e9
GIB: Final = float(1 << 30)
MEGA: Final = 1e6
GIGA: Final = 1e9
TERA: Final = 1e12
MICRO: Final = 1e-6


def format_bytes(size: float) -> str:
    """Return ``size`` bytes in decimal units, as memory capacities are stated: ``51.2 GB``."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return a duration with three significant digits: ``82.1 s``, ``4.30 ms``, ``2.1 h``."""
    if abs(seconds) >= 7200:
        return f"{seconds / 3600:.1f} h"
    if abs(seconds) >= 1000:
        return f"{seconds:.0f} s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def listed(things: Sequence[object], most: int = 8) -> str:
    """Return the first things and how many more there are: ``slot-0, slot-1 and 510 more``."""
    text = ", ".join(map(str, things[:most]))
    return f"{text} and {len(things) - most} more" if len(things) > most else text
