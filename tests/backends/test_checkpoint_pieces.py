"""Does state survive any change of layout, element by element, and is damage noticed on the way back?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from nereus.backends.manifest import FORMAT, MANIFEST, CheckpointManifest, SlotFile, seal
from nereus.backends.torch import checkpoint
from nereus.core.plan import Layout
from nereus.errors import CheckpointError
from nereus.runtime.checkpoints import CheckpointStore
from nereus.transition.reshard import Piece, TensorSpec, piece_of, pieces_of, publication, whole

LAYERS = 3
KINDS = ("parameter", "exp_avg", "exp_avg_sq")


def specs(tp: int = 1) -> tuple[TensorSpec, ...]:
    """A tied model with a vocabulary that no tp but 7 and 29 divides: kept whole or split unevenly (R04, R06)."""
    return (
        TensorSpec("embed", (203, 8), "float32", 0, -1),
        *(TensorSpec(f"layer.{i}.up", (12, 8), "float32", 0, i) for i in range(LAYERS)),
        *(TensorSpec(f"layer.{i}.down", (8, 12), "float32", 1, i) for i in range(LAYERS)),
        *(TensorSpec(f"layer.{i}.norm", (8,), "float32", None, i) for i in range(LAYERS)),
        TensorSpec("norm", (8,), "float32"),
    )


State = dict[tuple[str, str], Tensor]


def make_state(seed: int = 0) -> State:
    random = torch.Generator().manual_seed(seed)
    return {(kind, spec.name): torch.randn(spec.shape, generator=random) for kind in KINDS for spec in specs()}


def cut(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor[tuple(map(slice, piece.start, piece.stop))]


def save(store: CheckpointStore, layout: Layout, replicas: int, state: Mapping[tuple[str, str], Tensor]) -> Path:
    """Save as the trainer slots of a layout do: from padded, flat-buffer-like views."""
    folder = store.begin(6)
    entries = []
    for replica in range(replicas):
        for index in range(layout.slots):
            mine = publication(specs(), LAYERS, layout, index, replica, replicas)
            held = {}
            for kind in KINDS:
                for piece in mine:
                    value = cut(state[kind, piece.name], piece)
                    flat = torch.full((value.numel() + 9,), float("nan"))  # padding that must not reach the disk
                    flat[: value.numel()] = value.reshape(-1)
                    held[kind, piece.name] = (piece, flat[: value.numel()].view(value.shape))
            name = f"{replica}-{index}"
            entries.append(
                checkpoint.save_slot(folder, slot_name=name, step=6, pieces=held, counters={"step": 6, "updates": 12})
            )
    return store.commit(6, entries, {"cursor": 3}, tensors=specs())


@pytest.mark.parametrize(("old", "replicas"), [("t1p1", 1), ("t2p1", 2), ("t3p2", 1), ("t4p3", 2)])
def test_any_layout_reads_what_any_other_wrote(tmp_path: Path, old: str, replicas: int) -> None:
    """R12, R14: moments are keyed by global name and offset; nothing stays uninitialised."""
    state = make_state()
    layout = Layout(int(old[1]), int(old[3]))
    folder = save(CheckpointStore(tmp_path, 1), layout, replicas, state)
    for new in (Layout(1, 1), Layout(2, 1), Layout(1, 3), Layout(5, 2), Layout(4, 3)):
        for index in range(new.slots):
            held = {spec.name: spec for spec in specs()}
            wanted = [
                (kind, held[piece.name], piece) for kind in KINDS for piece in pieces_of(specs(), LAYERS, new, index)
            ]
            found = checkpoint.read_pieces(folder, wanted)
            assert len(found) == len(wanted)
            for kind, spec, piece in wanted:
                assert torch.equal(found[kind, spec.name], cut(state[kind, spec.name], piece)), (new, index, kind, spec)
    assert checkpoint.read_counters(folder) == {"step": 6, "updates": 12}


def test_the_file_holds_the_true_vocabulary(tmp_path: Path) -> None:
    """R06: what a layout pads is no row of the checkpoint."""
    folder = save(CheckpointStore(tmp_path, 1), Layout(4), 1, make_state())
    rows = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            rows += sum(file.get_slice(key).get_shape()[0] for key in file.keys() if key.startswith("parameter|embed|"))  # noqa: SIM118
    assert rows == 203


@pytest.mark.parametrize("size", [1, 2, 6, 7, 2003])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 7])
def test_uneven_splits_follow_torch_chunk(size: int, tp: int) -> None:
    spec = TensorSpec("x", (size, 2), "float32", 0, 0)
    pieces = [piece_of(spec, 1, Layout(tp), rank) for rank in range(tp)]
    chunks = torch.arange(size).chunk(tp)
    assert [(p.start[0], p.stop[0]) for p in pieces if p] == [(int(c[0]), int(c[-1]) + 1) for c in chunks]
    assert all(piece is None for piece in pieces[len(chunks) :])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_survive(tmp_path: Path, dtype: torch.dtype) -> None:
    spec = TensorSpec("x", (5, 3), checkpoint.dtype_name(dtype))
    value = torch.randn(5, 3).to(dtype)
    store = CheckpointStore(tmp_path, 1)
    folder = store.begin(1)
    pieces = {("parameter", "x"): (whole(spec), value)}
    entry = checkpoint.save_slot(folder, slot_name="0", step=1, pieces=pieces, counters={})
    found = checkpoint.read_pieces(store.commit(1, [entry], {}), [("parameter", spec, Piece("x", (1, 1), (4, 3)))])
    assert torch.equal(found["parameter", "x"], value[1:4, 1:3])


def test_damage_in_what_is_read_names_the_file(tmp_path: Path) -> None:
    folder = save(CheckpointStore(tmp_path, 1), Layout(2), 1, make_state())
    path = folder / "slot-0-1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 128
    path.write_bytes(content)
    everything = [(kind, spec, whole(spec)) for kind in KINDS for spec in specs()]
    with pytest.raises(CheckpointError, match=r"slot-0-1\.safetensors is damaged: the checksum of \w+\|"):
        checkpoint.read_pieces(folder, everything)


def test_what_is_not_stored_is_listed(tmp_path: Path) -> None:
    folder = save(CheckpointStore(tmp_path, 1), Layout(), 1, make_state())
    other = TensorSpec("bias", (3,), "float32")
    with pytest.raises(CheckpointError, match="parameter of bias: 3 elements"):
        checkpoint.read_pieces(folder, [("parameter", other, whole(other))])
    larger = TensorSpec("embed", (208, 8), "float32")
    with pytest.raises(CheckpointError, match="parameter of embed: 40 elements"):
        checkpoint.read_pieces(folder, [("parameter", larger, whole(larger))])
    smaller = TensorSpec("embed", (200, 8), "float32")
    with pytest.raises(CheckpointError, match="embed is stored as"):
        checkpoint.read_pieces(folder, [("parameter", smaller, whole(smaller))])


def test_slots_that_disagree_about_the_step_are_refused(tmp_path: Path) -> None:
    """S04-like: a counter of one slot must not silently stand for all."""
    folder = tmp_path
    slots = tuple(SlotFile(f"slot-{i}", 0, 1, {"updates": i}, ()) for i in range(2))
    (folder / MANIFEST).write_bytes(seal(CheckpointManifest(FORMAT, 1, slots, (), msgspec.Raw(b"{}"))))
    with pytest.raises(CheckpointError, match=r"slot-0 has the counters .*, but slot-1"):
        checkpoint.read_counters(folder)


def test_a_piece_that_is_not_what_it_says_is_the_callers_bug(tmp_path: Path) -> None:
    pieces = {("parameter", "x"): (Piece("x", (0,), (4,)), torch.zeros(3))}
    with pytest.raises(ValueError, match=r"parameter x of shape \(3,\) is not the piece"):
        checkpoint.save_slot(tmp_path, slot_name="0", step=1, pieces=pieces, counters={})


def test_a_slot_that_cannot_write_says_where(tmp_path: Path) -> None:
    pieces = {("parameter", "x"): (Piece("x", (0,), (3,)), torch.zeros(3))}
    with pytest.raises(CheckpointError, match=r"absent/slot-0\.safetensors cannot be written"):
        checkpoint.save_slot(tmp_path / "absent", slot_name="0", step=1, pieces=pieces, counters={})
