"""The buddy allocator of the Orca baselines (paper section 6.1; rules as in the paper's artefact)."""

from __future__ import annotations

from collections.abc import Sequence as Seq


class BuddyAllocator:
    """Chunks of 1, 2, 4 .. `max_chunk` blocks over a pool of `num_blocks`.

    The pool is cut greedily into chunks of `max_chunk`, then of half that, and so on (983 blocks with chunks up to
    128: seven of 128, then 64, 16, 4, 2 and 1). `take` uses the last freed chunk of the smallest adequate size and
    splits it, keeping the low half; `give` merges with the neighbour at start XOR size while that one is free
    and whole. Both take time in the logarithm of `max_chunk`.
    """

    def __init__(self, num_blocks: int, max_chunk: int) -> None:
        if max_chunk < 1 or max_chunk & (max_chunk - 1):
            raise ValueError(f"max_chunk = {max_chunk}: must be a power of two")
        self.num_blocks = num_blocks
        self.max_chunk = max_chunk
        self.free_blocks = num_blocks
        self._top = max_chunk.bit_length() - 1
        # free chunks by order, as dictionaries: last in, first out, and any of them can be taken out to merge
        self._free: list[dict[int, None]] = [{} for _ in range(self._top + 1)]
        start = 0
        for order in range(self._top, -1, -1):
            while num_blocks - start >= 1 << order:
                self._free[order][start] = None
                start += 1 << order

    @staticmethod
    def rounded(blocks: int) -> int:
        """The chunk size that holds `blocks` (at least 1): the next power of two."""
        return 1 << (blocks - 1).bit_length()

    def chunks(self) -> list[tuple[int, int]]:
        """Free chunks as (start, size), by start."""
        return sorted((start, 1 << order) for order, starts in enumerate(self._free) for start in starts)

    def fits(self, count: int, blocks: int) -> bool:
        """Whether `count` chunks of `blocks` blocks each could be taken one after the other."""
        order = (blocks - 1).bit_length()
        room = 0
        for bigger in range(order, self._top + 1):
            room += len(self._free[bigger]) << (bigger - order)
            if room >= count:
                return True
        return count == 0

    def take(self, blocks: int) -> tuple[int, int]:
        """A chunk of at least `blocks` blocks: (start, size). Ask `fits` first."""
        order = (blocks - 1).bit_length()
        found = next((bigger for bigger in range(order, self._top + 1) if self._free[bigger]), None)
        assert found is not None, f"no free chunk holds {blocks} blocks; ask `fits` before `take`"
        start, _ = self._free[found].popitem()
        while found > order:
            found -= 1
            self._free[found][start + (1 << found)] = None
        self.free_blocks -= 1 << order
        return start, 1 << order

    def give(self, start: int, size: int) -> None:
        """Free a chunk as `take` returned it."""
        self.free_blocks += size
        order = size.bit_length() - 1
        while order < self._top and start ^ (1 << order) in self._free[order]:
            del self._free[order][start ^ (1 << order)]
            start &= ~(1 << order)
            order += 1
        self._free[order][start] = None

    def check(self, live: Seq[tuple[int, int]]) -> None:
        """Free and live chunks cover the pool once, and no two free buddies are left unmerged."""
        position = 0
        for start, size in sorted([*live, *self.chunks()]):
            assert start == position, f"block {min(start, position)} is in two chunks or in none"
            assert start % size == 0, f"the chunk of {size} at {start} is out of line"
            position = start + size
        assert position == self.num_blocks, f"the chunks end at {position} of {self.num_blocks} blocks"
        assert self.free_blocks == sum(size for _, size in self.chunks()), "free blocks were miscounted"
        for order, starts in enumerate(self._free[:-1]):
            for start in starts:
                assert start ^ (1 << order) not in starts, f"free buddies of {1 << order} at {start} were not merged"
