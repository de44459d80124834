"""A pool of equal blocks with reference counts: the one place that knows which blocks are free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

_KEPT, _FOUND = 1, 2
"""What can be found again, and what has been."""


class BlockPool:
    """`num_blocks` block ids, 0-based, each untouched, free, held (counted references) or idle.

    Idle blocks have no holder but keep contents worth finding again (marked by `keep`). They may be handed out, oldest
    first, but only when no other block is left, and `evicting(block)` is called before that happens. The free
    list is last in, first out: the block freed last is the one most likely still in a processor's cache.

    Memory that is only made when it is first touched can be spared: with `idle_share`, an idle block is handed out
    before an untouched one while there are more idle blocks than this share of the most that were ever held at once.
    Those go first whose contents nobody has asked for a second time (see `found`), and only they are counted. A pool
    then grows with what runs, not with what ran.
    All operations take constant time.
    """

    __slots__ = ("_found", "_free", "_idle", "_idle_share", "_kept", "_most_held", "evicting", "num_blocks", "refs",
                 "touched")

    def __init__(self, num_blocks: int, idle_share: float | None = None) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        """References of each block; read freely, change only through the methods."""
        self.evicting: Callable[[int], None] | None = None
        self.touched = 0
        """Blocks that were ever handed out: those with the lowest ids."""
        self._free: list[int] = []
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._found: OrderedDict[int, None] = OrderedDict()
        self._kept = bytearray(num_blocks)
        self._idle_share = idle_share
        self._most_held = 0

    @property
    def available(self) -> int:
        """Blocks that `take` can still hand out."""
        return self.num_blocks - self.held

    @property
    def held(self) -> int:
        """Blocks with at least one reference."""
        return self.touched - len(self._free) - len(self._idle) - len(self._found)

    @property
    def idle(self) -> int:
        """Blocks without a holder whose contents can still be found."""
        return len(self._idle) + len(self._found)

    def take(self) -> int:
        """A block nobody holds, now with one reference. Ask `available` first."""
        if self._free:
            block = self._free.pop()
        elif self.touched < self.num_blocks and not self._spares():
            block = self.touched
            self.touched += 1
        else:
            block = self._evict()
        self.refs[block] = 1
        self._heed_held()
        return block

    def _spares(self) -> bool:
        """Whether an idle block is to be used before an untouched one."""
        if self._idle_share is None:
            return False
        most = max(self._most_held, self.held + 1)  # with the one that is about to be taken
        return len(self._idle) > self._idle_share * most

    def _heed_held(self) -> None:
        if self._idle_share is not None:
            self._most_held = max(self._most_held, self.held)

    def _evict(self) -> int:
        idle = self._idle or self._found
        assert idle, f"all {self.num_blocks} blocks are held; ask `available` before `take`"
        block, _ = idle.popitem(last=False)
        self._kept[block] = 0
        if self.evicting is not None:
            self.evicting(block)
        return block

    def share(self, block: int) -> bool:
        """One more reference. True when the block was idle, that is, it just became held."""
        self.refs[block] += 1
        if self.refs[block] == 1:
            del self._home(block)[block]
            self._heed_held()
            return True
        return False

    def found(self, block: int) -> None:
        """A second request has asked for a kept block's contents: others may too."""
        if self._idle_share is not None and self.refs[block]:
            self._kept[block] = _FOUND

    def _home(self, block: int) -> OrderedDict[int, None]:
        """Where a kept block without a holder waits."""
        return self._found if self._kept[block] == _FOUND else self._idle

    def release(self, block: int) -> bool:
        """One reference less. True when it was the last: the block is free, or idle if its contents are kept."""
        left = self.refs[block] - 1
        assert left >= 0, f"block {block} was released more often than it was taken"
        self.refs[block] = left
        if left:
            return False
        if self._kept[block]:
            self._home(block)[block] = None
        else:
            self._free.append(block)
        return True

    def keep(self, block: int) -> None:
        """The contents of a held block can be found again: make it idle, not free, when its last holder leaves."""
        self._kept[block] = _KEPT

    def unkeep(self, block: int) -> None:
        """Undo `keep`; an idle block becomes free at once."""
        home = self._home(block)
        self._kept[block] = 0
        if block in home:
            del home[block]
            self._free.append(block)

    def check(self) -> None:
        """Each block is untouched, free, idle or held, exactly one of them. Raises AssertionError. O(pool)."""
        free, idle = set(self._free) | set(range(self.touched, self.num_blocks)), {*self._idle, *self._found}
        assert len(free) == len(self._free) + self.num_blocks - self.touched, "a block is twice in the free list"
        assert len(idle) == self.idle, "a block is idle in two ways"
        assert not free & idle, f"blocks {sorted(free & idle)} are both free and idle"
        for block, count in enumerate(self.refs):
            assert count >= 0, f"block {block} has {count} references"
            loose = block in free or block in idle
            assert loose == (count == 0), f"block {block} has {count} references and is {'' if loose else 'not '}loose"
            assert not (block in free and self._kept[block]), f"block {block} is free, yet its contents are kept"
            assert not (block in idle and not self._kept[block]), f"block {block} is idle, yet not kept"
