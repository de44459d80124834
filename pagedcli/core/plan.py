"""What one iteration computes, as integers only: the whole interface between scheduling and execution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Slice:
    """Consecutive tokens of one sequence computed in this step.

    `tokens` are ids at positions `start` ..; `blocks` is the sequence's block table, a live view which
    the plan's maker does not change before the step has run. `logit_rows` is how many of the *last* tokens want
    logits: 0 for a chunk in mid-prompt, 1 for the token after which one is sampled, more for prompt_logprobs.
    """

    seq: int
    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    logit_rows: int = 1


@dataclass(slots=True)
class StepPlan:
    """One iteration. Executed in this order: swap_out, swap_in, copies, then all slices as one flattened batch.

    `copies` are (source block, destination block) on the device; `swap_out` (device, host); `swap_in` (host, device).
    No plan has both swap_in and swap_out.
    """

    slices: list[Slice] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(item.tokens) for item in self.slices)

    @property
    def num_logit_rows(self) -> int:
        return sum(item.logit_rows for item in self.slices)

    @property
    def empty(self) -> bool:
        return not (self.slices or self.copies or self.swap_out or self.swap_in)

    def frozen(self) -> dict[str, Any]:
        """A copy fit for logging, diffing and replaying."""
        return {
            "slices": [[s.seq, list(s.tokens), s.start, list(s.blocks), s.logit_rows] for s in self.slices],
            "copies": list(self.copies), "swap_out": list(self.swap_out), "swap_in": list(self.swap_in),
        }


@dataclass(slots=True)
class StepResult:
    """`logits`: [sum of logit_rows, vocabulary] floats in slice order (an array, or a torch tensor), or None when
    simulated. They hold until the next step.

    `seconds` is how long the step took; `parts` splits it for profiles (attention, linear, ...), in seconds.
    """

    logits: Any
    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
