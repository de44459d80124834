"""An engine whose times are known beforehand: `slots` requests at once, each step takes what the script says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pagedcli.core.clock import Clock, VirtualClock
from pagedcli.core.errors import RequestError
from pagedcli.core.plan import Slice, StepPlan, StepResult
from pagedcli.core.request import Request, SamplingParams
from pagedcli.core.sequence import Sequence, SequenceGroup
from pagedcli.engine.interface import Counters
from pagedcli.memory.interface import Usage

POOL = 1000


class ScriptedEngine:
    """FCFS, one token a running request and step. `step_seconds(step, running)` is the length of a step.

    Requests with a prompt longer than `max_prompt` are refused. `reuse` keeps prompts seen before (a prefix cache).
    """

    def __init__(self, step_seconds: Callable[[int, int], float] | float, slots: int = 1, clock: Clock | None = None,
                 max_prompt: int = 10**9) -> None:
        self.clock = clock or VirtualClock()
        self.counters = Counters()
        self.on_step = None
        self.slots = slots
        self.max_prompt = max_prompt
        self.waiting: deque[SequenceGroup] = deque()
        self.running: list[SequenceGroup] = []
        self._seconds = step_seconds if callable(step_seconds) else lambda step, running: step_seconds
        self._seen: set[tuple[int, ...]] = set()

    def add(self, request: Request) -> SequenceGroup:
        if len(request.prompt) > self.max_prompt:
            raise RequestError("too_long", f"prompt of {len(request.prompt)} tokens, limit {self.max_prompt}")
        group = SequenceGroup(request, 0)
        group.max_output = request.output_len or 0
        self.waiting.append(group)
        return group

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def depth(self) -> tuple[int, int, int]:
        return len(self.running), len(self.waiting), 0

    def abort(self, group: SequenceGroup) -> None:
        (self.running if group in self.running else self.waiting).remove(group)

    def step(self) -> list[SequenceGroup]:
        now = self.clock.now()
        while self.waiting and len(self.running) < self.slots:
            group = self.waiting.popleft()
            group.scheduled_at, group.token_times = now, []
            group.live = [Sequence(0, group, list(group.request.prompt), group.prompt_len, 0)]
            group.cached_tokens = group.prompt_len - 1 if group.request.prompt in self._seen else 0
            self._seen.add(group.request.prompt)
            self.running.append(group)
        seconds = self._seconds(self.counters.steps, len(self.running))
        self.clock.advance(seconds)
        self.counters.steps += 1
        plan = StepPlan([Slice(id(g), g.live[0].tokens[-1:], 0, [], 1) for g in self.running])
        if self.on_step is not None:
            self.on_step(plan, StepResult(None, seconds), self.usage())
        done = []
        for group in list(self.running):
            group.live[0].tokens.append(0)
            group.token_times.append(self.clock.now())
            if group.live[0].output_len == group.max_output:
                group.finished_at = self.clock.now()
                group.done, group.live = group.live, []
                self.running.remove(group)
                done.append(group)
        return done

    def usage(self) -> Usage:
        used = sum(group.live[0].length for group in self.running)
        return Usage(used, 0, 0, 0, POOL - used, 2 * used, used)


def requests(lengths: list[tuple[int, int]]) -> list[Request]:
    """Requests of (prompt, output) tokens; prompts differ from each other."""
    return [Request(i, f"r{i}", tuple([i] * prompt), SamplingParams(max_tokens=output), 0.0, output)
            for i, (prompt, output) in enumerate(lengths)]
