"""Groups for memory tests, and a stand-in for the KV store that says whether every block holds what it should."""

from __future__ import annotations

from itertools import count

from pagedcli.core.request import Request, SamplingParams
from pagedcli.core.sequence import Sequence, SequenceGroup
from pagedcli.memory.interface import MemoryPolicy, Usage

_ids = count()


def make_group(prompt: list[int], *, n: int = 1, output_len: int | None = None, max_tokens: int | None = 1000,
               sequences: int = 1, beams: bool = False, order: int = 0) -> SequenceGroup:
    """A waiting group whose request asks for n samples (or beams) and that enters with `sequences` sequences."""
    params = SamplingParams(n=n, temperature=0.0 if beams else 1.0, use_beam_search=beams,
                            beam_width=n if beams else None, max_tokens=max_tokens)
    group = SequenceGroup(Request(order, str(order), tuple(prompt), params, output_len=output_len), order)
    for sample in range(sequences):
        group.live.append(Sequence(next(_ids), group, list(prompt), len(prompt), sample))
    return group


def fork(memory: MemoryPolicy, parent: Sequence, store: Store | None = None) -> Sequence:
    """Fork in core and in memory, and run the copies."""
    child = parent.fork(next(_ids), len(parent.group.live))
    copies = memory.fork(parent, child)
    if store is not None:
        store.copy(copies)
    parent.group.live.append(child)
    return child


def compute(memory: MemoryPolicy, seq: Sequence, store: Store | None = None, most: int | None = None) -> None:
    """What a step does for one sequence: compute its next tokens (at most `most`)."""
    upto = len(seq.tokens) if most is None else min(len(seq.tokens), seq.computed + most)
    memory.computed(seq, upto)
    if store is not None:
        store.write(memory, seq, upto)
    seq.computed = upto


def shares_sum(usage: Usage) -> float:
    return sum(usage.shares().values())


class Store:
    """Device and host slots. Each holds the whole text that led to it, since that is what keys and values depend on."""

    def __init__(self, memory: MemoryPolicy) -> None:
        self.size = memory.block_size
        self.device: list[list[tuple[int, ...] | None]] = [[None] * self.size for _ in range(memory.num_blocks)]
        self.host: list[list[tuple[int, ...] | None]] = [[None] * self.size for _ in range(memory.host_blocks)]

    def copy(self, moves: list[tuple[int, int]]) -> None:
        for source, target in moves:
            assert source != target
            self.device[target] = list(self.device[source])

    def swap_out(self, moves: list[tuple[int, int]]) -> None:
        for source, target in moves:
            self.host[target] = list(self.device[source])
            self.device[source] = [None] * self.size  # whoever still reads it there is caught

    def swap_in(self, moves: list[tuple[int, int]]) -> None:
        for source, target in moves:
            self.device[target] = list(self.host[source])

    def write(self, memory: MemoryPolicy, seq: Sequence, upto: int) -> None:
        """Compute tokens `seq.computed` .. `upto`: reads all before them, writes their slots."""
        table = memory.table(seq)
        self.verify(memory, seq, seq.computed)
        for position in range(seq.computed, upto):
            self.device[table[position // self.size]][position % self.size] = tuple(seq.tokens[:position + 1])

    def verify(self, memory: MemoryPolicy, seq: Sequence, upto: int) -> None:
        """The first `upto` tokens of the sequence are in its blocks."""
        table = memory.table(seq)
        for position in range(upto):
            here = self.device[table[position // self.size]][position % self.size]
            right = tuple(seq.tokens[:position + 1])
            assert here == right, f"sequence {seq.id} position {position} finds {here}, should be {right}"
