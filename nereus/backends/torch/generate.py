"""How are many completions drawn at once?

Owner: the rollout backend. Continuous batching: one forward per token over all live sequences, which lie in dense
slots of a preallocated cache. A prompt is prefilled once, without its last token, and its cache copied to the other
samples of its group; the last token is fed by the next decode step, like any other. Bookkeeping is in arrays over
slots; per step one small transfer brings tokens and log-probabilities to the host.

Invariants (tests/backends/test_generate_engine.py): a completion depends on its request and the weights only; every
token carries the version that drew it; a cache computed under old weights is never given to a new sequence; new
weights take effect between two steps, whole.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from nereus.backends.api import Completion, Interrupt, SampleRequest
from nereus.backends.emulation import GenerationCosts, Pacer
from nereus.backends.torch.decode_model import Decoder, DecoderWeights, Shape
from nereus.backends.torch.sampling import Controls, controls, draw, stream_key, uniforms
from nereus.core.plan import PolicyVersion
from nereus.errors import TransitionError

NO_VERSION = -1
"""The version of an engine that has no weights yet."""

_NO_TOKEN = -1
_NO_INT = np.empty(0, np.int32)
_NO_FLOAT = np.empty(0, np.float32)

Finish = Literal["stop", "length", "context", "aborted"]


@dataclass
class Counters:
    """What the engine has done since it was made."""

    decode_steps: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    """Prompt and resubmitted tokens that went through the model."""
    shared_tokens: int = 0
    """Prompt tokens whose cache was copied instead."""
    cached_tokens: int = 0
    """Keys and values that decoding has read: for each token drawn, the tokens that it saw."""
    decode_s: float = 0.0
    prefill_s: float = 0.0


@dataclass(frozen=True)
class _Offer:
    weights: DecoderWeights
    version: PolicyVersion
    interrupt: Interrupt


class _Slots:
    """The bookkeeping of the live sequences: arrays over slots, moved together."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.requests: list[SampleRequest | None] = [None] * slots
        self.prompts: list[bytes] = [b""] * slots
        self.tokens = np.zeros((slots, capacity), np.int32)
        self.logprobs = np.zeros((slots, capacity), np.float32)
        self.versions = np.zeros((slots, capacity), np.int32)
        self.count = np.zeros(slots, np.int64)
        """Tokens drawn."""
        self.limit = np.zeros(slots, np.int64)
        self.cached = np.zeros(slots, np.int64)
        """Tokens in the cache: all that were fed."""
        self.prefilled_by = np.full(slots, NO_VERSION, np.int64)
        """The version that computed the cache of the prompt."""
        self.last = np.zeros(slots, np.int64)
        self.key = np.zeros(slots, np.uint64)
        self.temperature = np.ones(slots)
        self.top_k = np.zeros(slots, np.int64)
        self.top_p = np.ones(slots)
        self.stop = np.full((slots, 1), _NO_TOKEN, np.int64)

    def put(self, slot: int, request: SampleRequest, prompt: bytes, capacity: int) -> None:
        """Place a sequence of which nothing is drawn or cached yet."""
        stops = request.stop_token_ids
        if len(stops) > self.stop.shape[1]:
            wider = ((0, 0), (0, len(stops) - self.stop.shape[1]))
            self.stop = np.pad(self.stop, wider, constant_values=_NO_TOKEN)
        self.requests[slot], self.prompts[slot] = request, prompt
        self.stop[slot] = _NO_TOKEN
        self.stop[slot, : len(stops)] = stops
        self.count[slot] = 0
        self.limit[slot] = min(request.max_new_tokens, capacity - len(request.prompt))
        self.last[slot] = request.prompt[-1]
        self.key[slot] = stream_key(request.seed)
        self.temperature[slot], self.top_k[slot], self.top_p[slot] = request.temperature, request.top_k, request.top_p

    def move(self, source: list[int], target: list[int]) -> None:
        for values in vars(self).values():
            if isinstance(values, np.ndarray):
                values[target] = values[source]
            else:
                for a, b in zip(source, target, strict=True):
                    values[b] = values[a]

    def completion(self, slot: int, finish: Finish) -> Completion:
        request, count = self.request(slot), self.count[slot]
        drawn = slice(0, count)
        logprobs, versions = self.logprobs[slot, drawn].copy(), self.versions[slot, drawn].copy()
        return Completion(request.id, self.tokens[slot, drawn].copy(), logprobs, versions, finish)

    def request(self, slot: int) -> SampleRequest:
        request = self.requests[slot]
        assert request is not None, f"slot {slot} is empty"
        return request

    def fed(self, slot: int) -> NDArray[np.int64]:
        """Return the tokens that belong in the cache: all but the last, which the next step feeds."""
        drawn = self.tokens[slot, : self.count[slot]]
        return np.concatenate((self.request(slot).prompt, drawn))[:-1].astype(np.int64)


