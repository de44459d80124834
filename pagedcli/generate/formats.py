"""From a line to a row, and from a row's end to a line, whichever format it is in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pagedcli.core.errors import RequestError
from pagedcli.core.sequence import SequenceGroup
from pagedcli.generate import native, openai
from pagedcli.generate.encoding import Line, encode
from pagedcli.generate.row import Row, decode_object
from pagedcli.generate.row_ids import id_of, is_openai, lenient_fields
from pagedcli.generate.source import RawRow
from pagedcli.generate.tokens import TextCodec


def parse_row(raw: RawRow, first_line: int | None = None) -> Row:
    """Read one line. Never raises for what the line holds: a fault is in `row.error`.

    `first_line`: line of the row that has the id which this row says, which makes this row a fault without an id.
    """
    row = Row(raw.index, raw.line)
    try:
        fields = _fields(row, raw.data)
        if row.form.openai:
            openai.parse(row, fields)
        else:
            native.parse(row, fields)
        if first_line is not None:
            said = json.dumps(row.id, ensure_ascii=False)
            raise RequestError("duplicate_id", f"id {said} on line {row.line} is that of line {first_line}: ids must "
                               "be unique, and a row that says none has its row number (from 0); use other ids, such "
                               "as strings")
    except RequestError as fault:
        row.fail(fault.code, fault.message)
    if first_line is not None:
        row.id = None
    return row


def _fields(row: Row, data: bytes) -> Mapping[str, Any]:
    """The fields of a line, with the row's id and form set from them. Raises RequestError for a line that is refused,
    whose id and form are then set as far as they can be read."""
    known: Mapping[str, Any] | None = None
    try:
        known = decode_object(data)
        return known
    except RequestError:
        known = lenient_fields(data)
        raise
    finally:
        row.id, _ = id_of(known, row.index)
        if known is not None and is_openai(known):
            row.form = openai.form_of(known)


def render_result(row: Row, group: SequenceGroup, codec: TextCodec | None, model: str) -> Line:
    """The output line (without its end) of a finished request."""
    if row.form.openai:
        return encode(openai.result(row, group, codec, model))
    return encode(native.result(row, group, codec))


def render_failure(row: Row, prompt_tokens: int = 0) -> Line:
    """The output line (without its end) of a row with a fault."""
    return encode(openai.failure(row) if row.form.openai else native.failure(row, prompt_tokens))
