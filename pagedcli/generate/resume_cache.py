"""After a resume the prefix cache is empty; this brings back what finished rows had left in it for the rows to come.

Without it, the first rows of a resumed run would compute prefixes that an uninterrupted run finds in the cache, and say
so in `usage.cached_tokens`: right answers, but other bytes. Bringing a prefix back costs no more than what the
first row that needs it would have spent on computing it.
"""

from __future__ import annotations

from collections.abc import Sequence


class FinishedPrefixes:
    """Full prompt blocks of the rows before the one at hand, by chained hash of their tokens.

    Rows are told in input order, the order in which they enter the engine: `finished` for a row that the journal has,
    `needed` for one about to be served.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._gone: set[int] = set()  # computed before the stop only
        self._here: set[int] = set()  # computed, or about to be, in this process

    def finished(self, ids: Sequence[int]) -> None:
        """A row that is done already held these prompt tokens."""
        self._gone.update(self._chain(ids, len(ids) // self._size))

    def needed(self, ids: Sequence[int]) -> int:
        """How many leading tokens of this prompt must be computed first for it to find what it would have found."""
        blocks = self._chain(ids, len(ids) // self._size)
        usable = (len(ids) - 1) // self._size  # the last token is always computed
        found = 0
        while found < usable and (blocks[found] in self._gone or blocks[found] in self._here):
            found += 1
        missing = any(block not in self._here for block in blocks[:found])
        self._here.update(blocks)
        return found * self._size if missing else 0

    def _chain(self, ids: Sequence[int], count: int) -> list[int]:
        chain, past = [], 0
        for block in range(count):
            past = hash((past, *ids[block * self._size:(block + 1) * self._size]))
            chain.append(past)
        return chain
