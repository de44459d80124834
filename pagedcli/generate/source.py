"""The input file of a job: rows as raw bytes, read in two passes and never held whole."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO

import numpy as np

from pagedcli.core.errors import CannotRunError, UsageError
from pagedcli.core.wording import counted
from pagedcli.generate.remote import is_url, open_url
from pagedcli.generate.row_ids import MAX_ROW_BYTES, RowId, id_of, lenient_fields, model_of

MAX_MODELS = 256
_ENDS = 1 << 16
_CR_LINES = re.compile(rb"\}[ \t]*\r[ \t\r]*\{")
_ARRAY = re.compile(rb"\[\s*(\{|$)")
_BUFFER = 1 << 20
_BLANK = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_FOREIGN = (
    (b"\xff\xfe", "UTF-16 or UTF-32 text"), (b"\xfe\xff", "UTF-16 text"), (b"\x1f\x8b", "gzip data"),
    (b"PAR1", "a Parquet file"), (b"PK\x03\x04", "a zip archive"), (b"\x28\xb5\x2f\xfd", "zstd data"),
)


@dataclass(frozen=True, slots=True)
class RawRow:
    """One non-blank line. `index` counts rows from 0, `line` physical lines from 1. `data` is stripped of blanks;
    a line above MAX_ROW_BYTES is cut to one byte more than that."""

    index: int
    line: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Scan:
    """What the first pass found. `digest` is a hash of the lines read, whatever the file's name or date.

    `repeated` holds, in file order, the rows that say an id which another row has, and `first_lines` that row's line.
    `models`: (rows, index of the first) by the model that a batch request names; names after the first MAX_MODELS
    count as one, the empty name.
    """

    rows: int
    size: int
    digest: str
    repeated: array[int]
    first_lines: array[int]
    models: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def first_line_of(self, index: int) -> int | None:
        """Line of the row that has the id which this row says, or None where it is its own."""
        place = int(np.searchsorted(np.asarray(self.repeated), index))
        if place < len(self.repeated) and self.repeated[place] == index:
            return self.first_lines[place]
        return None


class InputRows:
    """A JSON Lines file opened for several passes.

    Lines end at `\\n` and nowhere else (U+2028, U+0085 and form feeds belong to the text). Memory: one line.
    Raises UsageError for a file that cannot be read or is another format altogether.
    """

    def __init__(self, stream: IO[bytes], name: str, limit: int | None = None) -> None:
        self.name = name
        self.limit = limit
        self._stream = stream
        head, tail = self._ends()
        for magic, what in _FOREIGN:
            if head.startswith(magic):
                raise UsageError(f"{name} is {what}; JSON Lines in UTF-8 is needed, so convert or unpack it first",
                                 "not_utf8")
        found = _other_layout(head.removeprefix(_BOM), tail)
        if found is not None:
            raise UsageError(f"{name} {found}", "not_json_lines")

    @classmethod
    def open(cls, path: str, stdin: IO[bytes], limit: int | None = None) -> InputRows:
        """Open `path`, or `stdin` for `-`. What cannot be rewound, and URLs, are spooled to a
        temporary file."""
        if path == "-":
            return cls(_spool(stdin, "standard input"), "standard input", limit)
        if is_url(path):
            with open_url(path, "rb") as remote:
                return cls(_spool(remote, path), path, limit)
        try:
            stream = open(path, "rb", buffering=_BUFFER)  # noqa: SIM115 - closed by close()
        except OSError as fault:
            raise UsageError(f"cannot read {path}: {fault.strerror}", "unreadable_input") from fault
        if not stream.seekable():
            with stream:
                return cls(_spool(stream, path), path, limit)
        return cls(stream, path, limit)

    def close(self) -> None:
        self._stream.close()

    def __iter__(self) -> Iterator[RawRow]:
        index = 0
        for line, raw in self._lines():
            data = raw.strip(_BLANK)
            if not data:
                continue
            if self.limit is not None and index >= self.limit:
                return
            yield RawRow(index, line, data)
            index += 1

    def scan(self) -> Scan:
        """The first pass: count and hash the rows, and find repeated ids.

        Holds 8 bytes a row, plus the repeated ids themselves. Which row has an id: see `row_ids`.
        """
        digest = hashlib.blake2b(digest_size=16)
        hashes = array("q")
        size = undecodable = 0
        given = False
        models: dict[str, tuple[int, int]] = {}
        found: RowId | None
        for row in self:
            data = row.data
            size += len(data)
            digest.update(b"%d:" % row.line)
            digest.update(data)
            found, said = row.index, False
            if _may_say_id(data):
                fields = lenient_fields(data)
                found, said = id_of(fields, row.index)
                _count_model(models, model_of(fields), row.index)
            given = given or said
            hashes.append(hash(row.index if found is None else found))
            undecodable += not _is_utf8(data)
        if undecodable and undecodable == len(hashes):
            raise UsageError(f"{self.name} is not UTF-8 text: none of its {counted(undecodable, 'line')} can be "
                             "decoded", "not_utf8")
        repeated, first_lines = self._repeated(hashes) if given else (array("q"), array("q"))
        return Scan(len(hashes), size, digest.hexdigest(), repeated, first_lines, models)

    def _repeated(self, hashes: array[int]) -> tuple[array[int], array[int]]:
        """Rows that repeat an id: candidates by equal hashes, then compared exactly in one more pass."""
        view = np.frombuffer(hashes, dtype=np.int64)
        ordered = np.sort(view)
        candidates = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
        repeated: dict[int, int] = {}
        owners: dict[RowId, tuple[int, int]] = {}  # (index, line) of the row that has an id so far
        for row in self if candidates else ():
            if hashes[row.index] not in candidates:
                continue
            found, said = id_of(lenient_fields(row.data), row.index)
            if found is None:
                continue
            owner = owners.get(found)
            if owner is None or not said:
                owners[found] = row.index, row.line
            if owner is not None:
                refused, line = (row.index, owner[1]) if said else (owner[0], row.line)
                repeated[refused] = line
        places = sorted(repeated)
        return array("q", places), array("q", [repeated[place] for place in places])

    def _ends(self) -> tuple[bytes, bytes]:
        """The first and the last bytes, up to _ENDS of each."""
        stream = self._stream
        try:
            stream.seek(0)
            head = stream.read(_ENDS)
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(size - _ENDS, 0))
            tail = stream.read(_ENDS)
            stream.seek(0)
        except OSError as fault:
            raise UsageError(f"cannot read {self.name}: {fault.strerror}", "unreadable_input") from fault
        return head, tail

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        stream, line = self._stream, 0
        stream.seek(0)
        if stream.read(3) != _BOM:
            stream.seek(0)
        try:
            while raw := stream.readline(MAX_ROW_BYTES + 1):
                line += 1
                if len(raw) > MAX_ROW_BYTES:
                    rest = raw
                    while rest and not rest.endswith(b"\n"):
                        rest = stream.readline(_BUFFER)
                yield line, raw
        except OSError as fault:
            raise CannotRunError(f"reading {self.name} failed at line {line + 1}: {fault.strerror}",
                                 "unreadable_input") from fault


def _other_layout(head: bytes, tail: bytes) -> str | None:
    """What is wrong with a file whose objects do not stand one a line, by its two ends; None when nothing is."""
    if b"\n" not in head and _CR_LINES.search(head):
        return "has lines that end in CR only: end them in LF (tr '\\r' '\\n' does it)"
    first, last = head.split(b"\n", 1)[0].strip(_BLANK), tail.strip(_BLANK)[-1:]
    if _ARRAY.match(first or head.strip(_BLANK)) and last == b"]":
        return "looks like a JSON array: one object a line is wanted (jq -c '.[]' makes that of it)"
    if first == b"{" and last == b"}":
        return "looks like JSON over several lines: one object a line is wanted (jq -c . makes that of it)"
    return None


def _may_say_id(data: bytes) -> bool:
    """False for most rows that say no id, without reading them as JSON."""
    return b'id"' in data or b"\\u" in data


def _count_model(models: dict[str, tuple[int, int]], name: str | None, index: int) -> None:
    if name is None:
        return
    if name not in models and len(models) >= MAX_MODELS:
        name = ""
    count, first = models.get(name, (0, index))
    models[name] = count + 1, first


def _is_utf8(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _spool(stream: IO[bytes], name: str) -> IO[bytes]:
    """A rewindable copy of a stream in an unnamed temporary file."""
    spool = tempfile.TemporaryFile(buffering=_BUFFER)  # noqa: SIM115 - closed by its user
    try:
        shutil.copyfileobj(stream, spool, _BUFFER)
        spool.flush()
    except OSError as fault:
        spool.close()
        raise CannotRunError(f"cannot spool {name} to the temporary folder {tempfile.gettempdir()}: "
                             f"{fault.strerror}; set TMPDIR to a folder with room", "no_space") from fault
    spool.seek(0, os.SEEK_SET)
    return spool
