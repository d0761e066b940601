"""Does scoring survive every nasty reward function, and does nothing outlive it? Real processes."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nereus.actors.reward import RewardActor, RewardFailed, RewardPool, check_reward
from nereus.bus.endpoint import Buffer, Delivery
from nereus.bus.messages import Message, Refused, Score, Scored
from nereus.config import DataConfig, JobConfig, RewardConfig
from nereus.errors import ConfigError, PeerLost

pytestmark = pytest.mark.live

FILE = DataConfig(source="rows.jsonl")
LIMIT_S = 60.0
COLUMNS = {"answer": "1"}

PRELUDE = """
import os, sys, time

def note(folder):
    with open(os.path.join(folder, "pids"), "a") as file:
        file.write(f"{os.getpid()}\\n")

def good(completions):
    return [float(c) for c in completions]
"""

NASTY = {
    "raises": ("raise ValueError('no')", {"error": 1}),
    "hangs": ("time.sleep(600)", {"timeout": 1}),
    "spins": ("while True: pass", {"timeout": 1}),
    "leaves": ("os._exit(3)", {"crash": 1}),
    "dies": ("os.kill(os.getpid(), 9)", {"crash": 1}),
    "multiplies": (
        "for _ in range(150):\n        if os.fork() == 0: time.sleep(600)\n    time.sleep(600)",
        {"crash": 1},
    ),
    "returns nonsense": ("return ['x', None, float('nan')][:len(completions)]", {"invalid": 1}),
    "returns without end": ("return iter(int, 1)", {"invalid": 1}),
}


def write(folder: Path, body: str) -> None:
    """Make reward.py whose function behaves when the first completion is a number, and runs ``body`` otherwise."""
    guard = "    if completions[0] != 'nasty':\n        return good(completions)\n"
    (folder / "reward.py").write_text(
        f"{PRELUDE}\ndef score(completions, **rest):\n{guard}    note({str(folder)!r})\n    {body}\n"
    )


def run(folder: Path, work: Callable[[RewardPool], Awaitable[None]], **config: Any) -> RewardPool:
    """Run ``work`` on a started pool and close it."""

    async def main() -> RewardPool:
        async with asyncio.timeout(LIMIT_S):
            pool = RewardPool(RewardConfig(function="reward.py:score", **config), FILE, base=folder)
            try:
                await pool.start()
                await work(pool)
            finally:
                await pool.close()
            return pool

    return asyncio.run(main())


def alive(pid: int) -> bool:
    """Tell whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until_gone(pid: int) -> None:
    """Wait until a process has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], 10.0)[0], f"process {pid} still runs"
    finally:
        os.close(handle)


def pids(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "pids").read_text().split()]


@pytest.mark.parametrize("name", NASTY)
def test_nasty_functions_are_counted_and_scoring_goes_on(tmp_path: Path, name: str) -> None:
    body, failures = NASTY[name]
    write(tmp_path, body)

    async def work(pool: RewardPool) -> None:
        assert await pool.score("p", ["1", "2"], COLUMNS) == Scored((1.0, 2.0))
        scored = await pool.score("p", ["nasty", "2"], COLUMNS)
        assert scored.failures == failures
        assert scored.rewards[0] == 0.0
        assert await pool.score("p", ["3", "4"], COLUMNS) == Scored((3.0, 4.0))

    pool = run(tmp_path, work, timeout_s=2.0 if "timeout" in failures else 30.0)
    assert dict(pool.failures) == failures
    assert not any(map(alive, pids(tmp_path)))


def test_noise_on_every_stream_is_harmless_and_bounded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "os.write(1, b'x' * 5_000_000); print('y' * 5_000_000); sys.stdin.read(); return [1, 2]")

    async def work(pool: RewardPool) -> None:
        assert await pool.score("p", ["nasty", "2"], COLUMNS) == Scored((1.0, 2.0))

    run(tmp_path, work)
    out, err = capfd.readouterr()
    assert "x" * 1000 not in out and 1000 < len(err) < 400_000


@pytest.mark.parametrize("escape", ["pass", "os.setsid()"])
def test_what_a_function_starts_dies_with_it(tmp_path: Path, escape: str) -> None:
    child = f"{escape}; note({str(tmp_path)!r}); os.write(w, b'1'); time.sleep(600)"
    write(tmp_path, f"r, w = os.pipe()\n    if os.fork() == 0:\n        {child}\n    os.read(r, 1); os._exit(1)")

    async def work(pool: RewardPool) -> None:
        assert (await pool.score("p", ["nasty"], COLUMNS)).failures == {"crash": 1}

    run(tmp_path, work)
    assert len(pids(tmp_path)) == 2
    for pid in pids(tmp_path):
        until_gone(pid)


def test_a_forked_copy_cannot_answer_too(tmp_path: Path) -> None:
    write(tmp_path, "os.fork(); return [7.0]")

    async def work(pool: RewardPool) -> None:
        for _ in range(5):
            assert await pool.score("p", ["nasty"], COLUMNS) == Scored((7.0,))
            assert await pool.score("p", ["1", "2"], COLUMNS) == Scored((1.0, 2.0))

    run(tmp_path, work)


def test_policies(tmp_path: Path) -> None:
    write(tmp_path, "return [None, 'x']")

    async def keep_none(pool: RewardPool) -> None:
        assert (await pool.score("p", ["nasty", "b"], COLUMNS)).rewards == (None, None)

    async def zero(pool: RewardPool) -> None:
        assert (await pool.score("p", ["nasty", "b"], COLUMNS)).rewards == (None, 0.0)

    async def stop(pool: RewardPool) -> None:
        with pytest.raises(RewardFailed, match=r"\(invalid\): .*returned 'x'.*on_failure"):
            await pool.score("p", ["nasty", "b"], COLUMNS)

    run(tmp_path, keep_none, on_failure="none")
    run(tmp_path, zero, on_failure="zero")
    run(tmp_path, stop, on_failure="stop")


def test_one_hanging_group_does_not_hold_up_another(tmp_path: Path) -> None:
    write(tmp_path, "time.sleep(600)")

    async def work(pool: RewardPool) -> None:
        hanging = asyncio.create_task(pool.score("p", ["nasty"], COLUMNS))
        for _ in range(20):
            assert await pool.score("p", ["1"], COLUMNS) == Scored((1.0,))
        assert not hanging.done()
        assert (await hanging).failures == {"timeout": 1}

    run(tmp_path, work, workers=2, timeout_s=5.0)


def test_pool_says_why_when_no_process_can_start(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("import os; os._exit(5)")

    async def work(pool: RewardPool) -> None:
        raise AssertionError("it started")

    with pytest.raises(ConfigError, match="ended with code 5"):
        run(tmp_path, work)


def test_reward_processes_die_with_their_parent(tmp_path: Path) -> None:
    write(tmp_path, "time.sleep(600)")
    script = f"""
