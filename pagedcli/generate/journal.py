"""The crash-safe record of a job: finished rows in the order they finish, put into input order at the end.

A journal is JSON Lines: a header with the settings that decide the rows, then one line a row,
`{"index": 3, "ok": true, "row": {...}, "crc": "1c291ca3"}`. Lines are handed to the kernel once per engine step in
which rows finished, so a killed process loses none of them; they are forced to the disk every SYNC_SECONDS and before
the rename, so a power cut loses at most those seconds. A line that is torn or fails its checksum is cut off together
with what follows it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pagedcli.core.errors import CannotRunError
from pagedcli.core.wording import counted
from pagedcli.generate.encoding import Line
from pagedcli.generate.journal_file import DiskFaults, open_locked, sync_folder, write_all
from pagedcli.generate.journal_header import (
    FORMAT,
    Settings,
    check_header,
    differences,
    read_ran_on,
    refuse_differences,
    torn_header,
)

SYNC_SECONDS = 10.0
_CHUNK = 1 << 20
_HEAD = re.compile(rb'\{"index": (\d+), "ok": (true|false), "row": ')
_TAIL = re.compile(rb', "crc": "([0-9a-f]{8})"\}\n')
_TAIL_BYTES = len(b', "crc": "01234567"}\n')


class Journal:
    """An open journal of `rows` rows. Holds 16 bytes a row, never the rows themselves.

    `settings` is what the header holds and a resumed run must agree with. One process at a time: a lock is held until
    `close`. Raises UsageError for a journal of another run (naming what differs) or of a running one, CannotRunError
    when the disk refuses.
    """

    def __init__(self, path: Path, settings: Settings, rows: int, restart: bool = False) -> None:
        self.path = path
        self.rows = rows
        self.resumed = 0
        self.finished = 0
        self.failed = 0
        self.first_failed: int | None = None
        self._kept = 0  # rows that the kernel has taken whole
        self.ran_on: dict[str, Any] | None = None
        self._places = array("q", [-1]) * rows
        self._lengths = array("q", [0]) * rows
        self._pending: list[bytes] = []
        self._synced = time.monotonic()
        self._ours = False  # until the file is known to be a journal of this run, closing must not touch it
        self._fd = open_locked(path)
        try:
            self._end = self._load(json.loads(json.dumps(settings)), restart)
        except BaseException:
            self.close()
            raise

    def done(self, index: int) -> bool:
        """Whether the row is in the journal."""
        return self._places[index] >= 0

    @property
    def complete(self) -> bool:
        return self.finished == self.rows

    def confirm(self, ran_on: Settings) -> None:
        """Note what the rows are computed on once it is known. Raises UsageError when earlier rows were computed on
        something else: the file would mix two models' words."""
        ours = json.loads(json.dumps(ran_on))
        if self.ran_on is not None:
            refuse_differences(self.path, differences(ours, self.ran_on))
            return
        self.ran_on = ours
        line = json.dumps({"ran_on": ours}).encode() + b"\n"
        self._pending.append(line)
        self._end += len(line)

    def append(self, index: int, line: Line, ok: bool) -> None:
        """Add a finished row (its output line, without the end). Durable after the next `flush`."""
        head = b'{"index": %d, "ok": %s, "row": ' % (index, b"true" if ok else b"false")
        place = self._end + len(head)
        self._pending.append(head)
        length = crc = 0
        for piece in (line,) if isinstance(line, bytes) else line:
            self._pending.append(piece)
            length += len(piece)
            crc = zlib.crc32(piece, crc)
            if len(piece) >= _CHUNK:
                self.flush()
        self._pending.append(b', "crc": "%08x"}\n' % crc)
        self._end = place + length + _TAIL_BYTES
        self._note(index, place, length, ok)

    def flush(self) -> None:
        """Hand the rows added so far to the kernel."""
        if not self._pending:
            return
        data = b"".join(self._pending)
        self._pending.clear()
        with self._disk():
            write_all(self._fd, data)
            self._kept = self.finished  # of a part of the data that was taken, the next start may find more
            if time.monotonic() - self._synced > SYNC_SECONDS:
                os.fsync(self._fd)
                self._synced = time.monotonic()

    def row(self, index: int) -> bytes:
        """A finished row's output line, without its end; also after `publish`, until `close`."""
        self.flush()
        return os.pread(self._fd, self._lengths[index], self._places[index])

    def ordered(self) -> Iterator[bytes]:
        """The output in input order, in pieces of about a mebibyte."""
        pieces: list[bytes] = []
        size = 0
        for place, length in zip(self._places, self._lengths, strict=True):
            for start in range(place, place + length, _CHUNK):
                pieces.append(os.pread(self._fd, min(_CHUNK, place + length - start), start))
                size += len(pieces[-1])
                if size >= _CHUNK:
                    yield b"".join(pieces)
                    pieces.clear()
                    size = 0
            pieces.append(b"\n")
        yield b"".join(pieces)

    def publish(self, output: Path) -> None:
        """Write `output` in input order beside itself, rename it into place at once, and remove the journal."""
        self.flush()
        draft = output.with_name(output.name + ".sorting")
        with self._disk(), draft.open("wb", buffering=0) as target:
            try:
                for piece in self.ordered():
                    write_all(target.fileno(), piece)
                os.fsync(target.fileno())
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
        with self._disk():
            os.replace(draft, output)
            sync_folder(output.parent)
            self.remove()

    def stream(self, target: BinaryIO) -> None:
        """Write the output in input order to a stream, and remove the journal once it has taken everything."""
        self.flush()
        try:
            for piece in self.ordered():
                target.write(piece)
            target.flush()
        except OSError as fault:
            closed = isinstance(fault, BrokenPipeError) or fault.errno == errno.EPIPE
            what = "the output was closed before all rows were written" if closed else (
                f"writing the output failed: {fault.strerror}")
            raise CannotRunError(f"{what}; {counted(self.rows, 'row')}, all of them, kept in {self.path}: run the "
                                 "same command again and none is generated twice",
                                 "output_closed" if closed else "no_space") from fault
        self.remove()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; idempotent. Rows not yet flushed are flushed when the disk still takes them, and a journal
        without any row is removed."""
        if self._fd < 0:
            return
        try:
            if self._ours and self.rows and not self.finished:
                self.remove()
            elif self._pending:
                write_all(self._fd, b"".join(self._pending))
        except OSError:
            pass  # the failure that brought us here has been reported; those rows will be generated again
        finally:
            self._pending.clear()
            os.close(self._fd)
            self._fd = -1

    # -- reading what an earlier run left -----------------------------------------------------------------------------

    def _load(self, settings: Settings, restart: bool) -> int:
        """Take over an earlier run's rows, or start anew. Returns the file's length."""
        with os.fdopen(os.dup(self._fd), "rb", buffering=_CHUNK) as stream:
            stream.seek(0)
            head = b"" if restart else stream.readline(_CHUNK)
            end = 0
            if head and not torn_header(head):
                check_header(self.path, head, settings)
                end = self._load_rows(stream, len(head))
        self._ours = True
        with self._disk():
            os.ftruncate(self._fd, end)
            os.lseek(self._fd, end, os.SEEK_SET)
            if end == 0:
                head = json.dumps({"pagedcli_journal": FORMAT, **settings}).encode() + b"\n"
                write_all(self._fd, head)
                end = len(head)
        self.resumed = self._kept = self.finished
        return end

    def _load_rows(self, stream: BinaryIO, end: int) -> int:
        line = stream.readline(_CHUNK)
        self.ran_on = read_ran_on(line)
        if self.ran_on is not None:
            end += len(line)
            line = stream.readline(_CHUNK)
        while head := _HEAD.match(line):
            index, start = int(head[1]), head.end()
            length = _checked_length(stream, line[start:])
            if length is None or index >= self.rows or self.done(index):
                break
            self._note(index, end + start, length, head[2] == b"true")
            end += start + length + _TAIL_BYTES
            line = stream.readline(_CHUNK)
        return end

    def _note(self, index: int, place: int, length: int, ok: bool) -> None:
        self._places[index] = place
        self._lengths[index] = length
        self.finished += 1
        self.failed += not ok
        if not ok and (self.first_failed is None or index < self.first_failed):
            self.first_failed = index

    def _disk(self) -> DiskFaults:
        return DiskFaults(self.path, lambda: self._kept)


def _checked_length(stream: BinaryIO, part: bytes) -> int | None:
    """Length of a row whose first bytes are `part` (the rest of its line is read from `stream`), or None when the line
    is torn or its checksum is wrong. Memory is bounded however long the line is."""
    length = crc = 0
    while not part.endswith(b"\n"):
        keep = max(len(part) - _TAIL_BYTES, 0)
        crc, length = zlib.crc32(part[:keep], crc), length + keep
        more = stream.readline(_CHUNK)
        if not more:
            return None
        part = part[keep:] + more
    keep = len(part) - _TAIL_BYTES
    tail = _TAIL.fullmatch(part[max(keep, 0):])
    if tail is None or zlib.crc32(part[:keep], crc) != int(tail[1], 16):
        return None
    return length + keep
