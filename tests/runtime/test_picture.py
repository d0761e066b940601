"""Does the picture of a run stay legible, whatever happened in it?"""

from __future__ import annotations

import itertools
import re

import pytest
from stories import Story

from nereus.runtime import picture
from nereus.runtime.timeline import Timeline, timeline

pytest.importorskip("matplotlib")

TEXT = re.compile(r"<text[^>]*>([^<]*)</text>")


def texts(line: Timeline) -> list[str]:
    return TEXT.findall(picture.svg(line))


def height_inches(svg: str) -> float:
    found = re.search(r'height="([\d.]+)pt"', svg)
    assert found
    return float(found[1]) / 72


def test_plans_units_changes_and_losses_are_named() -> None:
    story = Story().starts("d2t1p1", "d1t1p1", range(4)).trains(*[1.0] * 20)
    story.changes("d1t2p1", "d1t1p1", range(4), 3.0).trains(*[2.0] * 20).loses("slot-2").loses("reward-0")
    story.changes("d1t1p1", "d1t1p1", [0, 1, 3], 2.0, failure="no way").trains(*[2.0] * 10)
    story.starts("d1t1p1", "d1t1p1", range(4), attempt=2).trains(*[1.0] * 20)
    found = texts(timeline(story.entries))
    for text in (
        "slot 3", "plan 0", "plan 1", "train d2t1p1", "train d1t2p1", "generate d1t1p1", "train/2  t2p1",
        "median 1 s", "median 2 s", "reward-0", " attempt 2", "plan changes", "change given up", "worker lost",
    ):  # fmt: skip
        assert text in found, text


@pytest.mark.deep
def test_text_that_has_no_room_is_shortened_and_then_left_out() -> None:
    story = Story().starts("d2t1p1", "d1t1p1", range(4)).trains(*[1.0] * 20)
    for train in itertools.islice(itertools.cycle(["d1t2p1", "d2t1p1"]), 60):
        story.changes(train, "d1t1p1", range(4), 0.1).trains(0.2)
    story.changes("d1t1p1", "d1t1p1", range(4), 0.1).trains(*[1.0] * 20)
    found = texts(timeline(story.entries))
    assert "plan 0" in found and "plan 61" in found
    assert not {f"plan {epoch}" for epoch in range(1, 61)} & {*found}
    assert "train/0  t1p1" in found and "train/3  t2p1" not in found


@pytest.mark.deep
def test_any_number_of_slots_stays_on_one_page_and_a_plain_run_is_small() -> None:
    runs = (
        Story().starts("d2t1p1", "d2t1p1", range(4)).trains(1.0, 1.0),
        Story().starts("d2t1p1", "d2t1p1", range(4)).trains(1.0).changes("d1t2p1", "d2t1p1", range(4), 1.0),
        Story().starts("d32t2p1", "d64t1p1", range(128)).trains(1.0).changes("d16t4p1", "d64t1p1", range(128), 1.0),
    )
    plain, changed, large = (picture.svg(timeline(story.entries)) for story in runs)
    assert height_inches(plain) < height_inches(changed) < height_inches(large) < 8.5
    assert "plan 0" in TEXT.findall(plain) and "plan changes" not in TEXT.findall(plain)
    assert sum(text.startswith("slot ") for text in TEXT.findall(large)) <= 25


@pytest.mark.deep
def test_nothing_is_drawn_of_nothing_and_the_same_twice() -> None:
    assert picture.svg(Timeline()) == "" and picture.png(Timeline()) == b""
    line = timeline(Story().starts("d1t1p1", "d1t1p1", range(2)).trains(1.0).entries)
    assert picture.svg(line) == picture.svg(line)
    assert picture.png(line).startswith(b"\x89PNG")
