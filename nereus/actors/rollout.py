"""How does one rollout unit turn grants into finished, scored groups?

Owner: one ``RolloutActor`` per rollout slot. Each granted group is one task: tokenize the prompt, draw the completions
(the backend batches all live sequences of all groups), score them, hand the group to the collector. A finished group is
kept until the supervisor releases it, and handed over once more when there is a new collector.

Invariants: a group is never handed over without a reward for each completion; nothing is sampled before the first
weight switch; after ``Switch`` the unit says which version and checksum it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from nereus.actors.names import RELAY, REWARD, SUPERVISOR, slot_worker
from nereus.actors.wiring import Links, Wiring
from nereus.backends.api import Completion, RolloutBackend, SampleRequest
from nereus.bus.endpoint import Buffer, Delivery, Endpoint, PeerGone
from nereus.bus.messages import (
    Assign,
    Commit,
    Fault,
    Generated,
    Grant,
    Group,
    GroupFailed,
    GroupSpec,
    Message,
    Ok,
    Peers,
    Pull,
    PullDone,
    PullFrom,
    Ready,
    Refused,
    Release,
    Sample,
    Score,
    Scored,
    Switch,
    WeightsLive,
)
from nereus.config import JobConfig
from nereus.core.plan import POLICY_TRAINING, SlotId
from nereus.errors import NereusError, PeerLost, ProtocolError, TransitionError

HAND_OVER_TIMEOUT_S = 120.0
"""How long the collector may take to acknowledge a group (a full window means that training is behind)."""

PULL_TIMEOUT_S = 60.0

ASK_AGAIN_S = 1.0
"""How long after the loss of a server it is tried again, unless it is named anew before."""


class TextCodec(Protocol):
    """Text to tokens and back, with the model's own tokenizer."""

    stop_token_ids: tuple[int, ...]

    def encode(self, prompt: object) -> NDArray[np.int32]: ...

    def decode(self, tokens: NDArray[np.int32]) -> str: ...


class FinishedGroup(msgspec.Struct, frozen=True):
    """What is kept of a group until it is released."""

    message: Group
    frames: tuple[Buffer, ...]


