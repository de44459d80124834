"""Where the slots of a pool go, counted as things happen, and what sharing saves."""

from __future__ import annotations

from collections.abc import Iterable

from pagedcli.memory.interface import Usage


class SlotLedger:
    """Filled and hopeless slots of the held blocks of a paged pool, each block counted once however many share it.

    `filled[b]`: slots of block b with keys and values. `never[b]`: slots of b past the known end of its sequence.
    `token` and `internal` are their sums over held blocks. Constant time an event.
    """

    __slots__ = ("block_size", "filled", "internal", "never", "token")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.filled = [0] * num_blocks
        self.never = [0] * num_blocks
        self.token = 0
        self.internal = 0

    def hold(self, block: int, filled: int, never: int = 0) -> None:
        """A block nobody held is now held, with `filled` slots written and `never` that will not be."""
        never = min(never, self.block_size - filled)
        self.filled[block] = filled
        self.never[block] = never
        self.token += filled
        self.internal += never

    def fill(self, block: int, upto: int) -> None:
        """Slots below `upto` of a held block are written."""
        grown = upto - self.filled[block]
        if grown <= 0:
            return
        self.filled[block] = upto
        self.token += grown
        over = upto + self.never[block] - self.block_size
        if over > 0:  # the sequence went past the end it was said to have
            self.never[block] -= over
            self.internal -= over

    def drop(self, block: int) -> None:
        """The last holder of a block has left."""
        self.token -= self.filled[block]
        self.internal -= self.never[block]
        self.filled[block] = 0
        self.never[block] = 0

    def usage(self, total: int, held: int, logical: int) -> Usage:
        """The five classes for a pool of `total` blocks of which `held` are held. Nothing is lost between blocks."""
        size = self.block_size
        reserved = held * size - self.token - self.internal
        return Usage(self.token, reserved, self.internal, 0, (total - held) * size, logical, held)


def beyond(index: int, block_size: int, final_len: int | None) -> int:
    """Slots of a sequence's block number `index` that lie past its known final length (0 when unknown)."""
    if final_len is None:
        return 0
    return min(block_size, max(0, (index + 1) * block_size - final_len))


def others(usage: Usage) -> float:
    """The paper's class "external & others" as a share of the pool: lost between allocations, or not handed out."""
    return (usage.external + usage.free) / max(usage.total, 1)


def sharing_saving(usages: Iterable[Usage]) -> float:
    """Memory saved by sharing, 1 - 1 / mean(logical / physical), over steps with any block held (paper Figure 15)."""
    ratios = [usage.logical / usage.physical for usage in usages if usage.physical and usage.logical]
    return 1 - len(ratios) / sum(ratios) if ratios else 0.0
