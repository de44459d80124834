"""Request-level scheduling: a batch starts together and ends together (FasterTransformer, paper section 6.1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from pagedcli.core.config import SchedulerConfig
from pagedcli.core.plan import Slice, StepPlan
from pagedcli.core.sequence import Sequence, SequenceGroup, Status
from pagedcli.engine.interface import Choices, Counters, Scheduler
from pagedcli.engine.lifecycle import Lifecycle
from pagedcli.memory.interface import Verdict
from pagedcli.memory.static import StaticBatchMemory


class StaticScheduler(Scheduler):
    """When idle, takes the earliest waiting requests as one batch and runs it to the end of its longest output.

    A batch stops growing at `static_batch` sequences (default: what the buffers have room for), at a request with
    another number of samples, and at one whose lengths would make max(input) + max(output) too long. Results are
    handed over when the whole batch is done. Sequences that have ended are not computed any further, which is
    kinder than the real system, whose ended rows go on as padding.
    """

    def __init__(self, config: SchedulerConfig, memory: StaticBatchMemory, lifecycle: Lifecycle,
                 counters: Counters) -> None:
        self.config = config
        self.memory = memory
        self.lifecycle = lifecycle
        self.counters = counters
        self.waiting: deque[SequenceGroup] = deque()
        self.batch: list[SequenceGroup] = []
        self._ended: list[SequenceGroup] = []

    @property
    def sequences(self) -> Mapping[int, Sequence]:
        return self.lifecycle.sequences

    @property
    def depth(self) -> tuple[int, int, int]:
        return len(self.batch) + len(self._ended), len(self.waiting), 0

    def add(self, group: SequenceGroup) -> None:
        self.lifecycle.open(group)
        self.waiting.append(group)

    def has_work(self) -> bool:
        return bool(self.batch or self.waiting)

    def abort(self, group: SequenceGroup) -> None:
        for queue in (self.waiting, self.batch, self._ended):
            if group in queue:
                queue.remove(group)
        for seq in list(group.live):
            self.lifecycle.drop(seq)
        group.status = Status.FINISHED

    def plan(self, now: float) -> StepPlan | None:
        plan = StepPlan()
        plan.copies, self.lifecycle.pending_copies = self.lifecycle.pending_copies, []
        if not self.batch:
            self._open_batch(now)
        self._add_groups(plan, self.batch)
        return None if plan.empty else plan

    def _add_groups(self, plan: StepPlan, groups: list[SequenceGroup]) -> None:
        for group in groups:
            for seq in group.live:
                plan.copies += self.memory.append(seq)
                plan.slices.append(Slice(seq.id, seq.tokens[seq.computed:], seq.computed, self.memory.table(seq), 1))
                self.memory.computed(seq, seq.length)

    def commit(self, plan: StepPlan, choices: Choices, now: float) -> list[SequenceGroup]:
        return self._hand_over(self.lifecycle.apply(plan, choices, now), now)

    def _hand_over(self, ended: list[SequenceGroup], now: float) -> list[SequenceGroup]:
        """Keep what has ended until the whole batch has."""
        for group in ended:
            self.batch.remove(group)
            self._ended.append(group)
        if self.batch:
            return []
        finished, self._ended = self._ended, []
        for group in finished:
            group.finished_at = now
        return finished

    def _open_batch(self, now: float) -> None:
        picked: list[SequenceGroup] = []
        sequences = max_input = max_output = 0
        while self.waiting:
            group = self.waiting[0]
            same_kind = not picked or group.params.max_sequences == picked[0].params.max_sequences
            wanted = (sequences + group.params.max_sequences, max(max_input, group.prompt_len),
                      max(max_output, group.max_output))
            if picked and (not same_kind or wanted[0] > self.sequence_cap):
                break
            if self.memory.can_open(*wanted) is not Verdict.YES:
                break
            sequences, max_input, max_output = wanted
            picked.append(self.waiting.popleft())
        if not picked:
            return
        self.memory.open(sequences, max_input, max_output)
        for group in picked:
            self.memory.admit(group)
            group.status = Status.RUNNING
            group.scheduled_at = now
            group.cached_tokens = 0
            self.counters.prompt_tokens += group.prompt_len
        self.batch = picked

    @property
    def sequence_cap(self) -> int:
        """Most sequences of a batch."""
        return self.config.static_batch or self.config.max_num_seqs
