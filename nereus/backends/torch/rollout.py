"""How does an event loop use the built-in generation engine?

Owner: the rollout actor. The engine runs on one thread of its own, which takes commands from a queue between two
steps and hands results back in one call per step. New weights are verified and copied on a second thread while decoding
goes on; the engine then switches between two steps.

Invariants (tests/backends/test_rollout_backend.py): a failure of the engine fails every call that waits, and every
later one; weights that do not fit leave the old version in service; no call outlives ``close``.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path

import msgspec
import torch

from nereus.backends.api import Completion, Interrupt, SampleRequest
from nereus.backends.emulation import GenerationCosts, Speeds
from nereus.backends.torch.decode_model import Shape, read_shape
from nereus.backends.torch.devices import device_of
from nereus.backends.torch.generate import NO_VERSION, GenerateEngine, needed_bytes
from nereus.backends.torch.lent_weights import load_weights
from nereus.bus.messages import PullFrom
from nereus.config import JobConfig
from nereus.core.plan import Emu, Layout, PolicyVersion, SlotId
from nereus.core.shape import ModelShape
from nereus.errors import ConfigError, OutOfMemory, TransitionError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_JOIN_S = 30.0

Command = Callable[[GenerateEngine], None]


class TorchRollout:
    """Implements ``RolloutBackend`` by the built-in engine: one slot per unit."""

    def __init__(self, config: JobConfig, slot: SlotId = 0) -> None:
        self._config = config
        self._threads = config.cluster.threads_per_slot
        self._device = device_of(config.cluster.device, slot)
        self._dtype = _DTYPES[config.model.dtype]
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._results: dict[str, asyncio.Future[Completion]] = {}
        self._switched: asyncio.Future[int] | None = None
        self._switching = asyncio.Lock()
        self._tickets = itertools.count()
        self._failure: TransitionError | None = None
        self._busy_s = 0.0

    async def start(self, model: Path, *, emu: Emu, slot: SlotId) -> None:
        """Build the engine for the model folder's config.json and start its thread.

        ``OutOfMemory`` if it needs more than the slot has.
        """
        if emu.layout != Layout(1, 1):
            raise ConfigError(
                f"the built-in engine serves t1p1 only, {emu.id} has {emu.layout}",
                where="rollout.layout",
                remedy="use more replicas (d2t1p1, d4t1p1, ...)",
            )
        self._loop = asyncio.get_running_loop()
        # One worker, which loads weights; torch's thread count is a property of the calling thread.
        self._loader = ThreadPoolExecutor(1, "weights", initializer=torch.set_num_threads, initargs=(self._threads,))
        build = partial(self._build, model, f"{emu.id} on slot {slot}")
        self._shape, self._engine = await self._loop.run_in_executor(self._loader, copy_context().run, build)
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name="generate", daemon=True)
        self._thread.start()

    def _build(self, model: Path, where: str) -> tuple[Shape, GenerateEngine]:
        rollout, limit_bytes = self._config.rollout, self._config.emulate.memory_mb * 1_000_000
        shape, slots, device, dtype = read_shape(model), rollout.max_live, self._device, self._dtype
        capacity = min(shape.context, rollout.max_prompt_tokens + rollout.max_new_tokens)
        self._needed_bytes = needed_bytes(shape, slots, capacity, dtype)
        if limit_bytes and sum(self._needed_bytes.values()) > limit_bytes:
            raise OutOfMemory(where, self._needed_bytes, limit_bytes)
        speeds = Speeds.of(self._config.emulate)
        costs = None if speeds is None else GenerationCosts(speeds, _sizes(shape), dtype.itemsize)
        try:
            return shape, GenerateEngine(shape, slots=slots, capacity=capacity, device=device, dtype=dtype, costs=costs)
        except torch.OutOfMemoryError as error:
            whole = torch.cuda.get_device_properties(device).total_memory
            raise OutOfMemory(where, self._needed_bytes, whole) from error

    async def generate(self, request: SampleRequest) -> Completion:
        """Draw one completion; cancelling aborts the sequence."""
        self._check_alive()
        if self.version == NO_VERSION:
            raise TransitionError("the engine has no weights: switch to a version before generating")
        # Not the caller's id: a late result must not answer a later request of the same name.
        ticket = str(next(self._tickets))
        result: asyncio.Future[Completion] = self._loop.create_future()
        self._results[ticket] = result
        numbered = msgspec.structs.replace(request, id=ticket)
        self._commands.put(lambda engine: self._submit(engine, numbered))
        try:
            return msgspec.structs.replace(await result, id=request.id)
        except asyncio.CancelledError:
            self._commands.put(lambda engine: _cancel(engine, ticket))
            raise
        finally:
            del self._results[ticket]

    async def switch(self, source: PullFrom, *, interrupt: Interrupt) -> int:
        """Verify and copy the lent weights, then switch; return how many sequences were in flight.

        If cancelled after the copy, the version takes effect all the same, unless a later one comes first.
        """
        self._check_alive()
        async with self._switching:
            load = partial(load_weights, source, self._shape, self._device, self._dtype)
            weights = await self._loop.run_in_executor(self._loader, copy_context().run, load)
            self._check_alive()
            switched: asyncio.Future[int] = self._loop.create_future()
            self._switched = switched
            self._commands.put(lambda engine: engine.offer(weights, source.version, interrupt))
            return await switched

    @property
    def version(self) -> PolicyVersion:
        return self._engine.version

    def stats(self) -> dict[str, float]:
        """Counters since start; ``shared_tokens`` are prompt tokens whose cache was copied from another sample."""
        counters, engine = self._engine.counters, self._engine
        return {
            "decode_steps": counters.decode_steps,
            "tokens": counters.tokens,
            "prefill_tokens": counters.prefill_tokens,
            "shared_tokens": counters.shared_tokens,
            "cached_tokens": counters.cached_tokens,
            "decode_s": counters.decode_s,
            "prefill_s": counters.prefill_s,
            "peak_bytes": self._peak_bytes(),
            "busy_s": self._busy_s,
            "live": engine.live,
            "waiting": engine.waiting,
        }

    def _peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return sum(self._needed_bytes.values())

    async def close(self) -> None:
        """Stop the thread after its current step; calls that still wait fail."""
        if not hasattr(self, "_thread"):
            return
        self._commands.put(None)
        await self._loop.run_in_executor(None, self._thread.join, _JOIN_S)
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._fail(TransitionError("the generation engine is closed"))

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise TransitionError(str(self._failure)) from self._failure

    # On the engine's thread

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            while self._take_commands():
                began = time.perf_counter()
                interrupted = self._engine.switch_if_due()
                if interrupted is not None:
                    self._loop.call_soon_threadsafe(self._tell_switched, interrupted)
                finished = self._engine.step()
                self._busy_s += time.perf_counter() - began
                if finished:
                    self._loop.call_soon_threadsafe(self._deliver, finished)
        except Exception as error:  # noqa: BLE001  Whatever it is, those who wait must hear of it.
            failure = TransitionError(f"the generation engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._loop.call_soon_threadsafe(self._fail, failure)

    def _take_commands(self) -> bool:
        """Carry out the commands that came since the last step; wait for one while idle; False means leave."""
        while True:
            try:
                command = self._commands.get(block=self._engine.idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(self._engine)

    def _submit(self, engine: GenerateEngine, request: SampleRequest) -> None:
        try:
            engine.submit(request)
        except ValueError as error:
            self._loop.call_soon_threadsafe(self._refuse, request.id, error)

    # On the event loop

    def _tell_switched(self, interrupted: int) -> None:
        if self._switched is not None and not self._switched.done():
            self._switched.set_result(interrupted)

    def _deliver(self, finished: list[Completion]) -> None:
        for completion in finished:
            result = self._results.get(completion.id)
            if result is not None and not result.done():
                result.set_result(completion)

    def _refuse(self, ticket: str, error: ValueError) -> None:
        result = self._results.get(ticket)
        if result is not None and not result.done():
            result.set_exception(error)

    def _fail(self, failure: TransitionError) -> None:
        """Remember the first failure and end every call that waits with it."""
        self._failure = self._failure or failure
        waiting: list[asyncio.Future[Completion] | asyncio.Future[int]] = list(self._results.values())
        if self._switched is not None:
            waiting.append(self._switched)
        for future in waiting:
            if not future.done():
                error = TransitionError(str(failure))
                error.__cause__ = failure
                future.set_exception(error)


def _sizes(shape: Shape) -> ModelShape:
    return ModelShape(
        shape.layers,
        shape.hidden,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.intermediate,
        shape.vocabulary,
        shape.context,
        shape.tied,
        shape.qkv_bias,
        shape.qk_norm,
    )


def _cancel(engine: GenerateEngine, ticket: str) -> None:
    engine.cancel(ticket)
