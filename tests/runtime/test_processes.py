from __future__ import annotations

import asyncio
import os
import select
import signal
from pathlib import Path

import pytest

from nereus.errors import NereusError
from nereus.runtime.processes import Exited, LocalProcesses

LIMIT_S = 60.0


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_an_exit_is_reported_once_with_its_cause(tmp_path: Path) -> None:
    async def main() -> list[Exited]:
        processes = LocalProcesses(tmp_path)
        await processes.start("bad", ["nereus.no_such_module"])
        await processes.start("slow", ["http.server", "--bind", "127.0.0.1", "0"])
        first = await asyncio.wait_for(processes.exits.get(), LIMIT_S)
        processes.kill("slow")
        second = await asyncio.wait_for(processes.exits.get(), LIMIT_S)
        assert processes.exits.empty()
        await processes.stop(grace_s=LIMIT_S)
        return [first, second]

    bad, slow = asyncio.run(main())
    assert (bad.worker, bad.code, bad.why) == ("bad", 1, "exited with code 1")
    assert (slow.worker, slow.code, slow.why) == ("slow", -signal.SIGKILL, "killed by SIGKILL")
    assert "no_such_module" in (tmp_path / "bad.log").read_text()


def test_stop_leaves_no_process_behind(tmp_path: Path) -> None:
    async def main() -> int:
        processes = LocalProcesses(tmp_path)
        pid = await processes.start("slow", ["http.server", "--bind", "127.0.0.1", "0"])
        assert await processes.wait(timeout_s=0.01) == ("slow",)
        await processes.stop(grace_s=LIMIT_S)
        assert await processes.wait(timeout_s=0.01) == ()
        return pid

    pid = asyncio.run(main())
    assert not Path(f"/proc/{pid}").exists()


def test_a_service_that_ends_before_it_announces_itself_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        processes = LocalProcesses(tmp_path)
        with pytest.raises(NereusError, match="service ended before it announced itself"):
            await processes.start_announced("service", ["nereus.no_such_module"], timeout_s=LIMIT_S)
        await processes.stop(grace_s=LIMIT_S)

    asyncio.run(main())


def test_one_name_is_one_process(tmp_path: Path) -> None:
    async def main() -> None:
        processes = LocalProcesses(tmp_path)
        await processes.start("slow", ["http.server", "--bind", "127.0.0.1", "0"])
        with pytest.raises(ValueError, match="slow is already running as pid"):
            await processes.start("slow", ["http.server", "--bind", "127.0.0.1", "0"])
        await processes.stop(grace_s=LIMIT_S)

    asyncio.run(main())


def test_a_lost_server_takes_its_children_along_and_says_so(tmp_path: Path) -> None:
    async def main() -> tuple[Exited, int]:
        processes = LocalProcesses(tmp_path)
        pid = await processes.start("slow", ["http.server", "--bind", "127.0.0.1", "0"])
        watch = os.pidfd_open(pid)
        os.kill(_parent(pid), signal.SIGKILL)
        exited = await asyncio.wait_for(processes.exits.get(), LIMIT_S)
        assert select.select([watch], [], [], LIMIT_S)[0]  # the child itself has ended
        os.close(watch)
        with pytest.raises(NereusError, match=r"the fork server ended with code -9; see .*forkserver\.log"):
            await processes.start("again", ["http.server"])
        await processes.stop(grace_s=LIMIT_S)
        return exited, pid

    exited, pid = asyncio.run(main())
    assert (exited.worker, exited.pid, exited.why) == ("slow", pid, "killed by SIGKILL")


def test_a_child_is_like_a_process_of_its_own(tmp_path: Path) -> None:
    """Its own session, only its own files, the modules of the server, and a clean end after its last line."""
    (tmp_path / "look.py").write_text(
        "import os, sys\n"
        "print('decimal' in sys.modules, os.getsid(0) == os.getpid(), sys.argv[1:], __name__, flush=True)\n"
        "print(sorted(os.path.realpath(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')),"
        " file=sys.stderr)\n"
        "sys.exit(3)\n"
    )

    async def main() -> tuple[str, Exited]:
        processes = LocalProcesses(tmp_path, preload=["decimal", "nereus.no_such_module"])
        await processes.start("other", ["http.server", "--bind", "127.0.0.1", "0"])
        line = await processes.start_announced("look", ["look", "a", "b c"], timeout_s=LIMIT_S)
        exited = await asyncio.wait_for(processes.exits.get(), LIMIT_S)
        assert await processes.wait(timeout_s=0.01) == ("other",)
        await processes.stop(grace_s=LIMIT_S)
        return line, exited

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        line, exited = asyncio.run(main())
    assert line == "True True ['a', 'b c'] __main__"
    assert (exited.worker, exited.code) == ("look", 3)
    handles = (tmp_path / "look.log").read_text()
    assert handles.count("pipe") == 1
    assert "pidfd" not in handles
    assert "no_such_module" in (tmp_path / "forkserver.log").read_text()


