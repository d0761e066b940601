"""How do worker scripts of the tests run one process per slot? Forked after the imports, which take longest."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable

from nereus.actors.slot import LATE


def run_slots(slots: Iterable[int], work: Callable[[int], None], modules: Iterable[str] = LATE) -> None:
    """Run ``work(slot)`` in one process per slot and print the exit codes as a JSON list, in the order of the slots.

    ``modules`` are those that slots would import late, every one for itself.
    """
    for module in modules:
        importlib.import_module(module)
    children = []
    for slot in slots:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(slot)
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                    sys.stderr.flush()
                os._exit(code)
        children.append(child)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))
