"""What is a completion worth, and what if the operator's function hangs, crashes or talks nonsense?

Owner: the reward service process. It holds ``reward.workers`` reward processes and one spare, each in a process group
of its own. A group of completions has ``timeout_s`` from the moment its function is called; a process that is too slow,
dies, multiplies or answers nonsense is killed with everything it started, and a warm spare takes its place.

Invariants (tests/actors/test_reward_pool.py): every call is answered, by rewards or by the policy ``on_failure``; each
failure is counted by kind (``timeout``, ``error``, ``invalid``, ``crash``); nothing outlives the process that started
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from nereus.actors.reasoning_task import is_task
from nereus.actors.reward_child import FRAME_BYTES, Answer, Call, Loaded, Setup, frame
from nereus.actors.reward_function import WHERE, Judgement
from nereus.bus.endpoint import Delivery, Endpoint, Fenced, PeerGone
from nereus.bus.messages import Commit, Message, Ok, Refused, Score, Scored
from nereus.config import DataConfig, JobConfig, RewardConfig, environment
from nereus.errors import ConfigError, NereusError, PeerLost

START_TIMEOUT_S = 180.0
"""How long importing the function may take."""
WATCH_S = 0.25
"""How often a running call is checked for having multiplied."""
PROCESS_LIMIT = 64
"""Processes that one call may have at a time."""
LOG_BYTES = 256 * 1024
"""What one reward process may print into the log; the rest is dropped."""
TOKEN = "NEREUS_REWARD_TOKEN"
"""Environment variable by which everything that a reward process started is recognized, whatever its group."""

log = structlog.get_logger()


T = TypeVar("T")


class RewardFailed(NereusError):
    """The reward function failed and ``reward.on_failure`` is ``stop``."""


class RewardCrash(NereusError):
    """A reward process died, multiplied or broke the protocol."""


def check_reward(
    reward: RewardConfig, data: DataConfig, *, base: Path = Path(), columns: Iterable[str] | None = None
) -> None:
    """Load the reward function in a process of its own and throw it away; ``ConfigError`` if that does not work.

    ``columns`` are the names that rows of the data set have. Blocks for as long as the import takes (bounded).
    """
    if not reward.function and is_task(data):
        return  # opening the data set has opened the task, scorer and all
    setup = Setup(reward.function, data, str(base), None if columns is None else tuple(columns))
    token = uuid.uuid4().hex
    with subprocess.Popen(
        _command(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(token),
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(frame(setup), timeout=START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise _unloadable(reward.function, f"importing it took more than {START_TIMEOUT_S:.0f} s") from None
        finally:
            _sweep(token)
    try:
        loaded = msgspec.msgpack.decode(out[4:], type=Loaded)
    except msgspec.MsgspecError:
        raise _unloadable(reward.function, f"its process died with code {process.returncode}: {_last(err)}") from None
    _raise_if_broken(loaded)


class RewardPool:
    """Scores groups of completions in killable processes. All methods belong to one event loop."""

    def __init__(self, reward: RewardConfig, data: DataConfig, *, base: Path = Path()) -> None:
        self._reward = reward
        self._setup = Setup(reward.function, data, str(base))
        self._running = asyncio.Semaphore(reward.workers)
        self._warm: asyncio.Queue[_Child | None] = asyncio.Queue()
        """Processes that wait for a call; None when there will never be one again."""
        self._children: set[_Child] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._broken: ConfigError | None = None
        self.failures: Counter[str] = Counter()
        """Failures since start, by kind."""

    async def start(self) -> None:
        """Start the processes and wait until the first is ready; ``ConfigError`` if the function cannot be loaded."""
        for _ in range(self._reward.workers):
            self._start_one()
        self._warm.put_nowait(await self._next())
        self._start_one()  # the spare; only now, because imports may be heavy and the first call waits for one of them

    async def score(self, prompt: Any, completions: Sequence[str], columns: Mapping[str, Any]) -> Scored:
        """Return one reward per completion, and the failures by kind; ``RewardFailed`` under policy ``stop``."""
        async with self._running:
            child = await self._next()
            judgement = await self._judge(child, prompt, completions, columns)
        return self._apply_policy(judgement)

    async def close(self) -> None:
        """Kill all processes and whatever they started."""
        for task in tuple(self._starting):
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(child.kill() for child in tuple(self._children)))
        self._children.clear()

    async def _judge(
        self, child: _Child, prompt: Any, completions: Sequence[str], columns: Mapping[str, Any]
    ) -> Judgement:
        """Have ``child`` judge a group; put it back if it is sound, else kill it and start another."""
        sound = False
        try:
            async with asyncio.timeout(self._reward.timeout_s):
                judgement = await child.judge(prompt, completions, columns)
            sound = True
            return judgement
        except TimeoutError:
            return _failed("timeout", len(completions), f"no answer within {self._reward.timeout_s:g} s")
        except RewardCrash as crash:
            return _failed("crash", len(completions), str(crash))
        finally:
            if sound:
                self._warm.put_nowait(child)
            else:
                self._children.discard(child)
                await child.kill()
                self._start_one()

    def _apply_policy(self, judgement: Judgement) -> Scored:
        for kind, count in judgement.failures.items():
            self.failures[kind] += count
            total = self.failures[kind]
            if total.bit_length() > (total - count).bit_length():  # all are counted; the 1st, 2nd, 4th, ... are logged
                log.warning("reward function failed", kind=kind, so_far=total, message=judgement.message)
        if judgement.failed and self._reward.on_failure == "stop":
            raise RewardFailed(
                f"the reward function failed ({', '.join(judgement.failures)}): {judgement.message}; "
                f'reward.on_failure is "stop"'
            )
        rewards = list(judgement.rewards)
        if self._reward.on_failure == "zero":
            for index in judgement.failed:
                rewards[index] = 0.0
        return Scored(tuple(rewards), dict(judgement.failures))

    async def _next(self) -> _Child:
        """Return the next warm process; raises why if none can be started any more."""
        child = await self._warm.get()
        if child is None:
            self._warm.put_nowait(None)  # for whoever else waits
            assert self._broken is not None
            raise self._broken
        return child

    def _start_one(self) -> None:
        task = asyncio.create_task(self._start_child(), name="start-reward-process")
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start_child(self) -> None:
        """Start one process, in up to three attempts unless the function itself is at fault."""
        child = _Child()
        self._children.add(child)
        for _ in range(3):
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await child.start(self._setup)
                self._warm.put_nowait(child)
                return
            except ConfigError as error:
                self._broken = error
                break
            except RewardCrash as crash:
                self._broken = _unloadable(self._setup.function, str(crash))
            except TimeoutError:
                self._broken = _unloadable(self._setup.function, f"loading it took over {START_TIMEOUT_S:.0f} s")
            await child.kill()
        await child.kill()
        self._children.discard(child)
        if not self._children:
            self._warm.put_nowait(None)


class _Streams(asyncio.subprocess.SubprocessStreamProtocol):
    """The pipes of a process, and word of its end.

    ``Process.wait`` also waits for the pipes to end, which never happens while something that the process forked holds
    them open.
    """

    def __init__(self) -> None:
        super().__init__(limit=1 << 16, loop=asyncio.get_running_loop())
        self.ended = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.ended.set()


class _Child:
    """One reward process."""

    def __init__(self) -> None:
        self._token = uuid.uuid4().hex
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.SubprocessTransport | None = None
        self._ended: asyncio.Event | None = None
        self._printing: asyncio.Task[None] | None = None
        self._tail = b""
        self._calls = 0

    async def start(self, setup: Setup) -> None:
        """Start the process and have it load the function."""
        loop = asyncio.get_running_loop()
        self._transport, protocol = await loop.subprocess_exec(
            _Streams,
            *_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(self._token),
            start_new_session=True,
        )
        self._process = asyncio.subprocess.Process(self._transport, protocol, loop)
        self._ended = protocol.ended
        self._printing = asyncio.create_task(self._forward_prints(), name="reward-process-prints")
        _raise_if_broken(await self._exchange(setup, Loaded))

    async def judge(self, prompt: Any, completions: Sequence[str], columns: Mapping[str, Any]) -> Judgement:
        """Call the function; ``RewardCrash`` if the process does not survive it or answers nonsense."""
        self._calls += 1
        call = Call(self._calls, prompt, tuple(completions), dict(columns))
        multiplied = asyncio.create_task(self._until_multiplied(), name="watch-reward-process")
        answer = await self._exchange(call, Answer, unless=multiplied)
        judgement = answer.judgement
        if answer.number != self._calls or len(judgement.rewards) != len(completions):
            raise RewardCrash("the reward process answered another call than it was asked")
        return judgement

    async def kill(self) -> None:
        """Kill the process, its group and everything else it started, and reap it."""
        if self._process is None or self._transport is None or self._ended is None:
            return
        if self._process.returncode is None:  # not reaped, so its number still means this group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(_sweep, self._token)
        await self._ended.wait()
        self._transport.close()
        if self._printing is not None:
            self._printing.cancel()
            await asyncio.gather(self._printing, return_exceptions=True)

    async def _exchange(self, message: Setup | Call, kind: type[T], *, unless: asyncio.Task[str] | None = None) -> T:
        """Send one frame and read the answer; ``RewardCrash`` if the process ends, or ``unless`` does, before it."""
        assert self._process is not None
        answering = asyncio.create_task(self._ask(message, kind), name="reward-exchange")
        ended = asyncio.create_task(self._until_ended(), name="reward-process-ends")
        tasks = [task for task in (answering, ended, unless) if task is not None]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            raise RewardCrash(ended.result() if ended.done() or unless is None else unless.result())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, message: Setup | Call, kind: type[T]) -> T:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(frame(message))
            await self._process.stdin.drain()
            length = int.from_bytes(await self._process.stdout.readexactly(4), "big")
            if length > FRAME_BYTES:
                raise RewardCrash(f"the reward process answers with {length} bytes")
            return msgspec.msgpack.decode(await self._process.stdout.readexactly(length), type=kind)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise RewardCrash(await self._until_ended()) from None
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RewardCrash(f"the reward process answers nonsense: {error}") from None

    async def _until_ended(self) -> str:
        """Wait for the end of the process and say what it died of."""
        assert self._process is not None and self._ended is not None
        await self._ended.wait()
        return f"the reward process ended with code {self._process.returncode}: {_last(self._tail)}"

    async def _until_multiplied(self) -> str:
        """Wait until the process group has grown beyond all measure."""
        assert self._process is not None
        group = self._process.pid
        while True:
            await asyncio.sleep(WATCH_S)
            if await asyncio.to_thread(_group_size, group) > PROCESS_LIMIT:
                return f"the reward function started more than {PROCESS_LIMIT} processes"

    async def _forward_prints(self) -> None:
        """Copy what the process prints to our own standard error, as far as the limit goes, and keep the last lines."""
        assert self._process is not None and self._process.stderr is not None
        left = LOG_BYTES
        while chunk := await self._process.stderr.read(65536):
            self._tail = (self._tail + chunk)[-2000:]
            if left > 0:
                sys.stderr.buffer.write(chunk[:left])
                sys.stderr.buffer.flush()
                left -= len(chunk)
                if left <= 0:
                    log.warning("a reward process prints too much; the rest is dropped", limit_bytes=LOG_BYTES)


class RewardActor:
    """The reward service: answers ``Score`` with ``Scored``, several at a time."""

    def __init__(self, config: JobConfig, service: Endpoint, *, base: Path = Path()) -> None:
        self._pool = RewardPool(config.reward, config.data, base=base)
        self._service = service
        self._calls: asyncio.Queue[Delivery] = asyncio.Queue()

    async def handle(self, delivery: Delivery) -> Message | None:
        """Take a call; it is answered later, so that calls do not wait for each other."""
        if isinstance(delivery.message, Score):
            self._calls.put_nowait(delivery)
        return Ok() if isinstance(delivery.message, Commit) else None

    async def peer_gone(self, event: PeerGone) -> None:
        """Nothing is kept for a peer; an answer to it is refused by the endpoint."""

    async def background(self) -> None:
        """Start the processes and answer calls; a failure under policy ``stop`` ends the service."""
        await self._pool.start()
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    delivery = await self._calls.get()
                    group.create_task(self._answer(delivery), name=f"score-for-{delivery.peer}")
        except ExceptionGroup as several:
            raise several.exceptions[0] from None  # the first one says why; the rest only followed

    async def close(self) -> None:
        await self._pool.close()

    async def _answer(self, delivery: Delivery) -> None:
        score = delivery.message
        assert isinstance(score, Score)
        answer: Message
        try:
            prompt = msgspec.json.decode(score.prompt)
            columns = msgspec.json.decode(score.columns, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as error:
            answer = Refused(f"the prompt or the columns of Score cannot be read: {error}")
        else:
            answer = await self._pool.score(prompt, score.completions, columns)
        with contextlib.suppress(PeerLost, Fenced):  # nobody waits for it any more
            await self._service.reply(delivery, answer)


# Processes


def _command() -> list[str]:
    return [sys.executable, "-m", "nereus.actors.reward_child", str(os.getpid())]


def _environment(token: str) -> dict[str, str]:
    return {**environment(), TOKEN: token}


def _group_size(group: int) -> int:
    """Count the processes of a group."""
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                count += os.getpgid(int(entry.name)) == group
    return count


def _sweep(token: str) -> None:
    """Kill every process that carries ``token`` in its environment, also if it has left its process group."""
    mark = f"{TOKEN}={token}".encode()
    for _ in range(5):
        found = False
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{entry.name}/environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        if not found:
            return


# Messages


def _failed(kind: str, count: int, message: str) -> Judgement:
    return Judgement((None,) * count, tuple(range(count)), {kind: 1}, message)


def _raise_if_broken(loaded: Loaded) -> None:
    if loaded.what:
        raise ConfigError(loaded.what, where=loaded.where, remedy=loaded.remedy)


def _unloadable(function: str, why: str) -> ConfigError:
    return ConfigError(f"{function or 'the built-in scorer'} cannot be used: {why}", where=WHERE, remedy="correct it")


def _last(output: bytes) -> str:
    """Return the last line that a process printed."""
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it printed nothing"
