"""Contracts between the parts of the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.core.request import Request
from pagedcli.core.sequence import Sequence, SequenceGroup, TokenChoice

Choices = Mapping[int, list[TokenChoice]]
"""Sampler's answer: for each sequence id that had its last token computed, its continuations (see TokenChoice)."""


@dataclass(slots=True)
class Counters:
    """Running totals of an engine, for summaries. Times in seconds, the rest counts.

    `prompt_tokens` and `cached_tokens` are of requests that serve a row. `warmed_tokens`: prompt tokens computed for
    those that do not, which only bring a beginning into the cache.
    """

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    warmed_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    preempt_recompute: int = 0
    preempt_swap: int = 0
    swap_fallbacks: int = 0
    block_copies: int = 0
    blocks_swapped: int = 0
    logical_block_steps: int = 0
    physical_block_steps: int = 0
    sharing_ratio_sum: float = 0.0
    sharing_ratio_steps: int = 0
    peak_used_blocks: int = 0
    waste_sum: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class Sampler(ABC):
    """Chooses tokens. Keeps per-sequence state by sequence id (penalty counts and the like), rebuilt when missing."""

    @abstractmethod
    def choose(self, plan: StepPlan, result: StepResult, sequences: Mapping[int, Sequence]) -> Choices:
        """Choices for every slice whose last token was computed in this step and is its sequence's last token
        (`slice.start + len(slice.tokens) == sequence.length`). Fills `group.prompt_logprobs` from prompt rows."""

    def check(self, request: Request, vocab_size: int) -> None:
        """Raises RequestError for a request whose fields this sampler or model cannot serve."""
        del request, vocab_size

    def forked(self, parent: int, child: int) -> None:
        """A child sequence now exists with the parent's history."""
        del parent, child

    def forget(self, seq: int) -> None:
        """A sequence has ended; drop its state."""
        del seq


class TextState(Protocol):
    """Turns a sequence's ids into text as they come and finds stops across token borders."""

    def start(self, seq: Sequence) -> None: ...

    def advance(self, seq: Sequence) -> str | None:
        """Take in the last token; update `seq.text`; return the stop string that now ends the sequence, or None."""
        ...

    def finish(self, seq: Sequence) -> None:
        """The sequence has ended: release held-back text, drop an unfinished character."""
        ...


class Scheduler(ABC):
    """Decides who runs in each step. FCFS: nothing overtakes an earlier request at admission."""

    @abstractmethod
    def add(self, group: SequenceGroup) -> None: ...

    @abstractmethod
    def abort(self, group: SequenceGroup) -> None:
        """Drop a group in any state, at once, freeing all it holds."""

    @abstractmethod
    def has_work(self) -> bool: ...

    @abstractmethod
    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run. Never None while there is work."""

    @abstractmethod
    def commit(self, plan: StepPlan, choices: Choices, now: float) -> list[SequenceGroup]:
        """Apply a step's choices: append, fork, free. Returns the groups that finished."""

    @property
    @abstractmethod
    def depth(self) -> tuple[int, int, int]:
        """(running, waiting, swapped) groups."""


class RequestSource(Protocol):
    """Whatever feeds an engine: `take` returns the next request or None when there is none now."""

    def take(self) -> Request | None: ...
