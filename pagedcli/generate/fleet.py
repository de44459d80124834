"""A job over several engines: rows to whichever replica has room, results into the one journal.

Replicas are asked through calls that may be under way on another machine (`Crew`); this file decides who gets which
rows and what happens when one is lost. Memory is bounded: rows leave the source only as replicas have room for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from pagedcli.core.errors import CannotRunError, ExitStatus, PagedError
from pagedcli.core.wording import counted
from pagedcli.engine.interface import Counters
from pagedcli.generate.job import PROGRESS_SECONDS, Interrupted, Observer, Progress
from pagedcli.generate.journal import Journal
from pagedcli.generate.reader import RowReader
from pagedcli.generate.replica import Ready, Report, Task
from pagedcli.generate.source import InputRows, Scan

CALLS = 2
"""Calls under way at each replica: one runs while the next, with its rows, already waits there."""

CALL_FACTOR = 1
"""Rows in one call, as a multiple of --max-num-seqs."""

SPARE_LOSSES = 3
"""Replicas lost and replaced, beyond one each, before the job gives up: something kills them all."""

WAIT_SECONDS = 0.2

Reading = Callable[[Ready], RowReader]
"""Makes the driver's own reader of rows, once it is known what replicas are."""


class ReplicaLost(Exception):
    """The replica behind a call is gone, with everything it held."""


class Crew(Protocol):
    """Where replicas run. Calls are known by tokens of the crew's choosing."""

    def hire(self) -> Hashable:
        """Start one more replica; returns its name."""

    def start(self, worker: Hashable) -> Hashable:
        """Ask it to load; the answer is a Ready."""

    def work(self, worker: Hashable, tasks: Sequence[Task], more: bool) -> Hashable:
        """Give it rows; the answer is a Report."""

    def done(self, calls: Sequence[Hashable], seconds: float) -> Sequence[Hashable]:
        """Calls that have an answer, waiting up to `seconds` for the first."""

    def answer(self, call: Hashable) -> Any:
        """The answer of a call. Raises ReplicaLost."""

    def close(self) -> None:
        """End every replica; idempotent."""


@dataclass
class _Worker:
    name: Hashable
    number: int
    ready: Ready | None = None
    calls: set[Hashable] = field(default_factory=set)
    held: dict[int, Task] = field(default_factory=dict)
    report: Report = field(default_factory=Report)
    rows: int = 0


