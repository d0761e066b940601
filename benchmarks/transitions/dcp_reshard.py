"""What does torch's distributed checkpoint take to carry training state from one layout to another, in its best case?

    python dcp_reshard.py MODEL FOLDER BEFORE AFTER REPEATS

One process per slot of the larger layout, joined by gloo. Those of BEFORE (one replica) hold parameters, exp_avg and
exp_avg_sq in float32, as trainer slots of Nereus do: DTensors on a tensor-parallel mesh, whole tensors where only a
pipeline cuts. They save into FOLDER (a memory file system in the benchmark), and those of AFTER load into tensors that
are there already and have been written to. No process starts or ends, nothing is built, no file is synchronised, and
each repeat overwrites the files of the one before. Prints one JSON object: seconds of saving and loading, by repeat.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nereus.backends.api import STATE_KINDS
from nereus.backends.torch.state import Blueprint
from nereus.config import ModelConfig
from nereus.core.plan import Replication
from nereus.transition.reshard import held_to_train

RANK = "RESHARD_RANK"


def mesh_of(replication: Replication, rank: int) -> DeviceMesh | None:
    """Return the tensor-parallel mesh of ``rank``, if it has one; every rank of the world makes this call."""
    tp, found = replication.layout.tp, None
    for start in range(0, replication.slots, tp):
        group = dist.new_group(list(range(start, start + tp)))
        if start <= rank < start + tp and tp > 1:
            found = DeviceMesh.from_group(group, "cpu")
    return found


def state_of(blueprint: Blueprint, replication: Replication, rank: int, value: float) -> dict[str, Any]:
    """Return what ``rank`` holds, every element ``value``; every rank of the world makes this call."""
    mesh = mesh_of(replication, rank)
    if rank >= replication.slots:
        return {}
    held = held_to_train(frozenset(blueprint.tied.values()))
    state: dict[str, Any] = {}
    for spec in blueprint.tensors:
        piece = held(spec, blueprint.layers, replication.layout, rank % replication.layout.slots)
        if piece is None:
            continue
        for kind in STATE_KINDS:
            local = torch.full([high - low for low, high in zip(piece.start, piece.stop, strict=True)], value)
            state[f"{kind}.{spec.name}"] = local
            if mesh is not None:
                cut = spec.split is not None and local.shape[spec.split] != spec.shape[spec.split]
                placement = Shard(spec.split) if cut and spec.split is not None else Replicate()
                shape = torch.Size(spec.shape)
                stride = torch.empty(shape, device="meta").stride()
                state[f"{kind}.{spec.name}"] = DTensor.from_local(
                    local, mesh, [placement], run_check=False, shape=shape, stride=stride
                )
    return state


def work(model: Path, folder: str, before: Replication, after: Replication, repeats: int, rank: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=max(before.slots, after.slots))
    blueprint = Blueprint(model, ModelConfig(dtype="float32"))
    source, target = state_of(blueprint, before, rank, 1.0), state_of(blueprint, after, rank, 0.0)
    saved, loaded = [], []
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        dcp.save(source, storage_writer=FileSystemWriter(folder, sync_files=False, overwrite=True))
        dist.barrier()
        saved.append(time.perf_counter() - began)
        began = time.perf_counter()
        dcp.load(target, storage_reader=FileSystemReader(folder))
        dist.barrier()
        loaded.append(time.perf_counter() - began)
    for name, value in target.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        if not float(local.min()) == float(local.max()) == 1.0:
            raise SystemExit(f"rank {rank} did not get {name}")
    if rank == 0:
        sys.stdout.write(json.dumps({"save_s": saved, "load_s": loaded}) + "\n")
    dist.destroy_process_group()


def main() -> None:
    model, folder, before, after, repeats = sys.argv[1:]
    source, target = Replication.parse(before), Replication.parse(after)
    if source.dp != 1:
        raise SystemExit("one replica saves: the others have the same")
    if RANK in os.environ:
        return work(Path(model), folder, source, target, int(repeats), int(os.environ[RANK]))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **address, RANK: str(rank)})
        for rank in range(max(source.slots, target.slots))
    ]
    try:
        codes = [process.wait() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
