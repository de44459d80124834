"""From a line to a row, and from a row's end to a line, whichever format it is in."""

from __future__ import annotations

from pagedcli.core.errors import RequestError
from pagedcli.core.sequence import SequenceGroup
from pagedcli.generate import native, openai
from pagedcli.generate.encoding import Line, encode
from pagedcli.generate.row import Row, decode_object
from pagedcli.generate.source import RawRow
from pagedcli.generate.tokens import TextCodec


def parse_row(raw: RawRow, first_line: int | None = None) -> Row:
    """Read one line. Never raises for what the line holds: a fault is in `row.error`.

    `first_line`: line of an earlier row with the same id, which makes this row a fault.
    """
    row = Row(raw.index, raw.line)
    try:
        fields = decode_object(raw.data)
        if openai.is_openai(fields):
            openai.parse(row, fields)
        else:
            native.parse(row, fields)
        if first_line is not None:
            raise RequestError("duplicate_id", f"id {row.id!r} on line {row.line} was already used on line "
                               f"{first_line}; ids must be unique, and a row without one has its row number (from 0)")
    except RequestError as fault:
        row.fail(fault.code, fault.message)
    return row


def render_result(row: Row, group: SequenceGroup, codec: TextCodec | None, model: str) -> Line:
    """The output line (without its end) of a finished request."""
    if row.form.openai:
        return encode(openai.result(row, group, codec, model))
    return encode(native.result(row, group, codec))


def render_failure(row: Row, prompt_tokens: int = 0) -> Line:
    """The output line (without its end) of a row with a fault."""
    return encode(openai.failure(row) if row.form.openai else native.failure(row, prompt_tokens))
