"""A reward that even a random model can earn: the share of digits among the characters."""

from __future__ import annotations


def digits(completions: list[str], **columns: object) -> list[float]:
    return [sum(char.isdigit() for char in text) / max(1, len(text)) for text in completions]
