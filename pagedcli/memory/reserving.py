"""What the baselines have in common: a sequence reserves all its slots on entry and keeps them to the end."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq

from pagedcli.core.sequence import Sequence, SequenceGroup
from pagedcli.memory.interface import Admission, MemoryPolicy, Move, Usage, Verdict
from pagedcli.memory.invariants import check_usage


class Reservation:
    """One sequence's slots. blocks: its table. held: blocks taken from the pool for it, rounding included.
    length: slots reserved. final: slots it will have filled at its end. filled: so far."""

    __slots__ = ("blocks", "filled", "final", "held", "length")

    def __init__(self, blocks: Seq[int], held: int, length: int, final: int) -> None:
        self.blocks = blocks
        self.held = held
        self.length = length
        self.final = min(final, length)
        self.filled = 0


class ReservingMemory(MemoryPolicy):
    """A policy without sharing, growth or preemption: each of n samples or beams is a reservation of its own, with
    its own prompt computation, and a fork copies every used block into the child's.

    Subclasses say how many slots a sequence reserves and where they lie. Waste: token is filled slots,
    reserved the rest up to the final length, internal from there to the reserved length, external what the
    allocator lost in rounding (paper Figure 2 as its artefact counts it).
    """

    shares_prompt = False
    preemptible = False

    def __init__(self, num_blocks: int, block_size: int, max_len: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_len = max_len
        self._reservations: dict[int, Reservation] = {}
        self._token = 0
        self._final = 0
        self._length = 0
        self._held = 0

    @abstractmethod
    def reserved_len(self, group: SequenceGroup) -> int:
        """Slots that each sequence of the group reserves. Raises RequestError when that cannot be told."""

    def final_len(self, group: SequenceGroup) -> int:
        """Slots that each sequence will fill: the true number when known beforehand, else the most it may."""
        if group.final_len is not None:
            return group.final_len
        limit = group.params.max_tokens
        return self.max_len if limit is None else group.prompt_len + limit

    @abstractmethod
    def _fits(self, count: int, length: int) -> bool:
        """Whether `count` reservations of `length` slots can be made now."""

    @abstractmethod
    def _reserve(self, length: int) -> tuple[Seq[int], int]:
        """A table for `length` slots and the number of blocks taken for it."""

    @abstractmethod
    def _give_back(self, reservation: Reservation) -> None: ...

    def blocks_of(self, length: int) -> int:
        """Blocks that hold `length` slots."""
        return -(-length // self.block_size)

    def can_admit(self, group: SequenceGroup, *, running: bool = True) -> Verdict:
        """No watermark: `running` does not matter."""
        length = self.reserved_len(group)
        if max((seq.length for seq in group.live), default=0) > length or (group.final_len or 0) > length:
            return Verdict.NEVER
        if self._fits(len(group.live), length):
            return Verdict.YES
        return Verdict.NEVER if self.blocks_for_ever(group, self.max_len) > self.capacity else Verdict.LATER

    def admit(self, group: SequenceGroup) -> Admission:
        for seq in group.live:
            self._enter(seq)
            seq.computed = 0
        return Admission(sum(self._reservations[seq.id].held for seq in group.live))

    def _enter(self, seq: Sequence) -> Reservation:
        assert seq.id not in self._reservations, f"sequence {seq.id} already has a reservation"
        length = self.reserved_len(seq.group)
        blocks, held = self._reserve(length)
        made = Reservation(blocks, held, length, self.final_len(seq.group))
        self._reservations[seq.id] = made
        self._final += made.final
        self._length += length
        self._held += held
        return made

    def can_append(self, group: SequenceGroup) -> bool:
        del group
        return True

    @property
    def refusal_stands(self) -> bool:
        return True

    def steady_until(self, seq: Sequence) -> int:
        return self._reservations[seq.id].final

    def append(self, seq: Sequence) -> list[Move]:
        room = self._reservations[seq.id].length
        assert len(seq.tokens) <= room, f"sequence {seq.id} grew to {seq.length} tokens, past its {room} reserved slots"
        return []

    def fork(self, parent: Sequence, child: Sequence) -> list[Move]:
        source = self._reservations[parent.id]
        assert self._fits(1, self.reserved_len(parent.group)), (
            f"no room for a copy of sequence {parent.id}: free a dropped sequence of the group before forking")
        made = self._enter(child)
        used = self.blocks_of(source.filled)
        self._fill(made, source.filled)
        return list(zip(source.blocks[:used], made.blocks[:used], strict=True))

    def free(self, seq: Sequence) -> None:
        gone = self._reservations.pop(seq.id, None)
        if gone is None:
            return
        self._token -= gone.filled
        self._final -= gone.final
        self._length -= gone.length
        self._held -= gone.held
        self._give_back(gone)

    def computed(self, seq: Sequence, upto: int) -> None:
        self._fill(self._reservations[seq.id], upto)

    def _fill(self, reservation: Reservation, upto: int) -> None:
        if upto <= reservation.filled:
            return
        self._token += upto - reservation.filled
        reservation.filled = upto
        if upto > reservation.final:  # the sequence went past the end it was said to have
            self._final += upto - reservation.final
            reservation.final = upto

    def table(self, seq: Sequence) -> Seq[int]:
        return self._reservations[seq.id].blocks

    def usage(self) -> Usage:
        size = self.block_size
        return Usage(
            token=self._token, reserved=self._final - self._token, internal=self._length - self._final,
            external=self._held * size - self._length, free=(self.num_blocks - self._held) * size,
            logical=self._held, physical=self._held)

    def check(self) -> None:
        everyone = self._reservations.values()
        assert self._token == sum(item.filled for item in everyone), "filled slots were miscounted"
        assert self._final == sum(item.final for item in everyone), "final lengths were miscounted"
        assert self._length == sum(item.length for item in everyone), "reserved slots were miscounted"
        taken: set[int] = set()
        for seq, item in self._reservations.items():
            assert item.filled <= item.final <= item.length, (
                f"sequence {seq}: {item.filled} filled, {item.final} final, {item.length} reserved slots")
            assert len(item.blocks) == self.blocks_of(item.length), f"the table of sequence {seq} has a wrong length"
            assert len(item.blocks) <= item.held, f"sequence {seq} uses more blocks than it holds"
            assert not taken & set(item.blocks), f"sequence {seq} has a block of another"
            taken.update(item.blocks)
        assert all(0 <= block < self.num_blocks for block in taken), "a block lies outside the pool"
        check_usage(self.usage(), self.num_blocks, self.block_size)
