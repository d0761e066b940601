"""What does DeepSpeed's universal checkpoint take to carry training state from one number of ranks to another?

    .venv-peers/deepspeed/bin/python deepspeed_universal.py SHAPES FOLDER save RANKS
    .venv-peers/deepspeed/bin/python deepspeed_universal.py SHAPES FOLDER load RANKS

SHAPES is a JSON file: tensor name -> shape. A model of just these float32 parameters with ZeRO stage 1 and Adam on the
CPU: ``save`` makes one update, so that moments exist, and saves; ``ds_to_universal`` converts; ``load`` starts with
another number of ranks and loads what was converted. Prints one JSON object a call: seconds of the save or load alone,
from a barrier to a barrier.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

RANK = "UNIVERSAL_RANK"


def engine_of(shapes: dict[str, list[int]], *, universal: bool):  # type: ignore[no-untyped-def]
    import deepspeed
    import torch

    # An all-reduce for inference, which would be compiled first: minutes, and of no use here.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # the attribute of that name is torch

    class Shapes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, shape in shapes.items():
                self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(torch.zeros(shape)))

        def forward(self) -> torch.Tensor:
            return sum((parameter.sum() for parameter in self.parameters()), torch.zeros(()))

        def universal_checkpoint_info(self) -> dict[str, object]:
            return {"universal_checkpoint_version": 0.2}

    model = Shapes()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": universal},
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def work(shapes: dict[str, list[int]], folder: str, what: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    engine = engine_of(shapes, universal=what == "load")
    if what == "save":
        engine.backward(engine())
        engine.step()
    dist.barrier()
    began = time.perf_counter()
    if what == "save":
        client = {"universal_checkpoint_info": engine.module.universal_checkpoint_info(), "iteration": 1}
        engine.save_checkpoint(folder, tag="step1", client_state=client)
    else:
        path, _ = engine.load_checkpoint(folder, tag="step1_universal")
        if path is None:
            raise SystemExit("nothing was loaded")
    dist.barrier()
    seconds = time.perf_counter() - began
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps({"seconds": seconds}) + "\n")


def main() -> None:
    shapes_file, folder, what, ranks = sys.argv[1:]
    if RANK in os.environ:
        return work(json.loads(Path(shapes_file).read_text()), folder, what)
    port = str(20000 + os.getpid() % 20000)
    children = []
    for rank in range(int(ranks)):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu", RANK: str(rank)}
        children.append(subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **place}))
    try:
        codes = [child.wait() for child in children]
    finally:
        for child in children:
            child.kill()
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
