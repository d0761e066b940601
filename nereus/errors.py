"""Which failures does Nereus raise, and who is to blame for each?

Expected outcomes are values (``Infeasible``, ``Verdict``, ...). An exception means that a rule was broken:
``ValueError`` by the calling code, ``ProtocolError`` by a peer, ``TransitionError`` by a device, ``OutOfMemory`` by a
plan that asks more of a slot than it has, ``ConfigError`` by the operator. Only ``ConfigError`` is printed without a
traceback; it exits with code 2.
"""

from __future__ import annotations

from collections.abc import Mapping


class NereusError(Exception):
    """Base of the failures that Nereus itself raises."""


class ConfigError(NereusError):
    """The operator asked for something that cannot be done.

    ``what`` is wrong, ``where`` it stands (a TOML key, a file, an address) and which ``remedy`` helps; all three
    are printed on one line.
    """

    def __init__(self, what: str, *, where: str, remedy: str) -> None:
        super().__init__(f"{where}: {what}; {remedy}")
        self.what = what
        self.where = where
        self.remedy = remedy


class ProtocolError(NereusError):
    """A peer sent something that the protocol does not allow."""


class PeerLost(NereusError):
    """A peer died, hung or closed its connection while somebody waited for it."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(f"{peer} is lost: {why}")
        self.peer = peer
        self.why = why


class TransitionError(NereusError):
    """A device operation (collective, weight transfer, state move) failed."""


class OutOfMemory(NereusError):
    """A slot needs more memory than it has; what it holds is as before.

    ``needed_bytes`` is by purpose, the largest first; ``limit_bytes`` is ``emulate.memory_mb`` or the device's memory.
    """

    def __init__(self, where: str, needed_bytes: Mapping[str, int], limit_bytes: int) -> None:
        ordered = sorted(needed_bytes.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{purpose} {size / 1e6:.1f} MB" for purpose, size in ordered if size)
        whole = sum(needed_bytes.values())
        super().__init__(f"{where} needs {whole / 1e6:.1f} MB ({parts}), its limit is {limit_bytes / 1e6:.1f} MB")
        self.where = where
        self.needed_bytes = dict(ordered)
        self.limit_bytes = limit_bytes

    @property
    def shortfall_bytes(self) -> int:
        return sum(self.needed_bytes.values()) - self.limit_bytes


class CheckpointError(NereusError):
    """A checkpoint or model folder is incomplete, damaged or does not fit."""
