"""Which words of a command line are settings, and which belong to the command?

Every setting has a dot in its name (``--train.learning-rate 3e-4``), no option of a command has; so they can be told
apart without knowing the command.
"""

from __future__ import annotations

from collections.abc import Sequence

from nereus.configuration import schema
from nereus.configuration.job import COMMAND_LINE
from nereus.errors import ConfigError

Overrides = list[tuple[str, str]]


def split_overrides(words: Sequence[str]) -> tuple[list[str], Overrides]:
    """Take ``--dotted.key value``, ``--dotted.key=value``, ``--flag.key`` and ``--no-flag.key`` out of ``words``.

    Return the other words and the overrides, both in their order. What follows ``--`` is left alone.
    """
    rest: list[str] = []
    overrides: Overrides = []
    pending = list(words)
    while pending:
        word = pending.pop(0)
        if word == "--":
            return [*rest, word, *pending], overrides
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            rest.append(word)
        elif equals:
            overrides.append((name, value))
        elif _is_switch(name.removeprefix("no-")) and name.startswith("no-"):
            overrides.append((name.removeprefix("no-"), "false"))
        elif _is_switch(name) and not (pending and pending[0] in ("true", "false")):
            overrides.append((name, "true"))
        elif pending and not pending[0].startswith("--"):
            overrides.append((name, pending.pop(0)))
        elif schema.find(schema.normalize(name)) is None:
            overrides.append((name, ""))  # loading refuses the name, which helps more than to ask for a value
        else:
            raise ConfigError(f"--{name} has no value", where=COMMAND_LINE, remedy=f"write --{name} VALUE")
    return rest, overrides


def complete_option(words: Sequence[str], option: str, value: str) -> list[str]:
    """Write ``option`` as ``option=value`` where no value of its own follows it.

    A following option or job file (``*.toml``) is not its value.
    """
    completed = list(words)
    for index, word in enumerate(words):
        following = words[index + 1] if index + 1 < len(words) else "--"
        if word == option and (following.startswith("--") or following.endswith(".toml")):
            completed[index] = f"{option}={value}"
    return completed


def _is_switch(name: str) -> bool:
    key = schema.find(schema.normalize(name))
    return key is not None and key.is_bool
