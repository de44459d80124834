"""Orca's memory: one contiguous chunk a sequence, reserved on entry (paper section 6.1, Orca Oracle, Pow2 and Max)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Literal

from pagedcli.core.errors import RequestError
from pagedcli.core.sequence import SequenceGroup
from pagedcli.memory.buddy import BuddyAllocator
from pagedcli.memory.reserving import Reservation, ReservingMemory

Reserve = Literal["oracle", "pow2", "max"]


def next_power_of_two(value: int) -> int:
    """The least power of two that is at least `value` (1 for anything below 1)."""
    return 1 << (max(value, 1) - 1).bit_length()


class ContiguousMemory(ReservingMemory):
    """Each sequence reserves min(prompt + estimate, max_len) slots from a buddy allocator over blocks.

    The estimate of the output length by `reserve`: `oracle` the true length, `pow2` the next power of two at or above
    it (25 gives 32), `max` the most the model allows. The largest chunk is the power of two that holds
    `max_len` (2048 tokens in blocks of 16: 128 blocks). oracle and pow2 need `Request.output_len`: they
    raise RequestError (code `output_len_unknown`) for a request without it.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, *, max_len: int = 2048,
                 reserve: Reserve = "max") -> None:
        super().__init__(num_blocks, block_size, max_len)
        self.name = f"orca-{reserve}"
        self.reserve: Reserve = reserve
        self.buddy = BuddyAllocator(num_blocks, next_power_of_two(self.blocks_of(max_len)))
        self._chunks: dict[int, int] = {}

    def reserved_len(self, group: SequenceGroup) -> int:
        if self.reserve == "max":
            return self.max_len
        output = group.request.output_len
        if output is None:
            raise RequestError(
                "output_len_unknown", f"policy {self.name} reserves memory by the true output length, and this request "
                "has none; run it under `pagedcli bench`, or use orca-max")
        estimate = output if self.reserve == "oracle" else next_power_of_two(output)
        return min(group.prompt_len + estimate, self.max_len)

    def blocks_for_ever(self, group: SequenceGroup, max_len: int) -> int:
        """A chunk per sequence, whatever `max_len`. Equal chunks fit an empty pool exactly when their sum does."""
        del max_len
        return group.params.max_sequences * self.buddy.rounded(self.blocks_of(self.reserved_len(group)))

    def _fits(self, count: int, length: int) -> bool:
        return self.buddy.fits(count, self.blocks_of(length))

    def _reserve(self, length: int) -> tuple[Seq[int], int]:
        blocks = self.blocks_of(length)
        start, size = self.buddy.take(blocks)
        self._chunks[start] = size
        return range(start, start + blocks), size

    def _give_back(self, reservation: Reservation) -> None:
        start = reservation.blocks[0]
        self.buddy.give(start, self._chunks.pop(start))

    def check(self) -> None:
        super().check()
        self.buddy.check(list(self._chunks.items()))
        assert self._held == sum(self._chunks.values()), "held blocks were miscounted"
        starts = {item.blocks[0]: item.held for item in self._reservations.values()}
        assert starts == self._chunks, "a chunk has no sequence, or a sequence no chunk"
