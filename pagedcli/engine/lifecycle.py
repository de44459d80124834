"""What a step's choices do to sequences: append, fork, drop, finish. Shared by all schedulers."""

from __future__ import annotations

from itertools import count

from pagedcli.core.plan import StepPlan
from pagedcli.core.sequence import Sequence, SequenceGroup, Status, TokenChoice
from pagedcli.engine.interface import Choices, Sampler, TextState
from pagedcli.memory.interface import MemoryPolicy, Move


class Lifecycle:
    """Creates, continues and ends sequences on behalf of a scheduler.

    `sequences` maps ids to the live sequences. `pending_copies` are block copies that forks ask for (policies that do
    not share); the next plan takes them. `record_times` keeps the time of every token for latency metrics.
    """

    def __init__(self, memory: MemoryPolicy, sampler: Sampler, text: TextState | None, eos_ids: frozenset[int],
                 record_times: bool = False) -> None:
        self.memory = memory
        self.sampler = sampler
        self.text = text
        self.eos_ids = eos_ids
        self.record_times = record_times
        self.sequences: dict[int, Sequence] = {}
        self.pending_copies: list[Move] = []
        self._ids = count()

    def open(self, group: SequenceGroup) -> None:
        """Give a new group its first sequences: one, or one a sample where the memory shares no prompt."""
        request = group.request
        wanted = 1 if self.memory.shares_prompt else group.params.max_sequences
        for sample in range(wanted):
            seq = Sequence(next(self._ids), group, list(request.prompt), group.prompt_len, sample)
            if group.params.logprobs is not None:
                seq.logprobs = []
            if self.text is not None:
                self.text.start(seq)
            self.sequences[seq.id] = seq
            group.live.append(seq)

    def apply(self, plan: StepPlan, choices: Choices, now: float) -> list[SequenceGroup]:
        """Advance every sequence of the step; returns the groups whose last live sequence ended."""
        touched: dict[int, SequenceGroup] = {}
        for item in plan.slices:
            seq = self.sequences[item.seq]
            seq.computed = item.start + len(item.tokens)
            if item.seq in choices:
                touched[id(seq.group)] = seq.group
        for group in touched.values():
            self._mark(group, now)
            if group.params.use_beam_search and group.beam is not None:
                self._apply_beams(group, choices)
            else:
                self._apply_samples(group, choices)
        return [self._close(group, now) for group in touched.values() if not group.live]

    def drop(self, seq: Sequence) -> None:
        """Free a sequence's memory and forget it; it keeps its tokens and text."""
        self.memory.free(seq)
        self.sampler.forget(seq.id)
        del self.sequences[seq.id]
        seq.group.live.remove(seq)

    def _mark(self, group: SequenceGroup, now: float) -> None:
        if group.first_token_at is None:
            group.first_token_at = now
            if self.record_times:
                group.token_times = []
        if group.token_times is not None:
            group.token_times.append(now)

    def _apply_samples(self, group: SequenceGroup, choices: Choices) -> None:
        for seq in list(group.live):
            options = choices.get(seq.id)
            if not options:
                continue
            children = [self._fork(seq, choice) for choice in options[1:]]
            for branch, choice in zip([seq, *children], options, strict=True):
                self._take(branch, choice)
                reason = self._stop(branch)
                if reason is not None:
                    self._finish(branch, *reason)

    def _apply_beams(self, group: SequenceGroup, choices: Choices) -> None:
        kept = [(seq, choices[seq.id]) for seq in group.live if choices.get(seq.id)]
        for seq in [seq for seq in group.live if not choices.get(seq.id)]:
            self.drop(seq)
        for seq, options in kept:
            children = [self._fork(seq, choice) for choice in options[1:]]
            for branch, choice in zip([seq, *children], options, strict=True):
                self._take(branch, choice)
        if group.beam.done:
            for seq in list(group.live):
                self.drop(seq)

    def _fork(self, parent: Sequence, choice: TokenChoice) -> Sequence:
        sample = choice.sample if choice.sample is not None else parent.sample
        child = parent.fork(next(self._ids), sample)
        self.pending_copies.extend(self.memory.fork(parent, child))
        self.sampler.forked(parent.id, child.id)
        self.sequences[child.id] = child
        parent.group.live.append(child)
        return child

    def _take(self, seq: Sequence, choice: TokenChoice) -> None:
        if seq.group.max_output == 0:
            return
        if choice.sample is not None:
            seq.sample = choice.sample
        seq.tokens.append(choice.token)
        seq.cumulative_logprob += choice.logprob
        if seq.logprobs is not None:
            seq.logprobs.append(choice)

    def _stop(self, seq: Sequence) -> tuple[str, str | int | None] | None:
        """(finish_reason, stop_reason) when the sequence ends with its last token, else None."""
        params, made, limit = seq.group.params, seq.output_len, seq.group.max_output
        stop_text = self.text.advance(seq) if self.text is not None and made else None
        if seq.group.request.output_len is None and made >= max(params.min_tokens, 1):
            last = seq.tokens[-1]
            if last in self.eos_ids and not params.ignore_eos:
                return "stop", None
            if last in params.stop_token_ids:
                return "stop", last
            if stop_text is not None:
                return "stop", stop_text
        return ("length", None) if made >= limit else None

    def _finish(self, seq: Sequence, reason: str, stop_reason: str | int | None) -> None:
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if self.text is not None:
            self.text.finish(seq)
        self.drop(seq)
        seq.group.done.append(seq)

    def _close(self, group: SequenceGroup, now: float) -> SequenceGroup:
        """Order and number the outputs of a group that has ended."""
        if group.beam is not None:
            group.done = self._beam_outputs(group)
        elif group.params.best_of is not None:
            group.done.sort(key=lambda seq: (-seq.cumulative_logprob, seq.sample))
            group.done = group.done[: group.params.n]
        else:
            group.done.sort(key=lambda seq: seq.sample)
        group.status = Status.FINISHED
        group.finished_at = now
        return group

    def _beam_outputs(self, group: SequenceGroup) -> list[Sequence]:
        outputs = []
        for rank, hypothesis in enumerate(group.beam.results(group.params.n)):
            seq = Sequence(-1, group, list(group.request.prompt), group.prompt_len, rank)
            if self.text is not None:
                self.text.start(seq)
            for token in hypothesis.tokens:
                seq.tokens.append(token)
                if self.text is not None:
                    self.text.advance(seq)
            seq.cumulative_logprob = hypothesis.logprob
            seq.logprobs = None if hypothesis.logprobs is None else list(hypothesis.logprobs)
            seq.finish_reason, seq.stop_reason = hypothesis.finish_reason, hypothesis.stop_reason
            if self.text is not None:
                self.text.finish(seq)
            outputs.append(seq)
        return outputs
