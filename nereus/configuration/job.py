"""What is a loaded job: its values, and where each of them comes from?"""

from __future__ import annotations

from msgspec import Struct

from nereus.config import JobConfig
from nereus.errors import ConfigError

COMMAND_LINE = "command line"
DEFAULT = "default"


class LoadedJob(Struct, frozen=True):
    """A job description and where each of its values comes from: ``default``, ``FILE:LINE`` or ``command line``."""

    config: JobConfig
    provenance: dict[str, str]

    def origin(self, key: str) -> str:
        """Say where ``key`` stands, for an error message: ``train.layout (job.toml:12)``."""
        return f"{key} ({self.provenance[key]})"

    def is_set(self, key: str) -> bool:
        """True if the operator wrote ``key``, be it with the default's value."""
        return self.provenance[key] != DEFAULT

    def refuse(self, key: str, what: str, remedy: str) -> ConfigError:
        """Make the error that blames ``key``."""
        return ConfigError(what, where=self.origin(key), remedy=remedy)
