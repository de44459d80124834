"""Simulated serving at speed: the engine's loop over schedulers that are told only of what changes.

Same policies, same decisions, same times as `Engine` with a SimulatedExecutor, property-tested step by step. It needs
what a simulation has: forced output lengths, scripted tokens, a cost model and a virtual clock.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from pagedcli.core.clock import VirtualClock
from pagedcli.core.config import RunConfig
from pagedcli.core.errors import RequestError, UsageError
from pagedcli.core.plan import StepResult
from pagedcli.core.request import Request
from pagedcli.core.sequence import SequenceGroup
from pagedcli.engine.beam_script import BeamScript, KeepBeams
from pagedcli.engine.build import make_memory, scheduler_settings
from pagedcli.engine.engine import Engine
from pagedcli.engine.event_scheduler import EventScheduler, EventStaticScheduler
from pagedcli.engine.flows import Flows, Spans
from pagedcli.engine.interface import Counters
from pagedcli.engine.lifecycle import Lifecycle
from pagedcli.engine.preemption import recovery_policy
from pagedcli.engine.scripted import ScriptedSampler
from pagedcli.execution.cost_model import StepLoad
from pagedcli.execution.simulated import SimulatedExecutor
from pagedcli.memory.static import StaticBatchMemory

_NO_RESULT = StepResult(None, 0.0)
_LOOK_AROUND = 512
"""Steps between two looks at whether a run can still end under its latency limit."""


class StepRow(NamedTuple):
    """What the steps from `first` to the next row's have in common: counts of requests, sequences, tokens and blocks as
    in a run's step table. In each further step `token` grows by `sequences` and `reserved` shrinks by as many."""

    first: int
    running: int
    waiting: int
    swapped: int
    sequences: int
    computed: int
    token: int
    reserved: int
    internal: int
    external: int
    free: int
    logical: int
    physical: int
    preempt_recompute: int
    preempt_swap: int
    finished: int


class Ended(NamedTuple):
    """One request at its end. `spans`: the steps in which it got a token."""

    number: int
    group: SequenceGroup
    dispatched: float
    spans: Spans


class Refused(NamedTuple):
    """A request that could never run here."""

    number: int
    dispatched: float
    code: str
    message: str


@dataclass(slots=True)
class Log:
    """A finished simulation. `starts`, `ends`: seconds of every step; `rows` cover all steps in order."""

    starts: array[float] = field(default_factory=lambda: array("d"))
    ends: array[float] = field(default_factory=lambda: array("d"))
    rows: list[StepRow] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    unfinished: list[Ended] = field(default_factory=list)
    stopped: str | None = None