class FleetJob:
    """Runs every row that the journal does not have yet on `replicas` engines.

    A lost replica's unfinished rows go to the others, and a new one takes its place. `run` raises Interrupted after
    `stop`, the fault of a replica that could not start, and CannotRunError when too many are lost; the journal then
    holds all finished rows. `reading` is given when replicas have prefix caches: rows are then tokenised here too, so
    that each replica is told what a row shares with earlier ones, wherever those went.
    """

    def __init__(self, source: InputRows, scan: Scan, crew: Crew, replicas: int, journal: Journal,
                 observer: Observer | None = None, say: Callable[[str], None] | None = None,
                 reading: Reading | None = None) -> None:
        self.journal = journal
        self.replicas = replicas
        self.lost = 0
        self._crew = crew
        self._observer = observer
        self._say = say or (lambda line: None)
        self._tasks = self._unfinished(source, scan, reading)
        self._again: deque[Task] = deque()
        self._exhausted = False
        self._workers: dict[Hashable, _Worker] = {}
        self._owner: dict[Hashable, _Worker] = {}  # of each call under way
        self._gone: list[_Worker] = []
        self._stopping = False
        self._started = self._shown = time.perf_counter()

    def stop(self) -> None:
        """Ask `run` to end soon. Safe in a signal handler."""
        self._stopping = True

    def run(self) -> None:
        journal = self.journal
        for _ in range(self.replicas):
            self._hire()
        while not journal.complete and not self._stopping:
            for worker in list(self._workers.values()):
                self._supply(worker)
            for call in self._crew.done(list(self._owner), WAIT_SECONDS):
                self._take(call)
            journal.flush()
            self._show()
        journal.flush()
        self._show(last=True)
        if not journal.complete:
            raise Interrupted(f"stopped with {journal.finished:,} of {counted(journal.rows, 'row')} done, kept in "
                              f"{journal.path}", "interrupted")

    # -- rows out ------------------------------------------------------------------------------------------------------

    def _unfinished(self, source: InputRows, scan: Scan, reading: Reading | None) -> Iterator[Task]:
        repeated = scan.first_line_of if scan.repeated else None
        if reading is None:
            for raw in source:
                if not self.journal.done(raw.index):
                    yield Task(raw, repeated(raw.index) if repeated else None)
            return
        ready = self.first_ready()
        assert ready is not None, "rows are asked for once a replica is there"
        for raw, row, _ in reading(ready):
            yield Task(raw, repeated(raw.index) if repeated else None, row.shared)

    def _next_tasks(self, count: int) -> list[Task]:
        tasks: list[Task] = []
        while len(tasks) < count:
            if self._again:
                tasks.append(self._again.popleft())
                continue
            task = None if self._exhausted else next(self._tasks, None)
            if task is None:
                self._exhausted = True
                break
            tasks.append(task)
        return tasks

    def _supply(self, worker: _Worker) -> None:
        """Keep CALLS calls under way at a replica while it has, or can get, rows to work on."""
        if worker.ready is None:
            return
        size = max(CALL_FACTOR * worker.ready.max_num_seqs, 1)
        while len(worker.calls) < CALLS:
            room = CALLS * size + worker.ready.max_num_seqs - len(worker.held)
            tasks = self._next_tasks(min(size, room))
            if not tasks and (worker.calls or not worker.held):
                return
            for task in tasks:
                worker.held[task.raw.index] = task
            more = bool(self._again) or not self._exhausted
            self._note_call(worker, self._crew.work(worker.name, tasks, more))

    def _hire(self) -> None:
        name = self._crew.hire()
        worker = self._workers[name] = _Worker(name, len(self._workers) + len(self._gone))
        self._note_call(worker, self._crew.start(name))

    def _note_call(self, worker: _Worker, call: Hashable) -> None:
        worker.calls.add(call)
        self._owner[call] = worker

    # -- answers in ----------------------------------------------------------------------------------------------------

    def _take(self, call: Hashable) -> None:
        worker = self._owner.pop(call, None)
        if worker is None:
            return  # the replica was lost while its other call was looked at
        worker.calls.discard(call)
        try:
            answer = self._crew.answer(call)
        except ReplicaLost as fault:
            self._lose(worker, str(fault))
            return
        if answer.fault is not None:
            raise _fault(worker, *answer.fault)
        if isinstance(answer, Ready):
            self._welcome(worker, answer)
            return
        worker.report = Report((), answer.counters, answer.running, answer.kv_used)
        for index, line, good in answer.finished:
            worker.held.pop(index, None)
            if not self.journal.done(index):
                worker.rows += 1
                self.journal.append(index, line, good)

    def _welcome(self, worker: _Worker, ready: Ready) -> None:
        """Rows of all replicas must be computed on the same: the journal holds what the first one said."""
        assert ready.info is not None and ready.limits is not None
        self.journal.confirm(ran_on(ready.info, ready.limits.vocab_size))
        worker.ready = ready

    def _lose(self, worker: _Worker, reason: str) -> None:
        self.lost += 1
        for call in worker.calls:
            self._owner.pop(call, None)
        worker.calls.clear()
        self._again.extend(worker.held.values())
        again = len(worker.held)
        worker.held.clear()
        self._gone.append(self._workers.pop(worker.name))
        if self.lost > self.replicas + SPARE_LOSSES:
            raise CannotRunError(f"{counted(self.lost, 'replica')} lost, the last one because {reason}; too many for "
                                 f"chance. {self.journal.finished:,} of {counted(self.journal.rows, 'row')} kept in "
                                 f"{self.journal.path}: run the same command again to go on", "replicas_lost")
        self._say(f"replica {worker.number} was lost ({reason}); {again} of its rows, unfinished, go to the others, "
                  "and a new one takes its place")
        self._hire()

    # -- telling -------------------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[_Worker]:
        """Every replica that ever was, in order of hiring."""
        return sorted((*self._gone, *self._workers.values()), key=lambda worker: worker.number)

    def counters(self) -> Counters:
        """Sums over all replicas, lost ones as far as they had told."""
        return add_counters([worker.report.counters for worker in self.members])

    def lines(self) -> list[str]:
        """One line a replica: where it is and what it has done."""
        told = []
        for worker in self.members:
            counters = worker.report.counters
            place = "starting" if worker.ready is None else worker.ready.place
            state = "lost" if worker in self._gone else f"KV {worker.report.kv_used:.0%}"
            told.append(f"replica {worker.number} ({place}, {state}): {counted(worker.rows, 'row')}, "
                        f"{counted(counters.output_tokens, 'token')}, {counted(len(worker.held), 'row')} in hand")
        return told

    def first_ready(self) -> Ready | None:
        """What the first replica that started said of itself."""
        return next((worker.ready for worker in self.members if worker.ready is not None), None)

    def _show(self, last: bool = False) -> None:
        now = time.perf_counter()
        if self._observer is None or (not last and now - self._shown < PROGRESS_SECONDS):
            return
        self._shown = now
        live = list(self._workers.values())
        counters = self.counters()
        self._observer(Progress(
            rows=self.journal.finished, total=self.journal.rows, failed=self.journal.failed,
            prompt_tokens=counters.prompt_tokens, output_tokens=counters.output_tokens, seconds=now - self._started,
            kv_used=sum(worker.report.kv_used for worker in live) / max(len(live), 1),
            running=sum(worker.report.running for worker in live),
            waiting=sum(len(worker.held) - worker.report.running for worker in live), replicas=tuple(self.lines())))


def ran_on(info: Any, vocab_size: int) -> dict[str, Any]:
    """What rows are computed on, for the journal's second line."""
    return {"model": info.model, "device": info.device, "dtype": info.dtype, "kv_dtype": info.kv_dtype,
            "attention": info.attention, "vocabulary": vocab_size}


def add_counters(parts: Sequence[Counters]) -> Counters:
    """Totals of several engines. Peaks are added too: they are of separate pools."""
    total = Counters()
    for part in parts:
        for item in fields(Counters):
            mine, theirs = getattr(total, item.name), getattr(part, item.name)
            if isinstance(mine, dict):
                for name, value in theirs.items():
                    mine[name] = mine.get(name, 0.0) + value
            else:
                setattr(total, item.name, mine + theirs)
    return total


def _fault(worker: _Worker, code: str, message: str, status: int) -> PagedError:
    fault = PagedError(message if worker.ready is None else f"replica {worker.number}: {message}", code)
    fault.exit_status = ExitStatus(status)
    return fault