import asyncio
from pathlib import Path
from nereus.actors.reward import RewardPool
from nereus.config import DataConfig, RewardConfig
async def main():
    reward = RewardConfig(function="reward.py:score", timeout_s=600)
    pool = RewardPool(reward, DataConfig(source="x"), base=Path({str(tmp_path)!r}))
    await pool.start()
    await pool.score("p", ["1"], {{}})
    print(*(child._process.pid for child in pool._children), flush=True)
    await pool.score("p", ["nasty"], {{}})
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [int(pid) for pid in parent.stdout.readline().split()]
        assert children and all(map(alive, children))
        parent.send_signal(signal.SIGKILL)
    for pid in children:
        until_gone(pid)


def test_preflight(tmp_path: Path) -> None:
    write(tmp_path, "pass")
    check_reward(RewardConfig(function="reward.py:score"), FILE, base=tmp_path)
    with pytest.raises(ConfigError, match="did you mean score"):
        check_reward(RewardConfig(function="reward.py:scores"), FILE, base=tmp_path)
    (tmp_path / "needy.py").write_text("def score(completions, solution): ...")
    with pytest.raises(ConfigError, match="needs 'solution'"):
        check_reward(RewardConfig(function="needy.py:score"), FILE, base=tmp_path, columns=["answer"])
    (tmp_path / "deadly.py").write_text(
        "import os, sys; sys.stderr.write('cannot go on'); sys.stderr.flush(); os._exit(5)"
    )
    with pytest.raises(ConfigError, match="died with code 5: cannot go on"):
        check_reward(RewardConfig(function="deadly.py:score"), FILE, base=tmp_path)


class Replies:
    """The part of a server endpoint that the reward service uses."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[tuple[int, Message]] = asyncio.Queue()

    async def reply(self, delivery: Delivery, message: Message, frames: tuple[Buffer, ...] = ()) -> None:
        if delivery.peer == "gone":
            raise PeerLost("gone", "it left")
        self.sent.put_nowait((delivery.token, message))


def ask(token: int, *completions: str, peer: str = "slot-0", columns: bytes = b"{}") -> Delivery:
    score = Score(msgspec.Raw(b'"p"'), completions, msgspec.Raw(columns))
    return Delivery(peer, "1", 0, score, (), token)


def test_service_answers_calls_side_by_side_and_out_of_order(tmp_path: Path) -> None:
    write(tmp_path, "time.sleep(600)")

    async def main() -> None:
        replies = Replies()
        config = JobConfig(data=FILE, reward=RewardConfig(function="reward.py:score", workers=2, timeout_s=3.0))
        actor = RewardActor(config, replies, base=tmp_path)  # type: ignore[arg-type]
        background = asyncio.create_task(actor.background())
        try:
            async with asyncio.timeout(LIMIT_S):
                for delivery in (ask(1, "nasty"), ask(2, "5", peer="gone"), ask(3, "5"), ask(4, "5", columns=b"[]")):
                    assert await actor.handle(delivery) is None
                answers = dict([await replies.sent.get() for _ in range(3)])
            assert list(answers)[-1] == 1
            assert answers[1] == Scored((0.0,), {"timeout": 1}) and answers[3] == Scored((5.0,))
            assert isinstance(answers[4], Refused)
            assert not background.done()
        finally:
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)
            await actor.close()

    asyncio.run(main())


def test_service_ends_with_the_reason_under_policy_stop(tmp_path: Path) -> None:
    write(tmp_path, "raise ValueError('broken sum')")

    async def main() -> None:
        reward = RewardConfig(function="reward.py:score", on_failure="stop")
        actor = RewardActor(JobConfig(data=FILE, reward=reward), Replies(), base=tmp_path)  # type: ignore[arg-type]
        await actor.handle(ask(1, "nasty"))
        try:
            async with asyncio.timeout(LIMIT_S):
                with pytest.raises(RewardFailed, match="broken sum"):
                    await actor.background()
        finally:
            await actor.close()

    asyncio.run(main())
