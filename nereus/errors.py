"""Which failures does Nereus raise, and who is to blame for each?

Expected outcomes are values (``Infeasible``, ``Verdict``, ...). An exception means that a rule was broken:
``ValueError`` by the calling code, ``ProtocolError`` by a peer, ``TransitionError`` by a device, ``ConfigError``
by the operator. Only ``ConfigError`` is printed without a traceback; it exits with code 2.
"""

from __future__ import annotations


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


class CheckpointError(NereusError):
    """A checkpoint or model folder is incomplete, damaged or does not fit."""
