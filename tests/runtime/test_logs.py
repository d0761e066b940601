"""Is every event one safe line that says where it belongs?"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from nereus.runtime.logs import bind, configure_logs, configure_worker, escape, reset_logs

NASTY = "a\x1b[2J\x1b]0;owned\x07\r\nINFO forged line\u202egnp.exe\u2028\x9b31m\x7f"


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    yield
    reset_logs()


@given(st.text())
def test_escaped_text_is_one_printable_line(text: str) -> None:
    safe = escape(text)
    assert len(safe.splitlines()) <= 1
    assert not any(ord(char) < 32 or 0x7F <= ord(char) < 0xA0 for char in safe)
    assert not set(safe) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029\u200b\ufeff")


@pytest.mark.parametrize("text", ["plain", "naïve café", "中文", "π ≈ 3.14", "[bold]x[/]", "emoji 🙂"])
def test_harmless_text_is_left_alone(text: str) -> None:
    assert escape(text) == text


def test_text_lines_carry_what_is_bound(tmp_path: Path) -> None:
    file = tmp_path / "supervisor.log"
    configure_logs(file=file, run="demo-001", epoch=0)
    bind(step=3, version=2)
    structlog.get_logger().info("step done", reward=0.51234567, note="two words")
    line = file.read_text().rstrip("\n")
    assert "INFO     step done" in line
    for part in ("run=demo-001", "epoch=0", "step=3", "version=2", "reward=0.512346", 'note="two words"'):
        assert part in line


def test_json_lines_carry_the_same_fields(tmp_path: Path) -> None:
    file = tmp_path / "worker.log"
    configure_worker(file, log_format="json", run="demo-001", emu="policy.training/0")
    structlog.get_logger().warning("slow", path=Path("x"), seconds=1.5)
    row = json.loads(file.read_text())
    assert row.pop("t") > 0
    assert row == {
        "run": "demo-001",
        "emu": "policy.training/0",
        "event": "slow",
        "level": "warning",
        "path": "x",
        "seconds": 1.5,
    }


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_foreign_text_cannot_forge_lines_or_steer_a_terminal(tmp_path: Path, log_format: str) -> None:
    console = io.StringIO()
    file = tmp_path / "log"
    configure_logs(file=file, log_format=log_format, console=console)  # type: ignore[arg-type]
    structlog.get_logger().info(NASTY, completion=NASTY)
    logging.getLogger("somebody.else").warning("%s", NASTY)
    for text in (file.read_text(), console.getvalue()):
        assert len(text.splitlines()) == 2
        assert not any(ord(char) < 32 or 0x7F <= ord(char) < 0xA0 for char in text.replace("\n", ""))
        assert "\u202e" not in text


def test_libraries_and_warnings_take_the_same_road(tmp_path: Path) -> None:
    file = tmp_path / "log"
    configure_logs(file=file, run="demo-001")
    logging.getLogger("some.library").warning("careful")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old way", DeprecationWarning, stacklevel=1)
    text = file.read_text()
    assert "WARNING  careful  run=demo-001" in text
    assert "old way" in text


def test_a_traceback_is_indented_below_its_line(tmp_path: Path) -> None:
    file = tmp_path / "log"
    configure_logs(file=file)
    try:
        raise ValueError(NASTY)
    except ValueError:
        structlog.get_logger().exception("broke")
    first, *rest = file.read_text().splitlines()
    assert "ERROR    broke" in first
    assert rest and all(line.startswith("    ") for line in rest)
    assert "\x1b" not in "".join(rest)


def test_the_level_holds_and_a_new_configuration_replaces_the_old(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    configure_logs(file=old, level="warning", run="a")
    structlog.get_logger().info("quiet")
    configure_logs(file=new, level="debug", run="b")
    structlog.get_logger().debug("loud")
    assert old.read_text() == ""
    assert "loud  run=b" in new.read_text()
