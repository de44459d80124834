"""Block pool, slot ledger and sharing figures, by hand."""

from __future__ import annotations

import pytest

from pagedcli.memory.accounting import SlotLedger, beyond, sharing_saving
from pagedcli.memory.interface import Usage
from pagedcli.memory.pool import BlockPool


def test_free_list_is_last_in_first_out() -> None:
    pool = BlockPool(4)
    assert [pool.take() for _ in range(4)] == [0, 1, 2, 3]
    pool.release(1)
    pool.release(3)
    assert (pool.take(), pool.take()) == (3, 1)
    assert pool.available == 0
    with pytest.raises(AssertionError, match="all 4 blocks are held"):
        pool.take()


def test_a_block_is_free_when_its_last_holder_leaves() -> None:
    pool = BlockPool(2)
    block = pool.take()
    assert pool.share(block) is False
    assert pool.release(block) is False
    assert (pool.held, pool.available) == (1, 1)
    assert pool.release(block) is True
    assert (pool.held, pool.available) == (0, 2)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block)


def test_kept_blocks_go_last_and_oldest_first() -> None:
    pool = BlockPool(5)
    gone: list[int] = []
    pool.evicting = gone.append
    a, b, c, d = (pool.take() for _ in range(4))
    for block in (a, b, c):
        pool.keep(block)
    for block in (b, a, d, c):
        pool.release(block)
    assert (pool.idle, pool.available, pool.held) == (3, 5, 0)
    assert pool.share(a) is True  # found again: idle no more
    assert pool.release(a) is True  # and now the most recently used
    assert [pool.take(), pool.take()] == [d, 4]  # free ones first
    assert gone == []
    assert [pool.take() for _ in range(3)] == [b, c, a]
    assert gone == [b, c, a]
    pool.release(b)
    assert pool.idle == 0  # an evicted block is not kept any more
    pool.check()


def rows(pool: BlockPool, lives: list[tuple[int, int]]) -> int:
    """Rows one after another that take blocks, keep all but the last, and give them back; (blocks, at once) each."""
    for blocks, at_once in lives:
        held = [[pool.take() for _ in range(blocks)] for _ in range(at_once)]
        for row in held:
            for block in row[:-1]:
                pool.keep(block)
        for row in held:
            for block in reversed(row):
                pool.release(block)
        pool.check()
    return pool.touched


def test_a_pool_grows_with_what_ran_or_with_what_runs() -> None:
    """100 times 4 rows of 5 blocks: 20 are held at once, 4 of them turn free and 16 idle each time."""
    lives = [(5, 4)] * 100
    assert rows(BlockPool(10_000), lives) == 20 + 99 * 16
    assert rows(BlockPool(10_000, 0.5), lives) == 20 + 10  # and half of 20 wait
    assert rows(BlockPool(10_000, 0.0), lives) == 20
    assert rows(BlockPool(24, 10.0), lives) == 24  # a pool that is full hands out idle ones as ever


def test_contents_that_were_asked_for_again_are_not_spared_away() -> None:
    pool, gone = BlockPool(100, 0.0), []
    pool.evicting = gone.append
    first = pool.take()
    pool.keep(first)
    pool.found(first)  # while it is held
    pool.release(first)
    once, again = pool.take(), pool.take()
    assert {first, once, again} == {0, 1, 2}  # not the idle one
    for block in (once, again):
        pool.keep(block)
        pool.release(block)
    assert pool.share(again) is True
    pool.found(again)  # idle, held again, found
    pool.release(again)
    assert [pool.take(), pool.take()] == [once, 3] and gone == [once]
    assert pool.idle == 2
    pool.unkeep(first)
    assert pool.take() == first and gone == [once]
    pool.check()


@pytest.mark.parametrize("way", ["shared", "from the free list"])
def test_the_most_held_counts_however_blocks_came_to_be_held(way: str) -> None:
    pool = BlockPool(100, 1.0)
    for block in (pool.take(), pool.take()):
        pool.keep(block)
        pool.release(block)
    third = pool.take()  # 2 may wait beside the 2 that were held
    if way == "shared":
        held = [third, *(block for block in (0, 1) if pool.share(block))]
    else:
        pool.unkeep(0)
        pool.unkeep(1)
        held = [third, pool.take(), pool.take()]
    for block in held:  # 3 at once, of which no block is untouched
        pool.keep(block)
        pool.release(block)
    assert pool.take() == pool.touched - 1 == 3  # so 3 may wait
    pool.check()


def test_found_blocks_go_when_nothing_else_is_left() -> None:
    pool, gone = BlockPool(3, 0.0), []
    pool.evicting = gone.append
    a, b = pool.take(), pool.take()
    for block in (a, b):
        pool.keep(block)
        pool.found(block)
        pool.release(block)
    assert [pool.take() for _ in range(3)] == [2, a, b] and gone == [a, b]
    pool.release(a)
    pool.keep(pool.take())  # new contents: nobody has found them yet
    pool.release(a)
    assert pool.take() == a
    pool.check()


def test_unkeep_frees_an_idle_block_at_once() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.keep(block)
    pool.release(block)
    pool.unkeep(block)
    assert (pool.idle, pool.available) == (0, 1)
    pool.check()


def test_ledger_counts_slots_once_and_gives_way_to_a_longer_sequence() -> None:
    ledger = SlotLedger(3, 4)
    ledger.hold(0, 0, beyond(0, 4, 3))
    assert (ledger.token, ledger.internal) == (0, 1)
    ledger.fill(0, 2)
    ledger.fill(0, 2)
    ledger.fill(0, 1)  # a sharer that is behind takes nothing back
    assert ledger.usage(3, 1, 2) == Usage(2, 1, 1, 0, 8, 2, 1)
    ledger.fill(0, 4)  # past the length it was said to end at
    assert ledger.usage(3, 1, 1) == Usage(4, 0, 0, 0, 8, 1, 1)
    ledger.drop(0)
    assert (ledger.token, ledger.internal) == (0, 0)


def test_slots_beyond_the_final_length() -> None:
    assert [beyond(index, 4, 6) for index in range(3)] == [0, 2, 4]
    assert beyond(5, 4, None) == 0


def test_saving_is_of_the_mean_ratio() -> None:
    """Figure 15's rule: ratios 1 and 3 have mean 2, so half is saved; steps with nothing held do not count."""
    steps = [Usage(1, 0, 0, 0, 0, 4, 4), Usage(1, 0, 0, 0, 0, 6, 2), Usage(0, 0, 0, 0, 1, 0, 0)]
    assert sharing_saving(steps) == pytest.approx(0.5)
    assert sharing_saving([]) == 0.0
