"""How far does somebody count without a mistake? A graded reward for the counting job, as ``[reward] function`` takes.

The share of the answer that is right before the first wrong word. Who goes on after the end gets the share of what was
said instead, so that a long answer is not better than a right one.
"""

from __future__ import annotations

from itertools import takewhile


def counted(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """Score each completion: 1 if it is the answer, 0 if its first word is wrong."""
    return [_score(text.split(), right.split()) for text, right in zip(completions, answer, strict=True)]


def _score(said: list[str], wanted: list[str]) -> float:
    right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(said, wanted, strict=False)))
    return right / max(len(said), len(wanted))
