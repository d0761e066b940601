"""Is a version visible only when it is complete and verified, whoever dies and whatever is sent?"""

from __future__ import annotations

import mmap
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nereus.actors.weights import Busy, Relay, remove_leftovers, shared_prefix
from nereus.bus.messages import PullFrom, PushDone, PushInto, Refused, VersionReady
from nereus.core.plan import Layout
from nereus.transition.checksum import piece_checksum, piece_view, tensor_view, tensors_checksum
from nereus.transition.reshard import Piece, TensorSpec, publication

LAYERS = 4
SPECS = (
    TensorSpec("embed", (103, 8), "float32", 0, -1),
    *(TensorSpec(f"layer.{i}.up", (12, 8), "float32", 0, i) for i in range(LAYERS)),
    *(TensorSpec(f"layer.{i}.down", (8, 12), "float32", 1, i) for i in range(LAYERS)),
    *(TensorSpec(f"layer.{i}.norm", (8,), "float32", None, i) for i in range(LAYERS)),
    TensorSpec("norm", (8,), "float32"),
)
TIED = {"lm_head": "embed"}
LAYOUT, REPLICAS = Layout(2, 2), 2
WRITERS = [f"slot-{i}" for i in range(REPLICAS * LAYOUT.slots)]

Weights = dict[str, NDArray[np.uint32]]


def weights(version: int) -> Weights:
    random = np.random.default_rng(version)
    return {spec.name: random.integers(0, 1 << 32, spec.shape, np.uint32) for spec in SPECS}


def pieces_of(writer: str) -> tuple[Piece, ...]:
    replica, index = divmod(WRITERS.index(writer), LAYOUT.slots)
    return publication(SPECS, LAYERS, LAYOUT, index, replica, REPLICAS)


def write(into: PushInto, pieces: Sequence[Piece], source: Weights) -> tuple[str, ...]:
    """Do what a trainer slot does: write pieces into whole tensors of the shared file."""
    specs = {spec.name: spec for spec in SPECS}
    with Path(into.path).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for piece in pieces:
            tensor = tensor_view(memory, specs[piece.name], into.offsets[piece.name])
            piece_view(tensor, piece)[...] = piece_view(source[piece.name], piece)
            del tensor
    return tuple(piece_checksum(piece_view(source[piece.name], piece)) for piece in pieces)


def push(relay: Relay, version: int, writer: str) -> VersionReady | Refused | None:
    into = relay.begin_push(version, writer)
    assert isinstance(into, PushInto), into
    pieces = pieces_of(writer)
    return relay.push_done(PushDone(version, writer, pieces, write(into, pieces, weights(version))))


def publish(relay: Relay, version: int) -> VersionReady:
    *early, last = [push(relay, version, writer) for writer in WRITERS]
    assert early == [None] * len(early)
    assert isinstance(last, VersionReady), last
    return last


def read(source: PullFrom) -> Weights:
    """Do what a rollout does: copy every tensor, and verify."""
    memory = np.fromfile(source.path, np.uint8)
    assert tensors_checksum(memory, source.tensors, source.offsets) == source.checksum
    return {spec.name: tensor_view(memory, spec, source.offsets[spec.name]) for spec in source.tensors}


def holds(source: PullFrom | Refused, version: int) -> bool:
    assert isinstance(source, PullFrom), source
    found, expected = read(source), weights(version)
    return source.version == version and all((found[name] == expected[name]).all() for name in expected)


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Relay]:
    relay = Relay("run1", "policy.weights/0", folder=tmp_path)
    relay.configure(SPECS, TIED)
    yield relay
    relay.close()
    assert list(tmp_path.iterdir()) == [], "no file outlives the relay"


def test_shards_of_t2p2_d2_become_whole_tensors(relay: Relay, tmp_path: Path) -> None:
    ready = publish(relay, 1)
    assert (ready.version, ready.tensors) == (1, len(SPECS))
    source = relay.pull(1, "slot-8")
    assert holds(source, 1)
    assert isinstance(source, PullFrom)
    assert (source.tied, source.checksum) == (TIED, ready.checksum)
    assert all(offset % 64 == 0 for offset in source.offsets.values())
    (file,) = tmp_path.iterdir()
    assert file.name == "nereus-run1-policy.weights.0-0"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_writers_that_write_side_by_side_do_not_disturb_each_other(relay: Relay) -> None:
    grants = {writer: relay.begin_push(1, writer) for writer in WRITERS}

    def work(writer: str) -> PushDone:
        into = grants[writer]
        assert isinstance(into, PushInto)
        pieces = pieces_of(writer)
        return PushDone(1, writer, pieces, write(into, pieces, weights(1)))

    with ThreadPoolExecutor(len(WRITERS)) as pool:
        answers = [relay.push_done(done) for done in pool.map(work, WRITERS)]
    assert answers[:-1] == [None] * (len(WRITERS) - 1)
    assert isinstance(answers[-1], VersionReady)
    assert holds(relay.pull(1, "reader"), 1)