async def _orphans(folder: Path, orphan_s: float) -> tuple[LocalProcesses, int]:
    """Start a process and leave it as a supervisor that is killed does."""
    processes = LocalProcesses(folder, orphan_s=orphan_s)
    pid = await processes.start("slow", ["http.server", "--bind", "127.0.0.1", "0"])
    await processes.abandon()
    return processes, pid


def test_the_next_supervisor_takes_over_what_the_one_before_has_started(tmp_path: Path) -> None:
    async def main() -> None:
        former, pid = await _orphans(tmp_path, LIMIT_S)
        processes = LocalProcesses(tmp_path)
        assert await processes.adopt()
        assert dict(processes.running) == {"slow": pid}
        await processes.start("other", ["http.server", "--bind", "127.0.0.1", "0"])
        processes.kill("slow")
        exited = await asyncio.wait_for(processes.exits.get(), LIMIT_S)
        assert (exited.worker, exited.pid, exited.code) == ("slow", pid, -signal.SIGKILL)
        await processes.stop(grace_s=LIMIT_S)
        assert await LocalProcesses(tmp_path).adopt() is False
        _wait_for(former)

    asyncio.run(main())


def test_what_a_service_has_announced_is_told_again(tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")

    async def main() -> None:
        former = LocalProcesses(tmp_path, orphan_s=LIMIT_S)
        assert await former.start_announced("told", ["told"], timeout_s=LIMIT_S) == "here"
        await former.start("slow", ["http.server", "--bind", "127.0.0.1", "0"])
        await former.abandon()
        processes = LocalProcesses(tmp_path)
        assert await processes.adopt()
        assert (processes.service("told"), processes.service("slow")) == ("here", "")
        await processes.stop(grace_s=LIMIT_S)
        _wait_for(former)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        asyncio.run(main())


def test_a_fresh_server_ends_the_one_that_was_left(tmp_path: Path) -> None:
    async def main() -> None:
        former, pid = await _orphans(tmp_path, LIMIT_S)
        watch = os.pidfd_open(pid)
        processes = LocalProcesses(tmp_path)
        assert await processes.start("slow", ["http.server", "--bind", "127.0.0.1", "0"]) != pid
        assert select.select([watch], [], [], LIMIT_S)[0]
        os.close(watch)
        assert processes.exits.empty()
        await processes.stop(grace_s=LIMIT_S)
        _wait_for(former)

    asyncio.run(main())


def test_a_server_that_is_stopped_is_ended_and_its_children_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nereus.runtime.processes._ANSWER_S", 0.3)

    async def main() -> None:
        former, pid = await _orphans(tmp_path, LIMIT_S)
        assert former._child is not None
        former._child.send_signal(signal.SIGSTOP)
        watch = os.pidfd_open(pid)
        processes = LocalProcesses(tmp_path)
        assert await processes.adopt() is False
        assert select.select([watch], [], [], LIMIT_S)[0]
        os.close(watch)
        _wait_for(former)
        assert await processes.start("slow", ["http.server", "--bind", "127.0.0.1", "0"]) != pid
        await processes.stop(grace_s=LIMIT_S)

    asyncio.run(main())


@pytest.mark.parametrize("gone", ["the folder", "the time", "the children"])
def test_a_server_that_nobody_takes_over_leaves(tmp_path: Path, gone: str) -> None:
    async def main() -> None:
        former, pid = await _orphans(tmp_path, 0.0 if gone == "the time" else LIMIT_S)
        watch = os.pidfd_open(pid)
        if gone == "the folder":
            (tmp_path / "forkserver.sock").unlink()
        elif gone == "the children":
            os.kill(pid, signal.SIGKILL)
        _wait_for(former)
        assert select.select([watch], [], [], LIMIT_S)[0]
        os.close(watch)

    asyncio.run(main())


def _wait_for(former: LocalProcesses) -> None:
    """Wait until the server that ``former`` has started is gone."""
    assert former._child is not None
    former._child.wait(LIMIT_S)
