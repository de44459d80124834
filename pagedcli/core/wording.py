"""Words that every message says alike."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun: `1 token`, `2 tokens`, `1,024 tokens`. `plural` where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def form(number: int, one: str, many: str) -> str:
    """The word that agrees with a count: `one` with 1, `many` with any other."""
    return one if number == 1 else many
