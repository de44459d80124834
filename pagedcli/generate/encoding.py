"""Rows as lines of JSON, in pieces where a row is larger than memory should hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

PIECE_BYTES = 1 << 20

Line = bytes | Iterator[bytes]
"""A line of output without its end: whole, or in pieces of about PIECE_BYTES."""

_BREAKS = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


class Lazy:
    """A JSON list whose items are made one at a time while the line is written: log probabilities of a whole
    vocabulary at thousands of positions do not fit in memory as JSON."""

    __slots__ = ("items",)

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items


def encode(record: dict[str, Any]) -> Line:
    """One line of JSON in UTF-8; infinities and NaN are refused with ValueError.

    Line breaks that only Unicode knows are escaped, so that readers which split on them still see one line; a lone
    surrogate is escaped too.
    """
    found: list[Lazy] = []
    text = _Encoder(found).encode(record)
    if not found:
        return _bytes(text)
    pieces = _gather(_splice(text, found))
    first = next(pieces)
    second = next(pieces, None)
    return first if second is None else _chain(first, second, pieces)


class _Encoder(json.JSONEncoder):
    """Leaves a mark for each Lazy list and remembers it."""

    def __init__(self, found: list[Lazy]) -> None:
        super().__init__(ensure_ascii=False, allow_nan=False)
        self._found = found

    def default(self, item: Any) -> Any:
        if not isinstance(item, Lazy):
            return super().default(item)
        self._found.append(item)
        return {_MARK: len(self._found)}


_MARK = "\x00list\x00"
_item = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def _splice(text: str, found: list[Lazy]) -> Iterator[bytes]:
    """The text with each mark replaced by its list, item by item. A mark is an object, so that no string of the row
    can be taken for one: quotes inside strings are escaped."""
    for number, lazy in enumerate(found, 1):
        before, _, text = text.partition(_item({_MARK: number}))
        yield _bytes(before + "[")
        for place, item in enumerate(lazy.items):
            yield _bytes((", " if place else "") + _item(item))
        yield b"]"
    yield _bytes(text)


def _gather(pieces: Iterable[bytes]) -> Iterator[bytes]:
    kept: list[bytes] = []
    size = 0
    for piece in pieces:
        kept.append(piece)
        size += len(piece)
        if size >= PIECE_BYTES:
            yield b"".join(kept)
            kept.clear()
            size = 0
    yield b"".join(kept)


def _chain(first: bytes, second: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield second
    yield from rest


def _bytes(text: str) -> bytes:
    if text.isascii():
        return text.encode("ascii")
    if "\u2028" in text or "\u2029" in text or "\u0085" in text:
        text = text.translate(_BREAKS)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return "".join(char if not 0xD800 <= ord(char) < 0xE000 else f"\\u{ord(char):04x}" for char in text).encode()
