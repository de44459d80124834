"""The GPU's sampler against the same code on the CPU's torch, and against itself row by row."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence as Items
from typing import Any

import torch

from pagedcli.core.plan import Slice, StepPlan, StepResult
from pagedcli.core.request import Request, SamplingParams
from pagedcli.core.sequence import Sequence, SequenceGroup
from pagedcli.engine.device_sampler import DeviceSampler
from pagedcli.engine.interface import Choices

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0}, {}, {"temperature": 0.7}, {"top_k": 20}, {"top_p": 0.9},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.01, "temperature": 1.3}, {"min_p": 0.05},
    {"temperature": 0, "repetition_penalty": 1.2}, {"frequency_penalty": 0.4, "presence_penalty": 0.2})


def _sequence(number: int) -> Sequence:
    request = Request(number, f"row-{number}", (1, 2, 3), SamplingParams(**KINDS[number % len(KINDS)]))
    group = SequenceGroup(request, number)
    seq = Sequence(number, group, [1, 2, 3, 40 + number, 41], 3, 0)
    group.live.append(seq)
    return seq


def compare_sampling(device: str = "cuda", rows: int = 256, vocabulary: int = 50_272) -> dict[str, Any]:
    """Rows of a step whose token is the same on `device` and on the CPU; rows whose token or log-probability changes
    when few are chosen at once; milliseconds of a whole step's choice."""
    logits = 2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))
    there, seqs = logits.to(device), [_sequence(number) for number in range(rows)]

    def choose(source: torch.Tensor, members: Items[int]) -> Choices:
        plan = StepPlan([Slice(m, seqs[m].tokens[-1:], seqs[m].length - 1, []) for m in members])
        return DeviceSampler(seed=1).choose(plan, StepResult(source[list(members)], 0.0), {m: seqs[m] for m in members})

    whole, here = choose(there, range(rows)), choose(logits, range(rows))
    parts = [choose(there, range(first, min(first + 7, rows))) for first in range(0, rows, 50)]
    taken = []
    for _ in range(7):
        begun = time.perf_counter()
        choose(there, range(rows))
        taken.append(time.perf_counter() - begun)
    return {"rows": rows, "same_as_cpu": sum(whole[m][0].token == here[m][0].token for m in range(rows)),
            "changed_by_neighbours": sum(whole[m] != chosen for part in parts for m, chosen in part.items()),
            "milliseconds": round(statistics.median(taken) * 1e3, 3)}
