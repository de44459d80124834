"""FasterTransformer's memory: equal buffers for a batch that starts and ends together (paper section 6.1)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from pagedcli.core.sequence import SequenceGroup
from pagedcli.memory.interface import Admission, Usage, Verdict
from pagedcli.memory.reserving import Reservation, ReservingMemory


class StaticBatchMemory(ReservingMemory):
    """One batch at a time. Its sequences are padded on the left to the longest prompt and run as many steps as the
    longest output, so each has a buffer of max(input) + max(output) slots.

    How a scheduler drives it, with nothing running:
        memory.can_open(sequences, max_input, max_output)   # YES or NEVER for an idle pool, LATER while a batch is on
        memory.open(sequences, max_input, max_output)       # all buffers are taken now
        memory.admit(group)                                 # for each group of the batch
        ...                                                 # max_output steps
        memory.free(seq)                                    # for every sequence, at the end or as each stops
    `sequences` counts n for a group of n samples or beams. `largest_batch` tells how many fit. A freed sequence's
    buffer stays with the batch, as waste, unless a fork of the same batch takes it over; when the last
    sequence is freed the batch closes and the pool is empty again.

    Waste: token is filled slots of sequences not yet freed, reserved the rest up to each one's final length,
    internal the padding on either side and the buffers of freed sequences, external the rounding to blocks.
    """

    name = "fastertransformer"

    def __init__(self, num_blocks: int, block_size: int = 16, *, max_len: int = 2048) -> None:
        super().__init__(num_blocks, block_size, max_len)
        self._buffers = 0
        self._width = 0
        self._max_output = 0
        self._spare: list[int] = []
        self._unused = 0

    @property
    def width(self) -> int:
        """Slots of each buffer of the open batch, 0 when there is none."""
        return self._width

    def largest_batch(self, max_input: int, max_output: int) -> int:
        """Sequences of such a batch that the pool holds."""
        return self.num_blocks // self.blocks_of(max_input + max_output)

    def can_open(self, sequences: int, max_input: int, max_output: int) -> Verdict:
        """Whether a batch of `sequences` buffers of max_input + max_output slots can start now."""
        if max_input + max_output > self.max_len or sequences > self.largest_batch(max_input, max_output):
            return Verdict.NEVER
        return Verdict.LATER if self._buffers else Verdict.YES

    def open(self, sequences: int, max_input: int, max_output: int) -> None:
        """Take the buffers of a batch. Ask `can_open` first."""
        verdict = self.can_open(sequences, max_input, max_output)
        assert verdict is Verdict.YES, f"a batch of {sequences} x ({max_input} + {max_output}) tokens: {verdict.value}"
        self._buffers = sequences
        self._width = max_input + max_output
        self._max_output = max_output
        self._spare = list(range(sequences - 1, -1, -1))
        self._unused = sequences

    def close(self) -> None:
        """End a batch that no sequence is left in. Happens by itself when the last is freed."""
        assert not self._reservations, f"{len(self._reservations)} sequences are still in the batch"
        self._buffers = self._width = self._max_output = self._unused = 0
        self._spare = []

    def reserved_len(self, group: SequenceGroup) -> int:
        return self._width

    def final_len(self, group: SequenceGroup) -> int:
        return group.final_len if group.final_len is not None else group.prompt_len + self._max_output

    def blocks_for_ever(self, group: SequenceGroup, max_len: int) -> int:
        """In a batch of its own. `max_len` is what is computed; the buffer also has a slot for the last token."""
        length = group.final_len if group.final_len is not None else min(max_len + 1, self.max_len)
        return group.params.max_sequences * self.blocks_of(length)

    def can_admit(self, group: SequenceGroup, *, running: bool = True) -> Verdict:
        """YES when the open batch has buffers that nobody had yet and that are long enough; open a batch first."""
        length = max([group.final_len or 0, *(seq.length for seq in group.live)])
        if len(group.live) * self.blocks_of(length) > self.num_blocks or length > self.max_len:
            return Verdict.NEVER
        return Verdict.YES if len(group.live) <= self._unused and length <= self._width else Verdict.LATER

    def admit(self, group: SequenceGroup) -> Admission:
        self._unused -= len(group.live)
        return super().admit(group)

    def _fits(self, count: int, length: int) -> bool:
        return count <= len(self._spare) and length <= self._width

    def _reserve(self, length: int) -> tuple[Seq[int], int]:
        blocks = self.blocks_of(self._width)
        start = self._spare.pop() * blocks
        return range(start, start + blocks), blocks

    def _give_back(self, reservation: Reservation) -> None:
        self._spare.append(reservation.blocks[0] // reservation.held)
        if not self._reservations:
            self.close()

    def usage(self) -> Usage:
        size = self.block_size
        held = self._buffers * self.blocks_of(self._width)
        slots = self._buffers * self._width
        return Usage(token=self._token, reserved=self._final - self._token, internal=slots - self._final,
                     external=held * size - slots, free=(self.num_blocks - held) * size, logical=held, physical=held)

    def check(self) -> None:
        super().check()
        used = sorted(item.blocks[0] // item.held for item in self._reservations.values())
        assert 0 <= self._unused <= len(self._spare), f"{self._unused} unused buffers of {len(self._spare)} spare ones"
        assert sorted([*used, *self._spare]) == list(range(self._buffers)), "a buffer was lost or is used twice"
