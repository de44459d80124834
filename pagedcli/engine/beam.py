"""Beam search with Hugging Face's meaning: who continues, who is finished, when to stop, who is returned.

Follows transformers 5 (`GenerationMixin._beam_search`) for one request: scores are float32 sums of processed
log-probabilities; each step looks at the best max(2, 1 + end tokens) x width continuations; those among the best
`width` that end enter a pool of finished hypotheses, ranked by score / length ** length_penalty; the best `width` that
do not end go on. Temperature, top_k, top_p and min_p play no part, as in a search without sampling.

Here a continuation is a choice for its parent sequence: several make it fork, none drops it. The state depends on
tokens and scores only, so a group may be preempted, swapped or computed anew at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from pagedcli.core.sequence import Sequence, SequenceGroup, TokenChoice
from pagedcli.engine.pieces import StopSpelling

Details = Callable[[int, int], tuple[float, Items[tuple[int, float]] | None]]
"""(place of a live sequence, token) -> log-probability of the model's own and the top list, if asked for."""

Ending = tuple[str, str | int | None]
"""finish_reason and stop_reason."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam. `tokens` are output ids, `score` ranks, `logprob` is the model's own cumulative one.

    `logprobs` holds a choice for each token when the request asked for log-probabilities.
    """

    tokens: tuple[int, ...]
    score: float
    logprob: float
    finish_reason: str
    stop_reason: str | int | None
    logprobs: tuple[TokenChoice, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Candidate:
    score: np.float32
    place: int
    token: int


def best_tokens(log_probs: np.ndarray, count: int) -> np.ndarray:
    """The tokens with the `count` largest entries of a row [vocabulary], largest first, ties by token."""
    count = min(count, len(log_probs))
    least = np.partition(log_probs, len(log_probs) - count)[len(log_probs) - count]
    tokens = np.flatnonzero(log_probs >= least)
    return tokens[np.argsort(-log_probs[tokens], kind="stable")][:count]


class BeamState:
    """The beams of one group, kept on `group.beam`. `limit` is the most output tokens; `eos_ids` end a beam unless the
    request ignores them; `spelling` is needed for stop strings.

    A live sequence is known by its `sample`, its rank among the beams of the last step. `done`: the search is over and
    no sequence goes on.
    """

    def __init__(self, group: SequenceGroup, eos_ids: Items[int], limit: int, spelling: StopSpelling | None) -> None:
        params = group.params
        free = group.request.output_len is not None  # a forced length: nothing else ends a beam
        self._group = group
        self._width = params.width
        self._limit = limit
        self._spelling = spelling if params.stop and not free else None
        self._eos_ids = frozenset() if free or params.ignore_eos else frozenset(eos_ids)
        self._stop_ids = frozenset() if free else frozenset(params.stop_token_ids) - self._eos_ids
        self._scores: list[np.float32] = []
        self._finished: list[Hypothesis] = []
        self.done = limit <= 0

    @property
    def candidates(self) -> int:
        """Continuations looked at in each step."""
        return max(2, 1 + len(self._eos_ids) + len(self._stop_ids)) * self._width

    def results(self, n: int) -> list[Hypothesis]:
        """The n best finished hypotheses, best first; with no output allowed, n empty ones."""
        if self._limit <= 0:
            return [Hypothesis((), 0.0, 0.0, "length", None)] * n
        return self._finished[:n]

    def step(self, live: Items[Sequence], log_probs: np.ndarray, details: Details) -> dict[int, list[TokenChoice]]:
        """Choices for all live sequences of the group, whose processed log-probabilities [live, vocabulary] float32 are
        given in the same order. A sequence with an empty list is to be dropped; all are when the search is done."""
        choices: dict[int, list[TokenChoice]] = {seq.id: [] for seq in live}
        if self.done:
            return choices
        length = live[0].output_len + 1
        ranked = self._continuations(live, log_probs)
        going: list[_Candidate] = []
        alive = False
        for rank, candidate in enumerate(ranked):
            ending = self._ending(live[candidate.place], candidate.token, length)
            if ending is None:
                alive = True
                if len(going) < self._width:
                    going.append(candidate)
            elif rank < self._width:
                self._finish(live[candidate.place], candidate, length, ending, details)
        first = not self._scores
        self._scores = [candidate.score for candidate in going]
        self.done = not (alive and self._worth_going_on(length))
        if self.done:
            return choices
        for rank, candidate in enumerate(going):
            # Where the prompt is not shared, every sequence holds it already and takes a beam of its own.
            seq = live[rank % len(live)] if first else live[candidate.place]
            logprob, top = details(candidate.place, candidate.token)
            choices[seq.id].append(TokenChoice(seq.id, candidate.token, logprob, top, rank))
        return choices

    def _continuations(self, live: Items[Sequence], log_probs: np.ndarray) -> list[_Candidate]:
        """The best candidates of all beams by score, ties by beam and then by token."""
        rows = len(live) if self._scores else 1  # at first all sequences are the same prompt
        found = []
        for place in range(rows):
            base = self._scores[live[place].sample] if self._scores else np.float32(0)
            tokens = best_tokens(log_probs[place], self.candidates)
            found += [_Candidate(score, place, token) for score, token in
                      zip(log_probs[place, tokens] + base, tokens.tolist(), strict=True) if score > -np.inf]
        found.sort(key=lambda item: (-item.score, live[item.place].sample))
        return found[:self.candidates]

    def _ending(self, seq: Sequence, token: int, length: int) -> Ending | None:
        if token in self._eos_ids:
            return "stop", None
        if token in self._stop_ids:
            return "stop", token
        if self._spelling is not None:
            stop = self._spelling.completed(seq.tokens, token, self._group.params.stop)
            if stop is not None:
                return "stop", stop
        return ("length", None) if length >= self._limit else None

    def _finish(self, seq: Sequence, candidate: _Candidate, length: int, ending: Ending, details: Details) -> None:
        score = self._normalised(candidate.score, length)
        if len(self._finished) == self._width and score <= self._finished[-1].score:
            return
        logprob, top = details(candidate.place, candidate.token)
        kept = None
        if seq.logprobs is not None:
            kept = (*seq.logprobs, TokenChoice(seq.id, candidate.token, logprob, top))
        self._finished.append(Hypothesis((*seq.output_ids, candidate.token), float(score),
                                         seq.cumulative_logprob + logprob, *ending, kept))
        self._finished.sort(key=lambda item: -item.score)
        del self._finished[self._width:]

    def _worth_going_on(self, length: int) -> bool:
        """Whether the open beams can still matter, by the rule that early_stopping names."""
        params = self._group.params
        if len(self._finished) < self._width:
            return True
        if params.early_stopping is True or self._width == 1:
            return False  # one beam is a greedy search, which ends with its first end
        hopeful = params.early_stopping == "never" and params.length_penalty > 0
        best = self._normalised(self._scores[0], self._limit if hopeful else length)
        return bool(best > self._finished[-1].score)

    def _normalised(self, score: np.float32, length: int) -> np.float32:
        with np.errstate(over="ignore", divide="ignore", under="ignore"):
            return np.float32(score / np.float32(np.power(np.float64(length), self._group.params.length_penalty)))
