"""A batch job: rows from disk through an engine into a journal, with bounded memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagedcli.core.errors import ExitStatus, PagedError
from pagedcli.core.wording import counted
from pagedcli.generate.desk import Desk, Serving
from pagedcli.generate.journal import Journal
from pagedcli.generate.prefix_window import PrefixWindow
from pagedcli.generate.reader import RowReader
from pagedcli.generate.sampling import SamplingDefaults
from pagedcli.generate.source import InputRows, Scan
from pagedcli.generate.tokens import TextCodec

QUEUE_FACTOR = 2
"""Requests in the engine at most, as a multiple of --max-num-seqs: enough that none of its steps starves."""

PROGRESS_SECONDS = 0.2


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
    all finished rows. Rows are parsed and tokenised a chunk ahead of the engine, which holds at most QUEUE_FACTOR
    times its `max_num_seqs` requests. `prefix_cache` says that the engine finds earlier prompts' blocks again, and
    `pinned` the tokens that it keeps for good: rows are then told what they share (`prefix_window`).
    """

    def __init__(self, source: InputRows, scan: Scan, engine: Serving, codec: TextCodec | None, journal: Journal,
                 defaults: SamplingDefaults, observer: Observer | None = None, prefix_cache: bool = False,
                 pinned: Sequence[int] = ()) -> None:
        self.engine = engine
        self.journal = journal
        self.observer = observer
        limits = engine.executor.limits
        ours, seen = (PrefixWindow.of_pool(limits, pinned) if prefix_cache else None for _ in range(2))
        self.desk = Desk(engine, codec, defaults, journal.append, ours)
        self._rows = RowReader(source, scan, journal, self.desk.tokeniser, seen)
        self._stopping = False
        self._started = self._shown = time.perf_counter()

    def stop(self) -> None:
        """Ask `run` to end after the step it is in. Safe in a signal handler."""
        self._stopping = True

    def run(self) -> None:
        engine, journal = self.engine, self.journal
        most = max(QUEUE_FACTOR * engine.max_num_seqs, 2)
        rows = iter(self._rows)
        exhausted = False
        while True:
            while not exhausted and len(self.desk) < most and not self._stopping:
                item = next(rows, None)
                if item is None:
                    exhausted = True
                else:
                    _, row, request = item
                    self.desk.submit(row, request)
            if self._stopping:
                break
            if engine.has_work():
                for group in engine.step():
                    self.desk.finish(group)
            elif self.desk:
                raise AssertionError(f"the engine is idle with {counted(len(self.desk), 'request')} unfinished")
            journal.flush()
            self._show()
            if exhausted and not self.desk:
                break
        journal.flush()
        self._show(last=True)
        if self._stopping and not journal.complete:
            raise Interrupted(f"stopped with {journal.finished:,} of {counted(journal.rows, 'row')} done, kept in "
                              f"{journal.path}", "interrupted")

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

