"""Does a run folder belong to one process, and are its files whole at every moment?"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from nereus.errors import ConfigError
from nereus.runtime.folder import RunFolder, read_status

HOLD = """
import sys
from contextlib import closing
from pathlib import Path
from nereus.runtime.folder import RunFolder
folder = RunFolder.open(Path(sys.argv[1]))
journal = folder.journal.open("a")
print("held", flush=True)
sys.stdin.readline()
print("late", file=journal, flush=True)
folder.withdraw()
folder.require_owned()
"""


def test_new_runs_are_numbered_and_never_share_a_folder(tmp_path: Path) -> None:
    folders = [RunFolder.create(tmp_path / "runs", "demo") for _ in range(3)]
    assert [folder.name for folder in folders] == ["demo-001", "demo-002", "demo-003"]
    assert RunFolder.create(tmp_path / "runs", "demo-002").name == "demo-002-001"
    assert RunFolder.create(tmp_path / "runs", "demo").name == "demo-004"


def test_the_layout_is_there_from_the_start(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "demo")
    for path in (folder.configs, folder.logs, folder.checkpoints, folder.rollouts, folder.keys):
        assert path.is_dir()
    assert folder.logs == folder.path / "logs" / "attempt_1"
    assert (folder.path / "logs" / "latest").resolve() == folder.logs.resolve()
    assert stat.S_IMODE(folder.keys.stat().st_mode) == 0o700


def test_keys_become_private_again_on_resume(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "demo")
    folder.write_status("stopped")
    folder.close()
    folder.keys.chmod(0o755)
    with_lock = RunFolder.open(folder.path)
    assert stat.S_IMODE(with_lock.keys.stat().st_mode) == 0o700


def test_every_attempt_has_its_own_log_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "demo")
    folder.write_status("starting")
    for attempt in (2, 3):
        folder.close()
        folder = RunFolder.open(folder.path)
        assert folder.attempt == attempt
        assert os.readlink(folder.path / "logs" / "latest") == f"attempt_{attempt}"


def test_a_folder_in_use_is_refused_with_the_pid_of_its_holder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "demo")
    folder.write_status("running")
    folder.close()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"{folder.path}: is in use by the process with pid {holder.pid}; stop"):
            RunFolder.open(folder.path)
        holder.send_signal(signal.SIGKILL)
        holder.wait(30)
    # The kernel freed the lock: nothing has to be cleaned up after a crash.
    assert RunFolder.open(folder.path).attempt == 3


def test_a_folder_whose_holder_is_stopped_is_taken_over_and_the_holder_is_told(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "demo")
    folder.write_status("running")
    folder.journal.write_text("before\n")
    folder.close()
    words = [sys.executable, "-c", HOLD, str(folder.path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **pipes) as holder:  # type: ignore[call-overload]
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED)
        newer = RunFolder.open(folder.path)
        newer.require_owned()
        newer.announce("tcp://127.0.0.1:1")
        with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
            RunFolder.open(folder.path)
        holder.send_signal(signal.SIGCONT)
        _, said = holder.communicate("go on\n", timeout=60)
    assert f"another supervisor (with pid {os.getpid()}) has taken the run over" in said
    assert newer.journal.read_text() == "before\n"
    assert newer.address.exists()
    newer.withdraw()
    assert not newer.address.exists()


def test_one_process_cannot_hold_a_folder_twice(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "demo")
    folder.write_status("running")
    with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
        RunFolder.open(folder.path)


def test_a_given_path_must_be_new_or_empty(tmp_path: Path) -> None:
    given = tmp_path / "here"
    assert RunFolder.create(tmp_path, "demo", path=given).path == given
    with pytest.raises(ConfigError, match="already exists and is not empty; resume it"):
        RunFolder.create(tmp_path, "demo", path=given)


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "../up"])
def test_names_that_leave_the_root_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name"):
        RunFolder.create(tmp_path, name)


def test_a_root_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be made .*set run\.dir"):
        RunFolder.create(tmp_path / "file" / "runs", "demo")


def test_only_run_folders_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        RunFolder.open(tmp_path)
    with pytest.raises(ConfigError, match="is not a run folder"):
        RunFolder.open(tmp_path / "absent")


def test_status_is_whole_and_tells_the_last_state(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "demo")
    for step in range(20):
        folder.write_status("running", step=step, version=step, reason="on its way")
        status = read_status(folder.path)
        assert (status.state, status.step, status.pid) == ("running", step, os.getpid())
    assert not list(folder.path.glob("*.tmp")) and not list(folder.path.glob(".*.tmp"))


def test_a_damaged_status_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "STATUS").write_text('{"state": "dancing"}')
    with pytest.raises(ConfigError, match="STATUS: cannot be read"):
        read_status(tmp_path)


def test_runs_of_one_name_in_two_places_are_told_apart_on_the_host(tmp_path: Path) -> None:
    names = set()
    for clone in ("a", "b"):
        with closing(RunFolder.create(tmp_path / clone, "quickstart")) as folder:
            names.add(folder.host_name)
            folder.write_status("running")
            first = folder.host_name
            path = folder.path
        with closing(RunFolder.open(path)) as folder:
            assert folder.host_name == first
    assert len(names) == 2