_WRITER = """
import sys, numpy as np
memory = np.memmap(sys.argv[1], np.uint8, "r+")
memory[: len(memory) // 2] = 255
memory.flush()
print("half", flush=True)
sys.stdin.read()
"""


@pytest.mark.live
def test_a_writer_process_killed_halfway_leaves_nothing_visible(relay: Relay) -> None:
    publish(relay, 1)
    into = relay.begin_push(2, "slot-9")
    assert isinstance(into, PushInto)
    command = [sys.executable, "-c", _WRITER, into.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "half\n"
        process.kill()
    assert holds(relay.pull(1, "reader"), 1)
    assert relay.writer_gone("slot-9")
    assert publish(relay, 2).version == 2 and holds(relay.pull(2, "reader"), 2)


@pytest.mark.parametrize("done", range(len(WRITERS)))
def test_a_writer_lost_after_k_of_n_leaves_the_old_version(relay: Relay, done: int) -> None:
    publish(relay, 1)
    for writer in WRITERS[:done]:
        assert push(relay, 2, writer) is None
    into = relay.begin_push(2, WRITERS[done])
    assert isinstance(into, PushInto)
    half = pieces_of(WRITERS[done])[:1]
    write(into, half, weights(2))
    assert holds(relay.pull(1, "reader"), 1), "what is half-written is not lent"
    dropped = relay.writer_gone(WRITERS[done])
    assert dropped and f"version 2 is dropped: its writer {WRITERS[done]} is gone" in dropped
    assert holds(relay.pull(1, "reader"), 1)
    late = relay.push_done(PushDone(2, WRITERS[0], pieces_of(WRITERS[0]), write_nothing(WRITERS[0])))
    assert isinstance(late, Refused) and "was dropped" in late.reason
    assert publish(relay, 2).version == 2
    write_into_orphan(into)
    assert holds(relay.pull(2, "reader"), 2), "a late writer of the dropped version writes into an orphan"


def write_nothing(writer: str) -> tuple[str, ...]:
    return tuple("0" * 16 for _ in pieces_of(writer))


def write_into_orphan(into: PushInto) -> None:
    assert not Path(into.path).exists(), "a dropped publication's file is unlinked, never lent again"


def test_wrong_checksum_is_refused_with_the_name(relay: Relay) -> None:
    into = relay.begin_push(1, WRITERS[0])
    assert isinstance(into, PushInto)
    pieces = pieces_of(WRITERS[0])
    good = write(into, pieces, weights(1))
    answer = relay.push_done(PushDone(1, WRITERS[0], pieces, ("0" * 16, *good[1:])))
    assert isinstance(answer, Refused)
    assert f"{pieces[0].name} [" in answer.reason and "checksum is 0000000000000000" in answer.reason
    assert publish(relay, 1).version == 1, "the writer may begin again"


def test_a_bit_that_flips_after_the_checksum_is_noticed(relay: Relay) -> None:
    into = relay.begin_push(1, WRITERS[0])
    assert isinstance(into, PushInto)
    pieces = pieces_of(WRITERS[0])
    checksums = write(into, pieces, weights(1))
    damaged = {name: array ^ np.uint32(1 << 7) for name, array in weights(1).items()}
    write(into, pieces[-1:], damaged)
    answer = relay.push_done(PushDone(1, WRITERS[0], pieces, checksums))
    assert isinstance(answer, Refused) and pieces[-1].name in answer.reason


def test_renamed_tied_and_double_tensors_are_refused_with_the_list(relay: Relay) -> None:
    cases = {
        "layer.0.upp: the model has no tensor of this name": Piece("layer.0.upp", (0, 0), (12, 8)),
        "lm_head: the model has no tensor of this name": Piece("lm_head", (0, 0), (103, 8)),
        "norm: piece [0:9] is empty or out of bounds": Piece("norm", (0,), (9,)),
    }
    for fault, piece in cases.items():
        assert isinstance(relay.begin_push(1, WRITERS[0]), PushInto)
        answer = relay.push_done(PushDone(1, WRITERS[0], (*pieces_of(WRITERS[0]), piece), ("0" * 16,) * 99))
        assert isinstance(answer, Refused) and "came with 99 checksums" in answer.reason
        assert isinstance(relay.begin_push(1, WRITERS[0]), PushInto)
        answer = relay.push_done(PushDone(1, WRITERS[0], (piece,), ("0" * 16,)))
        assert isinstance(answer, Refused) and fault in answer.reason
    push(relay, 1, WRITERS[0])
    assert isinstance(relay.begin_push(1, WRITERS[1]), PushInto)
    twice = relay.push_done(PushDone(1, WRITERS[1], pieces_of(WRITERS[0]), write_nothing(WRITERS[0])))
    assert isinstance(twice, Refused) and "overlaps" in twice.reason


def test_a_missing_tensor_is_named_by_the_last_writer(relay: Relay) -> None:
    relay.writers = len(WRITERS)
    for writer in WRITERS[:-1]:
        assert push(relay, 1, writer) is None
    into = relay.begin_push(1, WRITERS[-1])
    assert isinstance(into, PushInto)
    lacking, *pieces = pieces_of(WRITERS[-1])
    answer = relay.push_done(PushDone(1, WRITERS[-1], tuple(pieces), write(into, pieces, weights(1))))
    assert isinstance(answer, Refused) and f"{lacking.name}: " in answer.reason and "are missing" in answer.reason
    assert isinstance(relay.pull(0, "reader"), Refused)


def test_an_overdue_publication_says_what_lacks(tmp_path: Path) -> None:
    now = [0.0]
    relay = Relay("run1", "w/0", folder=tmp_path, clock=lambda: now[0])
    relay.configure(SPECS, TIED)
    push(relay, 1, WRITERS[0])
    now[0] = 9.0
    assert relay.expire(1, 10.0) is None
    now[0] = 10.0
    why = relay.expire(1, 10.0)
    assert why and f"not complete after 10 s; pushed by {WRITERS[0]}, begun by nobody; " in why
    assert "norm: 8 of 8 elements are missing" in why
    relay.close()


def test_versions_only_grow_and_are_pushed_one_at_a_time(relay: Relay) -> None:
    publish(relay, 3)
    for version in (2, 3):
        answer = relay.begin_push(version, WRITERS[0])
        assert isinstance(answer, Refused) and "version 3 is visible already" in answer.reason
    push(relay, 5, WRITERS[0])
    assert isinstance(relay.begin_push(5, WRITERS[0]), Refused)
    busy = relay.begin_push(6, WRITERS[0])
    assert isinstance(busy, Busy) and "version 5 is still being written" in busy.reason
    answer = relay.pull(4, "reader")
    assert isinstance(answer, Refused) and answer.reason == "version 4 is not visible; the newest is 3"
    stranger = relay.push_done(PushDone(5, "stranger", (), ()))
    assert isinstance(stranger, Refused) and "has not begun" in stranger.reason


def test_a_lent_buffer_is_never_written(relay: Relay) -> None:
    sources = []
    for version in (1, 2, 3):
        publish(relay, version)
        sources.append(relay.pull(version, f"reader-{version}"))
    busy = relay.begin_push(4, WRITERS[0])
    assert isinstance(busy, Busy) and "version 1 by reader-1" in busy.reason
    assert all(holds(source, version) for version, source in enumerate(sources, 1))
    assert relay.pull_done(1, "reader-1") and not relay.pull_done(1, "reader-1")
    publish(relay, 4)
    assert holds(sources[1], 2) and holds(sources[2], 3) and holds(relay.pull(4, "reader-4"), 4)


def test_what_a_lost_reader_was_lent_is_not_written_again(relay: Relay) -> None:
    publish(relay, 1)
    source = relay.pull(1, "reader")
    assert isinstance(source, PullFrom)
    memory = np.memmap(source.path, np.uint8, "r")
    relay.reader_gone("reader")
    assert holds(relay.pull(1, "other"), 1), "the visible version stays"
    relay.pull_done(1, "other")
    for version in (2, 3, 4):
        publish(relay, version)
    assert not Path(source.path).exists()
    assert tensors_checksum(memory, source.tensors, source.offsets) == source.checksum


def test_two_readers_of_one_version_hold_it_until_both_are_done(relay: Relay) -> None:
    publish(relay, 1)
    first, second = relay.pull(1, "a"), relay.pull(1, "b")
    relay.pull_done(1, "a")
    publish(relay, 2)
    publish(relay, 3)
    assert holds(second, 1)
    assert isinstance(first, PullFrom)


def test_the_manifest_is_checked(tmp_path: Path, relay: Relay) -> None:
    fresh = Relay("run2", "w/0", folder=tmp_path)
    answer = fresh.begin_push(1, WRITERS[0])
    assert isinstance(answer, Refused) and "Manifest" in answer.reason
    with pytest.raises(ValueError, match="without tensors"):
        fresh.configure([], {})
    with pytest.raises(ValueError, match=r"lm_head -> embedd"):
        fresh.configure(SPECS, {"lm_head": "embedd"})
    with pytest.raises(ValueError, match="norm is missing"):
        relay.configure(SPECS[:-1], TIED)
    push(relay, 1, WRITERS[0])
    relay.configure(SPECS, TIED)
    assert relay.publishing == -1, "announcing the model again drops what is half-pushed"


def test_a_full_folder_is_refused_with_the_remedy(tmp_path: Path) -> None:
    relay = Relay("run1", "w/0", folder=tmp_path)
    relay.configure([TensorSpec("huge", (1 << 45,), "float32")], {})
    answer = relay.begin_push(1, "slot-0")
    assert isinstance(answer, Refused)
    assert "cannot reserve" in answer.reason and "free memory in" in answer.reason
    assert list(tmp_path.iterdir()) == []


def test_a_dead_predecessors_files_are_removed_and_no_others(tmp_path: Path) -> None:
    own, other, longer = (tmp_path / name for name in ("nereus-r-w.0-0", "nereus-r-w.1-0", "nereus-r-w.0"))
    target = tmp_path / "precious"
    target.write_text("kept")
    own.symlink_to(target)
    other.touch()
    longer.touch()
    relay = Relay("r", "w/0", folder=tmp_path)
    assert relay.leftovers == (own,)
    assert not os.path.lexists(own) and other.exists() and longer.exists() and target.read_text() == "kept"
    assert remove_leftovers(tmp_path, shared_prefix("r")) == (longer, other)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, Any]]:
    actions = st.sampled_from(["push", "lose writer", "pull", "done", "lose reader", "announce"])
    return [(draw(actions), draw(st.integers(0, 7))) for _ in range(draw(st.integers(10, 60)))]


