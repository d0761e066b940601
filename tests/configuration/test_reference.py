"""Is the configuration reference complete and up to date?"""

from __future__ import annotations

from pathlib import Path

from nereus.configuration import schema
from nereus.configuration.reference import reference

ROOT = Path(__file__).parents[2]


def test_the_file_is_what_the_command_prints() -> None:
    stored = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert stored == reference(), "run: nereus config reference > docs/configuration.md"


def test_every_setting_is_explained() -> None:
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert len(rows) == len(schema.settings())
    assert [row for row in rows if row.endswith("|  |")] == []
