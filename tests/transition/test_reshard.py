"""Do the pieces of every layout fit together, and do moves bring what is missing and nothing else?"""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core.plan import POLICY_TRAINING, Emu, Layout
from nereus.transition.reshard import (
    Piece,
    TensorSpec,
    box,
    covers,
    difference,
    elements,
    intersection,
    layer_range,
    listing,
    moved_bytes,
    moves,
    offsets_of,
    piece_bytes,
    piece_of,
    pieces_of,
    publication,
    tensor_bytes,
    whole,
)

LAYERS = 3
quick = settings(deadline=None, max_examples=30)

SPECS = (
    TensorSpec("embed", (203, 6), "float32", 0, -1),  # R04: a vocabulary that no layout divides
    *(TensorSpec(f"layer.{i}.q", (12, 6), "float32", 0, i) for i in range(LAYERS)),
    *(TensorSpec(f"layer.{i}.q_bias", (12,), "float32", 0, i) for i in range(LAYERS)),
    *(TensorSpec(f"layer.{i}.o", (6, 10), "bfloat16", 1, i) for i in range(LAYERS)),
    *(TensorSpec(f"layer.{i}.norm", (6,), "float32", None, i) for i in range(LAYERS)),
    TensorSpec("norm", (6,), "float32"),
)
"""A tied model: the output head is an alias of ``embed`` and has no tensor of its own."""

layouts = st.builds(Layout, st.integers(1, 4), st.integers(1, LAYERS))


@st.composite
def boxes(draw: st.DrawFn) -> Piece:
    bounds = [sorted(draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))) for _ in range(2)]
    return Piece("x", tuple(low for low, _ in bounds), tuple(high + 1 for _, high in bounds))


def units(layout: Layout, replicas: int, first_slot: int = 0) -> list[Emu]:
    slots = [range(first_slot + i * layout.slots, first_slot + (i + 1) * layout.slots) for i in range(replicas)]
    return [Emu(POLICY_TRAINING, i, layout, tuple(numbers)) for i, numbers in enumerate(slots)]


def fill(array: np.ndarray, piece: Piece, by: int = 1) -> None:
    array[tuple(map(slice, piece.start, piece.stop))] += by


@quick
@given(boxes(), boxes())
def test_difference_and_intersection_partition_a_box(one: Piece, other: Piece) -> None:
    counts = np.zeros((7, 7), int)
    for part in difference(one, other):
        fill(counts, part)
    if common := intersection(one, other):
        fill(counts, common)
    expected = np.zeros((7, 7), int)
    fill(expected, one)
    assert (counts == expected).all()


@quick
@given(st.integers(1, 100), st.integers(1, 20))
def test_layers_are_balanced_and_complete(layers: int, pp: int) -> None:
    if layers < pp:
        with pytest.raises(ValueError, match=f"{layers} layers .* {pp} ranks"):
            layer_range(layers, pp, 0)
        return
    ranges = [layer_range(layers, pp, rank) for rank in range(pp)]
    assert [layer for one in ranges for layer in one] == list(range(layers))
    sizes = [len(one) for one in ranges]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@quick
@given(layouts)
def test_the_slots_of_a_unit_hold_each_tensor_once_or_once_per_tp_rank(layout: Layout) -> None:
    for spec in SPECS:
        held = [piece_of(spec, LAYERS, layout, index) for index in range(layout.slots)]
        found = [piece for piece in held if piece is not None]
        ranks = {layout.coordinates(i)[0] for i, piece in enumerate(held) if piece is not None}
        assert len(ranks) == 1, "one pipeline rank holds a tensor"
        if spec.split is None:
            assert found == [whole(spec)] * layout.tp
        else:
            assert covers([spec], found) == ()


def test_embedding_first_norm_and_head_last() -> None:
    layout = Layout(1, 2)
    assert piece_of(SPECS[0], LAYERS, layout, 0) and not piece_of(SPECS[0], LAYERS, layout, 1)
    assert piece_of(SPECS[-1], LAYERS, layout, 1) and not piece_of(SPECS[-1], LAYERS, layout, 0)


def test_a_scalar_tensor_is_one_piece() -> None:
    spec = TensorSpec("scale", (), "float32")
    assert covers([spec], [whole(spec)]) == ()
    assert covers([spec], []) == ("scale: 1 of 1 elements are missing",)


def test_impossible_placements_are_the_callers_bug() -> None:
    with pytest.raises(ValueError, match="x is said to be of layer 9, but the model has 3 layers"):
        piece_of(TensorSpec("x", (1,), "float32", None, 9), LAYERS, Layout(), 0)
    with pytest.raises(ValueError, match=r"x of shape .* cannot be split in dimension 1"):
        piece_of(TensorSpec("x", (4,), "float32", 1, 0), LAYERS, Layout(2), 0)
    with pytest.raises(ValueError, match="has no slot number 2"):
        piece_of(SPECS[0], LAYERS, Layout(2), 2)
    with pytest.raises(ValueError, match="dtype 'float31' is unknown"):
        tensor_bytes(TensorSpec("x", (4,), "float31"))


@quick
@given(layouts, st.integers(1, 4))
def test_publication_is_an_exact_cover_by_all_slots(layout: Layout, replicas: int) -> None:
    pushed = [
        publication(SPECS, LAYERS, layout, index, replica, replicas)
        for replica in range(replicas)
        for index in range(layout.slots)
    ]
    assert covers(SPECS, [piece for pieces in pushed for piece in pieces]) == ()
    for slot, pieces in enumerate(pushed):
        own = pieces_of(SPECS, LAYERS, layout, slot % layout.slots)
        assert set(pieces) <= set(own), "a slot pushes only what it holds"


