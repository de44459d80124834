"""The block table of one sequence."""

from __future__ import annotations

from pagedcli.memory.prefix import Node


class BlockTable:
    """Maps token positions to blocks: position p lies in `blocks[p // block_size]`, slot `p % block_size`.

    blocks: device blocks in token order (only the pinned ones while swapped out).
    filled: tokens whose keys and values are in the cache or in the current plan.
    open: positions below it can be written without looking: their blocks exist, and whatever sharing
        they have is of agreed contents. 0 after a fork, when the last block may need a private copy.
    chained, tip: how many full blocks have been offered to the prefix cache, and the node of the last of them.
    host: host blocks that follow `blocks` while swapped out, else None.
    """

    __slots__ = ("blocks", "chained", "filled", "host", "open", "tip")

    def __init__(self, blocks: list[int], filled: int, writable: int, chained: int, tip: Node) -> None:
        self.blocks = blocks
        self.filled = filled
        self.open = writable
        self.chained = chained
        self.tip = tip
        self.host: list[int] | None = None

    @property
    def swapped(self) -> bool:
        return self.host is not None

    def fork(self) -> BlockTable:
        """A table over the same blocks. Both may now have to copy the last block before they write."""
        self.open = 0
        return BlockTable(list(self.blocks), self.filled, 0, self.chained, self.tip)
