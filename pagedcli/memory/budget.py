"""Text Generation Inference's memory as of mid-2023: a budget of tokens, prompt plus output limit each."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from pagedcli.core.sequence import SequenceGroup
from pagedcli.memory.pool import BlockPool
from pagedcli.memory.reserving import Reservation, ReservingMemory


class TokenBudgetMemory(ReservingMemory):
    """A request enters when the sum of prompt + max_new_tokens over all running requests, itself included, stays within
    the budget, which is the pool; first come first served, stopping at the first that does not fit.

    Source: huggingface/text-generation-inference, router/src/queue.rs (`next_batch`: take entries from the front
    while prefill + decode tokens are within `token_budget`) and router/src/infer.rs (the budget left is
    `max_batch_total_tokens` less the running batch's `max_tokens`); server/.../flash_causal_lm.py before
    v0.9 sums input_length + max_new_tokens and lays the caches of a batch out in one tensor, copied together
    whenever requests join or leave. That copying leaves no holes, so here only the budget decides and a
    reservation's blocks may lie anywhere; rounding to whole blocks (external) is ours.

    max_new_tokens is `max_tokens`, or all that `max_len` leaves when the user set none; never the true output
    length, which TGI does not know.
    """

    name = "tgi"

    def __init__(self, num_blocks: int, block_size: int = 16, *, max_len: int = 2048) -> None:
        super().__init__(num_blocks, block_size, max_len)
        self.pool = BlockPool(num_blocks)

    def reserved_len(self, group: SequenceGroup) -> int:
        limit = group.params.max_tokens
        length = self.max_len if limit is None else min(group.prompt_len + limit, self.max_len)
        return max(length, min(group.final_len or 0, self.max_len))

    def blocks_for_ever(self, group: SequenceGroup, max_len: int) -> int:
        del max_len
        return group.params.max_sequences * self.blocks_of(self.reserved_len(group))

    def _fits(self, count: int, length: int) -> bool:
        return count * self.blocks_of(length) <= self.pool.available

    def _reserve(self, length: int) -> tuple[Seq[int], int]:
        blocks = [self.pool.take() for _ in range(self.blocks_of(length))]
        return blocks, len(blocks)

    def _give_back(self, reservation: Reservation) -> None:
        for block in reversed(reservation.blocks):
            self.pool.release(block)

    def check(self) -> None:
        super().check()
        self.pool.check()
        assert self._held == self.pool.held, "held blocks were miscounted"
