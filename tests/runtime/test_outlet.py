"""Is a run held up by whoever reads what it says?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console

from nereus.runtime.outlet import MOST_KEPT, Outlet

PIPE_BYTES = 65_536
LINE = "x" * 99 + "\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe of the usual size: (the reader's end, the writer's end)."""
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)


def _read_to_the_end(reader: int) -> str:
    content = b""
    while part := os.read(reader, PIPE_BYTES):
        content += part
    return content.decode()


def test_lines_come_in_order_and_as_they_are(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    with Outlet(writer) as outlet:
        console = Console(file=outlet)  # type: ignore[arg-type]
        assert not console.is_terminal
        for number in range(100):
            console.print(f"step {number} · ½", soft_wrap=True)
    os.close(writer)
    assert _read_to_the_end(reader) == "".join(f"step {number} · ½\n" for number in range(100))


@pytest.mark.parametrize("blocking", [True, False])
def test_a_reader_that_has_stopped_holds_nothing_up_and_is_told_what_it_missed(
    pipe: tuple[int, int], blocking: bool
) -> None:
    reader, writer = pipe
    os.set_blocking(writer, blocking)
    outlet = Outlet(writer)
    written = 2 * MOST_KEPT + PIPE_BYTES // len(LINE)
    for _ in range(written):
        outlet.write(LINE)
    assert not outlet.drain(0.01), "nobody reads"
    with ThreadPoolExecutor(1) as threads:
        content = threads.submit(_read_to_the_end, reader)
        assert outlet.drain(30.0)
        outlet.write("at last\n")
        assert outlet.drain(30.0)
        os.close(writer)
        lines = content.result(30.0).splitlines()
    assert lines.pop() == "at last"
    gaps = [int(line.split()[1]) for line in lines if line.endswith("lines left out: nobody was reading")]
    assert MOST_KEPT <= len(lines) - len(gaps) < written
    assert len(lines) - len(gaps) + sum(gaps) == written, "every line is there or counted"


def test_a_reader_that_is_gone_is_no_fault() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    outlet = Outlet(writer)
    outlet.write("nobody hears this\n")
    assert outlet.drain(30.0)
    outlet.write("nor this\n")
    assert outlet.drain(0.0)
    os.close(writer)
