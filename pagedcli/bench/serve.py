"""Replay: feeds an engine requests at their scheduled times and writes down what happens.

Deadlines are absolute, so that a late send never moves the next one. The loop is the engine's own: requests that have
come are handed over between two iterations, and when nothing is left to compute it sleeps until the next deadline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from pagedcli.bench.records import RequestRecord, RunResult, StepRecord, StepTable
from pagedcli.core.clock import Clock
from pagedcli.core.errors import RequestError, UsageError
from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.core.request import Request, SamplingParams
from pagedcli.core.sequence import SequenceGroup
from pagedcli.engine.interface import Counters
from pagedcli.memory.interface import Usage


class Served(Protocol):
    """What replay asks of an engine. It must record token times for TTFT, TPOT and ITL to exist."""

    clock: Clock
    counters: Counters
    on_step: Callable[[StepPlan, StepResult, Usage], None] | None

    def add(self, request: Request) -> SequenceGroup: ...

    def step(self) -> list[SequenceGroup]: ...

    def has_work(self) -> bool: ...

    def abort(self, group: SequenceGroup) -> None: ...

    @property
    def depth(self) -> tuple[int, int, int]: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands, for a live display. Times in seconds, rates in requests/s."""

    elapsed: float
    dispatched: int
    finished: int
    failed: int
    total: int
    rate: float
    step: StepRecord | None
    preemptions: int

    @property
    def achieved_rate(self) -> float:
        return self.dispatched / self.elapsed if self.elapsed > 0 else 0.0


class _Open(NamedTuple):
    """A request that the engine has: its number in the run, its group, when it was handed over."""

    number: int
    group: SequenceGroup
    dispatched: float


def _preempted(counters: Counters) -> tuple[int, int]:
    return counters.preempt_recompute, counters.preempt_swap


Observer = Callable[[Progress], None]
StopRule = Callable[["Replay"], "str | None"]
"""Asked after each step; a text ends the run, and says why."""


class Replay:
    """One run in progress. Make a fresh engine for each run: its prefix cache must be cold."""

    def __init__(self, engine: Served, requests: Sequence[Request], deadlines: Sequence[float], rate: float) -> None:
        if len(requests) != len(deadlines):
            raise UsageError(f"{len(requests)} requests and {len(deadlines)} arrival times: must be as many")
        if any(later < earlier for earlier, later in pairwise(deadlines)):
            raise UsageError("arrival times must be in increasing order")
        self.engine = engine
        self.requests = requests
        self.deadlines = [float(when) for when in deadlines]
        self.rate = rate
        self.steps = StepTable()
        self.open: dict[int, _Open] = {}  # by identity of the group
        self.closed: dict[int, RequestRecord] = {}
        self.failed = 0
        self.next = 0
        self.start = engine.clock.now()
        # Compared on the engine's own clock: start + deadline - start may round to just below the deadline, and a run
        # that slept until then would never see its time come.
        self.due = [self.start + when for when in self.deadlines]
        self._preempted = _preempted(engine.counters)
        self._seen: tuple[StepPlan, Usage, tuple[int, int, int]] | None = None

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return self.engine.clock.now() - self.start

    def run(self, observer: Observer | None = None, stop_rule: StopRule | None = None) -> str | None:
        """Serve everything. Returns why it ended early, or None."""
        engine = self.engine
        with self._watching():
            while True:
                self._dispatch()
                if engine.has_work():
                    self._step()
                elif self.next < len(self.requests):
                    engine.clock.sleep_until(self.due[self.next])
                else:
                    return None
                if observer is not None:
                    observer(self.progress())
                reason = None if stop_rule is None else stop_rule(self)
                if reason is not None:
                    self._abandon(reason)
                    return reason

    def progress(self) -> Progress:
        done = len(self.closed)
        recomputed, swapped = _preempted(self.engine.counters)
        return Progress(self.now, self.next, done - self.failed, self.failed, len(self.requests), self.rate,
                        self.steps[-1] if len(self.steps) else None,
                        recomputed + swapped - sum(self._preempted))

    def _dispatch(self) -> None:
        """Hand over every request whose time has come."""
        while self.next < len(self.requests) and self.due[self.next] <= self.engine.clock.now():
            number = self.next
            self.next += 1
            now = max(self.now, self.deadlines[number])
            request = replace(self.requests[number], arrival=self.due[number])
            try:
                group = self.engine.add(request)
            except RequestError as fault:
                self._close(number, RequestRecord(
                    index=request.index, key=request.key, arrival=self.deadlines[number], dispatched=now,
                    prompt_tokens=len(request.prompt), error=fault.code, error_message=fault.message))
            else:
                self.open[id(group)] = _Open(number, group, now)

    def _step(self) -> None:
        """One iteration, timed from plan to commit."""
        begun, before = self.now, _preempted(self.engine.counters)
        finished = self.engine.step()
        if self._seen is not None:
            (plan, usage, (running, waiting, swapped)), self._seen = self._seen, None
            after = _preempted(self.engine.counters)
            self.steps.append(StepRecord(
                begun, self.now - begun, running, waiting, swapped, len({item.seq for item in plan.slices}),
                plan.num_tokens, usage.token, usage.reserved, usage.internal, usage.external, usage.free,
                usage.logical, usage.physical, after[0] - before[0], after[1] - before[1], len(finished)))
        for group in finished:
            item = self.open.pop(id(group), None)
            if item is not None:
                self._close(item.number, self._record(item))

    def _close(self, number: int, record: RequestRecord) -> None:
        self.closed[number] = record
        self.failed += not record.ok

    def _on_step(self, plan: StepPlan, result: StepResult, usage: Usage) -> None:
        """Called by the engine while the step's memory is still held."""
        del result
        self._seen = (plan, usage, self.engine.depth)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        self.engine.on_step = self._on_step
        try:
            yield
        finally:
            self.engine.on_step = None

    def _record(self, item: _Open, error: tuple[str, str] | None = None) -> RequestRecord:
        number, group, dispatched = item
        lengths = [seq.output_len for seq in (group.done or group.live)]
        error = error or group.error

        def since(when: float | None) -> float | None:
            return None if when is None else when - self.start

        return RequestRecord(
            index=group.request.index, key=group.request.key, arrival=self.deadlines[number], dispatched=dispatched,
            prompt_tokens=group.prompt_len, output_len=max(lengths, default=0), output_tokens=sum(lengths),
            sequences=group.params.max_sequences, scheduled=since(group.scheduled_at),
            finish=since(group.finished_at),
            token_times=np.asarray(group.token_times or [], dtype=np.float64) - self.start,
            cached_tokens=group.cached_tokens or 0, preemptions=group.preemptions,
            error=None if error is None else error[0], error_message=None if error is None else error[1])

    def _abandon(self, reason: str) -> None:
        """End a run early: what is in the engine is dropped and counts as failed, as does what was never sent."""
        error = ("stopped", reason)
        for item in self.open.values():
            self.engine.abort(item.group)
            self._close(item.number, self._record(item, error))
        self.open.clear()
        for number in range(self.next, len(self.requests)):
            request = self.requests[number]
            self._close(number, RequestRecord(
                index=request.index, key=request.key, arrival=self.deadlines[number], dispatched=math.nan,
                prompt_tokens=len(request.prompt), error="stopped", error_message=reason))