class RolloutActor:
    """One rollout unit of one slot."""

    def __init__(
        self,
        backend: RolloutBackend,
        codec: TextCodec,
        config: JobConfig,
        slot: SlotId,
        control: Endpoint,
        wiring: Wiring,
        transcript: Path,
    ) -> None:
        self._backend = backend
        self._codec = codec
        self._config = config
        self._slot = slot
        self._control = control
        self._links = Links(wiring)
        self._transcript = transcript
        self._collector = ""
        self._told: dict[str, float] = {}
        self._finished: dict[int, FinishedGroup] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._handing: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Queue[BaseException] = asyncio.Queue()

    async def handle(self, delivery: Delivery) -> Message | None:
        match delivery.message:
            case Assign() as assign:
                await self._assign(assign)
            case Grant(groups):
                for spec in groups:
                    self._start(spec)
            case Release(groups):
                self._release(groups)
            case Switch(version):
                await self._switch(version)
            case Peers(peers):
                await self._links.update(peers)
            case Commit() as commit:
                await self._commit(commit)
                return Ok()
            case other:
                return Refused(f"a rollout unit does not understand {type(other).__name__}")
        return None

    async def peer_gone(self, event: PeerGone) -> None:
        """Servers that are gone show in the requests made to them."""

    async def background(self) -> None:
        """Wait for a group task that breaks in a way no re-issue can mend."""
        raise await self._failed.get()

    async def close(self) -> None:
        tasks = (*self._running.values(), *self._handing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._backend.close()
        await self._links.close()

    async def _assign(self, assign: Assign) -> None:
        began = perf_counter()
        self._control.advance(assign.plan.epoch)
        await self._links.update(assign.peers)
        self._links.advance(assign.plan.epoch)
        self._collector = slot_worker(assign.plan.of(POLICY_TRAINING)[0].slots[0])
        await self._backend.start(Path(assign.source), emu=assign.emu, slot=self._slot)
        await self._control.send(SUPERVISOR, Ready(assign.emu.id, perf_counter() - began))

    async def _commit(self, commit: Commit) -> None:
        """Go on under the new plan, which leaves this unit as it is; a new collector gets what is not trained yet."""
        before = self._collector, self._links.address(self._collector)
        await self._links.update(commit.peers)
        self._links.advance(commit.plan.epoch)
        self._collector = slot_worker(commit.plan.of(POLICY_TRAINING)[0].slots[0])
        if (self._collector, self._links.address(self._collector)) != before and self._finished:
            task = asyncio.create_task(self._hand_all_over(), name="hand-over")
            self._handing.add(task)
            task.add_done_callback(self._handed)

    async def _hand_all_over(self) -> None:
        for group in tuple(self._finished.values()):
            await self._hand_over(group)

    def _handed(self, task: asyncio.Task[None]) -> None:
        self._handing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed.put_nowait(error)

    def _generated(self) -> Generated:
        """Return what the engine has done since the last call."""
        now, before = self._backend.stats(), self._told
        self._told = now
        seconds = {name: now.get(name, 0.0) - before.get(name, 0.0) for name in ("decode_s", "prefill_s")}
        counts = {
            name: int(now.get(name, 0) - before.get(name, 0))
            for name in ("decode_steps", "tokens", "cached_tokens", "prefill_tokens")
        }
        return msgspec.convert({**seconds, **counts, "peak_bytes": int(now.get("peak_bytes", 0))}, Generated)

    async def _switch(self, version: int) -> None:
        """Take over new weights; when the relay is lost, go on with the old ones until it is back."""
        began = perf_counter()
        try:
            link = await self._links.to(RELAY)
            source = await link.request(RELAY, Pull(version, self._control.name), timeout_s=PULL_TIMEOUT_S)
        except PeerLost as error:
            return await self._keep_weights(error)
        if not isinstance(source, PullFrom):
            raise ProtocolError(f"{RELAY} answered Pull with {type(source).__name__}")
        failure: TransitionError | None = None
        try:
            interrupted = await self._backend.switch(source, interrupt=self._config.rollout.interrupt)
        except TransitionError as error:
            failure = error
        finally:
            with contextlib.suppress(PeerLost):  # then the loan has ended with the relay
                await link.request(RELAY, PullDone(source.version, self._control.name), timeout_s=PULL_TIMEOUT_S)
        if failure is not None:
            if RELAY in link.peers:
                raise failure
            return await self._keep_weights(failure)  # what was lent has gone with the relay
        generated = self._generated()
        live = WeightsLive(source.version, source.checksum, perf_counter() - began, interrupted, generated)
        await self._control.send(SUPERVISOR, live)

    async def _keep_weights(self, why: NereusError) -> None:
        fault = Fault(self._control.name, f"no new weights: {why}", fatal=False)
        await self._control.send(SUPERVISOR, fault)

    def _start(self, spec: GroupSpec) -> None:
        if spec.group in self._running or spec.group in self._finished:
            return  # a repeated grant
        task = asyncio.create_task(self._complete(spec), name=f"group-{spec.group}")
        self._running[spec.group] = task
        task.add_done_callback(lambda task: self._ended(spec.group, task))

    def _ended(self, group: int, task: asyncio.Task[None]) -> None:
        self._running.pop(group, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed.put_nowait(error)

    def _release(self, groups: tuple[int, ...]) -> None:
        for group in groups:
            self._finished.pop(group, None)
            if (task := self._running.get(group)) is not None:
                task.cancel()

    async def _complete(self, spec: GroupSpec) -> None:
        """Generate, score and hand over one group."""
        rollout = self._config.rollout
        prompt = self._codec.encode(msgspec.json.decode(spec.prompt))
        if len(prompt) > rollout.max_prompt_tokens:
            reason = (
                f"the prompt of data row {spec.row} has {len(prompt)} tokens, rollout.max_prompt_tokens is "
                f"{rollout.max_prompt_tokens}; raise it or leave the row out"
            )
            await self._control.send(SUPERVISOR, GroupFailed(spec.group, spec.attempt, reason))
            return
        began = perf_counter()
        async with asyncio.TaskGroup() as tasks:
            draws = [
                tasks.create_task(self._backend.generate(self._request(spec, prompt, index)))
                for index in range(rollout.group_size)
            ]
        completions = [draw.result() for draw in draws]
        generate_s = perf_counter() - began
        texts = tuple(self._codec.decode(completion.tokens) for completion in completions)
        began = perf_counter()
        scored = await self._score(spec, texts)
        group = self._finish(spec, prompt, completions, scored, generate_s, perf_counter() - began)
        self._finished[spec.group] = group
        self._write_transcript(spec, texts, scored, completions)
        await self._hand_over(group)

    def _request(self, spec: GroupSpec, prompt: NDArray[np.int32], index: int) -> SampleRequest:
        rollout = self._config.rollout
        return SampleRequest(
            id=f"{spec.group}.{spec.attempt}.{index}",
            prompt=prompt,
            seed=(self._config.run.seed, spec.group, index),
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=self._codec.stop_token_ids,
        )

    async def _score(self, spec: GroupSpec, texts: tuple[str, ...]) -> Scored:
        """Ask the reward service; when it is lost, ask again when it is back (bounded)."""
        # The service may still be starting its processes, or be busy with other groups.
        deadline_s = self._config.reward.timeout_s + self._config.bus.start_timeout_s
        message = Score(spec.prompt, texts, spec.columns)

        async def ask() -> Message:
            return await (await self._links.to(REWARD)).request(REWARD, message, timeout_s=deadline_s)

        answer = await self._until_heard(ask, self._config.bus.start_timeout_s)
        if not isinstance(answer, Scored) or len(answer.rewards) != len(texts):
            raise ProtocolError(f"{REWARD} answered Score of {len(texts)} completions with {answer!r}"[:500])
        return answer

    async def _until_heard(self, ask: Callable[[], Awaitable[Message]], patience_s: float) -> Message:
        """Ask again when the server was lost, which is back soon or was never away; ``PeerLost`` in the end."""
        clock = asyncio.get_running_loop().time
        deadline = 0.0
        while True:
            try:
                return await ask()
            except PeerLost:
                deadline = deadline or clock() + patience_s
                if clock() >= deadline:
                    raise
                await self._links.wait_for_news(ASK_AGAIN_S)

    def _finish(
        self,
        spec: GroupSpec,
        prompt: NDArray[np.int32],
        completions: list[Completion],
        scored: Scored,
        generate_s: float,
        reward_s: float,
    ) -> FinishedGroup:
        samples = tuple(
            Sample(
                len(completion.tokens),
                reward,
                completion.finish,
                int(completion.versions[0]),
                int(completion.versions[-1]),
            )
            for completion, reward in zip(completions, scored.rewards, strict=True)
        )
        message = Group(
            spec.group,
            spec.attempt,
            spec.row,
            self._control.name,
            len(prompt),
            samples,
            generate_s,
            reward_s,
            scored.failures,
        )
        arrays = (
            prompt,
            np.concatenate([completion.tokens for completion in completions]),
            np.concatenate([completion.logprobs for completion in completions]),
            np.concatenate([completion.versions for completion in completions]),
        )
        return FinishedGroup(message, tuple(np.ascontiguousarray(array).data.cast("B") for array in arrays))

    async def _hand_over(self, group: FinishedGroup) -> None:
        """Send one group to the collector; once there is another collector, that one gets all groups anew."""
        collector = self._collector

        async def ask() -> Message:
            if self._collector != collector or group.message.group not in self._finished:
                return Ok()
            link = await self._links.to(collector)
            return await link.request(collector, group.message, group.frames, timeout_s=HAND_OVER_TIMEOUT_S)

        await self._until_heard(ask, HAND_OVER_TIMEOUT_S)

    def _write_transcript(
        self, spec: GroupSpec, texts: tuple[str, ...], scored: Scored, completions: list[Completion]
    ) -> None:
        """Append one completion of every n-th group as a JSON line, about ``rollout.keep_rows`` a step."""
        keep = self._config.rollout.keep_rows
        groups = self._config.train.groups_per_step
        if not keep or spec.group % max(1, groups // keep):
            return
        row = {
            "step": spec.group // groups + 1,  # in the sample order; training may take it a step earlier or later
            "group": spec.group,
            "version": int(completions[0].versions[0]),
            "prompt": msgspec.json.decode(spec.prompt),
            "completion": texts[0],
            "reward": scored.rewards[0],
            "finish": completions[0].finish,
            "tokens": len(completions[0].tokens),
        }
        with self._transcript.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
