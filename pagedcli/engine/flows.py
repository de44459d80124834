"""Groups that decode undisturbed, advanced as sums instead of one by one.

A decoding group gets one token a step until something happens to it: a block runs full, beams change, its last token
comes, it is preempted. Between such moments only numbers change, and they change evenly: with N sequences flowing, a
step computes N tokens, reads C + N * step keys and fills N slots. `Flows` keeps those sums and a calendar of the next
moment of each group, so that a step costs what happens in it.
"""

from __future__ import annotations

from pagedcli.core.plan import Slice, StepPlan
from pagedcli.core.sequence import SequenceGroup
from pagedcli.engine.beam_script import BeamScript
from pagedcli.engine.scripted import ScriptedSampler
from pagedcli.memory.interface import MemoryPolicy

ENDED = -1
Spans = list[tuple[int, int]]
"""Half-open ranges of step numbers in which a group got a token."""


class Flow:
    """One flowing group. At the plan of step s each of its `count` sequences has `length + s - base` tokens, the last
    of them not yet computed. `last`: that length at the group's last step. `due`: the step at which it must be looked
    at. `since`: where its open span began."""

    __slots__ = ("base", "count", "due", "group", "last", "length", "since")

    def __init__(self, group: SequenceGroup, base: int, length: int, since: int) -> None:
        self.group = group
        self.base = base
        self.length = length
        self.since = since
        self.count = len(group.live)
        self.last = group.prompt_len + group.max_output - 1
        self.due = ENDED


class Flows:
    """All flowing groups, their sums and their calendar. Needs forced output lengths and the scripted sampler.

    sequences: N. The lag is the number of slots that are filled but not yet told to the memory policy.
    """

    def __init__(self, memory: MemoryPolicy, sampler: ScriptedSampler, beams: BeamScript) -> None:
        self.memory = memory
        self.sampler = sampler
        self.beams = beams
        self.step = 0
        self.sequences = 0
        self.calendar: dict[int, list[Flow]] = {}
        self._flows: dict[int, Flow] = {}
        self._spans: dict[int, Spans] = {}
        self._offset = 0  # sum of count * (length - base)
        self._told = 0  # sum of count * base

    @property
    def context(self) -> int:
        """Keys read by all flowing sequences in the present step, their own new one included."""
        return self._offset + self.step * self.sequences

    @property
    def lag(self) -> int:
        """Filled slots that the memory's own count does not have yet."""
        return self.step * self.sequences - self._told

    def get(self, group: SequenceGroup) -> Flow | None:
        return self._flows.get(id(group))

    def start(self, group: SequenceGroup, base: int, since: int) -> Flow:
        """A group starts to decode: its tokens but the last were computed by step `base`."""
        flow = Flow(group, base, len(group.live[0].tokens) - 1, since)
        self._flows[id(group)] = flow
        self.sequences += flow.count
        self._offset += flow.count * (flow.length - base)
        self._told += flow.count * base
        return flow

    def end(self, group: SequenceGroup, until: int) -> None:
        """A group stops to decode, if it did; its span closes before step `until`."""
        flow = self._flows.pop(id(group), None)
        if flow is None:
            return
        flow.due = ENDED
        self.sequences -= flow.count
        self._offset -= flow.count * (flow.length - flow.base)
        self._told -= flow.count * flow.base
        if until > flow.since:
            self._spans.setdefault(id(group), []).append((flow.since, until))

    def mark(self, group: SequenceGroup) -> None:
        """A group that does not flow got its last token in the present step."""
        self._spans.setdefault(id(group), []).append((self.step, self.step + 1))

    def spans(self, group: SequenceGroup) -> Spans:
        """Hand over the spans of a group that has ended."""
        return self._spans.pop(id(group), [])

    def forget(self, group: SequenceGroup) -> None:
        self._spans.pop(id(group), None)

    def take_due(self) -> list[Flow]:
        """Flows to look at in the present step, in arrival order."""
        due = self.calendar.pop(self.step, None)
        if due is None:
            return []
        due = [flow for flow in due if flow.due == self.step]
        due.sort(key=lambda flow: flow.group.order)
        return due

    def settle(self, flow: Flow, tell: bool = True) -> None:
        """Write down what has happened to a flow's sequences before the present step. `tell` the memory of the slots
        filled since, unless `append`, which does, comes next."""
        before = self.step - 1
        length = flow.length + before - flow.base
        group = flow.group
        for place, seq in enumerate(group.live):
            missing = length + 1 - len(seq.tokens)
            if missing > 0:
                if group.beam is not None:
                    seq.sample = place
                seq.tokens += self.sampler.tokens(seq, seq.sample, missing)
            seq.computed = length
            if tell:
                self.memory.computed(seq, length)
        self._rebase(flow, before, length)

    def append(self, flow: Flow, plan: StepPlan) -> None:
        """Give a settled flow the slots of the present step. Where the step's choices matter (the last token, beams
        that change) it gets slices in the plan, else an entry in the calendar."""
        memory = self.memory
        group = flow.group
        length = flow.length + 1
        for seq in group.live:
            plan.copies += memory.append(seq)
            memory.computed(seq, length)
        self._rebase(flow, self.step, length)
        if length >= flow.last or (group.beam is not None and self._beams_change(group, length - group.prompt_len)):
            plan.slices += [Slice(seq.id, seq.tokens[-1:], length - 1, memory.table(seq), 1) for seq in group.live]
        else:
            self.file(flow)

    def _beams_change(self, group: SequenceGroup, made: int) -> bool:
        return self.beams.next_change(group, made) == made

    def file(self, flow: Flow) -> None:
        """Enter the next moment of a flow that was written down up to its base."""
        group, length = flow.group, flow.length
        steady = self.memory.steady_until
        wait = min([steady(seq) for seq in group.live]) + 1 - length
        if flow.last - length < wait:
            wait = flow.last - length
        if group.beam is not None:
            made = length + 1 - group.prompt_len
            wait = min(wait, self.beams.next_change(group, made) - made + 1)
        flow.due = due = flow.base + (wait if wait > 0 else 1)
        entry = self.calendar.get(due)
        if entry is None:
            self.calendar[due] = [flow]
        else:
            entry.append(flow)

    def resume(self, flow: Flow) -> None:
        """A flow had slices in the present step and its choices have been applied."""
        count = len(flow.group.live)
        if count != flow.count:
            self.sequences += count - flow.count
            self._offset += (count - flow.count) * (flow.length - flow.base)
            self._told += (count - flow.count) * flow.base
            flow.count = count
        self.file(flow)

    def _rebase(self, flow: Flow, base: int, length: int) -> None:
        """Same line, another point of it: the sum of offsets does not change."""
        self._told += flow.count * (base - flow.base)
        flow.base, flow.length = base, length
