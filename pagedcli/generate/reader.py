"""From lines to rows with their requests, a chunk at a time, each told what it shares with the rows before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from pagedcli.core.config import RunConfig
from pagedcli.core.request import Request
from pagedcli.execution.interface import ExecutorLimits
from pagedcli.generate.formats import parse_row
from pagedcli.generate.journal import Journal
from pagedcli.generate.prefix_window import PrefixWindow
from pagedcli.generate.replica import prefix_tokens
from pagedcli.generate.row import Row
from pagedcli.generate.sampling import SamplingDefaults
from pagedcli.generate.source import InputRows, RawRow, Scan
from pagedcli.generate.tokens import TextCodec, Tokeniser

CHUNK_ROWS = 256
"""Rows parsed and tokenised at a time."""


class RowReader:
    """Rows that the journal does not have yet, in input order.

    With a window, rows that the journal has are read too, since later ones may share their beginnings, and each row
    gets its `shared`.
    """

    def __init__(self, source: InputRows, scan: Scan, journal: Journal, tokeniser: Tokeniser,
                 window: PrefixWindow | None) -> None:
        self._source = source
        self._repeated = scan.first_line_of if scan.repeated else None
        self._journal = journal
        self._tokeniser = tokeniser
        self._window = window

    def __iter__(self) -> Iterator[tuple[RawRow, Row, Request | None]]:
        """(line, row, request); no request for a row with a fault."""
        done, repeated, window = self._journal.done, self._repeated, self._window
        every = window is not None and self._journal.resumed > 0
        wanted = (raw for raw in self._source if every or not done(raw.index))
        while chunk := list(islice(wanted, CHUNK_ROWS)):
            rows = [parse_row(raw, repeated(raw.index) if repeated else None) for raw in chunk]
            for raw, row, request in zip(chunk, rows, self._tokeniser.requests(rows), strict=True):
                if window is not None and request is not None:
                    row.shared = window.add(request.prompt)
                if not done(row.index):
                    yield raw, row, request


def driver_reader(config: RunConfig, sampling: Mapping[str, Any], shared_prefix: str | None, source: InputRows,
                  scan: Scan, journal: Journal, limits: ExecutorLimits) -> RowReader:
    """The reader of a driver whose engines, with these limits, run elsewhere. Loads the model's tokenizer."""
    from pagedcli.engine.build import load_tokenizer_of

    tokenizer = load_tokenizer_of(config)
    codec = None if tokenizer is None else TextCodec(tokenizer)
    window = PrefixWindow.of_pool(limits, prefix_tokens(codec, shared_prefix))
    return RowReader(source, scan, journal, Tokeniser(codec, limits.vocab_size, SamplingDefaults(sampling)), window)
