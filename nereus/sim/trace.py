"""What changes while a simulated job runs: lengths, slots, speeds, failures?

Owner of the trace file. Values only; what is random is drawn from a seed that the caller gives. Steps count from 0, as
in the supervisor: step ``n`` is the one made after ``n`` steps are done. Seconds count from the start of the run.
Invariants (tests/sim/test_trace.py): what is written reads back equal; a trace that contradicts itself is refused with
the place in it; equal seeds draw equal lengths; times and steps never go back.
"""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from nereus.control.efficiency import CLASSES
from nereus.core.workload import Lengths, log_normal_parameters
from nereus.errors import ConfigError

ALL_OPERATIONS = "all"
"""A drift of every operation class."""

TRACES = Path(__file__).parent / "traces"
"""Traces that are known by name; ``benchmarks/simulation/build_traces.py`` makes them."""

LARGEST_BYTES = 16 << 20

_AtLeast0 = Annotated[float, Meta(ge=0)]
_Above0 = Annotated[float, Meta(gt=0)]
_Count0 = Annotated[int, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=1)]

_REMEDY = "correct the file; nereus/sim/trace.py says what it holds"


class StepLengths(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How long the responses of one step are; in a file ``[mean, p95]``."""

    mean_tokens: _Above0
    p95_tokens: _Above0

    def sample(self, seed: int | Sequence[int], count: int, longest: int) -> tuple[int, ...]:
        """Draw the lengths of ``count`` responses, log-normal with this mean and p95, each cut at ``longest``.

        Equal seeds draw equal lengths. A seed may be several numbers, such as (run, step, group), so that what a group
        is like depends on no plan.
        """
        mu, sigma = log_normal_parameters(self.mean_tokens, self.p95_tokens)
        drawn = np.random.default_rng(seed).lognormal(mu, sigma, count)
        return tuple(int(tokens) for tokens in np.clip(np.rint(drawn), 1, longest))

    def lengths(self, longest: int) -> Lengths:
        """Return the same distribution as the planner takes it."""
        return Lengths.log_normal(self.mean_tokens, self.p95_tokens, longest)


class Supply(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """From ``at_s`` on there are ``slots`` slots; in a file ``[at_s, slots]``."""

    at_s: _AtLeast0
    slots: _Count


class StepSupply(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Before step ``at_step`` is made and from then on there are ``slots`` slots; in a file ``[at_step, slots]``."""

    at_step: _Count0
    slots: _Count


class Drift(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """From ``at_step`` on ``operation`` runs at ``factor`` of its first efficiency; in a file ``[at_step, operation,
    factor]``."""

    at_step: _Count0
    operation: str
    """A class of operations (control/efficiency.py), or ``all``."""
    factor: _Above0


class Failure(Struct, frozen=True, forbid_unknown_fields=True):
    """A slot fails."""

    at_s: _AtLeast0
    slot: int | None
    """None: any one that is in use, as the world's seed has it."""
    kind: Literal["kill", "hang", "reclaim"]
    """Dies, stops answering, or is taken back by its provider."""


class Trace(Struct, frozen=True, forbid_unknown_fields=True):
    """A course of events. After its last step the newest lengths hold; what is empty does not change."""

    name: str
    source: str
    """Where the numbers come from."""
    steps: tuple[StepLengths, ...] = ()
    supply: tuple[Supply, ...] = ()
    efficiency: tuple[Drift, ...] = ()
    failures: tuple[Failure, ...] = ()
    step_supply: tuple[StepSupply, ...] = ()
    """Supply by steps in the place of ``supply``: then every plan meets the same slots in the same steps, however fast
    it is. Never both."""
    held_out: bool = False
    """For evaluation only: nothing is designed or tuned on it."""
    note: str = ""

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ValueError(problem)

    def lengths_at(self, step: int) -> StepLengths | None:
        """Return what the responses of ``step`` are like; None if the trace does not say."""
        return self.steps[min(step, len(self.steps) - 1)] if self.steps else None

    def slots_at(self, step: int, now_s: float) -> int | None:
        """Return how many slots there are before ``step``, ``now_s`` seconds after the start; None if unsaid."""
        by_step = [supply.slots for supply in self.step_supply if supply.at_step <= step]
        by_time = [supply.slots for supply in self.supply if supply.at_s <= now_s]
        return next((slots[-1] for slots in (by_step, by_time) if slots), None)

    def factor_at(self, step: int, operation: str) -> float:
        """Return at which share of its first efficiency ``operation`` runs in ``step``; drifts of all multiply in."""
        newest = {drift.operation: drift.factor for drift in self.efficiency if drift.at_step <= step}
        return newest.get(operation, 1.0) * newest.get(ALL_OPERATIONS, 1.0)

    @property
    def most_slots(self) -> int | None:
        """Return the largest pool of the trace; None if it says nothing of slots."""
        by_time, by_step = [one.slots for one in self.supply], [one.slots for one in self.step_supply]
        return max(by_time + by_step, default=None)


def _problems(trace: Trace) -> Iterable[str]:
    if not trace.name or not trace.source:
        yield "a trace needs a name and a source"
    if trace.supply and trace.step_supply:
        yield "supply and step_supply are both given; keep one of them"
    for index, lengths in enumerate(trace.steps):
        try:
            log_normal_parameters(lengths.mean_tokens, lengths.p95_tokens)
        except ValueError as error:
            yield f"steps[{index}]: {error}"
    known = {ALL_OPERATIONS, *map(str, CLASSES)}
    for index, drift in enumerate(trace.efficiency):
        if drift.operation not in known:
            what = f"there is no operation class {drift.operation!r}; known: {', '.join(sorted(known))}"
            yield f"efficiency[{index}]: {what}"
    ordered: tuple[tuple[str, list[float]], ...] = (
        ("supply", [one.at_s for one in trace.supply]),
        ("step_supply", [one.at_step for one in trace.step_supply]),
        ("efficiency", [one.at_step for one in trace.efficiency]),
        ("failures", [one.at_s for one in trace.failures]),
    )
    for name, times in ordered:
        for index, (before, after) in enumerate(itertools.pairwise(times)):
            if after < before:
                yield f"{name}[{index + 1}]: {after:g} comes after {before:g}"
        if any(not math.isfinite(at) for at in times):
            yield f"{name}: a time is not finite"


def read_trace(path: Path) -> Trace:
    """Read a trace from a TOML or JSON file; ``ConfigError`` names the file and the place in it."""
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise ConfigError(f"{path} is too large for a trace", where="trace", remedy="name a trace file")
        raw = path.read_bytes()
    except OSError as error:
        what = f"{path} cannot be read ({error.strerror})"
        raise ConfigError(what, where="trace", remedy="name a trace file (TOML or JSON)") from None
    try:
        return msgspec.convert(_document(path, raw), Trace)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no trace: {error}", where="trace", remedy=_REMEDY) from None


def trace_names() -> tuple[str, ...]:
    """Return the names of the traces that come with the package."""
    return tuple(sorted(path.stem for path in TRACES.glob("*.json")))


def load_trace(name: str) -> Trace:
    """Return a trace by its name, or by the path of its file; ``ConfigError`` lists the names."""
    if Path(name).suffix in (".toml", ".json"):
        return read_trace(Path(name))
    if name not in trace_names():
        remedy = f"name a file, or one of {', '.join(trace_names())}"
        raise ConfigError(f"there is no trace {name!r}", where="trace", remedy=remedy)
    return read_trace(TRACES / f"{name}.json")


def _document(path: Path, raw: bytes) -> Any:
    match path.suffix:
        case ".toml":
            return tomllib.loads(raw.decode())
        case ".json":
            return json.loads(raw)
        case suffix:
            raise ValueError(f"its name ends in {suffix!r}, and traces are .toml or .json")


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace as JSON, one entry a line, so that versions of it can be compared; the folder must exist."""
    fields: dict[str, Any] = msgspec.to_builtins(trace)
    lines = [f"{json.dumps(name)}: {_entries(value)}" for name, value in fields.items() if value]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _entries(value: object) -> str:
    if not isinstance(value, list | tuple):
        return json.dumps(value, ensure_ascii=False)
    return "[\n  " + ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in value) + "\n]"
