"""What must a device backend offer to the actors that use it?

Backends are imported by nobody: an actor loads ``nereus.backends.<name>`` by name, so that planning and simulating work
without torch. Arrays cross this boundary as numpy arrays or plain buffers; device tensors stay inside a backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from nereus.bus.messages import Loan, PullFrom, Receipt, Standing, StepReport
from nereus.core.plan import Emu, Plan, PolicyVersion, SlotId
from nereus.transition.primitive import Replica
from nereus.transition.reshard import Move, Piece, TensorSpec

Interrupt = Literal["keep", "wait", "abort"]
"""What happens to sequences in flight at a weight switch: they go on under the new version on their old KV cache, they
finish under the old version first, or they are resubmitted with their prefix (the cache is computed anew)."""


class SampleRequest(Struct, frozen=True):
    """One completion to draw."""

    id: str
    prompt: NDArray[np.int32]
    seed: tuple[int, int, int]
    """(run seed, group, index): position ``t`` of the completion draws from the stream of these three and ``t``, so a
    result depends neither on placement nor on what else is in the batch."""
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()


class Completion(Struct, frozen=True):
    """What came of a SampleRequest; the stop token, if any, is the last token."""

    id: str
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """Log-probability of each token under the distribution it was drawn from (after temperature, top-k and top-p)."""
    versions: NDArray[np.int32]
    finish: Literal["stop", "length", "context", "aborted"]


class RolloutBackend(Protocol):
    """Generates completions; one per rollout EMU slot. Methods belong to one event loop and never block it."""

    async def start(self, model: Path, *, emu: Emu, slot: SlotId) -> None:
        """Build the model from the folder's config.json (weights come by ``switch``) and preallocate the cache."""

    async def generate(self, request: SampleRequest) -> Completion:
        """Draw one completion; calls are batched continuously. Cancelling the call aborts the sequence."""

    async def switch(self, source: PullFrom, *, interrupt: Interrupt) -> int:
        """Take over the weights lent by ``source`` between two decode steps; return how many sequences were in flight.

        The weights are verified first: ``TransitionError`` if names, shapes or checksums differ, and the old version is
        served on.
        """

    @property
    def version(self) -> PolicyVersion: ...

    def stats(self) -> dict[str, float]:
        """Counters since start: ``live``, and where they are known ``decode_steps``, ``tokens``, ``prefill_tokens``,
        ``cached_tokens``, ``decode_s``, ``prefill_s``, ``busy_s`` (see ``messages.Generated``); ``peak_bytes``."""

    async def close(self) -> None: ...


class TrainBatch(Struct, frozen=True):
    """The samples of one optimizer step in global sample order, ragged, as flat arrays.

    With N samples: ``prompt_lengths``, ``lengths`` (completion tokens) int32 [N]; ``rewards`` float64 [N] with NaN for
    None; ``group_of`` int32 [N] (0, 0, ..., 1, 1, ...). ``tokens`` int32 [sum(prompt_lengths + lengths)]: prompt then
    completion, sample after sample. ``logprobs`` float32 and ``versions`` int32 [sum(lengths)].
    """

    step: int
    version: PolicyVersion
    prompt_lengths: NDArray[np.int32]
    lengths: NDArray[np.int32]
    group_of: NDArray[np.int32]
    rewards: NDArray[np.float64]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]


STATE_KINDS = ("parameter", "exp_avg", "exp_avg_sq")
"""What a trainer slot holds of each tensor that it trains: the master and both moments, all of the masters' dtype."""


class TrainerBackend(Protocol):
    """One slot of a trainer EMU. Methods block; the actor calls them on its compute thread, one at a time.

    Every rank of every trainer EMU must make the same calls in the same order: they contain collectives.
    """

    def assign(self, emu: Emu, plan: Plan, slot: SlotId, *, store: str) -> None:
        """Join the process groups of ``plan`` (all units of policy.training) as ``slot``."""

    def load(self, source: Path) -> int:
        """Load this slot's pieces of a model folder (returns step 0) or of a committed checkpoint (its step)."""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every tensor of the model, whole; tied aliases are left out."""

    @property
    def tied(self) -> dict[str, str]:
        """Alias name -> stored name, by real aliasing."""

    def share(self, batch: TrainBatch | None) -> TrainBatch:
        """Broadcast the batch from the lead slot (the first slot of the first unit) to all trainer slots."""

    def train(self, batch: TrainBatch) -> StepReport:
        """Advantages, packing, forward, backward, gradient sum over replicas, clipping, optimizer step.

        ``TransitionError`` if a peer is lost. No slot applies the step's last update before every slot has it ready.
        """

    def standing(self) -> Standing:
        """Return how far this slot has come, and of which replicas it holds a share."""

    def recall(self, step: int) -> None:
        """Let ``step`` be the next one, after a step that failed: apply the update that is ready, or forget it.

        ``ValueError`` if the slot can come to ``step`` neither way.
        """

    def publication(self) -> Sequence[Piece]:
        """The pieces this slot pushes at a weight sync: each piece of the model is pushed by exactly one slot, the work
        is spread over replicas."""

    def write(self, pieces: Sequence[Piece], path: Path, offsets: dict[str, int]) -> list[str]:
        """Write ``pieces`` into the shared file (whole tensors row-major at ``offsets``), return their checksums."""

    def save(self, folder: Path, step: int) -> bytes:
        """Write this slot's share of parameters, moments and counters into ``folder``, fsync, return a JSON manifest
        entry (see backends/torch/checkpoint.py)."""

    # State moves. Until ``adopt`` a slot keeps the replica that it trains (the committed one) beside those it took.

    def lend(self, moves: Sequence[Move], path: Path) -> Receipt:
        """Write the pieces of ``moves``, all of which leave this slot, into the existing file ``path``.

        They come from whatever replica this slot holds. ``ValueError`` if it holds a piece of them nowhere;
        ``TransitionError`` if the file cannot be written.
        """

    def take(self, replica: Replica, index: int, loans: Sequence[Loan], model: Path) -> int:
        """Hold slot number ``index`` of ``replica`` as well; return the bytes that were read.

        What the moves of ``loans`` bring to this slot is read and verified; the rest must be here already and is not
        copied. A slot that has nothing yet learns the model from the folder ``model``. ``TransitionError`` names piece
        and lender if something arrives damaged or of another step; nothing of ``replica`` is held then, and everything
        else as before.
        """

    def drop(self, replica: Replica) -> None:
        """Forget one replica and free what no other needs; without it being held, do nothing.

        This holds for the committed replica as well: dropped before the new plan is certain, it is lost.
        """

    def adopt(self) -> int:
        """Train the unit that this slot is assigned to with what it holds of it; return the step that comes next.

        ``ValueError`` if no held replica has the unit's layout and slots. Every other replica is forgotten. Comes after
        ``assign``, in place of ``load``; also to go on with the committed replica, under a new plan or after a peer was
        lost.
        """

    def abandon(self) -> None:
        """Forget every replica but the committed one."""

    def close(self) -> None:
        """Leave all process groups; safe when peers are dead."""
