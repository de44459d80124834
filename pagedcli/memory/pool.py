"""A pool of equal blocks with reference counts: the one place that knows which blocks are free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class BlockPool:
    """`num_blocks` block ids, 0-based, each free, held (counted references) or idle.

    Idle blocks have no holder but keep contents worth finding again (marked by `keep`). They may be handed out, oldest
    first, but only when the free list is empty, and `evicting(block)` is called before that happens. The free
    list is last in, first out: the block freed last is the one most likely still in a processor's cache.
    All operations take constant time.
    """

    __slots__ = ("_free", "_idle", "_kept", "evicting", "num_blocks", "refs")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        """References of each block; read freely, change only through the methods."""
        self.evicting: Callable[[int], None] | None = None
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._kept = bytearray(num_blocks)

    @property
    def available(self) -> int:
        """Blocks that `take` can still hand out."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - len(self._free) - len(self._idle)

    @property
    def idle(self) -> int:
        """Blocks without a holder whose contents can still be found."""
        return len(self._idle)

    def take(self) -> int:
        """A block nobody holds, now with one reference. Ask `available` first."""
        if self._free:
            block = self._free.pop()
        else:
            assert self._idle, f"all {self.num_blocks} blocks are held; ask `available` before `take`"
            block, _ = self._idle.popitem(last=False)
            self._kept[block] = 0
            if self.evicting is not None:
                self.evicting(block)
        self.refs[block] = 1
        return block

    def share(self, block: int) -> bool:
        """One more reference. True when the block was idle, that is, it just became held."""
        self.refs[block] += 1
        if self.refs[block] == 1:
            del self._idle[block]
            return True
        return False

    def release(self, block: int) -> bool:
        """One reference less. True when it was the last: the block is free, or idle if its contents are kept."""
        left = self.refs[block] - 1
        assert left >= 0, f"block {block} was released more often than it was taken"
        self.refs[block] = left
        if left:
            return False
        if self._kept[block]:
            self._idle[block] = None
        else:
            self._free.append(block)
        return True

    def keep(self, block: int) -> None:
        """The contents of a held block can be found again: make it idle, not free, when its last holder leaves."""
        self._kept[block] = 1

    def unkeep(self, block: int) -> None:
        """Undo `keep`; an idle block becomes free at once."""
        self._kept[block] = 0
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def check(self) -> None:
        """Each block is free, idle or held, exactly one of them. Raises AssertionError. O(pool)."""
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & idle, f"blocks {sorted(free & idle)} are both free and idle"
        for block, count in enumerate(self.refs):
            assert count >= 0, f"block {block} has {count} references"
            loose = block in free or block in idle
            assert loose == (count == 0), f"block {block} has {count} references and is {'' if loose else 'not '}loose"
            assert not (block in free and self._kept[block]), f"block {block} is free, yet its contents are kept"
            assert not (block in idle and not self._kept[block]), f"block {block} is idle, yet not kept"