class EventEngine(Engine):
    """An engine whose steps cost what happens in them. `run` serves a whole workload."""

    def __init__(self, config: RunConfig, executor: SimulatedExecutor, beams: BeamScript | None = None) -> None:
        limits = executor.limits
        max_len = min(limits.max_positions, config.model.max_model_len or limits.max_positions)
        memory = make_memory(config, limits, max_len)
        beams = beams or KeepBeams()
        sampler = ScriptedSampler(limits.vocab_size, parents=beams.parents)
        counters = Counters()
        lifecycle = Lifecycle(memory, sampler, None, frozenset())
        self.flows = Flows(memory, sampler, beams)
        scheduler: EventScheduler | EventStaticScheduler
        if isinstance(memory, StaticBatchMemory):
            scheduler = EventStaticScheduler(config.scheduler, memory, lifecycle, counters, self.flows)
        else:
            settings = scheduler_settings(config, memory)
            scheduler = EventScheduler(settings, memory, lifecycle, recovery_policy(settings.preemption), counters,
                                       self.flows)
        super().__init__(scheduler=scheduler, executor=executor, sampler=sampler, memory=memory, lifecycle=lifecycle,
                         clock=VirtualClock(), counters=counters, max_model_len=max_len,
                         max_num_seqs=scheduler.sequence_cap)
        self.events = scheduler
        self.cost = executor.cost
        self.log = Log()
        self._news = False  # a request has become the first in the queue since the last plan
        self._stale = False  # the last row no longer says how many requests wait

    def step(self) -> list[SequenceGroup]:
        """One iteration, logged."""
        scheduler, counters, clock, log = self.events, self.counters, self.clock, self.log
        begun = clock.now()
        before = counters.preempt_recompute, counters.preempt_swap
        step = self.flows.step
        plan = scheduler.plan(begun)
        self._news = self._stale = False
        if plan is None:
            return []
        load = scheduler.load
        clock.advance(self.cost.seconds(load))
        now = clock.now()
        usage, lag = self.memory.usage(), self.flows.lag
        depth = scheduler.depth
        if self.on_step is not None:
            self.on_step(plan, StepResult(None, now - begun), usage)
        finished: list[SequenceGroup] = []
        if plan.slices:
            choices = self.sampler.choose(plan, _NO_RESULT, self.lifecycle.sequences)
            finished = scheduler.commit(plan, choices, now)
        else:
            scheduler.commit(plan, {}, now)
        log.starts.append(begun)
        log.ends.append(now)
        log.rows.append(StepRow(
            step, *depth, load.decodes + load.prompts, load.tokens, usage.token + lag,
            usage.reserved - lag, usage.internal, usage.external, usage.free, usage.logical, usage.physical,
            counters.preempt_recompute - before[0], counters.preempt_swap - before[1], len(finished)))
        return finished

    def restart(self) -> None:
        """Begin a new log and set the clock back, keeping what memory holds (a pinned prefix). Only while idle."""
        self.clock = VirtualClock()
        self.log = Log()
        self.flows.step = 0

    def coast(self, until: float) -> None:
        """Run the steps that are like the last one: to the next entry of the calendar, or until an arrival's time."""
        flows, clock, calendar = self.flows, self.clock, self.flows.calendar
        starts, ends, seconds = self.log.starts, self.log.ends, self.cost.seconds
        load = StepLoad(flows.sequences)
        step, now = flows.step, clock.now()
        if self._stale and step not in calendar:
            self._stale = False
            usage, lag, sequences = self.memory.usage(), flows.lag, flows.sequences
            self.log.rows.append(StepRow(
                step, *self.scheduler.depth, sequences, sequences, usage.token + lag, usage.reserved - lag,
                usage.internal, usage.external, usage.free, usage.logical, usage.physical, 0, 0, 0))
        while step not in calendar and now < until:
            flows.step = step
            load.context = flows.context
            starts.append(now)
            clock.advance(seconds(load))
            now = clock.now()
            ends.append(now)
            step += 1
        flows.step = step

    def run(self, requests: Seq[Request], limit: float | None = None, horizon: float = math.inf) -> Log:
        """Serve requests that arrive at `request.arrival` (seconds, in order, each with `output_len`).

        `limit`: end early once the mean normalized latency is certain to exceed it, s/token. `horizon`: begin no step
        after this time, s, whatever is still being served.
        """
        log, clock, scheduler = self.log, self.clock, self.events
        open_groups: dict[int, tuple[int, SequenceGroup, float]] = {}
        total, place, gathered, look = len(requests), 0, 0.0, _LOOK_AROUND
        while True:
            now = clock.now()
            if now >= horizon:
                log.stopped = f"the run was to end at {horizon:g} s"
                break
            while place < total and requests[place].arrival <= now:
                self._take(requests[place], place, now, open_groups)
                place += 1
            if not scheduler.has_work():
                if place == total:
                    break
                clock.sleep_until(requests[place].arrival)
                continue
            if scheduler.quiet and self.flows.sequences and not self._news:
                following = min(requests[place].arrival if place < total else math.inf, horizon)
                self.coast(following)
                if following <= clock.now():
                    continue
            for group in self.step():
                number, _, dispatched = open_groups.pop(id(group))
                log.ended.append(Ended(number, group, dispatched, self.flows.spans(group)))
                made = group.request.output_len or 1
                gathered += ((group.finished_at or 0.0) - group.request.arrival) / made
            if limit is not None and self.flows.step > look:
                look = self.flows.step + _LOOK_AROUND
                if self._hopeless(limit, gathered, open_groups, total):
                    break
        log.unfinished = [Ended(number, group, dispatched, []) for number, group, dispatched in open_groups.values()]
        return log

    def _take(self, request: Request, number: int, now: float,
              open_groups: dict[int, tuple[int, SequenceGroup, float]]) -> None:
        if request.output_len is None:
            raise UsageError(f"request {request.key} has no output length; a simulation must be told it")
        self._stale = True
        self._news = self._news or not self.events.waiting
        try:
            group = self.add(request)
        except RequestError as fault:
            self.log.refused.append(Refused(number, now, fault.code, fault.message))
        else:
            open_groups[id(group)] = (number, group, now)

    def _hopeless(self, limit: float, gathered: float, open_groups: dict[int, tuple[int, SequenceGroup, float]],
                  total: int) -> bool:
        now = self.clock.now()
        waited = sum((now - group.request.arrival) / (group.request.output_len or 1)
                     for _, group, _ in open_groups.values())
        bound = (gathered + waited) / total
        if bound > limit:
            self.log.stopped = f"normalized latency is at least {bound:.3g} s/token, above {limit:g}"
            return True
        return False
