"""How right is a number? Graded rewards for the arithmetic jobs: plain functions, as ``[reward] function`` takes them.

The exact answer earns 1. A wrong one earns at most 0.1: a twentieth for being a number at all and up to as much for
being near, so that a group of wrong completions still says which of them is the least wrong.
"""

from __future__ import annotations

import re

NUMBER = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?")
FORM = 0.05
NEAR = 0.1


def last_number(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """Score the last number of each completion: the running totals end in the answer."""
    return [_grade(_numbers(text)[-1:], right) for text, right in zip(completions, answer, strict=True)]


def only_number(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """Score completions that should be one number and nothing else; the last number among other words earns half."""
    scores = []
    for text, right in zip(completions, answer, strict=True):
        bare = NUMBER.fullmatch(text.strip().rstrip(".")) is not None
        scores.append(_grade(_numbers(text)[-1:], right) * (1.0 if bare else 0.5))
    return scores


def _numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


def _grade(found: list[float], right: str) -> float:
    """Return the reward of the number found, if any: 1 if exact, else form plus a part that falls with the distance."""
    if not found:
        return 0.0
    wanted = float(right)
    if found[0] == wanted:
        return 1.0
    return FORM + NEAR / (1.0 + abs(found[0] - wanted))
