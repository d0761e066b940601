"""What do trainer slots compute? Runs the cases of a JSON file in one process per slot and writes results as files.

``python train_worker.py FOLDER SLOTS STORE``: reads ``FOLDER/cases.json``; each slot, for each case that has it,
trains on ``FOLDER/<batches>/<step>.safetensors`` and writes ``FOLDER/<case>-<slot>.safetensors`` and ``.json``. Slots
are forked after the imports, which cost more than the work. Prints the exit codes as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from forking import run_slots
from safetensors.numpy import load_file
from safetensors.torch import save_file

from nereus.backends.api import TrainBatch
from nereus.backends.torch.train import TorchTrainer
from nereus.config import JobConfig
from nereus.core.plan import POLICY_TRAINING, Emu, Plan, Replication
from nereus.errors import OutOfMemory, TransitionError


def make_plan(layout: str, epoch: int, *, recompute: bool = False) -> Plan:
    """Return a plan with units on slots 0, 1, 2, ... in order."""
    replication = Replication.parse(layout)
    size = replication.layout.slots
    return Plan(
        epoch,
        tuple(
            Emu(POLICY_TRAINING, unit, replication.layout, tuple(range(unit * size, (unit + 1) * size)))
            for unit in range(replication.dp)
        ),
        (POLICY_TRAINING,) if recompute else (),
    )


def read_batch(path: Path) -> TrainBatch:
    arrays = load_file(path)
    return TrainBatch(step=int(arrays.pop("step")[0]), version=int(arrays.pop("version")[0]), **arrays)


def run_case(folder: Path, case: dict[str, Any], slot: int, store: str, clock: dict[str, float]) -> None:
    recompute = case["config"].get("train", {}).get("recompute", False)
    plan = make_plan(case["layout"], case["epoch"], recompute=recompute)
    emu = next(unit for unit in plan.emus if slot in unit.slots)
    trainer = TorchTrainer(msgspec.convert(case["config"], JobConfig))
    trainer.assign(emu, plan, slot, store=store)
    trainer.load(folder / case["model"])
    if slot == case.get("small"):
        trainer._meter._limit_bytes = 1000
    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, Any] = {}
    reports = []
    for step in range(case.get("first", 0), case["steps"]):
        clock["step"] = time.monotonic()
        batch = read_batch(folder / case["batches"] / f"{step}.safetensors") if slot == 0 else None
        shared = trainer.share(batch)
        report = trainer.train(shared)
        reports.append(report)
        for kind in ("gradient", "parameter", "exp_avg", "exp_avg_sq"):
            for name, (piece, value) in trainer.pieces(kind).items():
                tensors[f"{step}/{kind}/{name}"] = value.clone()
                places[name] = (piece.start, piece.stop)
        if case.get("die_at") == step and slot == case["victim"]:
            os.kill(os.getpid(), signal.SIGKILL)
    if "save" in case:
        (folder / f"{case['name']}-{slot}.entry").write_bytes(trainer.save(folder / case["save"], case["steps"]))
    trainer.close()
    save_file(tensors, folder / f"{case['name']}-{slot}.safetensors")
    result = {"reports": reports, "places": places, "updates": trainer.updates}
    (folder / f"{case['name']}-{slot}.json").write_bytes(msgspec.json.encode(result))


def run_slot(folder: Path, slot: int, store: str) -> None:
    for case in json.loads((folder / "cases.json").read_text()):
        if slot >= Replication.parse(case["layout"]).slots:
            continue
        clock: dict[str, float] = {}
        try:
            run_case(folder, case, slot, store, clock)
        except (TransitionError, OutOfMemory) as error:
            kind = "exhausted" if isinstance(error, OutOfMemory) else "lost"
            lost = {kind: str(error), "seconds": time.monotonic() - clock["step"]}
            (folder / f"{case['name']}-{slot}.json").write_text(json.dumps(lost))


def main() -> None:
    folder, slots, store = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    run_slots(range(slots), lambda slot: run_slot(folder, slot, store))


if __name__ == "__main__":
    main()
