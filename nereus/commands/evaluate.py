"""How do our figures stand beside the paper's? The command ``nereus compare --paper``.

Measures the sections of ``sim/evaluation/sections.py`` and writes ``docs/evaluation.md`` below the current directory;
sections that are asked for alone go to standard output instead, so that the document is always of one piece.
Invariants (tests/sim/test_evaluation.py): unknown sections are refused before anything is measured.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

from nereus.core.units import format_seconds
from nereus.runtime.folder import write_whole
from nereus.runtime.logs import silence
from nereus.sim.evaluation.sections import Measured, chosen, document, measured

DOCUMENT = Path("docs") / "evaluation.md"


def evaluate(*, only: str, quick: bool, out: Path | None) -> int:
    """Measure and write; return the exit code. ``ConfigError`` for wrong input."""
    keys = chosen(only)
    silence()
    made: list[Measured] = []
    for one in measured(keys, quick=quick, clock=time.process_time):
        made.append(one)
        sys.stderr.write(f"{one.key}: {len(one.section.figures)} figures in {format_seconds(one.cpu_s)}\n")
    text = document(made, when=time.strftime("%Y-%m-%d", time.gmtime()), machine=_machine())
    place = out or (None if only else DOCUMENT)
    if place is None:
        sys.stdout.write(text)
    else:
        write_whole(place, text.encode())
        sys.stdout.write(f"{place}\n")
    return 0


def _machine() -> str:
    return f"{os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}"
