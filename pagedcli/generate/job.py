"""A batch job: rows from disk through an engine into a journal, with bounded memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from pagedcli.core.errors import ExitStatus, PagedError, RequestError
from pagedcli.core.request import Request, SamplingParams
from pagedcli.generate.desk import Desk, Serving
from pagedcli.generate.formats import parse_row
from pagedcli.generate.journal import Journal
from pagedcli.generate.resume_cache import FinishedPrefixes
from pagedcli.generate.row import Row
from pagedcli.generate.sampling import SamplingDefaults
from pagedcli.generate.source import InputRows, Scan
from pagedcli.generate.tokens import TextCodec

CHUNK_ROWS = 256
"""Rows parsed and tokenised at a time."""

QUEUE_FACTOR = 2
"""Requests in the engine at most, as a multiple of --max-num-seqs: enough that none of its steps starves."""

PROGRESS_SECONDS = 0.2

RESTORED = -1
"""Index of the requests that only bring a prefix back into the cache; they have no row."""


class Interrupted(PagedError):
    """The job was asked to stop; its journal is kept."""

    exit_status = ExitStatus.INTERRUPTED


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a job stands. Rows count input rows, whatever n is; `kv_used` is a share of the pool (0 to 1).
    `replicas` has a line for each engine when there are several."""

    rows: int
    total: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    kv_used: float
    running: int
    waiting: int
    replicas: tuple[str, ...] = ()


Observer = Callable[[Progress], None]


class Job:
    """Runs every row that the journal does not have yet.

    `run` raises Interrupted after `stop`, and whatever the engine or the disk raises; the journal then holds
    all finished rows. Rows are parsed and tokenised CHUNK_ROWS ahead of the engine, which holds at most QUEUE_FACTOR
    times its `max_num_seqs` requests. `prefix_cache` says that the engine finds earlier prompts' blocks again: a
    resumed run then first restores those that the rows to come share with finished ones.
    """

    def __init__(self, source: InputRows, scan: Scan, engine: Serving, codec: TextCodec | None, journal: Journal,
                 defaults: SamplingDefaults, observer: Observer | None = None, prefix_cache: bool = False) -> None:
        self.source = source
        self.scan = scan
        self.engine = engine
        self.journal = journal
        self.observer = observer
        self.desk = Desk(engine, codec, defaults, journal.append)
        self._stopping = False
        restoring = prefix_cache and journal.resumed > 0
        self._prefixes = FinishedPrefixes(engine.executor.limits.block_size) if restoring else None
        self._started = self._shown = time.perf_counter()

    def stop(self) -> None:
        """Ask `run` to end after the step it is in. Safe in a signal handler."""
        self._stopping = True

    def run(self) -> None:
        engine, journal = self.engine, self.journal
        most = max(QUEUE_FACTOR * engine.max_num_seqs, 2)
        feed = self._feed()
        exhausted = False
        while True:
            while not exhausted and len(self.desk) < most and not self._stopping:
                item = next(feed, None)
                if item is None:
                    exhausted = True
                else:
                    self._submit(*item)
            if self._stopping:
                break
            if engine.has_work():
                for group in engine.step():
                    if group.request.index != RESTORED:
                        self.desk.finish(group)
            elif self.desk:
                raise AssertionError(f"the engine is idle with {len(self.desk)} requests unfinished")
            journal.flush()
            self._show()
            if exhausted and not self.desk:
                break
        journal.flush()
        self._show(last=True)
        if self._stopping and not journal.complete:
            raise Interrupted(f"stopped with {journal.finished} of {journal.rows} rows done; they are kept in "
                              f"{journal.path}", "interrupted")

    def _feed(self) -> Iterator[tuple[Row, Request | None]]:
        """Rows still to do, each with its request unless it has a fault."""
        repeated = self.scan.first_line_of if self.scan.repeated else None
        done = self.journal.done
        wanted = (raw for raw in self.source if self._prefixes is not None or not done(raw.index))
        while chunk := list(islice(wanted, CHUNK_ROWS)):
            rows = [parse_row(raw, repeated(raw.index) if repeated else None) for raw in chunk]
            for row, request in zip(rows, self.desk.tokeniser.requests(rows), strict=True):
                if not done(row.index):
                    yield row, request
                elif request is not None and self._prefixes is not None:
                    self._prefixes.finished(request.prompt)

    def _submit(self, row: Row, request: Request | None) -> None:
        if request is not None and self._prefixes is not None:
            shared = self._prefixes.needed(request.prompt)
            if shared:
                prefix = Request(RESTORED, "restored prefix", request.prompt[:shared], SamplingParams(max_tokens=0))
                with suppress(RequestError):  # a prompt that cannot fit is told so below
                    self.engine.add(prefix)
        self.desk.submit(row, request)

    def _show(self, last: bool = False) -> None:
        if self.observer is None:
            return
        now = time.perf_counter()
        if not last and now - self._shown < PROGRESS_SECONDS:
            return
        self._shown = now
        self.observer(self.progress())

    def progress(self) -> Progress:
        counters, usage = self.engine.counters, self.engine.usage()
        running, waiting, swapped = self.engine.depth
        return Progress(rows=self.journal.finished, total=self.journal.rows, failed=self.journal.failed,
                        prompt_tokens=counters.prompt_tokens, output_tokens=counters.output_tokens,
                        seconds=time.perf_counter() - self._started, kv_used=1 - usage.free / max(usage.total, 1),
                        running=running, waiting=waiting + swapped)

