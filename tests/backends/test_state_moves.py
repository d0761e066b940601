"""Does state survive every change of plan, bit for bit, and is damage noticed on the way?

Fast: the slots of a world are objects in this process, and ``transition`` says what each of them lends and takes. Every
element of masters and moments tells its place, so a piece in a wrong place is found. Live: real processes train through
changes of layout and are compared with a run without any.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from nereus.backends.api import STATE_KINDS, TrainBatch
from nereus.backends.fake import FakeTrainer, Pace
from nereus.backends.holdings import Holdings, distinct
from nereus.backends.torch.model import Entry
from nereus.backends.torch.state import Blueprint, FlatRoom, TorchMemory
from nereus.bus.messages import Loan, Receipt
from nereus.config import ModelConfig
from nereus.core.plan import POLICY_TRAINING, Emu, Layout, Plan, Replication, SlotId
from nereus.errors import TransitionError
from nereus.transition.compile import compile_transition
from nereus.transition.cost import traffic
from nereus.transition.primitive import Destroy, Extend, Merge, Primitive, Replica, Split, TransitionDag
from nereus.transition.reshard import Move, Piece, TensorSpec, elements, held_to_train, remainder
from nereus.transition.run import TransitionRun
from tests.tiers import spread

MODELS: Mapping[str, tuple[type, Mapping[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": False, "vocab_size": 96}),
    "llama_tied": (LlamaConfig, {"tie_word_embeddings": True, "vocab_size": 96, "attention_bias": True}),
    "llama_odd": (LlamaConfig, {"tie_word_embeddings": True, "vocab_size": 98}),  # cut at tp=2, whole at tp=4
    "qwen3": (Qwen3Config, {"tie_word_embeddings": False, "vocab_size": 97, "head_dim": 8}),
}
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,  # uneven over 2 pipeline ranks
    "num_attention_heads": 8,
    "num_key_value_heads": 4,  # grouped queries
}
LAYOUTS = [Layout(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 3)]
COUNTERS = {"step": 3, "updates": 5, "self_checked": 1}
STATE = {kind: number * 1_000_000.0 for number, kind in enumerate(STATE_KINDS)}
CPU = torch.device("cpu")
LAID_OUT: dict[tuple[Blueprint, Layout, int], tuple[tuple[Entry, ...], int]] = {}


@pytest.fixture(scope="session")
def blueprints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Blueprint]:
    found = {}
    for name, (kind, options) in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        kind(**SIZES, **options).save_pretrained(folder)
        found[name] = Blueprint(folder, ModelConfig(dtype="float32"))
    return found


def whole_state(specs: Iterable[TensorSpec]) -> dict[tuple[str, str], torch.Tensor]:
    """Return tensors no two elements of which are equal, over all kinds and names."""
    result, start = {}, 0
    for spec in specs:
        count = int(np.prod(spec.shape))
        values = torch.arange(start, start + count, dtype=torch.float32).view(spec.shape)
        result |= {(kind, spec.name): values + base for kind, base in STATE.items()}
        start += count
    return result


def cut(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    return tensor[tuple(map(slice, piece.start, piece.stop))]


class World:
    """Slots with nothing but holdings, and a folder for what they lend."""

    def __init__(self, blueprint: Blueprint, folder: Path, plan: Plan) -> None:
        self.blueprint, self.folder = blueprint, folder
        self.state = whole_state(blueprint.tensors)
        self.specs = {spec.name: spec for spec in blueprint.tensors}
        self.slots: dict[SlotId, Holdings[FlatRoom]] = {}
        self.moved_bytes = self.written_bytes = self.least_bytes = 0
        self.files = 0
        for emu in plan.emus:
            for index, slot in enumerate(emu.slots):
                room = self.room(emu.layout, index)
                for kind in STATE_KINDS:
                    for name, piece in room.pieces.items():
                        room.view(kind, name)[...] = cut(self.state[kind, name], piece)
                self.slots[slot] = self.fresh()
                self.slots[slot].commit(Replica.of(emu), room, COUNTERS)

    def fresh(self) -> Holdings[FlatRoom]:
        return Holdings(TorchMemory(torch.float32, CPU))

    def room(self, layout: Layout, index: int) -> FlatRoom:
        key = self.blueprint, layout, index
        if key not in LAID_OUT:
            LAID_OUT[key] = self.blueprint.lay_out(layout, index)
        return FlatRoom(*LAID_OUT[key], torch.float32, CPU)

    def moves(self, primitive: Primitive) -> tuple[Move, ...]:
        held = held_to_train(frozenset(self.blueprint.tied.values()))
        return traffic(primitive, self.blueprint.tensors, self.blueprint.layers, held=held)

    def lend(self, moves: Iterable[Move]) -> list[Loan]:
        by_lender: dict[SlotId, list[Move]] = {}
        for move in moves:
            by_lender.setdefault(move.from_slot, []).append(move)
        loans = []
        for slot, lent in sorted(by_lender.items()):
            self.files += 1
            path = self.folder / f"loan-{self.files}"
            path.touch(0o600)
            receipt = self.slots[slot].lend(lent, path)
            self.written_bytes += receipt.size_bytes
            receipt = msgspec.json.decode(msgspec.json.encode(receipt), type=Receipt)
            loans.append(Loan(slot, tuple(lent), str(path), receipt))
        return loans

    def take(self, replica: Replica, index: int, loans: list[Loan]) -> None:
        slot = replica.slots[index]
        mine = [loan for loan in loans if any(move.to_slot == slot for move in loan.moves)]
        holdings = self.slots.setdefault(slot, self.fresh())
        self.moved_bytes += holdings.take(replica, index, mine, lambda: self.room(replica.layout, index))

    def perform(self, primitive: Primitive) -> None:
        loans = self.lend(self.moves(primitive))
        sources: tuple[Replica, ...] = ()
        made: tuple[Replica, ...] = ()
        match primitive:
            case Split(source=source, parts=parts):
                sources, made = (source,), parts
            case Merge(parts=parts, target=target):
                sources, made = parts, (target,)
            case Extend(sources=sources, target=target):
                made = (target,)
            case Destroy():
                pass
        for replica in made:
            for index in range(len(replica.slots)):
                self.least_bytes += self.lacking_bytes(sources, replica, index)
                self.take(replica, index, loans)
        for loan in loans:
            Path(loan.path).unlink()

    def lacking_bytes(self, sources: Iterable[Replica], replica: Replica, index: int) -> int:
        """Return the size of what a slot's share of ``replica`` has beyond its share of a source: the least there is to
        move. Counted from the rooms, not from the moves."""
        slot = replica.slots[index]
        rooms = [self.room(other.layout, other.slots.index(slot)) for other in sources if slot in other.slots]
        total = 0
        for name, piece in self.room(replica.layout, index).pieces.items():
            here = [room.pieces[name] for room in rooms if name in room.pieces]
            total += sum(map(elements, remainder(piece, here)))
        return total * 4 * len(STATE_KINDS)

    def commit(self, plan: Plan) -> None:
        """Adopt the plan on every slot it has, and drop everything on others."""
        for emu in plan.emus:
            for slot in emu.slots:
                self.slots[slot].settle(Replica.of(emu))
        for slot in self.slots.keys() - plan.slots():
            self.slots[slot].clear()

    def check(self, plan: Plan) -> None:
        """Every slot holds exactly its pieces of the state, bit for bit, and padding is zero."""
        for emu in plan.emus:
            for index, slot in enumerate(emu.slots):
                held = self.slots[slot]
                assert held.replicas == (Replica.of(emu),)
                assert held.counters == COUNTERS
                self.check_room(held.settle(Replica.of(emu)), emu.layout, index)
        for slot in self.slots.keys() - plan.slots():
            assert self.slots[slot].replicas == ()

    def check_room(self, room: FlatRoom, layout: Layout, index: int) -> None:
        held = held_to_train(frozenset(self.blueprint.tied.values()))
        expected = {spec.name: held(spec, self.blueprint.layers, layout, index) for spec in self.blueprint.tensors}
        assert room.pieces == {name: piece for name, piece in expected.items() if piece is not None}
        for kind in STATE_KINDS:
            for name, piece in room.pieces.items():
                assert torch.equal(room.view(kind, name), cut(self.state[kind, name], piece)), (kind, name, piece)
            kept = sum(int(torch.count_nonzero(room.view(kind, name))) for name in room.pieces)
            assert int(torch.count_nonzero(room.flats[kind])) == kept


def plan_of(epoch: int, layout: Layout, slots: Iterable[SlotId]) -> Plan:
    numbers = list(slots)
    size = layout.slots
    groups = [tuple(numbers[start : start + size]) for start in range(0, len(numbers), size)]
    return Plan(epoch, tuple(Emu(POLICY_TRAINING, 100 * epoch + i, layout, group) for i, group in enumerate(groups)))


def change(world: World, current: Plan, target: Plan, order: random.Random) -> TransitionRun:
    dag = compile_transition(current, target, groups=[(POLICY_TRAINING,)])
    assert isinstance(dag, TransitionDag), dag
    run = TransitionRun(dag)
    while not run.finished:
        run.ready()
        primitive = order.choice(run.running)
        world.perform(primitive)
        run.done(primitive.id)
    return run


@pytest.mark.parametrize("before", spread(LAYOUTS, 1), ids=str)
def test_state_survives_any_change_of_layout(before: Layout, blueprints: dict[str, Blueprint], tmp_path: Path) -> None:
    families = list(MODELS)
    for number, after in enumerate(LAYOUTS, LAYOUTS.index(before)):
        current = plan_of(0, before, range(before.slots))
        target = plan_of(1, after, range(after.slots))
        world = World(blueprints[families[number % len(families)]], tmp_path, current)
        change(world, current, target, random.Random(number))
        world.commit(target)
        world.check(target)
        assert world.moved_bytes == world.least_bytes, f"{before} -> {after}"
        assert world.written_bytes <= world.moved_bytes, "a piece that several slots want is written once"
    assert not list(tmp_path.iterdir())


@pytest.mark.deep
@given(
    family=st.sampled_from(sorted(MODELS)),
    steps=st.lists(st.tuples(st.sampled_from(LAYOUTS), st.integers(1, 3)), min_size=2, max_size=4),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=15)
def test_any_walk_of_plans_ends_with_every_slot_holding_its_pieces(
    family: str,
    steps: list[tuple[Layout, int]],
    order: random.Random,
    blueprints: dict[str, Blueprint],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    plans = []
    for epoch, (layout, replicas) in enumerate(steps):
        dp = min(replicas, max(1, 12 // layout.slots))
        plans.append(plan_of(epoch, layout, order.sample(range(12), dp * layout.slots)))
    world = World(blueprints[family], tmp_path_factory.mktemp("walk"), plans[0])
    current = plans[0]
    for target in plans[1:]:
        dag = compile_transition(current, target, groups=[(POLICY_TRAINING,)])
        if not isinstance(dag, TransitionDag):
            continue  # a swap of the only copy wants host memory
        change(world, current, target, order)
        world.commit(target)
        world.check(target)
        current = target
    assert world.moved_bytes == world.least_bytes


T1, T2 = Layout(), Layout(tp=2)
PAIR = Replica(POLICY_TRAINING, T2, (0, 1))
SINGLES = (Replica(POLICY_TRAINING, T1, (0,)), Replica(POLICY_TRAINING, T1, (1,)))


@pytest.fixture
def world(blueprints: dict[str, Blueprint], tmp_path: Path) -> World:
    """One unit of two tp ranks on slots 0 and 1."""
    return World(blueprints["llama_tied"], tmp_path, plan_of(0, T2, (0, 1)))


def split_loans(world: World) -> list[Loan]:
    return world.lend(world.moves(Split("split", PAIR, SINGLES)))


def intact(world: World) -> None:
    """The committed plan is held, and nothing else."""
    for slot in (0, 1):
        assert world.slots[slot].committed == PAIR
    world.check(plan_of(0, T2, (0, 1)))


def test_a_flipped_bit_is_named_and_changes_nothing(world: World) -> None:
    loans = split_loans(world)
    (loan,) = [loan for loan in loans if loan.lender == 1]
    pieces = distinct(loan.moves)
    number = len(pieces) // 2
    before = sum(map(elements, pieces[:number])) * 3 + elements(pieces[number])
    content = bytearray(Path(loan.path).read_bytes())
    content[4 * before] ^= 1  # first byte of the first moment
    Path(loan.path).write_bytes(content)
    with pytest.raises(TransitionError, match=rf"exp_avg of {pieces[number].name} \[.*\] from slot 1 arrived with"):
        world.take(SINGLES[0], 0, loans)
    assert world.slots[0].replicas == (PAIR,)
    world.take(SINGLES[1], 0, loans)
    world.slots[1].abandon()
    intact(world)


def test_a_file_that_is_short_or_gone_is_named_and_changes_nothing(world: World) -> None:
    loans = split_loans(world)
    for loan in loans:
        Path(loan.path).write_bytes(Path(loan.path).read_bytes()[:-4])
    with pytest.raises(TransitionError, match=r"exp_avg_sq of .* from slot 1: the file ends before byte"):
        world.take(SINGLES[0], 0, loans)
    Path(loans[0].path).unlink()
    with pytest.raises(TransitionError, match="what slot 0 has lent cannot be read"):
        world.take(SINGLES[1], 0, loans)
    intact(world)


def test_a_loan_of_something_else_is_refused(world: World) -> None:
    loans = split_loans(world)
    late = [msgspec.structs.replace(loan.receipt, counters=COUNTERS | {"step": 4}) for loan in loans]
    wrong = [msgspec.structs.replace(loan, receipt=receipt) for loan, receipt in zip(loans, late, strict=True)]
    with pytest.raises(
        TransitionError, match=r"slot 1 lends the state of .*'step': 4.*, but this slot has .*'step': 3"
    ):
        world.take(SINGLES[0], 0, wrong)
    fewer = [msgspec.structs.replace(loan, moves=loan.moves[1:]) for loan in loans]
    with pytest.raises(TransitionError, match=r"slot 1 was to lend \d+ pieces"):
        world.take(SINGLES[0], 0, fewer)
    with pytest.raises(ValueError, match="this slot does not hold"):
        world.take(SINGLES[0], 0, [])
    with pytest.raises(TransitionError, match=r"pieces cannot be lent in .*absent"):
        world.slots[0].lend(loans[0].moves, world.folder / "absent")
    with pytest.raises(ValueError, match="this slot does not hold"):
        world.slots[0].lend(loans[1].moves, Path(loans[1].path))
    intact(world)


def test_an_abandoned_transition_leaves_the_committed_replica(world: World) -> None:
    world.perform(Split("split", PAIR, SINGLES))
    world.perform(Extend("extend", SINGLES, Replica(POLICY_TRAINING, T1, (2,))))
    assert world.slots[0].replicas == (PAIR, SINGLES[0])
    for slot in (0, 1, 2):
        world.slots[slot].abandon()
    assert world.slots[2].replicas == ()
    assert world.slots[2].counters == {}
    intact(world)


def test_a_slot_keeps_what_its_new_share_borrows(world: World) -> None:
    """Dropping the old replica frees nothing that the new one looks into."""
    world.perform(Split("split", PAIR, SINGLES))
    for slot in (0, 1):
        world.slots[slot].drop(PAIR)
    target = plan_of(1, T1, (0, 1))
    world.commit(target)
    world.check(target)


def test_resident_state_is_not_copied_until_it_is_adopted(world: World) -> None:
    """What is received is the only memory that a new share fills."""
    room: list[FlatRoom] = []

    def make_room() -> FlatRoom:
        room.append(world.room(T1, 0))
        return room[0]

    received = world.slots[0].take(SINGLES[0], 0, split_loans(world)[1:], make_room)
    share = world.slots[0]._shares[SINGLES[0]]
    borrowed = [part for parts in share.parts.values() for part in parts if part.borrowed]
    own = [part for parts in share.parts.values() for part in parts if not part.borrowed]
    old = world.slots[0]._shares[PAIR].room.flats
    assert received == sum(elements(part.piece) for part in own) * 4 * 3
    for kind in STATE_KINDS:
        start = old[kind].data_ptr()
        places = [part.arrays[kind].data_ptr() for part in borrowed]
        assert all(start <= place < start + old[kind].nbytes for place in places)


# The fake


def test_the_fake_trainer_moves_like_a_real_one(tmp_path: Path) -> None:
    slots = [FakeTrainer(Pace()) for _ in range(3)]
    current, target = plan_of(0, T2, (0, 1)), plan_of(1, T1, (0, 1, 2))
    for slot in (0, 1):
        slots[slot].assign(current.emus[0], current, slot, store="")
        slots[slot].load(tmp_path)
        assert slots[slot].train(batch_of(0)).step == 0
    dag = compile_transition(current, target, groups=[(POLICY_TRAINING,)])
    assert isinstance(dag, TransitionDag)
    run = TransitionRun(dag)
    while not run.finished:
        for primitive in run.ready():
            fake_perform(slots, primitive, tmp_path)
            run.done(primitive.id)
    for emu in target.emus:
        (slot,) = emu.slots
        slots[slot].assign(emu, target, slot, store="")
        assert slots[slot].adopt() == 1
        assert slots[slot].train(batch_of(1)).step == 1


def fake_perform(slots: list[FakeTrainer], primitive: Primitive, folder: Path) -> None:
    held = held_to_train(frozenset(slots[0].tied.values()))
    moves = traffic(primitive, slots[0].tensors, 2, held=held)
    loans = []
    for lender in sorted({move.from_slot for move in moves}):
        lent = tuple(move for move in moves if move.from_slot == lender)
        path = folder / f"{primitive.id.replace('/', '-')}-{lender}"
        path.touch(0o600)
        loans.append(Loan(lender, lent, str(path), slots[lender].lend(lent, path)))
    made = primitive.parts if isinstance(primitive, Split) else [getattr(primitive, "target", None)]
    for replica in filter(None, made):
        for index, slot in enumerate(replica.slots):
            slots[slot].take(replica, index, loans, folder)


def batch_of(step: int) -> TrainBatch:
    none, ints = np.zeros(0), np.zeros(0, np.int32)
    return TrainBatch(step, step, ints, ints, ints, none, ints, none.astype(np.float32), ints)


# Real processes

WORKER = Path(__file__).with_name("moves_worker.py")
ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-9

WALKS: Mapping[str, tuple[str, ...]] = {
    "straight": ("d1t1p1",) * 6,
    "there and back": ("d2t1p1", "d1t2p1", "d1t1p2", "d2t1p1", "d1t2p2", "d1t1p1"),
    "up and down": ("d1t1p1", "d1t4p1", "d2t2p1", "d1t1p3", "d4t1p1", "d1t2p2"),
}


def write_model(folder: Path) -> None:
    torch.manual_seed(7)
    options = SIZES | {"num_key_value_heads": 4, "vocab_size": 98, "tie_word_embeddings": True}
    config = LlamaConfig(**options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
    folder.mkdir()
    config.save_pretrained(folder)
    tensors = {name: p.detach() + torch.randn_like(p) * 0.05 for name, p in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors")


def write_batches(folder: Path, steps: int) -> None:
    folder.mkdir()
    rng = np.random.default_rng(3)
    for step in range(steps):
        prompts = np.repeat(rng.integers(1, 6, 4), 3).astype(np.int32)
        lengths = rng.integers(1, 10, 12).astype(np.int32)
        drawn = int(lengths.sum())
        batch = {
            "step": np.array([step]),
            "version": np.array([step]),
            "prompt_lengths": prompts,
            "lengths": lengths,
            "group_of": np.repeat(np.arange(4), 3).astype(np.int32),
            "rewards": rng.random(12),
            "tokens": rng.integers(0, 98, int(prompts.sum()) + drawn).astype(np.int32),
            "logprobs": (-np.log(98) + rng.normal(0, 0.4, drawn)).astype(np.float32),
            "versions": np.full(drawn, step, np.int32),
        }
        save_arrays(batch, folder / f"{step}.safetensors")


def walk_plans(layouts: Sequence[str]) -> list[Plan]:
    """Return a plan for each step; units are numbered on, and sit on the slots from 0."""
    found = []
    for epoch, layout in enumerate(layouts):
        replication = Replication.parse(layout)
        found.append(plan_of(epoch, replication.layout, range(replication.slots)))
    return found


@pytest.mark.live
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["there and back", pytest.param("up and down", marks=pytest.mark.slow)])
def test_training_through_changes_of_plan_is_training_without(name: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_batches(tmp_path / "batches", 6)
    config = {
        "run": {"steps": 8},
        "cluster": {"group_timeout_s": 120.0},
        "model": {"dtype": "float64"},
        "train": {
            "micro_batch_tokens": 40,
            "learning_rate": 1e-3,
            "schedule": "cosine",
            "warmup_steps": 2,
            "minibatches": 2,
            "loss": {"normalize": "token", "kl_coefficient": 0.05},
        },
    }
    walks = []
    for number, walk in enumerate(("straight", name)):
        plans = [msgspec.structs.replace(plan, epoch=100 * number + plan.epoch) for plan in walk_plans(WALKS[walk])]
        walks.append({"name": walk, "plans": plans, "config": config, "model": "model", "batches": "batches"})
    (tmp_path / "walks.json").write_bytes(msgspec.json.encode(walks))
    assert run_walks(tmp_path, slots=4) == [0] * 4
    expected = load_file(tmp_path / "straight-0.safetensors")
    metrics = [report["metrics"] for report in read_result(tmp_path, "straight", 0)["reports"]]
    assert len(expected) == 3 * 29
    found = gathered(tmp_path, name, Replication.parse(WALKS[name][-1]).slots, like=expected)
    for key, value in found.items():
        error = (value - expected[key]).abs().max().item()
        assert error <= TOLERANCE, f"{key} is off by {error:.2e}"
    for slot in range(4):
        result = read_result(tmp_path, name, slot)
        assert result["read_bytes"] == result["least_bytes"]
        for report in result["reports"]:
            for metric in ("loss", "kl/ref", "optim/grad_norm", "optim/lr"):
                there = metrics[report["step"]][metric]
                assert report["metrics"][metric] == pytest.approx(there, rel=TOLERANCE, abs=TOLERANCE)


def gathered(folder: Path, name: str, slots: int, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return whole tensors by kind and name, put together from every slot; NaN where no slot has anything."""
    whole = {key: torch.full_like(value, torch.nan) for key, value in like.items()}
    for slot in range(slots):
        places = read_result(folder, name, slot)["places"]
        for key, value in load_file(folder / f"{name}-{slot}.safetensors").items():
            start, stop = places[key.split("/")[1]]
            whole[key][tuple(map(slice, start, stop))] = value
    return whole


def read_result(folder: Path, name: str, slot: int) -> dict[str, Any]:
    return dict(json.loads((folder / f"{name}-{slot}.json").read_text()))


def run_walks(folder: Path, slots: int) -> list[int]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "nereus.backends.torch.store", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as store:
        assert store.stdout is not None
        where = json.loads(store.stdout.readline())
        command = [sys.executable, str(WORKER), str(folder), str(slots), f"{where['host']}:{where['port']}"]
        with subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
        ) as workers:
            try:
                output, _ = workers.communicate(timeout=600)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(workers.pid, signal.SIGKILL)
                store.terminate()
        return list(json.loads(output.splitlines()[-1]))
