"""Glue between workloads and simulated engines: what `bench --simulate`, `paper`, `calibrate` and `plan` run on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pagedcli.bench.records import Floats, RequestRecord, RunResult, StepTable
from pagedcli.bench.serve import Observer, StopRule, replay, stop_after
from pagedcli.core.clock import VirtualClock
from pagedcli.core.config import RunConfig
from pagedcli.core.request import Request, SamplingParams
from pagedcli.engine.beam_script import BeamScript, KeepBeams
from pagedcli.engine.build import build_engine
from pagedcli.engine.engine import Engine
from pagedcli.engine.fast_forward import Ended, EventEngine, Log, StepRow
from pagedcli.engine.scripted import ScriptedSampler
from pagedcli.execution.simulated import Deployment, SimulatedExecutor
from pagedcli.workloads.spec import TraceRequest

_ROW_FIELDS = StepRow._fields[1:]


def plain_engine(config: RunConfig, deployment: Deployment, beams: BeamScript | None = None) -> Engine:
    """An ordinary engine on simulated hardware: slower than `simulate`, step by step the same (for `serve.replay`)."""
    executor = SimulatedExecutor(replace(deployment, policy=config.policy))
    sampler = ScriptedSampler(executor.limits.vocab_size, parents=(beams or KeepBeams()).parents)
    return build_engine(config, clock=VirtualClock(), executor=executor, sampler=sampler, record_times=True)


def light_requests(lengths: Iterable[tuple[int, int]], arrivals: Sequence[float],
                   params: SamplingParams | None = None) -> list[Request]:
    """Requests of forced lengths whose prompts are all the same token: nothing but lengths matters without prefix
    caching. `lengths`: (prompt, output) tokens; `arrivals`: seconds, in order."""
    params = params or SamplingParams(temperature=1.0, max_tokens=None, ignore_eos=True)
    blank: dict[int, tuple[int, ...]] = {}
    made = []
    for index, ((prompt, output), arrival) in enumerate(zip(lengths, arrivals, strict=False)):
        ids = blank.get(prompt)
        if ids is None:
            ids = blank[prompt] = (0,) * prompt
        made.append(Request(index, str(index), ids, params, float(arrival), int(output)))
    return made


def lengths_of(requests: Iterable[TraceRequest]) -> list[tuple[int, int]]:
    """(prompt, output) tokens of a workload's requests."""
    return [(request.prompt_len, request.output_len) for request in requests]


def run_events(config: RunConfig, deployment: Deployment, requests: Sequence[Request], *,
               beams: BeamScript | None = None, limit: float | None = None, horizon: float = math.inf,
               prefix: Sequence[int] = ()) -> tuple[EventEngine, Log]:
    """Serve `requests` (in order of arrival) on simulated hardware. `prefix` is pinned before the clock starts;
    `limit` cuts runs that are certain to have a higher normalized latency, s/token, `horizon` all runs at a time, s."""
    engine = EventEngine(config, SimulatedExecutor(replace(deployment, policy=config.policy)), beams)
    if prefix:
        engine.pin_prefix(prefix)
        engine.restart()
    return engine, engine.run(requests, limit, horizon)


def simulate(config: RunConfig, deployment: Deployment, requests: Sequence[Request], *,
             beams: BeamScript | None = None, limit: float | None = None, prefix: Sequence[int] = (),
             rate: float = math.inf, **labels: Any) -> RunResult:
    """As `serve.replay` over `plain_engine`, fast: the same records and steps, marked simulated.

    Raises RequestError or UsageError as building an engine does; requests that can never run become failed records.
    """
    engine, log = run_events(config, deployment, requests, beams=beams, limit=limit, prefix=prefix)
    ends = np.frombuffer(log.ends, dtype=np.float64) if len(log.ends) else np.empty(0)
    records: list[RequestRecord | None] = [None] * len(requests)
    for item in log.ended:
        records[item.number] = _record(item, ends)
    stopped = ("stopped", log.stopped or "the run was cut")
    for item in log.unfinished:
        records[item.number] = _record(item, ends, stopped)
    for refusal in log.refused:
        request = requests[refusal.number]
        records[refusal.number] = RequestRecord(
            index=request.index, key=request.key, arrival=request.arrival, dispatched=refusal.dispatched,
            prompt_tokens=len(request.prompt), error=refusal.code, error_message=refusal.message)
    kept = tuple(record or _unsent(requests[number], stopped) for number, record in enumerate(records))
    return RunResult(policy=config.policy, rate=rate, requests=kept, steps=step_table(log),
                     duration=engine.clock.now(), simulated=True, stopped=log.stopped, **labels)


