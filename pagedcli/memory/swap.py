"""Host blocks that preempted groups wait in."""

from __future__ import annotations

from pagedcli.memory.interface import Move
from pagedcli.memory.pool import BlockPool


class SwapSpace:
    """`num_blocks` host blocks, each remembering how many of its slots are filled.

    A block shared by several sequences of a group is moved once and stays shared: the references on the host mirror
    those on the device.
    """

    __slots__ = ("filled", "pool")

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.filled = [0] * num_blocks

    @property
    def available(self) -> int:
        return self.pool.available

    def park(self, blocks: list[int], filled: list[int], moved: dict[int, int], moves: list[Move]) -> list[int]:
        """Host blocks for one table's device blocks.

        `filled[b]`: filled slots of device block b. `moved` maps the device blocks of this group that already have
        their host block; new pairs are added to it and to `moves`.
        """
        host = []
        for block in blocks:
            place = moved.get(block)
            if place is None:
                place = moved[block] = self.pool.take()
                self.filled[place] = filled[block]
                moves.append((block, place))
            else:
                self.pool.share(place)
            host.append(place)
        return host

    def release(self, blocks: list[int]) -> None:
        """One reference less on each host block."""
        for block in reversed(blocks):
            if self.pool.release(block):
                self.filled[block] = 0

    def check(self, tables: list[list[int]]) -> None:
        """References are what the swapped tables hold; nothing leaks. Raises AssertionError. O(space)."""
        self.pool.check()
        counts = [0] * self.pool.num_blocks
        for blocks in tables:
            for block in blocks:
                counts[block] += 1
        assert counts == self.pool.refs, "host blocks are referenced other than by the swapped tables"
