"""What a row is called: the id that it says, its number where it says none, nothing where neither can be read.

Of several rows that say one id the first has it; a row that says none has its number, whoever says that number. All
others are refused and come out with the id null, so an id in the output stands for one row of the input.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

MAX_ROW_BYTES = 64 << 20
"""Longest line that is read as a row, in bytes; a longer one becomes an error row."""

RowId = int | str

_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],:"]|[^\s{}\[\],:"]+', re.DOTALL)
_AMBIGUOUS: list[object] = []
"""Stands for a field that is said twice: of no type that an id can have."""


def is_openai(fields: Mapping[str, Any]) -> bool:
    """Whether a row is meant as an OpenAI batch request."""
    return "custom_id" in fields or ("body" in fields and "url" in fields)


def is_row_id(value: object) -> bool:
    """Whether a JSON value can be a row's id: a string of valid characters, or an integer."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
        return True
    return isinstance(value, int) and not isinstance(value, bool)


def id_of(fields: Mapping[str, Any] | None, index: int) -> tuple[RowId | None, bool]:
    """(id, whether the row says it) of row number `index`; (None, False) for a line without fields, (None, True) for an
    id that cannot be one."""
    if fields is None:
        return None, False
    if is_openai(fields):
        found = fields.get("custom_id")
        return (found if isinstance(found, str) and is_row_id(found) else None), True
    found = fields.get("id")
    if found is None:
        return index, False
    return (found if is_row_id(found) else None), True


def model_of(fields: Mapping[str, Any] | None) -> str | None:
    """The model that a batch request names, if it names one."""
    body = fields.get("body") if fields is not None and is_openai(fields) else None
    name = body.get("model") if isinstance(body, dict) else None
    return name if isinstance(name, str) else None


def lenient_fields(data: bytes) -> dict[str, Any] | None:
    """The fields of a line for the sake of its id, also where something else in it is refused: half a surrogate pair,
    a byte that is not UTF-8, NaN, too deep a nesting, too long a number. None for what is not an object."""
    if len(data) > MAX_ROW_BYTES:
        return None  # it is cut
    try:
        once = data.count(b'id"') < 2 and b"\\u" not in data
        found = json.loads(data.decode(), strict=False, object_pairs_hook=None if once else _repeats_marked)
        return found if isinstance(found, dict) else None
    except (ValueError, RecursionError):
        pass
    try:
        return _outline(data.decode())
    except UnicodeDecodeError:
        found = _outline(data.decode(errors="replace"))
        if found is None:
            return None
        broken = {name: _AMBIGUOUS for name, value in found.items() if isinstance(value, str) and "\ufffd" in value}
        return {**found, **broken}


def _repeats_marked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        found |= {name: _AMBIGUOUS for name in found if names.count(name) > 1}
    return found


def _outline(text: str) -> dict[str, Any] | None:
    """The object's own strings and numbers, with what is nested in it passed over; None where brackets, names or commas
    do not make an object."""
    found: dict[str, Any] = {}
    depth, name, wanted = 0, "", "{"
    for match in _TOKEN.finditer(text):
        token = match[0]
        if depth > 1:
            depth += (token in "{[") - (token in "]}")
            continue
        if wanted == "name":
            if token[0] != '"' or len(token) == 1:
                return None
            name, wanted = str(_scalar(token)), ":"
        elif wanted == "value":
            if token in ',:]}"':
                return None
            value = {} if token in "{[" else _scalar(token)
            found[name] = _AMBIGUOUS if name in found else value
            depth += token in "{["
            wanted = ",}"
        elif not wanted or token not in wanted:
            return None
        else:
            depth += (token == "{") - (token == "}")
            wanted = {"{": "name", ",": "name", ":": "value", "}": ""}[token]
    return found if not wanted and not depth else None


def _scalar(token: str) -> object:
    try:
        return json.loads(token, strict=False)
    except ValueError:
        return _AMBIGUOUS
