"""Step plans as short runs of integers, for sending to other ranks each step.

Block tables are what makes plans long, and they change by at most a block or two a step, so the coder sends only what
was added since the sequence's last slice. Both sides remember the tables of the last plan and of no other: a sequence
that was not in it is sent whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagedcli.core.plan import Slice, StepPlan

Moves = Sequence[tuple[int, int]]
_FIELDS = 6


class PlanEncoder:
    """Encodes the plans of one run, in order."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}

    def encode(self, plan: StepPlan) -> NDArray[np.int32]:
        """The plan as int32 numbers: counts, then (seq, start, tokens, logit rows, blocks kept, blocks added) of each
        slice, then all tokens, all added blocks, and the moves."""
        head = [len(plan.slices), len(plan.copies), len(plan.swap_out), len(plan.swap_in)]
        fields: list[int] = []
        tokens: list[int] = []
        blocks: list[int] = []
        tables: dict[int, list[int]] = {}
        for item in plan.slices:
            table = list(item.blocks)
            before = self._tables.get(item.seq, [])
            kept = len(before) if table[:len(before)] == before else 0
            tables[item.seq] = table
            fields += (item.seq, item.start, len(item.tokens), item.logit_rows, kept, len(table) - kept)
            tokens += item.tokens
            blocks += table[kept:]
        self._tables = tables
        moves = [number for group in (plan.copies, plan.swap_out, plan.swap_in) for move in group for number in move]
        return np.array([*head, *fields, *tokens, *blocks, *moves], np.int32)


class PlanDecoder:
    """The other end of a PlanEncoder."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}

    def decode(self, data: NDArray[np.int32]) -> StepPlan:
        """The plan that was encoded; every plan must pass through, in order."""
        numbers: list[int] = data.tolist()
        slices, *moves = numbers[:4]
        at = 4 + slices * _FIELDS
        rows = [numbers[place:place + _FIELDS] for place in range(4, at, _FIELDS)]
        block_at = at + sum(row[2] for row in rows)
        plan = StepPlan()
        tables: dict[int, list[int]] = {}
        for seq, start, count, logit_rows, kept, added in rows:
            table = (self._tables[seq] if kept else []) + numbers[block_at:block_at + added]
            tables[seq] = table
            plan.slices.append(Slice(seq, numbers[at:at + count], start, table, logit_rows))
            at += count
            block_at += added
        self._tables = tables
        plan.copies, block_at = _pairs(numbers, block_at, moves[0])
        plan.swap_out, block_at = _pairs(numbers, block_at, moves[1])
        plan.swap_in, _ = _pairs(numbers, block_at, moves[2])
        return plan


def _pairs(numbers: list[int], at: int, count: int) -> tuple[list[tuple[int, int]], int]:
    end = at + 2 * count
    return list(zip(numbers[at:end:2], numbers[at + 1:end:2], strict=True)), end
