"""A row on its way from line to request, and the faults it can have."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterable
from enum import Enum
from typing import Any

from pagedcli.core.errors import RequestError
from pagedcli.generate.row_ids import MAX_ROW_BYTES, RowId

MAX_MESSAGE = 600
"""Characters of a row's error message; a longer one is cut in the middle."""


_CLOSE = 0.8
"""Likeness from which a known field is offered for an unknown one: max_new_tokens for max_tokens, but no field that
only shares words."""

_NUMBER = re.compile(r"-?\d+")
_ODD = {"\0": "NUL", "\x1a": "Ctrl-Z, with which DOS ends a file", "\ufeff": "a byte order mark, as in joined files"}


class Form(Enum):
    """The shape a row came in, which is the shape it goes out in."""

    NATIVE = "native"
    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"

    @property
    def openai(self) -> bool:
        return self is not Form.NATIVE


class Row:
    """One row of input. Exactly one of `text`, `ids` and `messages` is set once it has been parsed without a fault.

    `id` is None for a row that has none (`row_ids`).
    `error` is (code, message) of the first fault. `settings` are the sampling fields that the row sets itself.
    `shared`: leading prompt tokens that earlier rows have too (`prefix_window`); None when nobody asked.
    """

    __slots__ = ("error", "form", "id", "ids", "index", "line", "messages", "metadata", "model", "settings",
                 "shared", "text")

    def __init__(self, index: int, line: int) -> None:
        self.index = index
        self.line = line
        self.id: RowId | None = index
        self.form = Form.NATIVE
        self.text: str | None = None
        self.ids: list[int] | None = None
        self.messages: list[dict[str, Any]] | None = None
        self.settings: dict[str, Any] = {}
        self.metadata: dict[str, Any] | None = None
        self.model: str | None = None
        self.shared: int | None = None
        self.error: tuple[str, str] | None = None

    @property
    def key(self) -> str:
        """Name of the row in random streams: its id, where text that reads like a number is told from the number."""
        if isinstance(self.id, str) and (self.id.startswith('"') or _NUMBER.fullmatch(self.id)):
            return f'"{self.id}"'
        return str(self.id)

    def fail(self, code: str, message: str) -> None:
        if len(message) > MAX_MESSAGE:
            half = MAX_MESSAGE // 2 - 10
            message = f"{message[:half]} [...] {message[-half:]}"
        self.error = (code, message)


def wrong_type(name: str, value: object, rule: str) -> RequestError:
    return RequestError("wrong_type", f"{name} is {describe(value)}: must be {rule}")


def describe(value: object) -> str:
    """A JSON value in a few words, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return "the string " + json.dumps(value[:40], ensure_ascii=False) + ("..." if len(value) > 40 else "")
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)} item" + ("" if len(value) == 1 else "s")
    return f"the number {json.dumps(value)}"[:60]


def unknown_field(name: str, known: Iterable[str], where: str = "") -> RequestError:
    close = difflib.get_close_matches(name, list(known), 1, _CLOSE)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return RequestError("unknown_field", f"unknown field {name[:80]!r}{where}{hint}")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError("repeated_field", f"the field {twice[:80]!r} stands twice in one object; keep one")
    return result


def _no_constant(name: str) -> float:
    raise RequestError("invalid_json", f"{name} is not JSON; numbers must be finite")


# Not strict: raw tabs and form feeds inside strings are taken as they stand.
_decode = json.JSONDecoder(object_pairs_hook=_no_repeats, parse_constant=_no_constant, strict=False).decode


def decode_object(data: bytes) -> dict[str, Any]:
    """The JSON object of one line. Raises RequestError saying what is wrong and at which byte or column."""
    if len(data) > MAX_ROW_BYTES:
        raise RequestError("row_too_long", f"the line is longer than {MAX_ROW_BYTES} bytes, the limit for a row")
    try:
        text = data.decode()
        value = _decode(text)
    except UnicodeDecodeError as fault:
        raise RequestError("not_utf8", f"the line is not UTF-8: byte 0x{data[fault.start]:02x} at offset {fault.start} "
                           f"of {len(data)}") from fault
    except json.JSONDecodeError as fault:
        raise RequestError("invalid_json", f"the line is not JSON: {fault.msg.removesuffix(' at')} at column "
                           f"{fault.colno}{_odd(text, fault.pos)}") from fault
    except RecursionError as fault:
        raise RequestError("nested_too_deeply", f"objects and lists are nested {_depth(data)} deep; the limit is about "
                           f"{sys.getrecursionlimit()}") from fault
    except ValueError as fault:  # Python refuses to read integers of thousands of digits
        raise RequestError("number_too_long", "a number in the line has more than "
                           f"{sys.get_int_max_str_digits()} digits, the limit for an integer") from fault
    if not isinstance(value, dict):
        raise RequestError("not_an_object", f"the line is {describe(value)}: a row must be a JSON object such as "
                           '{"prompt": "..."}')
    if b"\\u" in data:
        _refuse_lone_surrogates(value)
    return value


def _odd(text: str, place: int) -> str:
    """What to say of a character that cannot be seen, where one stands."""
    found = text[place:place + 1]
    if not found or found.isprintable() or found.isspace():
        return ""
    return f", where U+{ord(found):04X} stands" + (f" ({_ODD[found]}); remove it" if found in _ODD else "")


def _depth(data: bytes) -> int:
    """Deepest nesting of brackets (those in strings counted too: good enough for a message)."""
    deepest = depth = 0
    for byte in data:
        if byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest


def _refuse_lone_surrogates(value: dict[str, Any]) -> None:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        code = ord(text[fault.start])
        raise RequestError("lone_surrogate", f"\\u{code:04x} stands without its other half, so it is not a character; "
                           "write the pair or the character itself") from fault
