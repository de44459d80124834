"""The same schedulers, told only of what changes: decisions and block identities are those of the plain ones.

They take over admission, preemption, swapping and the memory policies unchanged and replace only the walk over all
running groups. Plans hold slices of the groups whose choices matter in the step; `load` counts the others too.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping

from pagedcli.core.config import SchedulerConfig
from pagedcli.core.plan import StepPlan
from pagedcli.core.sequence import SequenceGroup
from pagedcli.engine.flows import Flow, Flows
from pagedcli.engine.interface import Choices, Counters
from pagedcli.engine.lifecycle import Lifecycle
from pagedcli.engine.preemption import RecoveryPolicy
from pagedcli.engine.scheduler import IterationScheduler, StepBudget, arrival_order, decoding
from pagedcli.engine.static_scheduler import StaticScheduler
from pagedcli.execution.cost_model import StepLoad
from pagedcli.memory.interface import MemoryPolicy
from pagedcli.memory.static import StaticBatchMemory


class EventScheduler(IterationScheduler):
    """IterationScheduler over `Flows`. `plan` never returns None while groups flow."""

    def __init__(self, config: SchedulerConfig, memory: MemoryPolicy, lifecycle: Lifecycle, recovery: RecoveryPolicy,
                 counters: Counters, flows: Flows) -> None:
        super().__init__(config, memory, lifecycle, recovery, counters)
        self.flows = flows
        self.load = StepLoad()
        self.quiet = False
        """Whether the last plan only let groups flow: until the calendar's next entry or the next arrival, every
        step will be like it."""
        self._filling: list[SequenceGroup] = []  # running groups with prompt left to compute
        self._refused: SequenceGroup | None = None
        self._kept_out: SequenceGroup | None = None

    def plan(self, now: float) -> StepPlan | None:
        plan, budget = StepPlan(), StepBudget(self.config)
        plan.copies, self.lifecycle.pending_copies = self.lifecycle.pending_copies, []
        preempted = self._decode(plan, budget)
        flowing = len(plan.slices)
        if self._filling:
            self._prefill_running(plan, budget)
        if self.swapped and not plan.swap_out:
            self._swap_in(plan, budget)
        if self.waiting and not (preempted or self.swapped):
            self._admit(plan, budget, now)
        self._count(plan, flowing)
        self.quiet = not (plan.slices or plan.swap_in or plan.swap_out or preempted or self._filling)
        return None if plan.empty and not self.flows.sequences else plan

    def commit(self, plan: StepPlan, choices: Choices, now: float) -> list[SequenceGroup]:
        finished = advance(self.flows, self.lifecycle, plan, choices, now)
        for group in finished:
            self._leave(group)
        if plan.slices:
            self._filling = [group for group in self._filling if self.flows.get(group) is None]
            self._refused = self._kept_out = None  # ended sequences and dropped beams have freed blocks
        self.flows.step += 1
        return finished

    def abort(self, group: SequenceGroup) -> None:
        flow = self.flows.get(group)
        if flow is not None:
            self.flows.settle(flow)
        super().abort(group)
        self.flows.forget(group)
        self._refused = self._kept_out = None

    # -- what replaces the walk over running groups ------------------------------------------------------------------

    def _decode(self, plan: StepPlan, budget: StepBudget) -> bool:
        flows, preempted = self.flows, False
        for flow in flows.take_due():
            if flow.due != flows.step:
                continue  # preempted by an earlier one of this step
            flows.settle(flow, tell=False)
            group = flow.group
            while not self.memory.can_append(group):
                victim = self.running[-1]
                self._preempt(victim, plan)
                preempted = True
                if victim is group:
                    break
            else:
                flows.append(flow, plan)
        budget.tokens -= flows.sequences
        return preempted

    def _prefill_running(self, plan: StepPlan, budget: StepBudget) -> None:
        for group in self._filling:
            self._add_prefill(group, plan, budget)

    def _add_decode(self, group: SequenceGroup, plan: StepPlan, budget: StepBudget) -> None:
        """A group is back from the host, in mid-decode."""
        step = self.flows.step
        self._filling.remove(group)
        flow = self.flows.start(group, step - 1, step)
        self.flows.append(flow, plan)
        budget.tokens -= flow.count

    def _count(self, plan: StepPlan, flowing: int) -> None:
        """The step's load: what flows, by its sums; the rest of the plan slice by slice."""
        flows = self.flows
        load = StepLoad(flows.sequences, flows.context, copies=len(plan.copies),
                        swaps=len(plan.swap_in) + len(plan.swap_out))
        if len(plan.slices) > flowing:
            sequences = self.lifecycle.sequences
            load.add([item for item in plan.slices[flowing:] if flows.get(sequences[item.seq].group) is None])
        self.load = load

    # -- comings and goings -------------------------------------------------------------------------------------------

    def _preempt(self, group: SequenceGroup, plan: StepPlan) -> None:
        flow = self.flows.get(group)
        if flow is not None:
            self.flows.settle(flow)
        super()._preempt(group, plan)

    def _leave(self, group: SequenceGroup) -> None:
        self.flows.end(group, self.flows.step)
        if self._filling and group in self._filling:
            self._filling.remove(group)
        self._refused = self._kept_out = None
        super()._leave(group)

    def _enter(self, group: SequenceGroup) -> None:
        super()._enter(group)
        insort(self._filling, group, key=arrival_order)

    def _memory_admits(self, group: SequenceGroup) -> bool:
        if group is self._refused:
            return False
        admits = super()._memory_admits(group)
        if not admits and self.memory.refusal_stands:
            self._refused = group
        return admits

    def _memory_returns(self, group: SequenceGroup) -> bool:
        if group is self._kept_out:
            return False
        returns = super()._memory_returns(group)
        if not returns:
            self._kept_out = group
        return returns


