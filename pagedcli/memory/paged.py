"""Paged memory: blocks on demand, shared by reference count and copied on write (paper sections 4.2 to 4.5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from pagedcli.core.sequence import Sequence, SequenceGroup
from pagedcli.memory.accounting import SlotLedger, beyond
from pagedcli.memory.entry import lay_out, usable_blocks
from pagedcli.memory.interface import Admission, MemoryPolicy, Move, Usage, Verdict
from pagedcli.memory.invariants import check_paged
from pagedcli.memory.pool import BlockPool
from pagedcli.memory.prefix import PrefixCache
from pagedcli.memory.swap import SwapSpace
from pagedcli.memory.table import BlockTable


class PagedMemory(MemoryPolicy):
    """vLLM's memory: fork, append and free on reference-counted blocks, with prefix cache and swap space.

    num_blocks, host_blocks: device and host blocks of `block_size` tokens each. `watermark`: share of the device blocks
    that admission and swap-in leave free while anything runs (paper's artefact: 1 %), so that what runs can
    grow. `prefix_cache`: whether full blocks can be found by later requests with the same beginning; an
    explicit shared prefix (`start_pin`, `pin`) works either way. `idle_share`: see `BlockPool`.
    """

    name = "paged"

    def __init__(self, num_blocks: int, block_size: int = 16, *, host_blocks: int = 0, watermark: float = 0.01,
                 prefix_cache: bool = True, idle_share: float | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.host_blocks = host_blocks
        self.watermark_blocks = int(watermark * num_blocks)
        self.pool = BlockPool(num_blocks, idle_share)
        self.swap = SwapSpace(host_blocks)
        self.prefix = PrefixCache(self.pool, block_size)
        self._automatic = prefix_cache
        self._offering = prefix_cache
        self._tables: dict[int, BlockTable] = {}
        self._ledger = SlotLedger(num_blocks, block_size)
        self._logical = 0

    # Admission

    @property
    def capacity(self) -> int:
        return self.num_blocks - len(self.prefix.pinned)

    def blocks_for_ever(self, group: SequenceGroup, max_len: int) -> int:
        """Full prompt blocks once, every other block once per sequence. Pinned blocks are there already."""
        full = group.prompt_len // self.block_size
        own = -(-max_len // self.block_size) - full
        found, _ = self.prefix.match(group.request.prompt, usable_blocks(group.prompt_len, self.block_size))
        pinned = sum(block in self.prefix.pinned for block in found)
        return full - pinned + own * group.params.max_sequences

    def can_admit(self, group: SequenceGroup, *, running: bool = True) -> Verdict:
        room = self.pool.available - (self.watermark_blocks if running else 0)
        if sum(-(-len(seq.tokens) // self.block_size) for seq in group.live) <= room:
            return Verdict.YES  # finding shared blocks only makes it less
        entry = lay_out(group, self.prefix, self.pool, self.block_size)
        if entry.fresh + entry.woken <= room:
            return Verdict.YES
        return Verdict.NEVER if entry.distinct > self.capacity else Verdict.LATER

    def admit(self, group: SequenceGroup) -> Admission:
        entry = lay_out(group, self.prefix, self.pool, self.block_size)
        final = group.final_len
        for blocks in entry.tables:  # all found blocks are held before any is taken, which may evict idle ones
            for block in blocks:
                if block >= 0:
                    if self.pool.share(block):
                        self._ledger.hold(block, self.block_size)
                    self.pool.found(block)
        fresh = [-1] * entry.fresh
        for seq, blocks, shared, (tip, depth) in zip(group.live, entry.tables, entry.shared, entry.tips, strict=True):
            for index, block in enumerate(blocks):
                if block >= 0:
                    continue
                if fresh[~block] < 0:
                    fresh[~block] = self._take(index, final)
                else:
                    self.pool.share(fresh[~block])
                blocks[index] = fresh[~block]
            assert seq.id not in self._tables, f"sequence {seq.id} was admitted twice"
            self.prefix.enter(tip)
            self._tables[seq.id] = BlockTable(blocks, shared, len(blocks) * self.block_size, depth, tip)
            self._logical += len(blocks)
            seq.computed = shared
        return Admission(entry.fresh, min(entry.tips[0][1] * self.block_size, group.prompt_len))

    def _take(self, index: int, final: int | None, filled: int = 0) -> int:
        block = self.pool.take()
        self._ledger.hold(block, filled, beyond(index, self.block_size, final))
        return block

    # Growth

    def can_append(self, group: SequenceGroup) -> bool:
        available = self.pool.available
        return available >= len(group.live) or available >= self._growth(group, swapped=False)

    def _growth(self, group: SequenceGroup, *, swapped: bool) -> int:
        """Blocks needed for one more token on every live sequence. Of those that share a last block and nobody
        else does, the last to write need not copy."""
        needed = 0
        sharers: Counter[int] = Counter()
        for seq in group.live:
            table = self._tables[seq.id]
            length = len(seq.tokens)
            if length <= table.open:
                continue
            if length > (len(table.blocks) + len(table.host or ())) * self.block_size:
                needed += 1
            elif length > table.filled:
                sharers[(table.host or table.blocks)[-1]] += 1
        refs = self.swap.pool.refs if swapped else self.pool.refs
        return needed + sum(min(count, refs[block] - 1) for block, count in sharers.items())

    def append(self, seq: Sequence) -> list[Move]:
        table = self._tables[seq.id]
        length = len(seq.tokens)
        if length <= table.open:
            return []
        if length <= table.filled:
            return []  # just forked and not yet given a token of its own
        blocks = table.blocks
        size = self.block_size
        moves: list[Move] = []
        if length > len(blocks) * size:
            assert length == len(blocks) * size + 1, (
                f"sequence {seq.id} grew to {length} tokens over {len(blocks)} blocks of {size}; append each token")
            blocks.append(self._take(len(blocks), seq.group.final_len))
            self._logical += 1
        elif self.pool.refs[blocks[-1]] > 1:
            old, index = blocks[-1], len(blocks) - 1
            blocks[-1] = self._take(index, seq.group.final_len, table.filled - index * size)
            self._release(old)
            moves.append((old, blocks[-1]))
        table.open = len(blocks) * size
        return moves

    @property
    def refusal_stands(self) -> bool:
        return not self._offering

    def steady_until(self, seq: Sequence) -> int:
        table = self._tables[seq.id]
        if self._offering:  # the token that fills a block is news
            return min(table.open, (table.chained + 1) * self.block_size - 1)
        return table.open

    def fork(self, parent: Sequence, child: Sequence) -> list[Move]:
        table = self._tables[parent.id]
        assert child.id not in self._tables, f"sequence {child.id} already has a table"
        assert not table.swapped, f"sequence {parent.id} is swapped out and cannot fork"
        self._tables[child.id] = table.fork()
        self.prefix.enter(table.tip)
        for block in table.blocks:
            self.pool.share(block)
        self._logical += len(table.blocks)
        return []

    def free(self, seq: Sequence) -> None:
        table = self._tables.pop(seq.id, None)
        if table is None:
            return
        self.prefix.leave(table.tip)
        if table.host is not None:
            self.swap.release(table.host)
        else:
            self._logical -= len(table.blocks)
        for block in reversed(table.blocks):  # so that the end of a prefix is evicted before its beginning
            self._release(block)

    def _release(self, block: int) -> None:
        if self.pool.release(block):
            self._ledger.drop(block)

    def computed(self, seq: Sequence, upto: int) -> None:
        table = self._tables[seq.id]
        if upto <= table.filled:
            return
        size = self.block_size
        for index in range(table.filled // size, (upto - 1) // size + 1):
            self._ledger.fill(table.blocks[index], min(size, upto - index * size))
        table.filled = upto
        if self._offering:
            while (table.chained + 1) * size <= upto:
                index = table.chained
                node = self.prefix.extend(table.tip, self.prefix.key(seq.tokens, index), table.blocks[index])
                self.prefix.enter(node)
                self.prefix.leave(table.tip)
                table.tip = node
                table.chained += 1

    def table(self, seq: Sequence) -> Seq[int]:
        return self._tables[seq.id].blocks

    # Swapping: all blocks of a group or none (paper section 4.5)

    def _pinned_part(self, table: BlockTable) -> int:
        """Leading pinned blocks, which stay on the device: they are there in any case."""
        pinned = self.prefix.pinned
        return next((i for i, block in enumerate(table.blocks) if block not in pinned), len(table.blocks))

    def swap_blocks(self, group: SequenceGroup) -> int:
        tables = [self._tables[seq.id] for seq in group.live]
        return len({block for table in tables for block in table.blocks[self._pinned_part(table):]})

    def can_swap_out(self, group: SequenceGroup) -> bool:
        return self.swap_blocks(group) <= self.swap.available

    def swap_out(self, group: SequenceGroup) -> list[Move]:
        moves: list[Move] = []
        moved: dict[int, int] = {}
        for seq in group.live:
            table = self._tables[seq.id]
            assert not table.swapped, f"sequence {seq.id} is already swapped out"
            self._logical -= len(table.blocks)
            leaving = table.blocks[self._pinned_part(table):]
            table.host = self.swap.park(leaving, self._ledger.filled, moved, moves)
            del table.blocks[len(table.blocks) - len(leaving):]
            for block in reversed(leaving):
                self._release(block)
        return moves

    def can_swap_in(self, group: SequenceGroup, *, running: bool = True) -> bool:
        """Room for the group's blocks and one more per sequence, above the watermark (paper's artefact); when
        nothing runs, for its blocks and what its next tokens really need."""
        blocks = len({block for seq in group.live for block in self._tables[seq.id].host or ()})
        if running:
            return self.pool.available - blocks - len(group.live) >= self.watermark_blocks
        return self.pool.available >= blocks + self._growth(group, swapped=True)

    def swap_in(self, group: SequenceGroup) -> list[Move]:
        moves: list[Move] = []
        moved: dict[int, int] = {}
        for seq in group.live:
            table = self._tables[seq.id]
            assert table.host is not None, f"sequence {seq.id} is not swapped out"
            for place in table.host:
                block = moved.get(place)
                if block is None:
                    block = self._take(len(table.blocks), group.final_len, self.swap.filled[place])
                    moved[place] = block
                    moves.append((place, block))
                else:
                    self.pool.share(block)
                table.blocks.append(block)
            if self._offering:
                self.prefix.restore(table.tip, table.blocks, table.chained)
            self._logical += len(table.blocks)
        for seq in group.live:
            table = self._tables[seq.id]
            self.swap.release(table.host or [])
            table.host = None
        return moves

    # Shared prefixes

    def start_pin(self) -> None:
        """From now until `pin`, full blocks can be found even where the automatic prefix cache is off. Then run
        one request whose prompt is the shared prefix (one output token is enough) and call `pin`."""
        self._offering = True

    def pin(self, tokens: Seq[int]) -> int:
        """Keep the leading full blocks of `tokens` on the device for good. Returns how many tokens that covers
        (fewer than given when the last block is not full or part of the prefix is no longer cached)."""
        for block in self.prefix.pin(tokens):
            self._ledger.hold(block, self.block_size)
        self._offering = self._automatic
        if not self._automatic:
            self.prefix.forget()
        found, _ = self.prefix.match(tokens, len(tokens) // self.block_size)
        return len(found) * self.block_size

    def unpin(self) -> None:
        """Let go of everything pinned; the blocks stay findable where the automatic cache is on."""
        for block in self.prefix.unpin():
            self._release(block)
        if not self._automatic:
            self.prefix.forget()

    def forget_cached(self) -> None:
        """Empty the prefix cache, pinned blocks apart: a cold start for the next measurement."""
        self.prefix.forget()

    # Accounts

    def usage(self) -> Usage:
        """Pinned blocks count as held (token, physical) whether or not a sequence uses them."""
        return self._ledger.usage(self.num_blocks, self.pool.held, self._logical)

    def check(self) -> None:
        check_paged(self._tables, self.pool, self.prefix, self.swap, self._ledger, self.usage())
