"""How does a command end? Exit codes, and expected failures as one line on stderr.

0 success, 1 failure, 2 wrong input, 130 left at the second interrupt.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from nereus.errors import ConfigError, NereusError

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130


def guarded(command: Callable[[], int]) -> int:
    """Run ``command``; turn every expected failure into one line on stderr and an exit code."""
    try:
        return command()
    except ConfigError as error:
        complain(str(error))
        return EXIT_CONFIG
    except NereusError as error:
        complain(str(error))
        return EXIT_FAILURE
    except KeyboardInterrupt:
        complain("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as in "nereus config reference | head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered has no reader either
        return EXIT_OK


def complain(text: str) -> None:
    """Print one line on stderr, whatever ``text`` holds."""
    sys.stderr.write("nereus: " + " ".join(text.split()) + "\n")
