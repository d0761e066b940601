"""Would Nereus decide again as it did in a run? The command ``nereus replay``.

Reads the journal and the job of a run folder, tells a fresh controller what the run's own was told, and says whether it
comes to the same. Invariants (tests/commands/test_simulate.py): a run that is whole is reproduced (exit code 0); a
difference is named (exit code 1).
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from nereus.errors import ConfigError
from nereus.runtime.folder import RunPaths
from nereus.runtime.journal import JournalError, read_journal
from nereus.runtime.pool import cluster_of
from nereus.runtime.replaying import replay_decisions
from nereus.runtime.wire import load_config


def replay(folder: Path, *, as_json: bool) -> int:
    """Replay the decisions of the run in ``folder`` and print what came of it."""
    paths = RunPaths(folder, 1)
    try:
        config, entries = load_config(paths), read_journal(paths.journal).entries
    except (OSError, msgspec.MsgspecError, JournalError) as error:
        raise ConfigError(f"cannot be replayed ({error})", where=str(folder), remedy="name a run folder") from None
    capacity = int(cluster_of(config).device.memory_bytes)
    found = replay_decisions(entries, gamma=config.adapt.gamma, capacity_bytes=capacity)
    if as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        lines = [*found.differences]
        same = "all are reproduced" if not found.differences else f"{len(found.differences)} differ"
        lines.append(f"{found.events} events, {found.decisions} decisions: {same}")
        sys.stdout.write("".join(line + "\n" for line in lines))
    return 1 if found.differences else 0
