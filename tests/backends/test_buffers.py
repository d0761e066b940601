"""Is memory of trainer slots used again only when nobody looks into it, and read only where that is safe?"""

from __future__ import annotations

import os
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from nereus.backends.api import STATE_KINDS
from nereus.backends.holdings import Holdings
from nereus.backends.torch.buffers import SharedBuffers
from nereus.backends.torch.model import Entry, Holding
from nereus.backends.torch.state import FlatRoom, TorchMemory
from nereus.bus.messages import Loan, Place
from nereus.core.plan import POLICY_TRAINING, Layout
from nereus.errors import TransitionError
from nereus.transition.primitive import Replica
from nereus.transition.reshard import Move, Piece, TensorSpec
from tests.tiers import spread

CPU = torch.device("cpu")
F32 = torch.float32
SHAPE = (96, 1024)
PAIR = Replica(POLICY_TRAINING, Layout(tp=2), (0, 1))
SINGLE = Replica(POLICY_TRAINING, Layout(), (2,))
COUNTERS = {"step": 1, "updates": 1, "self_checked": 1}


@pytest.fixture
def buffers() -> SharedBuffers:
    made = SharedBuffers()
    made.keep(64 << 20)
    return made


def test_memory_is_used_again_once_no_view_is_left(buffers: SharedBuffers) -> None:
    whole = buffers.zeros(1 << 20, F32)
    view, address = whole[3:5].view(2), whole.data_ptr()
    view.fill_(7.0)
    del whole
    assert buffers.spare_bytes == 0
    assert buffers.empty(1 << 20, F32).data_ptr() != address, "somebody still looks into the first"
    assert view.tolist() == [7.0, 7.0]
    del view
    assert buffers.spare_bytes == 2 * (4 << 20)
    again = [buffers.zeros(1 << 20, F32) for _ in range(2)]
    assert buffers.spare_bytes == 0 and address in {tensor.data_ptr() for tensor in again}
    assert not any(int(torch.count_nonzero(tensor)) for tensor in again)


def test_a_smaller_tensor_gets_a_larger_buffer_and_zeros_are_zeros(buffers: SharedBuffers) -> None:
    first = buffers.empty(1 << 20, F32).fill_(3.0)
    address = first.data_ptr()
    del first
    second = buffers.zeros(1000, torch.bfloat16)
    assert second.data_ptr() == address
    assert second.shape == (1000,) and int(torch.count_nonzero(second)) == 0
    assert buffers.zeros(0, F32).shape == (0,)


def test_what_is_kept_is_bounded(buffers: SharedBuffers) -> None:
    open_files = len(os.listdir("/proc/self/fd"))
    held = [buffers.empty(1 << 20, F32) for _ in range(5)]
    del held
    assert buffers.spare_bytes == 5 * (4 << 20)
    buffers.keep(9 << 20)
    assert buffers.spare_bytes == 2 * (4 << 20)
    buffers.keep(0)
    assert buffers.spare_bytes == 0
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_neighbouring_room_is_joined_for_a_larger_tensor(buffers: SharedBuffers) -> None:
    whole = buffers.empty(4 << 20, F32).fill_(1.0)
    address = whole.data_ptr()
    del whole
    first, second = (buffers.empty(1 << 20, F32).fill_(5.0) for _ in range(2))
    assert {first.data_ptr(), second.data_ptr()} == {address, address + (4 << 20)}
    del first
    assert not int(torch.count_nonzero(buffers.zeros(3 << 20, F32))), "the free parts are 4 and 8 MiB: this needs more"
    del second
    assert buffers.zeros(4 << 20, F32).data_ptr() == address


@pytest.mark.parametrize("seed", spread(range(3), 1))
def test_no_two_live_tensors_share_an_element(buffers: SharedBuffers, seed: int) -> None:
    rng = random.Random(seed)
    buffers.reserve(8 << 20)
    live: list[tuple[torch.Tensor, int]] = []
    for number in range(1, 200):
        if live and rng.random() < 0.45:
            live.pop(rng.randrange(len(live)))
        clear = rng.random() < 0.5
        tensor = (buffers.zeros if clear else buffers.empty)(rng.randint(1, 300_000), F32)
        assert not clear or not int(torch.count_nonzero(tensor))
        live.append((tensor.fill_(number), number))
        assert all(bool((tensor == value).all()) for tensor, value in rng.sample(live, min(8, len(live))))
    assert all(bool((tensor == value).all()) for tensor, value in live)
    del tensor
    live.clear()
    buffers.empty(1, F32)
    assert buffers.spare_bytes <= (64 << 20)


def test_reserved_room_is_ready_and_stays(buffers: SharedBuffers) -> None:
    buffers.keep(0)
    thread = buffers.reserve(5_000_000)
    assert thread is not None
    tensor = buffers.zeros(1000, F32).fill_(2.0)
    thread.join(30)
    assert not thread.is_alive() and tensor.tolist() == [2.0] * 1000
    place = buffers.locate(tensor)
    assert place is not None and os.stat(place.path).st_blocks * 512 >= 5_000_000, "its pages are there"
    del tensor
    assert buffers.spare_bytes == 6 << 20
    assert buffers.reserve(1 << 30) is None, "only the first call counts"
    assert SharedBuffers().reserve(0) is None


