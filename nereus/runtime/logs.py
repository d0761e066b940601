"""What does each process log, where, and how is every line tied to its run, step, version and plan epoch?

Owner: each process configures its own logs once. Code logs through ``structlog.get_logger()``; ``bind`` sets what every
later line of the process carries. Lines of third-party libraries and Python warnings take the same road.
Invariants (tests/runtime/test_logs.py): one event is one line; no control character of foreign text (a model's output,
a peer's message) reaches a terminal or a file unescaped.
"""

from __future__ import annotations

import logging
import time
import unicodedata
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec
import structlog

Format = Literal["text", "json"]

_INSTALLED: list[logging.Handler] = []
"""Handlers that this module has put on the root logger; replaced when a process configures its logs anew."""

_UNSAFE = frozenset(("Cc", "Cf", "Cs", "Co", "Zl", "Zp"))
"""Unicode categories that steer terminals or hide text: controls, formats (bidi), surrogates, private use, breaks."""


def silence() -> None:
    """Tell nothing: where many simulated runs are made, each has its own journal."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def escape(text: str) -> str:
    """Return ``text`` with every control or invisible formatting character written as an escape, on one line."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(char) if unicodedata.category(char) in _UNSAFE else char for char in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def configure_logs(
    *,
    file: Path | None,
    log_format: Format = "text",
    level: str = "info",
    console: TextIO | None = None,
    **bound: object,
) -> None:
    """Send this process's log to ``file`` (appending) and, if given, to ``console``; ``bound`` is on every line.

    Calling it again replaces the earlier configuration.
    """
    reset_logs()
    renderer = _render_json if log_format == "json" else _render_text
    shared: list[Any] = [structlog.contextvars.merge_contextvars, structlog.stdlib.add_log_level, _stamp]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.processors.format_exc_info,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.processors.format_exc_info],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )
    root = logging.getLogger()
    root.setLevel(level.upper())
    handlers: list[logging.Handler] = []
    if file is not None:
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    if console is not None:
        handlers.append(logging.StreamHandler(console))
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
        _INSTALLED.append(handler)
    logging.captureWarnings(True)
    structlog.contextvars.bind_contextvars(**bound)


def configure_worker(file: Path, *, log_format: Format = "text", level: str = "info", **bound: object) -> None:
    """Log a worker process to its own file only; its console belongs to the supervisor."""
    configure_logs(file=file, log_format=log_format, level=level, console=None, **bound)


def reset_logs() -> None:
    """Undo ``configure_logs``: close its files and forget what was bound."""
    root = logging.getLogger()
    while _INSTALLED:
        handler = _INSTALLED.pop()
        root.removeHandler(handler)
        # A stream handler's close leaves its stream (the console) open; a file handler's closes its file.
        handler.close()
    logging.captureWarnings(False)
    structlog.contextvars.clear_contextvars()
    structlog.reset_defaults()


def bind(**values: object) -> None:
    """Put ``values`` (step, version, epoch, emu, ...) on every later line of this context and of tasks made in it."""
    structlog.contextvars.bind_contextvars(**values)


Event = MutableMapping[str, Any]


def _stamp(_logger: object, _method: str, event: Event) -> Event:
    event["t"] = time.time()
    return event


def _render_text(_logger: object, _method: str, event: Event) -> str:
    """``12:34:56.789 INFO    step done  step=3 version=3 ...``; a traceback follows, one escaped line per line."""
    t = event.pop("t")
    clock = time.strftime("%H:%M:%S", time.localtime(t)) + f".{int(t % 1 * 1000):03d}"
    level = str(event.pop("level", "info")).upper()
    what = escape(str(event.pop("event", "")))
    trace = event.pop("exception", None)
    fields = " ".join(f"{key}={_value(value)}" for key, value in event.items())
    line = f"{clock} {level:<8} {what}" + (f"  {fields}" if fields else "")
    if trace:
        line += "".join("\n    " + escape(part) for part in str(trace).splitlines())
    return line


def _value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else escape(str(value))
    return f'"{text}"' if " " in text or not text else text


def _render_json(_logger: object, _method: str, event: Event) -> str:
    """One JSON object; JSON escapes controls itself, the other unsafe characters are escaped here."""
    safe = {
        key: escape(value) if isinstance(value, str) and key != "exception" else value for key, value in event.items()
    }
    return msgspec.json.encode(safe, enc_hook=lambda value: escape(str(value))).decode()
