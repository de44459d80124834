"""One engine of several that share a job: rows in by the handful, finished lines out. Knows nothing of who calls it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagedcli.core.config import RunConfig
from pagedcli.core.errors import PagedError, UsageError
from pagedcli.core.wording import counted
from pagedcli.engine.interface import Counters
from pagedcli.execution.interface import ExecutorInfo, ExecutorLimits
from pagedcli.generate.encoding import Line
from pagedcli.generate.source import RawRow

if TYPE_CHECKING:
    from pagedcli.generate.tokens import TextCodec

PATIENCE_SECONDS = 0.2
"""A call for work comes back after about this long, whatever is done by then."""


@dataclass(frozen=True, slots=True)
class Task:
    """A row to serve. `first_line`: line of the row that has its id, which makes it a fault. `shared`: leading
    prompt tokens that earlier rows have too, which the replica may not have seen (None: not known, nor asked for)."""

    raw: RawRow
    first_line: int | None = None
    shared: int | None = None



@dataclass(frozen=True, slots=True)
class Ready:
    """What a replica is, once its model is loaded; or the fault (code, message, exit status) that kept it from that."""

    info: ExecutorInfo | None = None
    limits: ExecutorLimits | None = None
    max_num_seqs: int = 0
    place: str = ""
    notes: tuple[str, ...] = ()
    fault: tuple[str, str, int] | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Rows that finished in one call as (index, line, good), and the replica's totals since its start."""

    finished: Sequence[tuple[int, bytes, bool]] = ()
    counters: Counters = field(default_factory=Counters)
    running: int = 0
    kv_used: float = 0.0
    fault: tuple[str, str, int] | None = None


class Replica:
    """An engine and the rows inside it. Nothing heavy happens before `start`; faults are returned, not raised."""

    def __init__(self, config: RunConfig, sampling: Mapping[str, Any], shared_prefix: str | None = None) -> None:
        self._config = config
        self._sampling = sampling
        self._prefix = shared_prefix
        self._finished: list[tuple[int, bytes, bool]] = []

    def start(self) -> Ready:
        """Load the model."""
        if self._config.model.threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(self._config.model.threads)  # read when torch is first imported
        try:
            return self._start()
        except PagedError as fault:
            return Ready(fault=_told(fault))

    def _start(self) -> Ready:
        from pagedcli.engine.build import build_engine
        from pagedcli.generate.desk import Desk
        from pagedcli.generate.prefix_window import PrefixWindow
        from pagedcli.generate.sampling import SamplingDefaults
        from pagedcli.generate.tokens import TextCodec

        engine = build_engine(self._config)
        codec = None if engine.tokenizer is None else TextCodec(engine.tokenizer)
        notes = () if self._prefix is None else (pin_shared_prefix(engine, codec, self._prefix),)
        window = None
        if self._config.finds_prefixes:
            window = PrefixWindow.of_pool(engine.executor.limits, prefix_tokens(codec, self._prefix))
        self._engine = engine
        self._desk = Desk(engine, codec, SamplingDefaults(self._sampling), self._deliver, window)
        info = engine.executor.info
        return Ready(info, engine.executor.limits, engine.max_num_seqs, f"{socket.gethostname()}:{os.getpid()}",
                     (*info.notes, *notes))

    def work(self, tasks: Sequence[Task], more: bool) -> Report:
        """Take rows in and run the engine for a while. With `more` rows on their way it comes back early, as soon as
        fewer are inside than one step can use."""
        try:
            return self._work(tasks, more)
        except PagedError as fault:
            return Report(fault=_told(fault))

    def _work(self, tasks: Sequence[Task], more: bool) -> Report:
        from pagedcli.generate.formats import parse_row

        engine, desk = self._engine, self._desk
        rows = [parse_row(task.raw, task.first_line) for task in tasks]
        for task, row, request in zip(tasks, rows, desk.tokeniser.requests(rows), strict=True):
            row.shared = task.shared
            desk.submit(row, request)
        enough = engine.max_num_seqs if more else 0
        end = time.monotonic() + PATIENCE_SECONDS
        while desk and (len(desk) > enough or not self._finished) and time.monotonic() < end:
            for group in engine.step():
                desk.finish(group)
        finished, self._finished = self._finished, []
        usage = engine.usage()
        return Report(finished, engine.counters, engine.depth[0], 1 - usage.free / max(usage.total, 1))

    def _deliver(self, index: int, line: Line, good: bool) -> None:
        self._finished.append((index, line if isinstance(line, bytes) else b"".join(line), good))

    def close(self) -> None:
        """End the engine and whatever it started."""
        if hasattr(self, "_engine"):
            self._engine.close()


def pin_shared_prefix(engine: Any, codec: Any, text: str) -> str:
    """Compute the shared prefix and keep it; returns what to tell about it. Raises UsageError."""
    from pagedcli.core.errors import RequestError

    if codec is None:
        raise UsageError("--shared-prefix: the model has no tokenizer, so a text prefix cannot be used")
    tokens = prefix_tokens(codec, text)
    try:
        kept = engine.pin_prefix(tokens)
    except RequestError as fault:
        raise UsageError(f"--shared-prefix cannot be kept: {fault.message}", fault.code) from fault
    return f"shared prefix: {kept:,} of its {counted(len(tokens), 'token')} kept in the KV cache (whole blocks only)"


def prefix_tokens(codec: TextCodec | None, text: str | None) -> list[int]:
    """Token ids of the shared prefix; none when there is none."""
    return [] if codec is None or text is None else codec.encode_batch([text])[0]


def _told(fault: PagedError) -> tuple[str, str, int]:
    return fault.code, fault.message, int(fault.exit_status)


