"""Sequences being generated and the groups they are scheduled in."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pagedcli.core.request import Request, SamplingParams


class Status(Enum):
    """Where a group stands. All sequences of a group share it (gang scheduling, paper section 4.5)."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """The sampler's word for one sequence.

    Sequence `seq` of the step continues with `token`. Several choices with one `seq` make it fork: the first keeps
    the sequence, each further one becomes a child with sample number `sample`. In beam search a sequence
    without any choice is dropped. `logprob` is of the model's own distribution (before temperature);
    `top` holds (token, logprob) pairs, most likely first, when the request asked for them.
    """

    seq: int
    token: int
    logprob: float = 0.0
    top: Items[tuple[int, float]] | None = None
    sample: int | None = None


class Sequence:
    """One stream of tokens: the prompt followed by what was generated.

    `tokens` holds prompt and output ids; `computed` counts those whose keys and values are in the cache, so the next
    step computes `tokens[computed:]`. A preempted sequence keeps its tokens and has `computed` 0.
    """

    __slots__ = ("computed", "cumulative_logprob", "finish_reason", "group", "id", "logprobs", "prompt_len",
                 "sample", "stop_reason", "text", "text_state", "tokens")

    def __init__(self, seq_id: int, group: SequenceGroup, tokens: list[int], prompt_len: int, sample: int) -> None:
        self.id = seq_id
        self.group = group
        self.tokens = tokens
        self.prompt_len = prompt_len
        self.sample = sample
        self.computed = 0
        self.cumulative_logprob = 0.0
        self.logprobs: list[TokenChoice] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.text = ""
        self.text_state: Any = None  # the engine's incremental detokeniser keeps its place here

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.tokens)

    @property
    def output_len(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def output_ids(self) -> list[int]:
        """Ids generated so far (a copy)."""
        return self.tokens[self.prompt_len:]

    @property
    def remaining(self) -> int:
        """Tokens not yet in the cache; 1 for a sequence in plain decoding."""
        return len(self.tokens) - self.computed

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def fork(self, seq_id: int, sample: int) -> Sequence:
        """A child that has generated the same tokens so far; its cache is shared by the memory layer's fork."""
        child = Sequence(seq_id, self.group, list(self.tokens), self.prompt_len, sample)
        child.computed = self.computed
        child.cumulative_logprob = self.cumulative_logprob
        child.logprobs = None if self.logprobs is None else list(self.logprobs)
        child.text = self.text
        child.text_state = self.text_state
        return child


class SequenceGroup:
    """All sequences of one request, scheduled and preempted as one.

    `order` is the arrival order that FCFS and preemption go by. `live` are the unfinished sequences, the ones that
    hold memory; finished ones move to `done`. `max_output` is the output length at which every sequence ends at the
    latest (max_tokens, or what model and pool leave room for). Times are seconds on the engine's clock.
    """

    __slots__ = ("beam", "cached_tokens", "done", "error", "finished_at", "first_token_at", "live", "max_output",
                 "order", "preemptions", "prompt_logprobs", "request", "scheduled_at", "status", "token_times")

    def __init__(self, request: Request, order: int) -> None:
        self.request = request
        self.order = order
        self.live: list[Sequence] = []
        self.done: list[Sequence] = []
        self.max_output = request.output_len or request.params.max_tokens or 0
        self.status = Status.WAITING
        self.cached_tokens: int | None = None
        self.prompt_logprobs: Any = None
        self.beam: Any = None  # the engine's beam state
        self.error: tuple[str, str] | None = None
        self.preemptions = 0
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self.token_times: list[float] | None = None

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def final_len(self) -> int | None:
        """Prompt plus the output length that is known beforehand (benchmarks force it), else None."""
        out = self.request.output_len
        return None if out is None else self.prompt_len + out
