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
