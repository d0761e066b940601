"""Big frames through shared memory: what arrives, what is refused, and that nothing stays behind."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from nereus.bus.shared import SharedMemory, sweep
from nereus.errors import ProtocolError

BIG = bytes(range(256)) * 1024


def test_big_frames_go_and_small_ones_stay_in_their_places(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path)
    sender, receiver = memory.channel(), memory.channel()
    frames = (b"a", BIG, b"b", BIG[::-1])
    kept, shared = sender.put(frames, 1024)
    assert kept == (b"a", b"b")
    assert [note.index for note in shared] == [1, 3]
    assert all((tmp_path / note.name).stat().st_mode & 0o777 == 0o600 for note in shared)
    assert receiver.take(kept, shared) == frames


def test_segments_are_used_again_and_their_files_vanish_once_acknowledged(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path)
    sender, receiver = memory.channel(), memory.channel()
    names = set()
    for fill in range(10):
        frame = bytes([fill]) * 100_000
        kept, shared = sender.put((frame,), 1024)
        assert receiver.take(kept, shared) == (frame,)
        sender.release(shared)
        names.add(shared[0].name)
    assert len(names) == 1
    assert os.listdir(tmp_path) == []


def test_what_was_taken_does_not_change_when_the_segment_is_used_again(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path)
    sender, receiver = memory.channel(), memory.channel()
    kept, shared = sender.put((b"1" * 100_000,), 1024)
    (first,) = receiver.take(kept, shared)
    sender.release(shared)
    sender.put((b"2" * 100_000,), 1024)
    assert first == b"1" * 100_000


def test_what_is_still_looked_at_is_not_overwritten_and_the_rest_is_used_again(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path)
    sender, receiver = memory.channel(), memory.channel()

    def pass_on(frame: bytes) -> memoryview:
        kept, shared = sender.put((frame,), 1024)
        (taken,) = receiver.take(kept, shared)
        sender.release(shared)
        return memoryview(taken)

    held = pass_on(b"0" * 100_000)[5:10]  # a view of a view, as an array makes it
    places = set()
    for fill in range(10):
        frame = bytes([fill]) * 90_000
        taken = pass_on(frame)
        assert taken == frame
        assert taken.readonly
        places.add(id(taken.obj))
        taken.release()
    assert held == b"0" * 5
    assert len(places) == 1
    assert len({id(pass_on(bytes(8 << 20)).obj) for _ in range(3)}) == 1
    everything = [pass_on(bytes([fill]) * (8 << 20)) for fill in range(6)]  # more than is kept for use again
    assert [view[-1] for view in everything] == list(range(6))


def test_closing_removes_what_nobody_took(tmp_path: Path) -> None:
    sender = SharedMemory(tmp_path).channel()
    sender.put((BIG, BIG), 1024)
    assert len(os.listdir(tmp_path)) == 2
    sender.close()
    assert os.listdir(tmp_path) == []


def test_frames_beyond_the_bound_stay_on_the_bus(tmp_path: Path) -> None:
    sender = SharedMemory(tmp_path, max_bytes=300_000).channel()
    kept, shared = sender.put((BIG, BIG), 1024)
    assert (len(kept), len(shared)) == (1, 1)


def test_a_damaged_frame_is_refused(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path)
    sender, receiver = memory.channel(), memory.channel()
    kept, shared = sender.put((BIG,), 1024)
    with open(tmp_path / shared[0].name, "r+b") as file:
        file.write(b"x")
    with pytest.raises(ProtocolError, match="checksum"):
        receiver.take(kept, shared)


@pytest.mark.parametrize("size", [0, len(BIG) * 64])
def test_a_wrong_size_is_refused(tmp_path: Path, size: int) -> None:
    memory = SharedMemory(tmp_path)
    kept, shared = memory.channel().put((BIG,), 1024)
    with pytest.raises(ProtocolError, match="holds"):
        memory.channel().take(kept, (msgspec.structs.replace(shared[0], size_bytes=size),))


@pytest.mark.parametrize("indices", [(0, 0), (0, 2), (5, 1)])
def test_impossible_places_are_refused(tmp_path: Path, indices: tuple[int, int]) -> None:
    memory = SharedMemory(tmp_path)
    _, shared = memory.channel().put((BIG, BIG), 1024)
    lies = tuple(msgspec.structs.replace(note, index=index) for note, index in zip(shared, indices, strict=True))
    with pytest.raises(ProtocolError, match="shared frames at"):
        memory.channel().take((), lies)


def test_only_private_plain_files_are_mapped(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path)
    sender = memory.channel()

    def refused(match: str) -> None:
        with pytest.raises(ProtocolError, match=match):
            memory.channel().take((), shared)

    _, shared = sender.put((BIG,), 1024)
    path = tmp_path / shared[0].name
    path.chmod(0o644)
    refused("not a private file")
    path.chmod(0o600)
    os.link(path, tmp_path / "other")
    refused("not a private file")
    path.unlink()
    refused("cannot be opened")
    path.symlink_to(tmp_path / "other")
    refused("cannot be opened")
    path.unlink()
    path.mkdir(0o700)
    refused("not a private file")
    path.rmdir()
    os.mkfifo(path, 0o600)
    refused("not a private file")


def test_a_receiver_maps_a_bounded_amount(tmp_path: Path) -> None:
    sender = SharedMemory(tmp_path).channel()
    receiver = SharedMemory(tmp_path, max_bytes=2 * len(BIG)).channel()
    kept, shared = sender.put((BIG, BIG, BIG), 1024)
    with pytest.raises(ProtocolError, match="segments of more than"):
        receiver.take(kept, shared)


def test_sweep_removes_what_dead_senders_left_and_nothing_else(tmp_path: Path) -> None:
    SharedMemory(tmp_path).channel().put((BIG,), 1024)
    dead = tmp_path / f"nereus-4194305-{'0' * 32}"
    for path in (dead, tmp_path / "nereus-x", tmp_path / "other"):
        path.write_bytes(b"")
    assert sweep(tmp_path) == 0
    assert sweep(tmp_path, min_age_s=0.0) == 1
    assert not dead.exists()
    assert len(os.listdir(tmp_path)) == 3


def test_hosts_differ_when_the_memory_does(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    here = SharedMemory(tmp_path / "a").host
    assert here == SharedMemory(tmp_path / "a").host != ""
    assert here != SharedMemory(tmp_path / "b").host
    assert SharedMemory(tmp_path / "missing").host == ""
