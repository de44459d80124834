"""Which leading blocks of a prompt earlier rows have: what `usage.cached_tokens` may say, whoever serves the row.

What one engine's prefix cache happens to hold depends on which rows it was given: on the number of replicas, and on
whether the job was stopped on the way. So that the bytes of a row do not, the input decides: rows are looked at in
input order, and a row counts as cached what it found in the cache and an earlier row within the window has too. An
engine that has not computed such a beginning itself (another replica did, or an earlier process) computes it once
ahead of the row, which then finds it; those tokens are counted apart (`Counters.warmed_tokens`).

Only the window's side is certain. When a pool is so short of blocks, or so sparing (`--idle-kv-share`), that it gives
up some which a later row would have shared, that row computes them and says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedcli.execution.interface import ExecutorLimits

MOST_BLOCKS = 1 << 16
"""Blocks in each of the window's halves at most: two sets of as many hashes, about 12 MB."""


class PrefixWindow:
    """Full blocks of the latest prompts, as chained 8-byte hashes of their tokens.

    Forgets in two halves: once the younger one has `half` blocks it becomes the older one, whose blocks go. A block
    that is used again moves to the younger half. Equal prompts in equal order leave equal windows.
    """

    def __init__(self, block_size: int, half: int, kept: Sequence[int] = ()) -> None:
        self._size = block_size
        self._half = max(half, 1)
        self._kept = frozenset(self._chain(kept))
        self._young: set[int] = set()
        self._old: set[int] = set()

    @classmethod
    def of_pool(cls, limits: ExecutorLimits, kept: Sequence[int] = ()) -> PrefixWindow:
        """The window that goes with an engine's pool. `kept`: tokens of a prefix that is pinned for good.

        Both halves together hold at most as many blocks as the pool: what was used before that may be gone from any
        cache. Each is a power of two, since pools that are sized by free memory are never quite the same.
        """
        half = min(limits.num_blocks // 2, MOST_BLOCKS)
        return cls(limits.block_size, 1 << max(half.bit_length() - 1, 0), kept)

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def shared(self, ids: Sequence[int]) -> int:
        """Leading tokens in blocks that the window has; the last token is never among them, as in the cache."""
        return self._found(self._chain(ids), len(ids))

    def add(self, ids: Sequence[int]) -> int:
        """Note a prompt. Returns what `shared` was before."""
        blocks = self._chain(ids)
        found = self._found(blocks, len(ids))
        self._young.update(blocks)
        if len(self._young) >= self._half:
            self._young, self._old = set(), self._young
        return found

    def _found(self, blocks: Sequence[int], length: int) -> int:
        usable = (length - 1) // self._size
        found = 0
        while found < usable and (blocks[found] in self._young or blocks[found] in self._old
                                  or blocks[found] in self._kept):
            found += 1
        return found * self._size

    def _chain(self, ids: Sequence[int]) -> list[int]:
        chain, past = [], 0
        for start in range(0, len(ids) - self._size + 1, self._size):
            past = hash((past, *ids[start:start + self._size]))
            chain.append(past)
        return chain
