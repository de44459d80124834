"""FCFS scheduling of every iteration: decodes first, then prompts, preempting the latest group when blocks run out."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping

from pagedcli.core.config import SchedulerConfig
from pagedcli.core.plan import Slice, StepPlan
from pagedcli.core.sequence import Sequence, SequenceGroup, Status
from pagedcli.engine.interface import Choices, Counters, Scheduler
from pagedcli.engine.lifecycle import Lifecycle
from pagedcli.engine.preemption import RecoveryPolicy
from pagedcli.memory.interface import MemoryPolicy, Verdict


def arrival_order(group: SequenceGroup) -> int:
    return group.order


class StepBudget:
    """What is left of a step: tokens to compute, and rows of logits for prompts that are scored. `behind`: a prompt
    could not be finished with it."""

    __slots__ = ("behind", "rows", "tokens")

    def __init__(self, config: SchedulerConfig) -> None:
        self.tokens = config.token_budget
        self.rows = config.max_logit_rows
        self.behind = False


class IterationScheduler(Scheduler):
    """Iteration-level FCFS (Orca's scheduling, the paper's section 4.5 rules) over any memory policy.

    Running groups go first in arrival order; swapped ones come back before anything new is let in; waiting ones enter
    in arrival order and the first that does not fit keeps the rest out, as does a prompt that is not finished: all
    full blocks of earlier prompts can be found by then. All sequences of a group run, wait and leave together.
    """

    def __init__(self, config: SchedulerConfig, memory: MemoryPolicy, lifecycle: Lifecycle,
                 recovery: RecoveryPolicy, counters: Counters) -> None:
        self.config = config
        self.memory = memory
        self.lifecycle = lifecycle
        self.recovery = recovery
        self.counters = counters
        self.waiting: deque[SequenceGroup] = deque()
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []
        self._seqs_running = 0  # of the running groups, each counted at the most it can have

    @property
    def sequences(self) -> Mapping[int, Sequence]:
        return self.lifecycle.sequences

    @property
    def depth(self) -> tuple[int, int, int]:
        return len(self.running), len(self.waiting), len(self.swapped)

    @property
    def sequence_cap(self) -> int:
        """Most sequences at once: each decode needs one token of the budget."""
        return min(self.config.max_num_seqs, self.config.token_budget)

    def add(self, group: SequenceGroup) -> None:
        self.lifecycle.open(group)
        self.waiting.append(group)

    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.swapped)

    def abort(self, group: SequenceGroup) -> None:
        self._leave(group)
        if group in self.waiting:
            self.waiting.remove(group)
        if group in self.swapped:
            self.swapped.remove(group)
        for seq in list(group.live):
            self.lifecycle.drop(seq)
        group.status = Status.FINISHED

    def plan(self, now: float) -> StepPlan | None:
        plan, budget = StepPlan(), StepBudget(self.config)
        plan.copies, self.lifecycle.pending_copies = self.lifecycle.pending_copies, []
        preempted = self._decode(plan, budget)
        self._prefill_running(plan, budget)
        if not plan.swap_out:
            self._swap_in(plan, budget)
        if not (preempted or self.swapped):
            self._admit(plan, budget, now)
        return None if plan.empty else plan

    def commit(self, plan: StepPlan, choices: Choices, now: float) -> list[SequenceGroup]:
        finished = self.lifecycle.apply(plan, choices, now)
        for group in finished:
            self._leave(group)
        return finished

    # -- running groups -----------------------------------------------------------------------------------------------

    def _decode(self, plan: StepPlan, budget: StepBudget) -> bool:
        """Slices of all groups in plain decoding. Returns whether anything was preempted."""
        preempted = False
        for group in list(self.running):
            if group.status is not Status.RUNNING or not decoding(group):
                continue
            while not self.memory.can_append(group):
                victim = self.running[-1]
                self._preempt(victim, plan)
                preempted = True
                if victim is group:
                    break
            else:
                self._add_decode(group, plan, budget)
        return preempted

    def _add_decode(self, group: SequenceGroup, plan: StepPlan, budget: StepBudget) -> None:
        memory = self.memory
        for seq in group.live:
            plan.copies += memory.append(seq)
            start = len(seq.tokens) - 1
            plan.slices.append(Slice(seq.id, seq.tokens[-1:], start, memory.table(seq), 1))
            memory.computed(seq, start + 1)
        budget.tokens -= len(group.live)

    def _prefill_running(self, plan: StepPlan, budget: StepBudget) -> None:
        for group in self.running:
            if not decoding(group):
                self._add_prefill(group, plan, budget)

    def _preempt(self, group: SequenceGroup, plan: StepPlan) -> None:
        """Send a running group away, all of it: to the host, or back to the queue as prompt plus generated."""
        self._leave(group)
        group.preemptions += 1
        if self.recovery.prefers_swap(group):
            if self.memory.can_swap_out(group):
                plan.swap_out += self.memory.swap_out(group)
                group.status = Status.SWAPPED
                insort(self.swapped, group, key=arrival_order)
                self.counters.preempt_swap += 1
                return
            self.counters.swap_fallbacks += 1
        for seq in group.live:
            self.memory.free(seq)
            seq.computed = 0
        group.status = Status.WAITING
        self.waiting.appendleft(group)
        if len(self.waiting) > 1 and self.waiting[1].order < group.order:
            self.waiting = deque(sorted(self.waiting, key=arrival_order))
        self.counters.preempt_recompute += 1

    def _leave(self, group: SequenceGroup) -> None:
        if group in self.running:
            self.running.remove(group)
            self._seqs_running -= group.params.max_sequences

    # -- groups that come (back) in -----------------------------------------------------------------------------------

    def _enter(self, group: SequenceGroup) -> None:
        group.status = Status.RUNNING
        insort(self.running, group, key=arrival_order)
        self._seqs_running += group.params.max_sequences

    def _has_seats(self, group: SequenceGroup) -> bool:
        return self._seqs_running + group.params.max_sequences <= self.sequence_cap

    def _memory_returns(self, group: SequenceGroup) -> bool:
        return self.memory.can_swap_in(group, running=bool(self.running))

    def _memory_admits(self, group: SequenceGroup) -> bool:
        return self.memory.can_admit(group, running=bool(self.running)) is Verdict.YES

    def _swap_in(self, plan: StepPlan, budget: StepBudget) -> None:
        while self.swapped:
            group = self.swapped[0]
            if not (budget.tokens >= len(group.live) and self._has_seats(group) and self._memory_returns(group)):
                return
            plan.swap_in += self.memory.swap_in(group)
            self.swapped.pop(0)
            self._enter(group)
            if decoding(group):
                self._add_decode(group, plan, budget)
            else:
                self._add_prefill(group, plan, budget)

    def _admit(self, plan: StepPlan, budget: StepBudget, now: float) -> None:
        first = True
        while self.waiting and not budget.behind:
            group = self.waiting[0]
            if not (self._has_seats(group) and self._prompt_fits(group, budget, first) and self._memory_admits(group)):
                return
            admission = self.memory.admit(group)
            self.waiting.popleft()
            self._enter(group)
            if group.scheduled_at is None:
                group.scheduled_at = now
                group.cached_tokens = admission.cached_tokens
                self._count_prompt(group, admission.cached_tokens)
            self._add_prefill(group, plan, budget)
            first = False

    def _count_prompt(self, group: SequenceGroup, cached: int) -> None:
        if group.request.index < 0:
            self.counters.warmed_tokens += group.prompt_len - cached
        else:
            self.counters.prompt_tokens += group.prompt_len
            self.counters.cached_tokens += cached

    def _prompt_fits(self, group: SequenceGroup, budget: StepBudget, first: bool) -> bool:
        """Chunks need one token of budget; a whole prompt needs all of its own, except that one above the cap may
        enter as the only prompt of its step (a recomputed one can be longer than any prompt of the user's)."""
        if self.config.chunked_prefill:
            return budget.tokens > 0
        need = sum(seq.length for seq in group.live)
        return need <= budget.tokens or (first and need > self.config.token_budget)

    def _add_prefill(self, group: SequenceGroup, plan: StepPlan, budget: StepBudget) -> None:
        """Slices over the uncomputed tokens of a group, as far as the budget goes.

        All sequences of a group reach their last token in one step, since beams are chosen among together: when not
        everything fits, each stops one short of it and the group goes on as a decode.
        """
        whole = not self.config.chunked_prefill
        need = sum(seq.remaining for seq in group.live)
        together = len(group.live) == 1 or whole or need <= budget.tokens
        for seq in group.live:
            scoring = group.params.prompt_logprobs is not None and seq.output_len == 0
            target = seq.length if together else seq.length - 1
            take = target - seq.computed
            if not whole:
                take = min(take, budget.tokens)
            if scoring:
                take = min(take, max(budget.rows, 1))
            if target == seq.computed:
                continue
            if take <= 0:
                budget.behind = True
                return
            end = seq.computed + take
            rows = take if scoring else int(end == seq.length)
            budget.rows -= take if scoring else 0
            plan.slices.append(Slice(seq.id, seq.tokens[seq.computed:end], seq.computed, self.memory.table(seq), rows))
            self.memory.computed(seq, end)
            budget.tokens -= take
            if end < target:
                budget.behind = True
                return  # later sequences may share blocks that this one has yet to fill


def decoding(group: SequenceGroup) -> bool:
    """Whether every live sequence has just its last token to compute, with something generated before."""
    for seq in group.live:  # the properties written out: this is asked of every sequence in every step
        length = len(seq.tokens)
        if length - seq.computed != 1 or length == seq.prompt_len:
            return False
    return True
