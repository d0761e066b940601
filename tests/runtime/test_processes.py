from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from nereus.errors import NereusError
from nereus.runtime.processes import Exited, LocalProcesses

LIMIT_S = 60.0


def test_an_exit_is_reported_once_with_its_cause(tmp_path: Path) -> None:
    async def main() -> list[Exited]:
        processes = LocalProcesses(tmp_path)
        await processes.start("bad", ["nereus.no_such_module"])
        await processes.start("slow", ["http.server", "--bind", "127.0.0.1", "0"])
        first = await asyncio.wait_for(processes.exits.get(), LIMIT_S)
        processes.kill("slow")
        second = await asyncio.wait_for(processes.exits.get(), LIMIT_S)
        assert processes.exits.empty()
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
