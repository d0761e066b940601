"""Which file describes a synchronous job that can only be simulated?

A TOML file with one table, ``[synchronous]``: the live runtime has no such jobs yet, so its configuration has no words
for them. Owner: ``nereus compare``. Invariants (tests/sim/test_jobfile.py): unknown keys and values that do not fit are
refused with the file and the place in it; a file of another kind is left to the configuration.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from nereus.core.profiles import load_cluster, load_model
from nereus.core.workflow import Algorithm
from nereus.errors import ConfigError
from nereus.sim.job import SynchronousJob

_Count = Annotated[int, Meta(ge=1)]


class _Table(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The table ``[synchronous]``."""

    model: str
    cluster: str
    slots: _Count
    algorithm: Algorithm = Algorithm.PPO
    steps: _Count = 25
    prompts: _Count = 1024
    group_size: _Count = 1
    minibatches: _Count = 4
    longest_prompt: _Count = 1024
    longest_response: _Count = 6144
    gamma: Annotated[float, Meta(ge=0, le=1)] = 0.5


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    synchronous: _Table


def synchronous_job(files: Sequence[Path]) -> SynchronousJob | None:
    """Return the job of a single file with a table ``[synchronous]``; None for files of another kind."""
    path = files[0]
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return None  # the configuration says what is wrong
    if "synchronous" not in table:
        return None
    if len(files) > 1:
        raise ConfigError("a synchronous job is one file", where=str(files[1]), remedy="name one file")
    try:
        wanted = msgspec.convert(table, _File).synchronous
    except msgspec.ValidationError as error:
        remedy = "correct the file; launchers/simulated/ppo_8b.toml shows one"
        raise ConfigError(str(error), where=str(path), remedy=remedy) from None
    fields = {name: getattr(wanted, name) for name in wanted.__struct_fields__}
    cluster, model = load_cluster(fields.pop("cluster"), fields.pop("slots")), load_model(fields.pop("model"))
    return SynchronousJob(cluster=cluster, model=model, **fields)
