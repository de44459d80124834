"""Reads trace and prompt files of every known shape into rows; the shape is found from the content.

JSON arrays, JSON Lines (split on \\n only), CSV with a header, and Parquet. Faults name the file, the line (or entry)
and the field.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedcli.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Record:
    """One raw record and where it stands (`trace.csv line 3`)."""

    where: str
    data: Mapping[str, Any]

    def fault(self, message: str) -> UsageError:
        return UsageError(f"{self.where}: {message}", "bad_trace")

    def get(self, field: str) -> Any:
        if field not in self.data or self.data[field] is None:
            raise self.fault(f"field {field!r} is missing; present: {', '.join(map(str, self.data)) or 'none'}")
        return self.data[field]

    def text(self, field: str) -> str:
        value = self.get(field)
        if not isinstance(value, str):
            raise self.fault(f"field {field!r} = {value!r}: must be a string")
        return value

    def number(self, field: str) -> float:
        value = self.get(field)
        try:
            if isinstance(value, bool):
                raise ValueError
            number = float(value)
        except (TypeError, ValueError):
            raise self.fault(f"field {field!r} = {value!r}: must be a number") from None
        if number != number or number in (float("inf"), float("-inf")):
            raise self.fault(f"field {field!r} = {value!r}: must be finite")
        return number

    def tokens(self, field: str) -> int:
        """A whole number of tokens, at least 0."""
        number = self.number(field)
        if number < 0 or number != int(number):
            raise self.fault(f"field {field!r} = {self.data[field]!r}: must be a whole number of tokens, at least 0")
        return int(number)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source, before tokens are counted and filters applied.

    Either text (`prompt`, `output`) or lengths (-1 where unknown); `drop` is the reason why the row cannot be used,
    if any. `name` is the row's own id, `turns` are the (speaker, text) of a whole conversation.
    """

    where: str
    prompt: str | None = None
    output: str | None = None
    prompt_len: int = -1
    output_len: int = -1
    arrival: float | None = None
    block_hashes: tuple[int, ...] = ()
    name: str | None = None
    turns: tuple[tuple[str, str], ...] = ()
    token_ids: tuple[int, ...] = ()
    drop: str | None = None


Parser = Callable[[Record], Row]


@dataclass(frozen=True, slots=True)
class Format:
    """One known shape: the fields that give it away, and how a record becomes a row.

    `content` is `conversations` (whole dialogues), `text` (prompt and output text), `lengths` or `prompts`.
    """

    name: str
    title: str
    fields: frozenset[str]
    content: str
    parse: Parser


@dataclass(frozen=True, slots=True)
class Table:
    """The records of one file and their shape."""

    name: str
    format: Format
    records: tuple[Record, ...]

    def rows(self) -> list[Row]:
        """Every record as a row, in file order."""
        return [self.format.parse(record) for record in self.records]


def known_formats() -> tuple[Format, ...]:
    """Every shape, most telling first."""
    from pagedcli.workloads import alpaca, prompts, sharegpt, traces, wmt16

    return (sharegpt.FORMAT, wmt16.FORMAT, alpaca.FORMAT, *traces.FORMATS, prompts.FORMAT, prompts.IDS_FORMAT)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file", "no_trace") from None
    except IsADirectoryError:
        raise UsageError(f"{path}: is a folder; give one file in it", "no_trace") from None
    except OSError as fault:
        raise UsageError(f"{path}: cannot be read ({fault.strerror})", "no_trace") from fault


def _decode(name: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        line = raw.count(b"\n", 0, fault.start) + 1
        raise UsageError(f"{name} line {line}: not UTF-8 (byte {fault.start})", "bad_trace") from None


def _object(where: str, data: Any) -> Record:
    if not isinstance(data, dict):
        raise UsageError(f"{where}: must be an object, is {type(data).__name__}", "bad_trace")
    return Record(where, data)


def _json_array(name: str, text: str) -> Iterator[Record]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as fault:
        raise UsageError(f"{name} line {fault.lineno} column {fault.colno}: not JSON ({fault.msg})",
                         "bad_trace") from None
    for number, item in enumerate(data, start=1):
        yield _object(f"{name} entry {number}", item)


def _json_lines(name: str, text: str) -> Iterator[Record]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                data = json.loads(line)
            except json.JSONDecodeError as fault:
                raise UsageError(f"{name} line {number} column {fault.colno}: not JSON ({fault.msg}); "
                                 "JSON Lines needs one whole object a line", "bad_trace") from None
            yield _object(f"{name} line {number}", data)


def _csv(name: str, text: str) -> Iterator[Record]:
    reader = csv.reader(io.StringIO(text, newline=""))
    header: list[str] | None = None
    for cells in reader:
        if not any(cell.strip() for cell in cells):
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
            continue
        where = f"{name} line {reader.line_num}"
        if len(cells) != len(header):
            raise UsageError(f"{where}: {len(cells)} fields where the header has {len(header)} "
                             f"({', '.join(header)})", "bad_trace")
        yield Record(where, dict(zip(header, (cell.strip() for cell in cells), strict=True)))


def _parquet(name: str, raw: bytes) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        items = pyarrow.parquet.read_table(io.BytesIO(raw)).to_pylist()
    except pyarrow.ArrowException as fault:
        raise UsageError(f"{name}: damaged Parquet file ({fault})", "bad_trace") from None
    for number, item in enumerate(items, start=1):
        yield _object(f"{name} row {number}", item)


def _records(path: Path) -> Iterable[Record]:
    raw = _bytes(path)
    if raw[:4] == b"PAR1":
        return _parquet(path.name, raw)
    text = _decode(path.name, raw)
    head = text.lstrip()[:1]
    if head == "[":
        return _json_array(path.name, text)
    if head == "{":
        return _json_lines(path.name, text)
    return _csv(path.name, text)


def detect(name: str, first: Record) -> Format:
    """The shape of a file from its first record; an unknown one is an error that lists the known ones."""
    present = {str(key).strip().lower() for key in first.data}
    for known in known_formats():
        if known.fields <= present:
            return known
    shapes = "; ".join(f"{f.name}: {', '.join(sorted(f.fields))}" for f in known_formats())
    raise UsageError(f"{first.where}: fields {', '.join(map(repr, first.data))} fit no known shape. "
                     f"Known ones need these fields: {shapes}", "unknown_trace")


def table_of(name: str, records: Iterable[Record]) -> Table:
    """Records with their detected shape; no record at all is an error."""
    found = tuple(records)
    if not found:
        raise UsageError(f"{name}: holds no rows", "empty_trace")
    return Table(name, detect(name, found[0]), found)


def read_table(path: Path) -> Table:
    """All records of a file and its shape. Raises UsageError naming the file, line and fault."""
    return table_of(path.name, _records(path))