@settings(max_examples=25, deadline=None)
@given(history=histories())
def test_in_any_history_every_loan_is_whole_and_stays_so(history: list[tuple[str, Any]], tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("shm")
    relay = Relay("run", "w/0", folder=folder)
    relay.configure(SPECS, TIED)
    loans: dict[str, PullFrom] = {}
    version, pushed, newest = 1, set[str](), -1
    for action, number in history:
        writer, reader = WRITERS[number], f"reader-{number % 3}"
        if action == "push":
            into = relay.begin_push(version, writer)
            if isinstance(into, PushInto):
                pieces = pieces_of(writer)
                result = relay.push_done(PushDone(version, writer, pieces, write(into, pieces, weights(version))))
                pushed.add(writer)
                assert isinstance(result, VersionReady) == (len(pushed) == len(WRITERS))
                if isinstance(result, VersionReady):
                    newest, version, pushed = version, version + 1, set()
            elif isinstance(into, Busy):
                assert len(loans) >= 2
        elif action == "lose writer" and relay.writer_gone(writer):
            pushed = set()
        elif action == "announce":
            relay.configure(SPECS, TIED)
            pushed = set()
        elif action == "pull" and reader not in loans and isinstance(answer := relay.pull(0, reader), PullFrom):
            loans[reader] = answer
            assert answer.version == newest
        elif action == "done" and reader in loans:
            assert relay.pull_done(loans.pop(reader).version, reader)
        elif action == "lose reader":
            relay.reader_gone(reader)
            loans.pop(reader, None)
        assert len(list(folder.iterdir())) <= 3
        for loan in loans.values():
            assert holds(loan, loan.version)
    relay.close()
    assert list(folder.iterdir()) == []