def test_only_what_lies_in_shared_memory_has_a_place(buffers: SharedBuffers) -> None:
    matrix = buffers.empty(12, F32).view(3, 4)
    place = buffers.locate(matrix[:, 1:3])
    assert place is not None and (place.offset, place.strides) == (4, (16, 4))
    assert buffers.locate(torch.zeros(3)) is None
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"path": "/etc/passwd"}, Place)


# Lending without a copy


class Slots:
    """A unit of two tp ranks in shared memory, which cut a matrix in the second dimension, and a slot without state."""

    def __init__(self, buffers: SharedBuffers, folder: Path) -> None:
        self.spec = TensorSpec("w", SHAPE, "float32", split=1, layer=0)
        self.state = {kind: torch.rand(SHAPE) for kind in STATE_KINDS}
        self.buffers, self.folder = buffers, folder
        self.slots: list[Holdings[FlatRoom]] = [Holdings(TorchMemory(F32, CPU, buffers)) for _ in range(3)]
        for slot in (0, 1):
            piece = self.half(slot)
            room = self.room(piece)
            for kind, whole in self.state.items():
                room.view(kind, "w")[...] = whole[:, piece.start[1] : piece.stop[1]]
            self.slots[slot].commit(PAIR, room, COUNTERS)

    def half(self, index: int) -> Piece:
        width = SHAPE[1] // 2
        return Piece("w", (0, index * width), (SHAPE[0], (index + 1) * width))

    def room(self, piece: Piece) -> FlatRoom:
        entry = Entry("w", self.spec, piece, Holding.SHARDED, 0)
        return FlatRoom([entry], entry.elements, F32, CPU, buffers=self.buffers)

    def loans(self) -> list[Loan]:
        found = []
        for slot in (0, 1):
            path = self.folder / str(slot)
            path.touch(0o600)
            moves = (Move(self.half(slot), slot, 2),)
            found.append(Loan(slot, moves, str(path), self.slots[slot].lend(moves, path)))
        return found

    def take(self, loans: list[Loan]) -> int:
        return self.slots[2].take(SINGLE, 0, loans, lambda: self.room(Piece("w", (0, 0), SHAPE)))


@pytest.fixture
def slots(buffers: SharedBuffers, tmp_path: Path) -> Slots:
    return Slots(buffers, tmp_path)


def test_state_in_shared_memory_is_lent_without_a_copy_and_arrives_whole(slots: Slots) -> None:
    loans = slots.loans()
    assert [Path(loan.path).stat().st_size for loan in loans] == [0, 0]
    assert slots.take(loans) == 3 * 4 * SHAPE[0] * SHAPE[1]
    room = slots.slots[2].settle(SINGLE)
    for kind, whole in slots.state.items():
        assert torch.equal(room.view(kind, "w"), whole)


def test_what_changes_after_it_was_lent_is_refused(slots: Slots) -> None:
    loans = slots.loans()
    slots.slots[1].settle(PAIR).view("exp_avg", "w")[random.Random(1).randrange(SHAPE[0]), 5] += 1
    with pytest.raises(TransitionError, match=r"exp_avg of w \[.*\] from slot 1 arrived with checksum"):
        slots.take(loans)
    assert slots.slots[2].replicas == ()


def with_place(loan: Loan, place: Place) -> Loan:
    receipt = msgspec.structs.replace(loan.receipt, places=(place, *loan.receipt.places[1:]))
    return msgspec.structs.replace(loan, receipt=receipt)


def test_a_place_outside_of_its_file_or_in_another_kind_of_file_is_refused(slots: Slots, tmp_path: Path) -> None:
    first, second = slots.loans()
    place = first.receipt.places[0]
    beyond = msgspec.structs.replace(place, offset=1 << 40)
    with pytest.raises(TransitionError, match=r"parameter of w .* from slot 0 is said to lie where it cannot"):
        slots.take([with_place(first, beyond), second])
    wide = msgspec.structs.replace(place, strides=(1 << 30, 4))
    with pytest.raises(TransitionError, match="is said to lie where it cannot"):
        slots.take([with_place(first, wide), second])
    plain = tmp_path / "plain"
    plain.write_bytes(np.zeros(SHAPE, np.float32).tobytes())
    with plain.open("rb") as file:
        elsewhere = msgspec.structs.replace(place, path=f"/proc/{os.getpid()}/fd/{file.fileno()}")
        with pytest.raises(TransitionError, match="what slot 0 has lent cannot be read"):
            slots.take([with_place(first, elsewhere), second])
    gone = msgspec.structs.replace(place, path="/proc/4194304/fd/3")
    with pytest.raises(TransitionError, match="what slot 0 has lent cannot be read"):
        slots.take([with_place(first, gone), second])
    assert slots.slots[2].replicas == ()
