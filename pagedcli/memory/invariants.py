"""What must hold in a paged memory after every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pagedcli.memory.accounting import SlotLedger
from pagedcli.memory.interface import Usage
from pagedcli.memory.pool import BlockPool
from pagedcli.memory.prefix import PrefixCache
from pagedcli.memory.swap import SwapSpace
from pagedcli.memory.table import BlockTable


def check_usage(usage: Usage, num_blocks: int, block_size: int) -> None:
    """The five classes are not negative and add to the pool. Raises AssertionError."""
    for name in ("token", "reserved", "internal", "external", "free", "logical", "physical"):
        value = getattr(usage, name)
        assert value >= 0, f"usage.{name} is {value}"
    total = num_blocks * block_size
    assert usage.total == total, f"the classes add to {usage.total} slots, the pool has {total}"


def check_paged(tables: Mapping[int, BlockTable], pool: BlockPool, prefix: PrefixCache, swap: SwapSpace,
                ledger: SlotLedger, usage: Usage) -> None:
    """Recounts everything from the tables. Raises AssertionError naming what is wrong. O(pool + tables)."""
    size = ledger.block_size
    pool.check()
    swap.check([table.host for table in tables.values() if table.host is not None])
    counts = Counter(block for table in tables.values() for block in table.blocks)
    counts.update(prefix.pinned)
    for block, references in enumerate(pool.refs):
        assert references == counts[block], f"block {block} has {references} references, {counts[block]} holders"
    prefix.check(Counter(id(table.tip) for table in tables.values()))
    _check_tables(tables, ledger, prefix.pinned)

    held = [block for block, references in enumerate(pool.refs) if references]
    for block, references in enumerate(pool.refs):
        if not references:
            assert ledger.filled[block] == ledger.never[block] == 0, f"loose block {block} still has filled slots"
    assert ledger.token == sum(ledger.filled[block] for block in held), "filled slots were miscounted"
    assert ledger.internal == sum(ledger.never[block] for block in held), "hopeless slots were miscounted"
    check_usage(usage, pool.num_blocks, size)
    logical = sum(len(table.blocks) for table in tables.values() if not table.swapped)
    assert usage.logical == logical, f"usage.logical is {usage.logical}, the tables have {logical} blocks"
    assert usage.physical == len(held), f"usage.physical is {usage.physical}, {len(held)} blocks are held"


def _check_tables(tables: Mapping[int, BlockTable], ledger: SlotLedger, pinned: set[int]) -> None:
    size = ledger.block_size
    place: dict[int, int] = {}
    most: dict[int, int] = {}
    least: dict[int, int] = {}
    for seq, table in tables.items():
        covered = (len(table.blocks) + len(table.host or ())) * size
        assert table.filled <= covered, f"sequence {seq} filled {table.filled} of {covered} slots"
        assert table.open in (0, covered), f"sequence {seq} may write below {table.open}, its blocks end at {covered}"
        assert table.chained * size <= table.filled, f"sequence {seq} offers blocks that it has not filled"
        assert len(set(table.blocks)) == len(table.blocks), f"a block is twice in the table of sequence {seq}"
        node, depth = table.tip, 0
        while node.parent is not None:
            node, depth = node.parent, depth + 1
        assert depth == table.chained, f"sequence {seq} offered {table.chained} blocks, its node is {depth} deep"
        for index, block in enumerate(table.blocks):
            here = min(size, max(0, table.filled - index * size))
            assert place.setdefault(block, index) == index, f"block {block} is at two places in different tables"
            most[block] = max(most.get(block, 0), here)
            least[block] = min(least.get(block, size), here)
    for block in place:
        filled, never = ledger.filled[block], ledger.never[block]
        assert 0 <= never <= size - filled, f"block {block}: {filled} filled and {never} hopeless slots of {size}"
        if block in pinned:
            assert filled == size, f"pinned block {block} has only {filled} filled slots"
        else:
            assert least[block] <= filled <= most[block], f"block {block} counts {filled} filled slots"
