"""What do trainer slots hold after training through changes of plan? Runs the walks of a JSON file, a process per slot.

``python moves_worker.py FOLDER SLOTS STORE``: reads ``FOLDER/walks.json``. A walk trains one step under each of its
plans. Between two, every slot carries out the primitives in the order of the graph; receipts pass through the store.
Writes ``FOLDER/<walk>-<slot>.safetensors`` and ``.json``. Prints the exit codes as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from forking import run_slots
from safetensors.torch import save_file
from train_worker import read_batch

from nereus.backends.api import STATE_KINDS
from nereus.backends.torch.groups import connect_store
from nereus.backends.torch.state import Blueprint
from nereus.backends.torch.train import TorchTrainer
from nereus.bus.messages import Loan, Receipt
from nereus.config import JobConfig
from nereus.core.plan import POLICY_TRAINING, Emu, Plan, SlotId
from nereus.transition.compile import compile_transition
from nereus.transition.cost import traffic
from nereus.transition.primitive import Primitive, Replica, Split, TransitionDag
from nereus.transition.reshard import Move, held_to_train, moved_bytes

LONGEST_WAIT_S = 300.0


class Slot:
    """One slot of one walk."""

    def __init__(self, folder: Path, walk: dict[str, Any], slot: SlotId, slots: int, store: str) -> None:
        self.folder, self.walk, self.slot, self.slots, self.store = folder, walk, slot, slots, store
        self.notes = connect_store(store, timeout_s=LONGEST_WAIT_S)
        config = msgspec.convert(walk["config"], JobConfig)
        self.trainer = TorchTrainer(config)
        self.plans = [msgspec.convert(plan, Plan) for plan in walk["plans"]]
        self.model = folder / walk["model"]
        self.blueprint = Blueprint(self.model, config.model)
        self.reports: list[Any] = []
        self.read_bytes = self.least_bytes = 0

    def run(self) -> None:
        for step, plan in enumerate(self.plans):
            if step == 0:
                self.begin(plan)
            else:
                self.change(step, self.plans[step - 1], plan)
            emu = self.unit(plan)
            if emu is not None:
                lead = plan.of(POLICY_TRAINING)[0].slots[0] == self.slot
                batch = read_batch(self.folder / self.walk["batches"] / f"{step}.safetensors") if lead else None
                self.reports.append(self.trainer.train(self.trainer.share(batch)))
        tensors, places = {}, {}
        if self.unit(self.plans[-1]) is not None:
            for kind in STATE_KINDS:
                for name, (piece, value) in self.trainer.pieces(kind).items():
                    tensors[f"{kind}/{name}"] = value.clone()
                    places[name] = (piece.start, piece.stop)
        self.trainer.close()
        path = self.folder / f"{self.walk['name']}-{self.slot}"
        save_file(tensors, path.with_suffix(".safetensors"))
        counts = {"read_bytes": self.read_bytes, "least_bytes": self.least_bytes}
        result = {"reports": self.reports, "places": places, **counts}
        path.with_suffix(".json").write_bytes(msgspec.json.encode(result))

    def unit(self, plan: Plan) -> Emu | None:
        return next(plan.on(self.slot), None)

    def begin(self, plan: Plan) -> None:
        emu = self.unit(plan)
        if emu is not None:
            self.trainer.assign(emu, plan, self.slot, store=self.store)
            self.trainer.load(self.model)

    def change(self, step: int, current: Plan, target: Plan) -> None:
        dag = compile_transition(current, target, groups=[(POLICY_TRAINING,)])
        assert isinstance(dag, TransitionDag), dag
        for number, primitive in enumerate(dag.primitives):
            self.perform(f"{step}-{number}", primitive)
        self.meet(step)  # as Destroy comes after every node that reads from its slots
        emu = self.unit(target)
        if emu is None:
            if (held := self.unit(current)) is not None:
                self.trainer.drop(Replica.of(held))
            self.trainer.abandon()
            return
        self.trainer.assign(emu, target, self.slot, store=self.store)
        assert self.trainer.adopt() == step

    def perform(self, key: str, primitive: Primitive) -> None:
        blueprint = self.blueprint
        held = held_to_train(frozenset(blueprint.tied.values()))
        moves = traffic(primitive, blueprint.tensors, blueprint.layers, held=held)
        mine = tuple(move for move in moves if move.from_slot == self.slot)
        if mine:
            file = self.file(key, self.slot)
            file.touch(0o600)
            self.notes.set(file.name, msgspec.json.encode(self.trainer.lend(mine, file)).decode())
        wanted = [move for move in moves if move.to_slot == self.slot]
        loans = [self.loan(key, lender, moves) for lender in sorted({move.from_slot for move in wanted})]
        for replica in primitive.parts if isinstance(primitive, Split) else [getattr(primitive, "target", None)]:
            if replica is not None and self.slot in replica.slots:
                self.read_bytes += self.trainer.take(replica, replica.slots.index(self.slot), loans, self.model)
                self.least_bytes += moved_bytes(blueprint.tensors, wanted) * len(STATE_KINDS)

    def meet(self, step: int) -> None:
        """Wait until all slots have what they need of this change."""
        key = f"{self.walk['name']}-{step}-taken"
        if self.notes.add(key, 1) == self.slots:
            self.notes.set(f"{key}-by-all", "")
        self.notes.get(f"{key}-by-all")

    def loan(self, key: str, lender: SlotId, moves: tuple[Move, ...]) -> Loan:
        file = self.file(key, lender)
        receipt = msgspec.json.decode(self.notes.get(file.name), type=Receipt)
        return Loan(lender, tuple(move for move in moves if move.from_slot == lender), str(file), receipt)

    def file(self, key: str, lender: SlotId) -> Path:
        return self.folder / f"{self.walk['name']}-{key}-{lender}.state"


def run_slot(folder: Path, slot: SlotId, slots: int, store: str) -> None:
    for walk in json.loads((folder / "walks.json").read_text()):
        Slot(folder, walk, slot, slots, store).run()


def main() -> None:
    folder, slots, store = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    run_slots(range(slots), lambda slot: run_slot(folder, slot, slots, store))


if __name__ == "__main__":
    main()
