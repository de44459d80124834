"""How a waiting group would be laid out in a paged pool, worked out without changing anything."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedcli.core.sequence import SequenceGroup
from pagedcli.memory.pool import BlockPool
from pagedcli.memory.prefix import Key, Node, PrefixCache


@dataclass(slots=True)
class Entry:
    """One table per live sequence, in their order.

    tables: block ids; ~k stands for the k-th block still to be taken. shared: leading tokens of each sequence that it
    does not compute itself. tips: each sequence's node in the prefix cache and how many of its blocks were found.
    fresh: blocks to take. woken: found blocks that nobody holds, so that holding them uses up room too.
    distinct: different blocks in the tables, pinned ones left out.
    """

    tables: list[list[int]] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    tips: list[tuple[Node, int]] = field(default_factory=list)
    fresh: int = 0
    woken: int = 0
    distinct: int = 0


def usable_blocks(length: int, block_size: int) -> int:
    """Leading full blocks that may be shared while the last token is still left to compute."""
    return (length - 1) // block_size


def lay_out(group: SequenceGroup, cache: PrefixCache, pool: BlockPool, block_size: int) -> Entry:
    """Tables for all live sequences: found blocks first, then those of earlier sequences of the group with the
    same contents, then new ones. O(tokens)."""
    entry = Entry()
    known: dict[tuple[Node | int, Key], int] = {}  # full blocks of the sequences before, by what they hold
    found: set[int] = set()
    several = len(group.live) > 1
    for seq in group.live:
        length = len(seq.tokens)
        usable = usable_blocks(length, block_size)
        scoring = group.params.prompt_logprobs is not None and seq.output_len == 0
        blocks, tip = cache.match(seq.tokens, 0 if scoring else usable)  # scoring needs logits of every prompt token
        found.update(blocks)
        depth = shared = len(blocks)
        past: Node | int = tip
        for index in range(depth, -(-length // block_size)):
            block = ~entry.fresh
            if several and (index + 1) * block_size <= length:
                key = (past, cache.key(seq.tokens, index))
                if index < usable and key in known:
                    block = known[key]
                    shared = index + 1
                past = known.setdefault(key, block)
            if block == ~entry.fresh:
                entry.fresh += 1
            blocks.append(block)
        entry.tables.append(blocks)
        entry.shared.append(shared * block_size)
        entry.tips.append((tip, depth))
    entry.woken = sum(not pool.refs[block] for block in found)
    entry.distinct = entry.fresh + len(found - cache.pinned)
    return entry