@dataclass(frozen=True)
class SimulatedRunner:
    """Serves the runs of a bench session on simulated hardware, fast. Each run starts from cold.

    Without a stop rule; a session that has one replays on `plain_engine`, which can be asked after each step.
    """

    config: RunConfig
    deployment: Deployment
    beams: BeamScript | None = None

    def __call__(self, requests: Sequence[Request], deadlines: Sequence[float], *, policy: str, rate: float,
                 observer: Observer | None = None, stop_rule: StopRule | None = None,
                 time_limit: float | None = None, **labels: Any) -> RunResult:
        if time_limit is not None:
            stop_rule = stop_after(time_limit, stop_rule)
        config = replace(self.config, policy=policy)
        if stop_rule is not None:
            return replay(plain_engine(config, self.deployment, self.beams), requests, deadlines, policy=policy,
                          rate=rate, observer=observer, stop_rule=stop_rule, simulated=True, **labels)
        arriving = [replace(request, arrival=float(when)) for request, when in zip(requests, deadlines, strict=True)]
        return simulate(config, self.deployment, arriving, beams=self.beams, rate=rate, **labels)


def _record(item: Ended, ends: Floats, error: tuple[str, str] | None = None) -> RequestRecord:
    group, request = item.group, item.group.request
    lengths = [seq.output_len for seq in (group.done or group.live)]
    spans = [ends[start:end] for start, end in item.spans]
    return RequestRecord(
        index=request.index, key=request.key, arrival=request.arrival, dispatched=item.dispatched,
        prompt_tokens=group.prompt_len, output_len=max(lengths, default=0), output_tokens=sum(lengths),
        sequences=group.params.max_sequences, scheduled=group.scheduled_at, finish=group.finished_at,
        token_times=spans[0] if len(spans) == 1 else np.concatenate(spans) if spans else np.empty(0),
        cached_tokens=group.cached_tokens or 0, preemptions=group.preemptions,
        error=None if error is None else error[0], error_message=None if error is None else error[1])


def _unsent(request: Request, error: tuple[str, str]) -> RequestRecord:
    return RequestRecord(index=request.index, key=request.key, arrival=request.arrival, dispatched=math.nan,
                         prompt_tokens=len(request.prompt), error=error[0], error_message=error[1])


def step_table(log: Log) -> StepTable:
    """The log's rows spread out to one per step."""
    starts = np.array(log.starts, dtype=np.float64)
    total = len(starts)
    rows = np.array(log.rows, dtype=np.int64).reshape(len(log.rows), len(StepRow._fields))
    first = rows[:, 0] - (rows[0, 0] if len(rows) else 0)
    index = np.repeat(np.arange(len(rows)), np.diff(np.append(first, total)))
    columns: dict[str, Any] = {name: rows[index, place + 1] for place, name in enumerate(_ROW_FIELDS)}
    grown = (np.arange(total) - first[index]) * columns["sequences"]
    columns["token"] = columns["token"] + grown
    columns["reserved"] = columns["reserved"] - grown
    columns["time"] = starts
    columns["seconds"] = np.array(log.ends, dtype=np.float64) - starts
    return StepTable.from_columns(columns)
