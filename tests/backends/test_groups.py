"""Do process groups form, fail in bounded time, and form again? And does the store keep to itself?"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nereus.backends.torch.groups import TrainerGroups, connect_store, form_trainer_groups, trainer_members
from nereus.core.plan import POLICY_TRAINING, Emu, Layout, Plan
from nereus.errors import TransitionError

ROOT = Path(__file__).parents[2]
STORE = [sys.executable, "-m", "nereus.backends.torch.store", "--port", "0"]


def plan(layout: Layout, units: int) -> Plan:
    size = layout.slots
    emus = (Emu(POLICY_TRAINING, i, layout, tuple(range(10 + i * size, 10 + (i + 1) * size))) for i in range(units))
    return Plan(4, tuple(emus))


def test_members_are_those_with_whom_a_slot_shares_a_coordinate() -> None:
    two = plan(Layout(tp=2, pp=3), 2)
    assert trainer_members(two.emus[1], two, 21) == {
        "everyone": tuple(range(10, 22)),
        "unit": tuple(range(16, 22)),
        "tp": (20, 21),
        "pp": (17, 19, 21),
        "dp": (15, 21),
        "ends": (17, 21),
    }
    assert trainer_members(two.emus[1], two, 18)["ends"] == (18,), "the middle of a pipeline holds no tied tensor"


def test_groups_of_one_kind_agree_between_their_members() -> None:
    for layout in (Layout(1, 1), Layout(2, 2), Layout(1, 3), Layout(4, 1)):
        both = plan(layout, 3)
        of = {slot: trainer_members(emu, both, slot) for emu in both.emus for slot in emu.slots}
        for members in of.values():
            for kind, group in members.items():
                assert all(of[member][kind] == group for member in group)


def test_a_single_slot_needs_no_store() -> None:
    one = plan(Layout(), 1)
    assert form_trainer_groups(one.emus[0], one, 10, store="", transport="gloo", timeout_s=1) == TrainerGroups()


def test_several_slots_without_a_store_are_refused() -> None:
    two = plan(Layout(), 2)
    with pytest.raises(ValueError, match="2 slots need a rendezvous store"):
        form_trainer_groups(two.emus[0], two, 10, store="", transport="gloo", timeout_s=1)


def test_a_malformed_store_address_is_refused() -> None:
    with pytest.raises(ValueError, match="host:port"):
        connect_store("nowhere", timeout_s=1)


@pytest.mark.live
def test_a_store_that_is_not_there_is_said_in_time() -> None:
    with pytest.raises(TransitionError, match=r"no rendezvous store answers at 127\.0\.0\.1:1 "):
        connect_store("127.0.0.1:1", timeout_s=1)


def listening(port: int) -> list[str]:
    """Return the local addresses on which somebody listens at ``port``, in the kernel's hexadecimal form."""
    tables = [Path(f"/proc/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return [line[1].split(":")[0] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")]


@pytest.mark.live
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_store_listens_on_loopback_only_and_dies_with_its_parent() -> None:
    script = f"import subprocess; p = subprocess.Popen({STORE!r}); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        where = json.loads(parent.stdout.readline())
        assert listening(where["port"]) == ["0100007F"]
        handle = os.pidfd_open(pid)
        parent.kill()
        ended, _, _ = select.select([handle], [], [], 30)
        assert ended, "the store outlives its parent"
        os.close(handle)


@pytest.mark.live
def test_a_taken_port_is_one_line_and_exit_code_2() -> None:
    with subprocess.Popen(STORE, stdout=subprocess.PIPE, cwd=ROOT, text=True) as first:
        assert first.stdout is not None
        port = json.loads(first.stdout.readline())["port"]
        command = [*STORE[:-1], str(port)]
        second = subprocess.run(command, capture_output=True, cwd=ROOT, text=True, timeout=120)
        first.terminate()
    assert second.returncode == 2
    assert second.stderr.count("\n") == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in second.stderr


@pytest.mark.live
def test_survivors_of_a_killed_member_are_freed_at_once_and_form_a_new_group(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(STORE, stdout=subprocess.PIPE, cwd=ROOT, text=True) as store:
        assert store.stdout is not None
        port = json.loads(store.stdout.readline())["port"]
        worker = [sys.executable, Path(__file__).with_name("groups_worker.py"), tmp_path, f"127.0.0.1:{port}"]
        ended = subprocess.run(worker, env=environment, cwd=ROOT, timeout=200, stdout=subprocess.PIPE, text=True)
        store.terminate()
    assert json.loads(ended.stdout) == [0, 0, -signal.SIGKILL]
    for slot in (3, 5):
        found = json.loads((tmp_path / f"{slot}.json").read_text())
        assert "cannot become slot" in found["other_slot"]
        assert "pass group= explicitly" in found["default_world"]
        assert (found["sum"], found["from_5"], found["survivors_sum"]) == (17.0, 5.0, 8.0)
        assert found["error"]
        assert found["freed_s"] < 10, "well below the group's time-out of 60 s"
        assert "did not form" in found["absent_member"]
        assert found["absent_s"] < 15
