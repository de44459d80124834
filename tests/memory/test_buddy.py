"""The buddy allocator against a slow model that keeps plain lists."""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagedcli.memory.buddy import BuddyAllocator


class SlowBuddy:
    """A map from size to a list of free starts; everything by searching."""

    def __init__(self, num_blocks: int, biggest: int) -> None:
        self.lists: dict[int, list[int]] = {}
        size, start = biggest, 0
        while size:
            self.lists[size] = []
            while start + size <= num_blocks:
                self.lists[size].append(start)
                start += size
            size //= 2

    def take(self, blocks: int) -> tuple[int, int] | None:
        wanted = 1
        while wanted < blocks:
            wanted *= 2
        for size in sorted(self.lists):
            if size >= wanted and self.lists[size]:
                start = self.lists[size].pop()
                while size > wanted:
                    size //= 2
                    self.lists[size].append(start + size)
                return start, size
        return None

    def give(self, start: int, size: int) -> None:
        buddy = start ^ size
        if 2 * size in self.lists and buddy in self.lists[size]:
            self.lists[size].remove(buddy)
            self.give(min(start, buddy), 2 * size)
        else:
            self.lists[size].append(start)

    def chunks(self) -> list[tuple[int, int]]:
        return sorted((start, size) for size, starts in self.lists.items() for start in starts)


class BuddyMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.sampled_from([1, 7, 96, 128, 200, 983]), order=st.integers(0, 7))
    def start(self, num_blocks: int, order: int) -> None:
        self.num_blocks = num_blocks
        self.biggest = 1 << order
        self.real = BuddyAllocator(num_blocks, self.biggest)
        self.model = SlowBuddy(num_blocks, self.biggest)
        self.first = self.model.chunks()
        self.live: list[tuple[int, int]] = []

    @rule(share=st.floats(0, 1), count=st.integers(1, 12))
    def take(self, share: float, count: int) -> None:
        blocks = 1 + int(share * (self.biggest - 1))
        trial = copy.deepcopy(self.model)
        fits = all(trial.take(blocks) is not None for _ in range(count))
        assert self.real.fits(count, blocks) == fits
        if not fits:
            assert not self.real.fits(count, 2 * self.biggest)
            return
        for _ in range(count):
            got = self.real.take(blocks)
            assert got == self.model.take(blocks)
            assert got[1] >= blocks > got[1] // 2 or got[1] == 1
            self.live.append(got)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 1000), count=st.integers(1, 6))
    def give(self, number: int, count: int) -> None:
        for _ in range(min(count, len(self.live))):
            chunk = self.live.pop(number % len(self.live))
            self.real.give(*chunk)
            self.model.give(*chunk)

    @invariant()
    def agree(self) -> None:
        assert self.real.chunks() == self.model.chunks()
        self.real.check(self.live)
        owners = [0] * self.num_blocks
        for start, size in self.live:
            for block in range(start, start + size):
                owners[block] += 1
        assert max(owners) <= 1, "two live chunks overlap"
        assert self.real.free_blocks == owners.count(0)

    def teardown(self) -> None:
        if hasattr(self, "real"):
            for chunk in self.live:
                self.real.give(*chunk)
            assert self.real.chunks() == self.first, "the pool did not merge back to how it began"


def test_against_the_slow_model() -> None:
    run_state_machine_as_test(BuddyMachine, settings=settings(
        max_examples=80, stateful_step_count=40, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck)))


def test_cut_of_the_papers_pool() -> None:
    buddy = BuddyAllocator(983, 128)
    assert [size for _, size in buddy.chunks()] == [128] * 7 + [64, 16, 4, 2, 1]
    assert buddy.chunks()[-1] == (982, 1)


def test_split_keeps_the_low_half_and_the_last_freed_goes_first() -> None:
    buddy = BuddyAllocator(16, 8)
    assert buddy.take(3) == (8, 4)  # the last of the two chunks of 8, low half
    assert buddy.take(1) == (12, 1)
    assert buddy.take(2) == (14, 2)
    buddy.give(12, 1)
    assert buddy.chunks() == [(0, 8), (12, 2)]
    buddy.give(14, 2)
    assert buddy.chunks() == [(0, 8), (12, 4)]
    buddy.give(8, 4)
    assert buddy.chunks() == [(0, 8), (8, 8)]


def test_max_chunk_must_be_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="max_chunk = 100: must be a power of two"):
        BuddyAllocator(983, 100)