def replay(engine: Served, requests: Sequence[Request], deadlines: Sequence[float], *, policy: str = "paged",
           rate: float = math.inf, observer: Observer | None = None, stop_rule: StopRule | None = None,
           **labels: Any) -> RunResult:
    """Serve `requests` as they arrive at `deadlines` (seconds from now, non-decreasing) and return the records.

    `rate` (requests/s) and `labels` (fields of RunResult such as burstiness or repeat) only describe the run.
    Raises UsageError when requests and deadlines do not match.
    """
    run = Replay(engine, requests, deadlines, rate)
    stopped = run.run(observer, stop_rule)
    records = tuple(run.closed[number] for number in range(len(requests)))
    return RunResult(policy=policy, rate=rate, requests=records, steps=run.steps, duration=run.now, stopped=stopped,
                     **labels)


def warm_up(engine: Served, vocab_size: int, lengths: Sequence[tuple[int, int]] = ((40, 4), (7, 8)),
            seed: int = 0) -> None:
    """Run a few requests of random tokens before timing, so that compiling and first touches are not measured.

    `lengths`: (prompt, output) tokens of each. The prompts are noise and no prompt of a workload begins with them:
    the prefix cache stays cold for the run that follows.
    """
    rng = np.random.default_rng(seed)
    for number, (prompt, output) in enumerate(lengths):
        ids = tuple(int(token) for token in rng.integers(0, vocab_size, prompt))
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        engine.add(Request(-1 - number, f"warm-up-{number}", ids, params, engine.clock.now(), output))
    while engine.has_work():
        engine.step()


def latency_bound(run: Replay) -> float:
    """A lower bound on the run's final normalized latency, s/token, exact arithmetic over what is already certain.

    Finished requests count as they are; those in the engine have waited at least until now; others count as 0.
    Divided by all requests of the run that can still succeed.
    """
    certain = sum(r.normalized_latency for r in run.closed.values() if r.ok and r.output_len)
    now = run.now
    for number, group, _ in run.open.values():
        most = group.request.output_len or group.max_output
        if most:
            certain += (now - run.deadlines[number]) / most
    return certain / max(len(run.requests) - run.failed, 1)


def out_of_time(seconds: float, done: int, sent: int, total: int) -> str:
    """Why a run ended at its time limit, and whether it kept up: what had come and was not done."""
    return (f"after {seconds:g} s (--time-limit) {done} of {total} requests were done, {sent - done} that had come "
            f"were not, and {total - sent} had yet to come")


def stop_after(seconds: float, rule: StopRule | None = None) -> StopRule:
    """End a run at this time on its clock, or when `rule` says so."""
    def limited(run: Replay) -> str | None:
        if run.now >= seconds:
            return out_of_time(seconds, len(run.closed), run.next, len(run.requests))
        return None if rule is None else rule(run)
    return limited


def stop_above(limit: float, every: int = 25) -> StopRule:
    """End a run once its normalized latency is certain to exceed `limit` s/token (looked at every few steps)."""
    def rule(run: Replay) -> str | None:
        if len(run.steps) % every or not len(run.steps):
            return None
        bound = latency_bound(run)
        return f"normalized latency is at least {bound:.3g} s/token, above {limit:g}" if bound > limit else None
    return rule
