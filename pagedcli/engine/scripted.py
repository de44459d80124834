"""Samplers that need no logits: lengths are forced and tokens follow a rule, for simulations and for `--model null`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.core.sequence import Sequence, SequenceGroup, TokenChoice
from pagedcli.engine.interface import Choices, Sampler

_PRINTABLE = 95
_STRIDE = 13

ParentRule = Callable[[SequenceGroup, int], list[int]]
"""(group, output tokens so far) -> for each beam of the next step, the index of its parent among the live ones."""


@dataclass(frozen=True, slots=True)
class ScriptedHypothesis:
    """One beam at its end (the fields that outputs are made of)."""

    tokens: tuple[int, ...]
    logprob: float = 0.0
    finish_reason: str = "length"
    stop_reason: str | int | None = None
    logprobs: None = None


class ScriptedBeams:
    """Beam state without scores: all beams run to the forced length and the first n are the outputs."""

    def __init__(self) -> None:
        self.done = False
        self._finals: list[ScriptedHypothesis] = []

    def finish(self, hypotheses: list[ScriptedHypothesis]) -> None:
        self.done, self._finals = True, hypotheses

    def results(self, n: int) -> list[ScriptedHypothesis]:
        return self._finals[:n]


def keep_all(group: SequenceGroup, made: int) -> list[int]:
    """Every beam continues itself: the parent rule that shares least."""
    del made
    return list(range(len(group.live)))


class ScriptedSampler(Sampler):
    """Token = a fixed function of (prompt's last id, sample, position): the same wherever and whenever it is computed.

    `base`: id that stands for the first of 95 printable characters (`--model null` decodes them to text).
    `parents`: who forks from whom in beam search, since there are no scores to tell.
    """

    def __init__(self, vocab_size: int, base: int = 0, parents: ParentRule = keep_all) -> None:
        self._span = min(_PRINTABLE, vocab_size - base)
        self._base = base
        # Tokens go up in strides through a cycle of `span`: where the stride visits all of it, any run of them is a
        # slice of one table.
        self._back = pow(_STRIDE, -1, self._span) if self._span > 1 and math.gcd(_STRIDE, self._span) == 1 else 0
        self._cycle = [base + _STRIDE * place % self._span for place in range(2 * self._span)]
        self._parents = parents

    def choose(self, plan: StepPlan, result: StepResult, sequences: Mapping[int, Sequence]) -> Choices:
        del result
        choices: dict[int, list[TokenChoice]] = {}
        for item in plan.slices:
            seq = sequences[item.seq]
            if item.start + len(item.tokens) != len(seq.tokens):
                continue
            group = seq.group
            if group.params.use_beam_search:
                if seq is group.live[0]:
                    choices.update(self._beams(group))
            elif group.params.samples > 1 and len(group.live) == 1 and seq.output_len == 0:
                choices[item.seq] = [self._token(seq, sample) for sample in range(group.params.samples)]
            else:
                choices[item.seq] = [self._token(seq, seq.sample)]
        return choices

    def _beams(self, group: SequenceGroup) -> Choices:
        if group.beam is None:
            group.beam = ScriptedBeams()
        made, live = group.live[0].output_len, group.live
        parents = [0] * group.params.width if made == 0 and len(live) == 1 else self._parents(group, made)
        choices: dict[int, list[TokenChoice]] = {}
        for rank, index in enumerate(parents):
            choices.setdefault(live[index].id, []).append(self._token(live[index], rank))
        if made + 1 >= group.max_output:
            tails = [(live[index], self._token(live[index], rank)) for rank, index in enumerate(parents)]
            group.beam.finish([ScriptedHypothesis((*seq.output_ids, choice.token)) for seq, choice in tails])
        return choices

    def _token(self, seq: Sequence, sample: int) -> TokenChoice:
        return TokenChoice(seq.id, self.tokens(seq, sample, 1)[0], sample=sample)

    def tokens(self, seq: Sequence, sample: int, count: int) -> list[int]:
        """The next `count` ids of a sequence that nothing but this rule continues."""
        base, span = self._base, self._span
        mixed = seq.tokens[seq.prompt_len - 1] * 7 + sample * 31 + len(seq.tokens) * _STRIDE
        if self._back and count <= span:
            place = mixed * self._back % span
            return self._cycle[place:place + count]
        return [base + (mixed + _STRIDE * place) % span for place in range(count)]
