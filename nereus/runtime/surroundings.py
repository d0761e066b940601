"""What does the supervisor need around it, and what does it give back?

The live assembly (``live.py``) and the in-process worlds of the tests provide the same few things.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from nereus.algo.sampler import Cursor
from nereus.bus.messages import StepReport
from nereus.core.plan import Plan
from nereus.errors import NereusError
from nereus.runtime.fleet import Worker
from nereus.runtime.processes import Exited


class RunFailed(NereusError):
    """The run cannot go on; the message is the explanation that the operator gets."""


class LeftAtOnce(RunFailed):
    """The operator did not want to wait for the drain."""


class Launcher(Protocol):
    """Starts worker processes and reports their exits."""

    @property
    def exits(self) -> asyncio.Queue[Exited]: ...

    async def start(self, worker: str) -> int:
        """Start a process for ``worker`` and return its pid."""

    @property
    def running(self) -> Mapping[str, int]:
        """The pids of those that can be killed from here, by name."""

    def kill(self, worker: str) -> None: ...

    async def wait(self, *, timeout_s: float) -> tuple[str, ...]: ...

    async def stop(self, *, grace_s: float) -> None: ...


class TransitionProgress(Struct, frozen=True):
    """How far a plan change has come."""

    target: str
    """The layouts to come, in a few words (``timeline.summarized``)."""
    total: int = 0
    """Primitives of the transition; 0 while it has not begun and waits for the weight-sync point."""
    done: int = 0
    running: tuple[str, ...] = ()
    """Ids of the primitives in flight; none when all are done: the new plan is being put in force."""


class Observer(Protocol):
    """Whoever shows the run to people: display, metrics file, STATUS."""

    def step(self, report: StepReport, metrics: dict[str, float]) -> None: ...

    def fleet(self, workers: Iterable[Worker]) -> None: ...

    def note(self, text: str) -> None: ...

    def plan(self, plan: Plan) -> None:
        """``plan`` is in force (also after a change that was given up); no change is under way any more."""

    def transition(self, progress: TransitionProgress) -> None:
        """A plan change waits for its boundary, or goes on."""


class Unobserved:
    """An ``Observer`` that nobody looks at; those who want a part of it overwrite that."""

    def step(self, report: StepReport, metrics: dict[str, float]) -> None: ...

    def fleet(self, workers: Iterable[Worker]) -> None: ...

    def note(self, text: str) -> None: ...

    def plan(self, plan: Plan) -> None: ...

    def transition(self, progress: TransitionProgress) -> None: ...


class Origin(Struct, frozen=True):
    """What the run starts from: a model folder, or a committed checkpoint."""

    source: Path
    """Where trainers load weights (and, from a checkpoint, all other state)."""
    model: Path
    """Folder of the model's configuration and tokenizer files, which outlives every checkpoint."""
    step: int = 0
    version: int = 0
    cursor: Cursor = Cursor()


class Outcome(Struct, frozen=True):
    """How a run ended well."""

    reason: str
    finished: bool
    """All steps are done; otherwise the run was drained and can be resumed."""
