"""How does a checkpoint come together from the shares of all trainer slots?

Owner: the supervisor. One checkpoint is under way at a time; it becomes visible when every slot has written its share.
Invariant (tests/virtual): a checkpoint holds the step, version and cursor of the moment it was begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog
from msgspec import Struct

from nereus.algo.sampler import Cursor
from nereus.core.plan import PolicyVersion
from nereus.runtime import journal as record
from nereus.runtime.checkpoints import CheckpointStore
from nereus.transition.reshard import TensorSpec

log = structlog.get_logger()


class _Saving(Struct):
    """The checkpoint under way."""

    step: int
    version: PolicyVersion
    cursor: Cursor
    shares: dict[str, bytes] = msgspec.field(default_factory=dict)


class Saver:
    """The checkpoint under way and the newest one on disk."""

    def __init__(self, checkpoints: CheckpointStore, model: Path, about: Mapping[str, Any], *, saved_step: int) -> None:
        """``model`` holds the model's files, ``about`` what every checkpoint of the run says of itself."""
        self._checkpoints = checkpoints
        self._model = model
        self._about = about
        self._saving: _Saving | None = None
        self.saved_step = saved_step
        """The newest step on disk; -1: none."""

    @property
    def busy(self) -> bool:
        return self._saving is not None

    @property
    def under_way(self) -> int | None:
        """The step whose checkpoint is being written."""
        return self._saving.step if self._saving is not None else None

    def begin(self, step: int, version: PolicyVersion, cursor: Cursor) -> Path:
        """Return the folder that the slots write into."""
        self._saving = _Saving(step, version, cursor)
        return self._checkpoints.begin(step)

    def add(self, worker: str, step: int, manifest: bytes) -> int:
        """Take note of one slot's share; return how many there are (0: of another checkpoint)."""
        if self._saving is None or self._saving.step != step:
            log.warning("share of another checkpoint", worker=worker, step=step)
            return 0
        self._saving.shares[worker] = manifest
        return len(self._saving.shares)

    async def commit(self, tensors: Sequence[TensorSpec]) -> record.CheckpointCommitted:
        """Make the checkpoint visible and return its record; ``CheckpointError`` leaves the older ones as they are."""
        assert self._saving is not None, "commit follows add"
        saving, self._saving = self._saving, None
        extra = {
            "step": saving.step,
            "version": saving.version,
            "cursor": msgspec.to_builtins(saving.cursor),
            **self._about,
        }
        shares = [saving.shares[name] for name in sorted(saving.shares)]
        folder = await asyncio.to_thread(
            self._checkpoints.commit, saving.step, shares, extra, model=self._model, tensors=tensors
        )
        self.saved_step = saving.step
        return record.CheckpointCommitted(
            step=saving.step, version=saving.version, cursor=saving.cursor.frontier, folder=folder.name
        )

    def abandon(self, step: int) -> bool:
        """Give the checkpoint of ``step`` up; return whether it was under way."""
        if self._saving is None or self._saving.step != step:
            return False
        self._saving = None
        self._checkpoints.abandon(step)
        return True
