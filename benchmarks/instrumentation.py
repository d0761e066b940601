"""What do the step reports cost that tell memory, and seconds by operation class?

    python benchmarks/instrumentation.py [--json] [--threads N] [--models 0.8M,19M] [--pairs N] [--micro-batches N]

One trainer slot makes the same step again and again, in turns with the meter (nereus/backends/torch/metering.py) and
with one that does nothing, in the order on, off, off, on. Overhead is CPU time, so CPU seconds count; wall seconds are
beside them. The fewer micro-batches a step has, the more the one weighs that is looked at closely. The last row is the
bookkeeping of the generation engine for each decode step, beside what such a step takes. Target: below 1 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.generate import MODELS, ROOT, make_model
from nereus.backends.api import SampleRequest, TrainBatch
from nereus.backends.torch.decode_model import DecoderWeights, read_shape
from nereus.backends.torch.generate import GenerateEngine
from nereus.backends.torch.metering import Meter
from nereus.backends.torch.train import TorchTrainer
from nereus.config import JobConfig, ModelConfig, TrainConfig
from nereus.core.plan import POLICY_TRAINING, Emu, Layout, Plan

TARGET = 0.01
PROMPT_TOKENS, GROUPS, GROUP_SIZE = 16, 4, 8
LIVE, DECODE_STEPS = 32, 64


class Silent(Meter):
    """A meter that measures nothing."""

    @contextlib.contextmanager
    def _nothing(self, *_arguments: Any) -> Iterator[None]:
        yield

    passes = forward = head = backward = phase = gradients = update = _nothing  # type: ignore[assignment]

    def operations(self) -> dict[Any, float]:
        return {}

    def forget(self) -> None:
        self._transient_bytes = {}


@dataclass(frozen=True)
class Row:
    """Medians over pairs of steps, or of decode steps."""

    what: str
    on_s: float
    off_s: float
    cpu_overhead: float
    wall_overhead: float


def make_batch(vocabulary: int, longest: int) -> TrainBatch:
    random = np.random.default_rng(0)
    count = GROUPS * GROUP_SIZE
    prompts = np.full(count, PROMPT_TOKENS, np.int32)
    lengths = random.integers(longest // 4, longest + 1, count).astype(np.int32)
    lengths[0] = longest
    drawn = int(lengths.sum())
    return TrainBatch(
        step=0,
        version=0,
        prompt_lengths=prompts,
        lengths=lengths,
        group_of=np.repeat(np.arange(GROUPS), GROUP_SIZE).astype(np.int32),
        rewards=random.random(count),
        tokens=random.integers(0, vocabulary, int(prompts.sum()) + drawn).astype(np.int32),
        logprobs=np.full(drawn, -np.log(vocabulary), np.float32),
        versions=np.ones(drawn, np.int32),  # off-policy: no self-check, no warning about random samples
    )


def training(
    name: str, folder: Path, vocabulary: int, longest: int, micro_batches: int, pairs: int, threads: int
) -> Row:
    """Return medians of steps with and without the meter."""
    batch = make_batch(vocabulary, longest)
    tokens = (PROMPT_TOKENS + longest) * GROUPS * GROUP_SIZE // micro_batches
    config = JobConfig(
        model=ModelConfig(path=str(folder)), train=TrainConfig(micro_batch_tokens=tokens, learning_rate=1e-6)
    )
    emu = Emu(POLICY_TRAINING, 0, Layout(), (0,))
    slot = TorchTrainer(config)
    torch.set_num_threads(threads)  # the backend has set it from its own configuration
    slot.assign(emu, Plan(1, (emu,)), 0, store="")
    slot.load(folder)
    pipeline, meter = slot._policy.pipeline, slot._meter
    silent = Silent.__new__(Silent)
    vars(silent).update(vars(meter))

    def step(which: Meter) -> tuple[float, float]:
        slot._kept_meter = pipeline._meter = which
        wall, cpu = perf_counter(), process_time()
        slot.train(batch)
        return perf_counter() - wall, process_time() - cpu

    for which in (meter, silent):
        step(which)
    on: list[tuple[float, float]] = []
    off: list[tuple[float, float]] = []
    for pair in range(pairs):
        for which, taken in ((meter, on), (silent, off)) if pair % 2 else ((silent, off), (meter, on)):
            taken.append(step(which))
    wall, cpu = (
        statistics.median(with_it[kind] / without[kind] for with_it, without in zip(on, off, strict=True)) - 1
        for kind in (0, 1)
    )
    middle = [statistics.median(taken[0] for taken in steps) for steps in (on, off)]
    return Row(f"step of {name}, {micro_batches} micro-batches", middle[0], middle[1], cpu, wall)


def decoding(name: str, folder: Path, vocabulary: int) -> Row:
    """Return what the bookkeeping takes for each decode step, beside the step."""
    cpu = torch.device("cpu")
    shape = read_shape(folder)
    engine = GenerateEngine(shape, slots=LIVE, capacity=PROMPT_TOKENS + DECODE_STEPS, device=cpu, dtype=torch.float32)
    engine.offer(DecoderWeights(shape, load_file(folder / "model.safetensors"), cpu, torch.float32), 0, "keep")
    prompt = np.arange(PROMPT_TOKENS, dtype=np.int32) % vocabulary
    for index in range(LIVE):
        engine.submit(SampleRequest(str(index), prompt, (0, 0, index), DECODE_STEPS))
    while not engine.idle:
        engine.step()
    whole = engine.counters.decode_s / engine.counters.decode_steps
    cached = np.full(LIVE, 100, np.int64)
    began = perf_counter()
    for _ in range(1000):  # what the engine does for its counters and nothing else, see ``GenerateEngine._decode``
        start, seen = perf_counter(), int(cached[:LIVE].sum())
        engine.counters.cached_tokens += seen
        engine.counters.decode_s += perf_counter() - start
    extra = (perf_counter() - began) / 1000
    share = extra / (whole - extra)
    return Row(f"decode step of {name}, {LIVE} live", whole, whole - extra, share, share)


def table(rows: list[Row]) -> str:
    lines = [f"{'what':<40} {'on':>10} {'off':>10} {'CPU':>8} {'wall':>8}"]
    lines += [
        f"{row.what:<40} {1e3 * row.on_s:>7.2f} ms {1e3 * row.off_s:>7.2f} ms "
        f"{100 * row.cpu_overhead:>+7.2f}% {100 * row.wall_overhead:>+7.2f}%"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--models", default="0.8M,19M", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--micro-batches", default="1,4")
    parser.add_argument("--pairs", type=int, default=10)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models.split(","):
        folder = ROOT / ".cache/benchmarks" / name
        config = make_model(name, folder)
        print(f"{name} ...", file=sys.stderr, flush=True)
        longest = 64 if name == "0.8M" else 32
        for count in map(int, arguments.micro_batches.split(",")):
            rows.append(training(name, folder, config.vocab_size, longest, count, arguments.pairs, arguments.threads))
        rows.append(decoding(name, folder, config.vocab_size))
    print(table(rows))
    met = {row.what: row.cpu_overhead < TARGET for row in rows}
    for what, reached in met.items():
        print(f"{'met' if reached else 'MISSED':>6}  below {100 * TARGET:g} % CPU: {what}")
    if arguments.json:
        print(json.dumps({"rows": [vars(row) for row in rows], "targets": met}))


if __name__ == "__main__":
    main()
