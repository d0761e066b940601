"""How does a process make sure that it does not outlive the one that started it?

Owner: the entry of every process that another one starts. Invariants (tests/actors/test_reward_pool.py,
tests/backends/test_groups.py): the process ends when its parent does, however that ends.
"""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(signal_number: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux to send this process a signal when its parent ends; elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number)