class EventStaticScheduler(StaticScheduler):
    """StaticScheduler over `Flows`: between the ends of sequences a batch only flows."""

    def __init__(self, config: SchedulerConfig, memory: StaticBatchMemory, lifecycle: Lifecycle, counters: Counters,
                 flows: Flows) -> None:
        super().__init__(config, memory, lifecycle, counters)
        self.flows = flows
        self.load = StepLoad()
        self.quiet = False

    def plan(self, now: float) -> StepPlan | None:
        plan, flows = StepPlan(), self.flows
        plan.copies, self.lifecycle.pending_copies = self.lifecycle.pending_copies, []
        opened = not self.batch
        if opened:
            self._open_batch(now)
            self._add_groups(plan, self.batch)
        else:
            for flow in flows.take_due():
                flows.settle(flow, tell=False)
                flows.append(flow, plan)
        self.load = StepLoad(flows.sequences, flows.context, copies=len(plan.copies))
        if opened:
            self.load.add(plan.slices)
        self.quiet = not plan.slices
        return None if plan.empty and not flows.sequences else plan

    def commit(self, plan: StepPlan, choices: Choices, now: float) -> list[SequenceGroup]:
        ended = advance(self.flows, self.lifecycle, plan, choices, now)
        self.flows.step += 1
        return self._hand_over(ended, now)

    @property
    def running(self) -> list[SequenceGroup]:
        return self.batch

    @property
    def swapped(self) -> Mapping[int, SequenceGroup]:
        return {}


def advance(flows: Flows, lifecycle: Lifecycle, plan: StepPlan, choices: Choices, now: float) -> list[SequenceGroup]:
    """Apply the choices of a step's slices; groups that now decode begin to flow. Returns those that finished."""
    if not plan.slices:
        return []
    touched: dict[int, SequenceGroup] = {}
    chosen: set[int] = set()
    for item in plan.slices:
        group = lifecycle.sequences[item.seq].group
        touched[id(group)] = group
        if item.seq in choices:
            chosen.add(id(group))
    finished = lifecycle.apply(plan, choices, now)
    for group in touched.values():
        flow: Flow | None = flows.get(group)
        if group.finished:
            if flow is not None:
                flows.end(group, flows.step + 1)
            else:
                flows.mark(group)
        elif flow is not None:
            flows.resume(flow)
        elif decoding(group):
            since = flows.step if id(group) in chosen else flows.step + 1
            flows.file(flows.start(group, flows.step, since))
    return finished