def needed_bytes(shape: Shape, slots: int, capacity: int, dtype: torch.dtype) -> dict[str, int]:
    """Return what an engine needs by purpose: old and new weights during a switch, the whole cache, logits."""
    cached = 2 * shape.layers * slots * capacity * shape.kv_heads * shape.head_dim
    values = {"weights": 2 * shape.parameters, "KV cache": cached, "logits": slots * shape.vocabulary}
    return {purpose: count * dtype.itemsize for purpose, count in values.items()}


class GenerateEngine:
    """Draws completions, synchronously; for one thread.

    ``slots`` sequences are live at most, each of at most ``capacity`` tokens, prompt included. With ``costs``, prefill
    and decode steps take at least as long as on the emulated device.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        slots: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        costs: GenerationCosts | None = None,
    ) -> None:
        if capacity > shape.context:
            raise ValueError(f"capacity {capacity} exceeds the model's context of {shape.context} tokens")
        self.counters = Counters()
        self.version: PolicyVersion = NO_VERSION
        self._shape, self._capacity, self._device, self._dtype = shape, capacity, device, dtype
        self._decoder = Decoder(shape, slots, capacity, device, dtype)
        self._slots = _Slots(slots, capacity)
        self._max_live = slots
        self._live = 0
        self._waiting: deque[SampleRequest] = deque()
        self._ids: set[str] = set()
        self._offer: _Offer | None = None
        self._last = torch.zeros(slots, dtype=torch.int64, device=device)
        self._positions = torch.zeros(slots, dtype=torch.int64, device=device)
        self._controls = Controls()
        self._costs = costs
        self._pacer = Pacer()

    @property
    def live(self) -> int:
        """How many sequences are in the batch."""
        return self._live

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """True if a step would do nothing."""
        return not (self._live or self._waiting or self._offer)

    def submit(self, request: SampleRequest) -> None:
        """Queue a request; ``ValueError`` says why it can never be served."""
        prompt, name = request.prompt, f"request {request.id}"
        if len(prompt) == 0:
            raise ValueError(f"{name} has an empty prompt")
        if len(prompt) >= self._capacity:
            raise ValueError(f"{name}: a prompt of {len(prompt)} tokens leaves no room in {self._capacity} tokens")
        if prompt.min() < 0 or prompt.max() >= self._shape.vocabulary:
            raise ValueError(f"{name} has a token outside the vocabulary of {self._shape.vocabulary}")
        if request.max_new_tokens < 1:
            raise ValueError(f"{name}: max_new_tokens is {request.max_new_tokens}, must be at least 1")
        if not request.temperature > 0 or not 0 < request.top_p <= 1 or request.top_k < 0:
            wanted = "temperature > 0, 0 < top_p <= 1, top_k >= 0"
            got = f"{request.temperature}, {request.top_p}, {request.top_k}"
            raise ValueError(f"{name}: wanted {wanted}, got {got}")
        if request.id in self._ids:
            raise ValueError(f"{name} is already being served")
        self._ids.add(request.id)
        self._waiting.append(request)

    def cancel(self, request_id: str) -> Completion | None:
        """Take a request out and return what was drawn for it; None if it is not (or no longer) here."""
        if request_id not in self._ids:
            return None
        for position, queued in enumerate(self._waiting):
            if queued.id == request_id:
                del self._waiting[position]
                self._ids.remove(request_id)
                return Completion(request_id, _NO_INT, _NO_FLOAT, _NO_INT, "aborted")
        slot = next(slot for slot in range(self._live) if self._slots.request(slot).id == request_id)
        with torch.inference_mode():
            completion = self._slots.completion(slot, "aborted")
            self._remove([slot])
        return completion

    def offer(self, weights: DecoderWeights, version: PolicyVersion, interrupt: Interrupt) -> None:
        """Let ``weights`` take effect before the next step or, with ``wait``, once nothing is live.

        An earlier offer that has not taken effect is dropped.
        """
        self._offer = _Offer(weights, version, interrupt)

    def switch_if_due(self) -> int | None:
        """Let offered weights take effect if they may; return how many sequences were live then, else None."""
        offer = self._offer
        if offer is None or (offer.interrupt == "wait" and self._live):
            return None
        self._offer = None
        self._decoder.weights, self.version = offer.weights, offer.version
        for slot in range(self._live):
            self._slots.versions[slot, self._slots.count[slot] :] = self.version
        if offer.interrupt == "abort" and self._live:
            with torch.inference_mode():
                self._prefill(list(range(self._live)))
        return self._live

    def step(self) -> list[Completion]:
        """Switch if due, admit what fits, draw one token for every live sequence; return what is finished."""
        self.switch_if_due()
        if self.version == NO_VERSION and self._waiting:
            raise TransitionError("the engine has no weights: switch to a version before generating")
        with torch.inference_mode():
            if self._offer is None and self._waiting and self._live < self._max_live:
                self._admit()
            return self._decode() if self._live else []

    def _admit(self) -> None:
        slots, first = self._slots, self._live
        while self._waiting and self._live < self._max_live:
            request = self._waiting.popleft()
            slots.put(self._live, request, request.prompt.astype(np.int32).tobytes(), self._capacity)
            slots.versions[self._live] = self.version
            self._live += 1
        new = range(first, self._live)
        # Prompts whose cache these weights have already computed; a cache of older weights is not shared.
        known = {slots.prompts[s]: s for s in range(first) if slots.prefilled_by[s] == self.version}
        fresh, copies = [], []
        for slot in new:
            source = known.setdefault(slots.prompts[slot], slot)
            if source == slot:
                fresh.append(slot)
            else:
                copies.append((source, slot))
        self._prefill(fresh)
        if copies:
            sources, targets = zip(*copies, strict=True)
            longest = max(len(slots.request(slot).prompt) for slot in targets) - 1
            self._copy(list(sources), list(targets), longest)
            for slot in targets:
                slots.cached[slot] = len(slots.request(slot).prompt) - 1
                slots.prefilled_by[slot] = self.version
                self.counters.shared_tokens += int(slots.cached[slot])
        self._refresh(first)

    def _prefill(self, of: list[int]) -> None:
        """Compute the caches of these slots under the current weights."""
        began, slots = perf_counter(), self._slots
        fed = {slot: slots.fed(slot) for slot in of}
        for slot, tokens in fed.items():
            slots.cached[slot] = len(tokens)
            slots.prefilled_by[slot] = self.version
            self.counters.prefill_tokens += len(tokens)
        filled = [slot for slot in of if len(fed[slot])]
        if filled:
            self._decoder.prefill(filled, [torch.from_numpy(fed[slot]).to(self._device) for slot in filled])
            if self._costs is not None:
                lengths = [len(fed[slot]) for slot in filled]
                self._pacer.pace(began, self._costs.prefill(sum(lengths), sum(length**2 for length in lengths)))
        self.counters.prefill_s += perf_counter() - began

    def _copy(self, source: list[int], target: list[int], tokens: int) -> None:
        if tokens:
            self._decoder.copy(self._tensor(source), self._tensor(target), tokens)

    def _refresh(self, first: int = 0) -> None:
        """Bring the device's copies of the bookkeeping up to date from slot ``first`` on, and the controls of all."""
        slots, live = self._slots, self._live
        if first < live:
            changed = slice(first, live)
            self._last[changed] = torch.from_numpy(slots.last[changed])
            self._positions[changed] = torch.from_numpy(slots.cached[changed])
            self._decoder.set_lengths(torch.arange(first, live, device=self._device), self._positions[changed])
        settings = (slots.temperature[:live], slots.top_k[:live], slots.top_p[:live])
        self._controls = controls(*settings, self._shape.vocabulary, self._device)

    def _decode(self) -> list[Completion]:
        began, slots, live = perf_counter(), self._slots, self._live
        rows = np.arange(live)
        numbers = uniforms(slots.key[:live], slots.count[:live])
        last, positions = self._last[:live], self._positions[:live]
        logits = self._decoder.decode(last, positions, self._decoder.spans(slots.cached[:live]))
        drawn, drawn_logprobs = draw(logits, numbers, self._controls)
        last.copy_(drawn)
        positions.add_(1)
        tokens, logprobs = torch.stack((drawn.double(), drawn_logprobs.double())).cpu().numpy()
        if not np.isfinite(logprobs).all():
            broken = [slots.request(slot).id for slot in np.flatnonzero(~np.isfinite(logprobs)).tolist()]
            raise TransitionError(f"logits of version {self.version} are not finite for {', '.join(broken[:4])}")
        slots.tokens[rows, slots.count[:live]] = tokens
        slots.logprobs[rows, slots.count[:live]] = logprobs
        slots.last[:live] = tokens
        slots.count[:live] += 1
        slots.cached[:live] += 1
        cached = int(slots.cached[:live].sum())
        if self._costs is not None:
            self._pacer.pace(began, self._costs.decode(live, cached))
        self.counters.decode_steps += 1
        self.counters.tokens += live
        self.counters.cached_tokens += cached
        self.counters.decode_s += perf_counter() - began
        stopped = (slots.stop[:live] == slots.last[:live, None]).any(1)
        over = stopped | (slots.count[:live] >= slots.limit[:live])
        return self._finish(np.flatnonzero(over).tolist(), stopped) if over.any() else []

    def _finish(self, over: list[int], stopped: NDArray[np.bool_]) -> list[Completion]:
        completions = []
        for slot in over:
            cut: Finish = "length" if self._slots.request(slot).max_new_tokens == self._slots.count[slot] else "context"
            completions.append(self._slots.completion(slot, "stop" if stopped[slot] else cut))
        self._remove(over)
        return completions

    def _remove(self, gone: list[int]) -> None:
        """Free slots and fill the holes with the last live sequences, so that slots stay dense."""
        left = self._live - len(gone)
        self._ids.difference_update(self._slots.request(slot).id for slot in gone)
        holes = [slot for slot in gone if slot < left]
        movers = [slot for slot in range(left, self._live) if slot not in gone]
        if movers:
            self._copy(movers, holes, int(self._slots.cached[movers].max()))
            self._slots.move(movers, holes)
        for slot in range(left, self._live):
            self._slots.requests[slot] = None  # Or moved into a hole.
        self._live = left
        self._refresh_moved(holes)

    def _refresh_moved(self, slots: list[int]) -> None:
        if slots:
            at = self._tensor(slots)
            self._last[at] = torch.from_numpy(self._slots.last[slots]).to(self._device)
            self._positions[at] = torch.from_numpy(self._slots.cached[slots]).to(self._device)
            self._decoder.set_lengths(at, self._positions[at])
        self._refresh(self._live)

    def _tensor(self, slots: list[int]) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self._device)