def test_publication_balances_bytes_over_replicas() -> None:
    specs = [TensorSpec(f"w{i}", (100 + i, 10), "float32", 0, i % 4) for i in range(40)]
    by_name = {spec.name: spec for spec in specs}
    loads = [
        sum(piece_bytes(by_name[p.name], p) for p in publication(specs, 4, Layout(), 0, replica, 4))
        for replica in range(4)
    ]
    assert max(loads) < 1.05 * min(loads)


def test_covers_names_every_fault() -> None:
    specs = [TensorSpec("a", (4, 4), "float32"), TensorSpec("b", (4,), "float32"), TensorSpec("c", (2,), "float32")]
    pieces = [
        Piece("a", (0, 0), (3, 4)),
        Piece("a", (2, 0), (4, 4)),
        Piece("b", (0,), (5,)),
        Piece("b", (0, 0), (1, 1)),
        Piece("d", (0,), (1,)),
    ]
    assert covers(specs, pieces) == (
        "a: [2:4, 0:4] overlaps [0:3, 0:4]",
        "b: piece [0:5] is empty or out of bounds of shape (4,)",
        "b: piece [0:1, 0:1] has other dimensions than shape (4,)",
        "d: the model has no tensor of this name",
    )
    assert covers(specs, [Piece("a", (0, 0), (3, 4)), Piece("c", (0,), (2,))]) == (
        "a: 4 of 16 elements are missing",
        "b: 4 of 4 elements are missing",
    )
    assert listing([str(i) for i in range(25)]).endswith("19; and 5 more")


@quick
@given(boxes(), boxes())
def test_two_overlapping_pieces_are_never_a_cover(one: Piece, other: Piece) -> None:
    spec = TensorSpec("x", (6, 6), "float32")
    assert bool(intersection(one, other)) == any("overlaps" in fault for fault in covers([spec], [one, other]))


@quick
@given(layouts, st.integers(1, 3), layouts, st.integers(1, 3), st.integers(0, 6))
def test_moves_bring_each_missing_element_once(
    old: Layout, old_replicas: int, new: Layout, new_replicas: int, shift: int
) -> None:
    source, target = units(old, old_replicas), units(new, new_replicas, shift)
    copies = moves(SPECS, LAYERS, source, target)
    assert all(copy.from_slot != copy.to_slot for copy in copies)
    for spec in SPECS:
        held = {slot: np.zeros(spec.shape, int) for emu in [*source, *target] for slot in emu.slots}
        for emu in source:
            for index, slot in enumerate(emu.slots):
                if piece := piece_of(spec, LAYERS, emu.layout, index):
                    fill(held[slot], piece)
        before = {slot: array.copy() for slot, array in held.items()}
        for copy in (copy for copy in copies if copy.name == spec.name):
            sent = before[copy.from_slot][tuple(map(slice, copy.piece.start, copy.piece.stop))]
            assert (sent == 1).all(), "a sender has what it sends"
            fill(held[copy.to_slot], copy.piece)
        for emu in target:
            for index, slot in enumerate(emu.slots):
                if piece := piece_of(spec, LAYERS, emu.layout, index):
                    assert (held[slot][tuple(map(slice, piece.start, piece.stop))] == 1).all()
        assert max(int(array.max()) for array in held.values()) == 1, "nothing arrives twice"


@quick
@given(layouts, st.integers(1, 3))
def test_nothing_moves_when_nothing_changes(layout: Layout, replicas: int) -> None:
    assert moves(SPECS, LAYERS, units(layout, replicas), units(layout, replicas)) == ()


def test_moves_spread_the_sending() -> None:
    copies = moves(SPECS, LAYERS, units(Layout(), 2), units(Layout(), 2, first_slot=2))
    sent = [moved_bytes(SPECS, [copy for copy in copies if copy.from_slot == slot]) for slot in (0, 1)]
    assert sent[0] == sent[1] == sum(map(tensor_bytes, SPECS))


@quick
@given(layouts, st.integers(1, 3), layouts, st.integers(1, 3), st.integers(0, 6), st.integers(1, 4))
def test_what_the_own_node_has_comes_from_there(
    old: Layout, old_replicas: int, new: Layout, new_replicas: int, shift: int, slots_per_node: int
) -> None:
    source, target = units(old, old_replicas), units(new, new_replicas, shift)
    slots = {slot for emu in [*source, *target] for slot in emu.slots}
    node_of = {slot: f"node-{slot // slots_per_node}" for slot in slots}
    copies = moves(SPECS, LAYERS, source, target, node_of=node_of)
    held = defaultdict(list)
    for emu in source:
        for index, slot in enumerate(emu.slots):
            for spec in SPECS:
                if piece := piece_of(spec, LAYERS, emu.layout, index):
                    held[spec.name, node_of[slot]].append(piece)
    for copy in copies:
        if node_of[copy.from_slot] != node_of[copy.to_slot]:
            assert not any(intersection(copy.piece, piece) for piece in held[copy.name, node_of[copy.to_slot]])
    anywhere = moves(SPECS, LAYERS, source, target)
    assert moved_bytes(SPECS, copies) == moved_bytes(SPECS, anywhere), "where it comes from does not change how much"


def test_moves_from_nowhere_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no slot of the source holds embed \[0:203, 0:6\], which slot 0 needs"):
        moves(SPECS, LAYERS, [], units(Layout(), 1))


def test_offsets_are_aligned_and_disjoint() -> None:
    offsets, size = offsets_of(SPECS)
    spans = sorted((offsets[spec.name], offsets[spec.name] + tensor_bytes(spec)) for spec in SPECS)
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= size


def test_a_piece_counts_and_prints_its_elements() -> None:
    piece = Piece("x", (1, 2), (4, 4))
    assert (elements(piece), box(piece)) == (6, "[1:4, 2:4]")
