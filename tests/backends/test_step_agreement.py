"""Does a step that fails leave every slot where it says, and can all of them come to the same step from there?

Real processes and gloo groups. The last slot is killed at a moment of choice; what the others train before and after is
compared with one process that trained alone all the time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_train_layouts import job, make_batches, make_model, rendezvous

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

WORKER = Path(__file__).with_name("agreement_worker.py")
ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-9
STEPS = 3
BREAKS_AT = 1


KILLED = -signal.SIGKILL
ALONE = {"name": "alone", "layout": "d1t1p1"}
EARLY = {"breaks_at": BREAKS_AT, "moment": "reduce", "recall": BREAKS_AT}
"""It dies before the last collective."""
LATE = {"breaks_at": BREAKS_AT, "moment": "agreed", "recall": BREAKS_AT + 1}
"""It dies after all have agreed, and before it has applied the update."""


class Bench:
    """A model, its batches, and cases played on them."""

    def __init__(self, folder: Path, **train: Any) -> None:
        self.folder, self.train = folder, train
        model = make_model(folder / "model", "llama_tied")
        make_batches(folder / "batches", model.config.vocab_size)

    def play(self, *cases: dict[str, Any]) -> dict[str, list[int]]:
        """Play cases; return their exit codes."""
        common = {"model": "model", "batches": "batches", "steps": STEPS, "able": {}, "deaf": []}
        prepared = []
        for number, case in enumerate((ALONE, *cases)):
            config = job(case["layout"], **self.train) | {"cluster": {"group_timeout_s": 20.0}}
            prepared.append(common | {"epoch": 1 + 2 * number, "config": config} | case)
        (self.folder / "cases.json").write_text(json.dumps(prepared))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with rendezvous() as store:
            command = [sys.executable, WORKER, self.folder, store]
            with subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
            ) as workers:
                try:
                    output, _ = workers.communicate(timeout=400)
                finally:
                    with suppress(ProcessLookupError):
                        os.killpg(workers.pid, signal.SIGKILL)
        codes = [json.loads(line) for line in output.splitlines() if line.startswith(b"[")]
        played = {case["name"]: of_case for case, of_case in zip(prepared, codes, strict=True)}
        assert played.pop("alone") == [0]
        return played

    def story(self, name: str, slot: int) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.folder / f"{name}-{slot}.json").read_text())
        return told

    def compare(self, name: str, slots: int, steps: set[int]) -> None:
        """Compare what the slots of a case held after ``steps`` with the run of one process."""
        whole = load_file(self.folder / "alone-0.safetensors")
        for slot in range(slots):
            places = self.story(name, slot)["places"]
            tensors = load_file(self.folder / f"{name}-{slot}.safetensors")
            assert {int(key.split("/")[0]) for key in tensors} == steps
            for key, value in tensors.items():
                start, stop = places[key.split("/")[2]]
                box = tuple(slice(low, high) for low, high in zip(start, stop, strict=True))
                error = (value - whole[key][box]).abs().max().item()
                assert error <= TOLERANCE, f"{name} slot {slot}: {key} is off by {error:.2e}"
                assert torch.isfinite(value).all()


def test_slots_come_to_one_step_after_a_loss_and_train_what_one_process_would(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    everybody = {slot: [1, 2] for slot in "012"}
    played = bench.play(
        EARLY | {"name": "early", "layout": "d2t1p1"},
        LATE | {"name": "forward", "layout": "d3t1p1", "deaf": [0], "able": {"0": [1, 2]}},
        LATE | {"name": "back", "layout": "d2t1p1", "deaf": [0], "able": everybody, "recall": BREAKS_AT},
        LATE | {"name": "shards", "layout": "d2t2p1", "deaf": [0, 1, 2], "able": everybody},
    )
    assert played == {
        "early": [0, KILLED],
        "forward": [0, 0, KILLED],
        "back": [0, KILLED],
        "shards": [0, 0, 0, KILLED],
    }

    # Nobody has the update, and the step is made once more.
    told = bench.story("early", 0)
    assert "on slot 0 lost a peer" in told["failure"]
    assert told["standing"] == [BREAKS_AT, False, False]
    assert [step for step, _ in told["refused"]] == [0, 2, 3]
    assert "stands before step 1 and cannot come to step 2" in told["refused"][1][1]
    assert told["next"] == BREAKS_AT
    bench.compare("early", 1, set(range(STEPS)))

    # The others have applied the update, or can.
    assert bench.story("forward", 0)["standing"] == [BREAKS_AT, True, False]
    assert bench.story("forward", 1)["standing"] == [BREAKS_AT + 1, False, False]
    for slot, refused in ((0, [0, 3]), (1, [0, 1, 3])):
        told = bench.story("forward", slot)
        assert [step for step, _ in told["refused"]] == refused
        assert told["then"] == [BREAKS_AT + 1, False, False]
        assert told["next"] == BREAKS_AT + 1
    bench.compare("forward", 2, set(range(STEPS)))

    # All that live have the update ready: it may as well be forgotten.
    told = bench.story("back", 0)
    assert (told["standing"], told["then"]) == ([BREAKS_AT, True, False], [BREAKS_AT, False, False])
    bench.compare("back", 1, set(range(STEPS)))

    bench.compare("shards", 2, set(range(STEPS)))


def test_a_step_of_several_updates_can_be_finished_but_not_undone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, minibatches=2)
    played = bench.play(
        EARLY | {"name": "torn", "layout": "d2t1p1", "updates": 1, "recall": None},
        LATE | {"name": "finished", "layout": "d2t1p1", "deaf": [0]},
    )
    assert played == {"torn": [0, KILLED], "finished": [0, KILLED]}

    # It died between the two updates: nobody can go anywhere.
    told = bench.story("torn", 0)
    assert told["standing"] == [BREAKS_AT, False, True]
    assert [step for step, _ in told["refused"]] == [0, 1, 2, 3]
    assert all("some updates of which are applied" in why for _, why in told["refused"])

    # All had agreed on the second one.
    told = bench.story("finished", 0)
    assert told["standing"] == [BREAKS_AT, True, True]
    assert [step for step, _ in told["refused"]] == [0, 1, 3]
    bench.compare("finished", 1, set(range(STEPS)))
