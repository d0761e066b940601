"""Where do trainer slots stand when a peer dies in a step? Plays the cases of a JSON file, one process per slot.

``python agreement_worker.py FOLDER STORE``: reads ``FOLDER/cases.json``. In the step ``breaks_at`` the last slot
dies, at the moment that the case names; every other slot writes how far it has come, what it refuses to be recalled to,
and, recalled to the step that the case names, trains on alone or with the others that are left. Writes
``FOLDER/<case>-<slot>.safetensors`` (parameters and moments after each step) and ``.json``. Prints a line of exit codes
per case.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from forking import run_slots
from safetensors.torch import save_file
from train_worker import make_plan, read_batch

from nereus.backends.api import STATE_KINDS
from nereus.backends.torch.train import TorchTrainer
from nereus.config import JobConfig
from nereus.core.plan import POLICY_TRAINING, Plan, Replication
from nereus.errors import TransitionError


def die(*_arguments: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(count: int, original: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``original`` for ``count`` calls, and ``then`` from there on."""
    calls = iter(range(count))

    def call(*arguments: object) -> Any:
        return (then if next(calls, None) is None else original)(*arguments)

    return call


def hear_nothing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``original``, but its caller learns that a peer is lost: the answer has come too late."""

    def call(*arguments: object) -> Any:
        original(*arguments)
        raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1")

    return call


class Slot:
    """One slot of one case."""

    def __init__(self, folder: Path, case: dict[str, Any], slot: int, store: str) -> None:
        self.folder, self.case, self.slot, self.store = folder, case, slot, store
        self.trainer: Any = TorchTrainer(msgspec.convert(case["config"], JobConfig))
        self.tensors: dict[str, torch.Tensor] = {}
        self.places: dict[str, Any] = {}

    def run(self) -> None:
        case = self.case
        plan = make_plan(case["layout"], case["epoch"])
        self.trainer.assign(self.unit(plan), plan, self.slot, store=self.store)
        self.trainer.load(self.folder / case["model"])
        story: dict[str, Any] = {}
        breaks_at = case.get("breaks_at", case["steps"])
        for step in range(breaks_at):
            self.step(plan, step)
        if breaks_at < case["steps"]:
            story = self.break_down(plan, breaks_at)
            units = plan.of(POLICY_TRAINING)[:-1]
            plan = Plan(case["epoch"] + 1, units)
            if not list(plan.on(self.slot)):  # its unit is not whole any more
                return self.trainer.close()
            self.trainer.assign(self.unit(plan), plan, self.slot, store=self.store)
            story["next"] = self.trainer.adopt()
            self.keep(case["recall"] - 1)
            for step in range(case["recall"], case["steps"]):
                self.step(plan, step)
        self.trainer.close()
        path = self.folder / f"{case['name']}-{self.slot}"
        save_file(self.tensors, path.with_suffix(".safetensors"))
        path.with_suffix(".json").write_text(json.dumps(story | {"places": self.places}))

    def unit(self, plan: Plan) -> Any:
        return next(plan.on(self.slot))

    def step(self, plan: Plan, step: int) -> None:
        lead = plan.of(POLICY_TRAINING)[0].slots[0] == self.slot
        batch = read_batch(self.folder / self.case["batches"] / f"{step}.safetensors") if lead else None
        self.trainer.train(self.trainer.share(batch))
        self.keep(step)

    def keep(self, step: int) -> None:
        for kind in STATE_KINDS:
            for name, (piece, value) in self.trainer.pieces(kind).items():
                self.tensors[f"{step}/{kind}/{name}"] = value.clone()
                self.places[name] = (piece.start, piece.stop)

    def break_down(self, plan: Plan, step: int) -> dict[str, Any]:
        """Fail in ``step``; return what this slot says and refuses, once it is recalled."""
        trainer, case = self.trainer, self.case
        if self.slot == Replication.parse(case["layout"]).slots - 1:
            if case["moment"] == "reduce":
                trainer._reduce = after(case.get("updates", 0), trainer._reduce, die)
            else:
                trainer._finish = die
        elif case["moment"] == "agreed" and self.slot in case["deaf"]:
            trainer._report = hear_nothing(trainer._report)
        failure = ""
        try:
            self.step(plan, step)
        except TransitionError as error:
            failure = str(error)
        for name in ("_report", "_reduce", "_finish"):
            trainer.__dict__.pop(name, None)
        standing = trainer.standing()
        story = {"failure": failure, "standing": [standing.step, standing.ready, standing.torn], "refused": []}
        for other in range(step - 1, step + 3):
            if other not in case["able"].get(str(self.slot), [case["recall"]]):
                try:
                    trainer.recall(other)
                except ValueError as error:
                    story["refused"].append([other, str(error)])
        if case["recall"] is None:
            story["places"] = {}
            (self.folder / f"{case['name']}-{self.slot}.json").write_text(json.dumps(story))
            os._exit(0)
        trainer.recall(case["recall"])
        standing = trainer.standing()
        story["then"] = [standing.step, standing.ready, standing.torn]
        return story


def main() -> None:
    folder, store = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    for case in json.loads((folder / "cases.json").read_text()):
        slots = range(Replication.parse(case["layout"]).slots)
        run_slots(slots, lambda slot, case=case: Slot(folder, case, slot, store).run())


if __name__ == "__main__":
    main()
