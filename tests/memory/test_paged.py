"""Paged memory case by case: copies, watermark, bounds, prefixes, swapping, coming back."""

from __future__ import annotations

import pytest

from pagedcli.core.sequence import Sequence, SequenceGroup
from pagedcli.memory.interface import Verdict
from pagedcli.memory.paged import PagedMemory
from tests.memory.memory_kit import Store, compute, fork, make_group


def enter(memory: PagedMemory, tokens: list[int], **options: int) -> SequenceGroup:
    group = make_group(tokens, **options)
    assert memory.can_admit(group) is Verdict.YES
    memory.admit(group)
    return group


def grow(memory: PagedMemory, seq: Sequence, token: int, store: Store | None = None) -> list[tuple[int, int]]:
    seq.tokens.append(token)
    copies = memory.append(seq)
    if store is not None:
        store.copy(copies)
    compute(memory, seq, store)
    return copies


def test_a_table_grows_by_one_block_when_the_last_is_full() -> None:
    memory = PagedMemory(10, 4)
    seq = enter(memory, list(range(7))).live[0]
    assert list(memory.table(seq)) == [0, 1]
    compute(memory, seq)
    assert grow(memory, seq, 7) == []
    assert list(memory.table(seq)) == [0, 1]
    assert grow(memory, seq, 8) == []
    assert list(memory.table(seq)) == [0, 1, 2]
    memory.check()


def test_tokens_must_be_appended_one_by_one() -> None:
    memory = PagedMemory(10, 4)
    seq = enter(memory, [1, 2, 3]).live[0]
    compute(memory, seq)
    seq.tokens += [4, 5, 6]
    with pytest.raises(AssertionError, match="append each token"):
        memory.append(seq)


def test_copy_on_write_takes_the_shared_half_block_only() -> None:
    memory = PagedMemory(10, 4, prefix_cache=False)
    store = Store(memory)
    group = enter(memory, list(range(6)), n=2)
    parent = group.live[0]
    compute(memory, parent, store)
    child = fork(memory, parent)
    assert list(memory.table(child)) == list(memory.table(parent)) == [0, 1]
    assert memory.append(parent) == []  # nothing new to write yet
    child.tokens.append(10)
    copies = memory.append(child)
    usage = memory.usage()
    assert (usage.token, usage.reserved, usage.physical) == (8, 4, 3)  # the copy holds the two tokens it began with
    memory.check()
    store.copy(copies)
    compute(memory, child, store)
    assert copies == [(1, 2)]
    assert grow(memory, parent, 20, store) == []
    assert (list(memory.table(parent)), list(memory.table(child))) == ([0, 1], [0, 2])
    for seq in group.live:
        store.verify(memory, seq, 7)
    memory.free(parent)
    assert memory.usage().physical == 2
    memory.check()


def test_can_append_counts_exactly_what_append_takes() -> None:
    """Three that share a half-full last block need two copies; with a free block less it is refused."""
    memory = PagedMemory(4, 4, prefix_cache=False)
    group = enter(memory, [1] * 6, n=3)
    compute(memory, group.live[0])
    fork(memory, group.live[0])
    fork(memory, group.live[0])
    for seq in group.live:
        seq.tokens.append(seq.sample)
    assert memory.pool.available == 2
    assert memory.can_append(group)
    other = PagedMemory(3, 4, prefix_cache=False)
    again = enter(other, [1] * 6, n=3)
    compute(other, again.live[0])
    fork(other, again.live[0])
    fork(other, again.live[0])
    for seq in again.live:
        seq.tokens.append(seq.sample)
    assert not other.can_append(again)


def test_can_append_with_one_writer_or_none() -> None:
    memory = PagedMemory(2, 4, prefix_cache=False)
    group = enter(memory, [1] * 6, n=2)
    compute(memory, group.live[0])
    child = fork(memory, group.live[0])
    assert memory.pool.available == 0
    assert memory.can_append(group)  # neither has a token to write
    child.tokens.append(2)
    assert not memory.can_append(group)  # it would write where its parent reads
    memory.free(group.live.pop(0))
    assert memory.can_append(group)
    assert memory.append(child) == []


def test_watermark_holds_at_the_door_only_and_only_while_something_runs() -> None:
    memory = PagedMemory(100, 4, watermark=0.03, prefix_cache=False)
    assert memory.watermark_blocks == 3
    full = make_group([1] * 400)
    assert memory.can_admit(full, running=False) is Verdict.YES
    assert memory.can_admit(full, running=True) is Verdict.LATER
    assert memory.can_admit(make_group([1] * 388), running=True) is Verdict.YES
    assert memory.can_admit(make_group([1] * 389), running=True) is Verdict.LATER
    assert memory.can_admit(make_group([1] * 401), running=False) is Verdict.NEVER
    group = enter(memory, [1] * 388)
    compute(memory, group.live[0])
    for token in range(12):  # growth may use the reserve
        group.live[0].tokens.append(token)
        assert memory.can_append(group)
        memory.append(group.live[0])
    group.live[0].tokens.append(0)
    assert not memory.can_append(group)
    assert PagedMemory(983).watermark_blocks == 9  # 1 %, rounded down as in the paper's artefact


def test_bound_counts_full_prompt_blocks_once() -> None:
    memory = PagedMemory(100, 16)
    assert memory.blocks_for_ever(make_group([1] * 40, n=1), 100) == 7
    assert memory.blocks_for_ever(make_group([1] * 40, n=4), 100) == 2 + 4 * 5
    assert memory.blocks_for_ever(make_group([1] * 32, n=3, beams=True), 33) == 2 + 3
    assert memory.capacity == 100


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("prompt", [1, 4, 7, 8])
def test_a_lone_group_within_the_bound_always_runs_to_its_end(size: int, n: int, prompt: int) -> None:
    """In a pool of exactly `blocks_for_ever` blocks, whether it is left alone, recomputed or swapped at every step."""
    length = prompt + 9
    for shock in ("none", "recompute", "swap"):
        probe = make_group([5] * prompt, n=n)
        blocks = PagedMemory(1, size).blocks_for_ever(probe, length)
        memory = PagedMemory(blocks, size, host_blocks=blocks)
        store = Store(memory)
        group = make_group([5] * prompt, n=n)
        assert memory.can_admit(group, running=False) is Verdict.YES
        memory.admit(group)
        compute(memory, group.live[0], store)
        for _ in range(n - 1):
            fork(memory, group.live[0])
        for step in range(length - prompt):
            for number, seq in enumerate(group.live):
                seq.tokens.append(number)
            if shock == "recompute" and step % 2:
                for seq in group.live:
                    memory.free(seq)
                assert memory.can_admit(group, running=False) is Verdict.YES
                memory.admit(group)
            else:
                if shock == "swap":
                    assert memory.can_swap_out(group)
                    store.swap_out(memory.swap_out(group))
                    assert memory.can_swap_in(group, running=False)
                    store.swap_in(memory.swap_in(group))
                assert memory.can_append(group)
                for seq in group.live:
                    store.copy(memory.append(seq))
            for seq in group.live:
                compute(memory, seq, store)
            memory.check()
        for seq in group.live:
            store.verify(memory, seq, length)


def test_prefix_is_found_up_to_the_last_token_and_no_further() -> None:
    memory = PagedMemory(20, 4)
    first = enter(memory, list(range(12)))
    compute(memory, first.live[0])
    same = make_group(list(range(12)))
    assert memory.admit(same).cached_tokens == 8  # the third block holds the last token, which must be computed
    assert same.live[0].computed == 8
    longer = make_group(list(range(13)))
    assert memory.admit(longer).cached_tokens == 12
    assert list(memory.table(longer.live[0]))[:3] == list(memory.table(first.live[0]))
    other = make_group([0, 1, 2, 3, 99, 5, 6, 7, 8])
    assert memory.admit(other).cached_tokens == 4
    memory.check()


def test_two_requests_of_one_step_share_what_the_first_is_about_to_compute() -> None:
    memory = PagedMemory(20, 4)
    first, second = make_group(list(range(9))), make_group(list(range(9)))
    memory.admit(first)
    assert memory.admit(second).cached_tokens == 0  # nothing planned yet
    memory.free(second.live[0])
    memory.computed(first.live[0], 6)  # one full block and a half are in the plan
    assert memory.admit(second).cached_tokens == 4
    assert memory.usage().physical == 3 + 2


def test_equal_hashes_are_not_equal_texts() -> None:
    """hash(-1) == hash(-2) in Python: a cache that trusted hashes would mix these two prompts up."""
    assert hash((-1, -1)) == hash((-2, -2))
    memory = PagedMemory(20, 2)
    first = enter(memory, [-1, -1, -1, -1, 7])
    compute(memory, first.live[0])
    assert memory.admit(make_group([-2, -2, -1, -1, 7])).cached_tokens == 0
    assert memory.admit(make_group([-1, -1, -2, -2, 7])).cached_tokens == 2


def test_the_same_block_after_another_past_is_another_block() -> None:
    memory = PagedMemory(20, 2)
    first = enter(memory, [1, 2, 5, 6, 0])
    compute(memory, first.live[0])
    assert memory.admit(make_group([3, 4, 5, 6, 0])).cached_tokens == 0
    assert memory.admit(make_group([5, 6, 0])).cached_tokens == 0


def test_cached_blocks_are_free_until_needed_and_the_end_of_a_prefix_goes_first() -> None:
    memory = PagedMemory(4, 2, watermark=0)
    first = enter(memory, [1, 2, 3, 4, 5, 6])
    compute(memory, first.live[0])
    memory.free(first.live[0])
    assert memory.usage().free == 8
    assert memory.pool.idle == 3
    other = enter(memory, [9, 9, 9, 9])  # takes the free block, then evicts the last block of the prefix
    assert memory.pool.idle == 2
    again = make_group([1, 2, 3, 4, 5, 6])
    assert memory.can_admit(again) is Verdict.LATER  # two found, but holding them leaves no block for the third
    memory.free(other.live[0])
    assert memory.can_admit(again) is Verdict.YES
    assert memory.admit(again).cached_tokens == 4
    memory.check()


def test_a_found_block_is_never_evicted_by_the_admission_that_found_it() -> None:
    memory = PagedMemory(3, 2, watermark=0)
    first = enter(memory, [1, 2, 3, 4])
    compute(memory, first.live[0])
    memory.free(first.live[0])  # two idle, the older one being [3, 4]; one free
    again = enter(memory, [1, 2, 3, 4, 5])
    assert again.live[0].computed == 4
    assert sorted(memory.table(again.live[0])) == [0, 1, 2]
    memory.check()


def test_without_the_cache_nothing_is_found_or_kept() -> None:
    memory = PagedMemory(10, 2, prefix_cache=False)
    first = enter(memory, [1, 2, 3, 4, 5])
    compute(memory, first.live[0])
    assert memory.admit(make_group([1, 2, 3, 4, 5])).cached_tokens == 0
    memory.free(first.live[0])
    assert memory.pool.idle == 0


@pytest.mark.parametrize("automatic", [True, False])
def test_a_pinned_prefix_outlives_pressure(automatic: bool) -> None:
    memory = PagedMemory(8, 2, watermark=0, prefix_cache=automatic, host_blocks=8)
    prefix = [1, 2, 3, 4, 5]
    memory.start_pin()
    filler = enter(memory, prefix)
    compute(memory, filler.live[0])
    memory.free(filler.live[0])
    assert memory.pin(prefix) == 4  # two full blocks
    assert memory.capacity == 6
    pinned = set(memory.prefix.pinned)
    usage = memory.usage()
    assert (usage.token, usage.physical, usage.logical, usage.free) == (4, 2, 0, 12)
    hog = enter(memory, [9] * 12)  # all the rest
    assert memory.pool.available == 0
    whole = make_group([*prefix[:4], *[8] * 12])  # the pinned blocks and all others
    assert memory.can_admit(whole) is Verdict.LATER
    assert memory.can_admit(make_group([8] * 13)) is Verdict.NEVER
    memory.free(hog.live[0])
    assert memory.can_admit(whole) is Verdict.YES
    user = make_group([*prefix, 6, 7], n=2)
    assert memory.blocks_for_ever(user, 9) == 1 + 2 * 2  # 3 full prompt blocks of which 2 are there
    assert memory.admit(user).cached_tokens == 4
    store = Store(memory)
    compute(memory, user.live[0])
    moves = memory.swap_out(user)
    assert not pinned & {source for source, _ in moves}  # pinned blocks stay where they are
    assert len(moves) == 2
    memory.check()
    store.swap_in(memory.swap_in(user))
    assert set(memory.table(user.live[0])[:2]) == pinned
    memory.free(user.live[0])
    never = make_group([8] * 13)
    assert memory.can_admit(never, running=False) is Verdict.NEVER
    memory.unpin()
    assert memory.capacity == 8
    assert memory.pool.held == 0
    assert (memory.pool.idle > 0) == automatic
    memory.check()


def test_a_group_that_comes_back_shares_what_its_sequences_have_in_common() -> None:
    memory = PagedMemory(30, 2, prefix_cache=False)
    store = Store(memory)
    group = enter(memory, [1, 2, 3, 4, 5], n=3)
    compute(memory, group.live[0], store)
    fork(memory, group.live[0])
    fork(memory, group.live[0])
    for tail, seq in zip([[6, 7, 8], [6, 7, 9], [1, 1, 1]], group.live, strict=True):
        for token in tail:
            grow(memory, seq, token, store)
    for seq in group.live:
        memory.free(seq)
        seq.computed = 0
    assert memory.usage().free == 60
    memory.admit(group)
    first, second, third = ([*memory.table(seq)] for seq in group.live)
    assert second[:3] == first[:3]  # [1 2] [3 4] [5 6]
    assert second[3] != first[3]  # [7 8] and [7 9]
    assert third[:2] == first[:2]
    assert len({*first, *second, *third}) == 4 + 1 + 2
    assert [seq.computed for seq in group.live] == [0, 6, 4]
    for seq in group.live:
        compute(memory, seq, store)
    for seq in group.live:
        store.verify(memory, seq, seq.length)
        assert grow(memory, seq, 3, store) == []  # a new block each, nothing to copy
    memory.check()


def test_samples_with_the_same_text_come_back_with_a_last_token_to_compute_each() -> None:
    memory = PagedMemory(30, 2, prefix_cache=False)
    group = enter(memory, [1, 2, 3], n=2)
    compute(memory, group.live[0])
    fork(memory, group.live[0])
    for seq in group.live:
        grow(memory, seq, 4)
        memory.free(seq)
    memory.admit(group)
    assert [seq.computed for seq in group.live] == [0, 2]
    first, second = (list(memory.table(seq)) for seq in group.live)
    assert first[0] == second[0]
    assert first[1] != second[1]
    memory.check()


def test_swapping_moves_shared_blocks_once_and_keeps_them_shared() -> None:
    memory = PagedMemory(10, 2, host_blocks=6, prefix_cache=False)
    store = Store(memory)
    group = enter(memory, [1, 2, 3], n=3)
    compute(memory, group.live[0], store)
    fork(memory, group.live[0])
    fork(memory, group.live[0])
    grow(memory, group.live[0], 8, store)
    grow(memory, group.live[1], 9, store)  # tables: [a b'] [a b''] [a b]
    before = memory.usage()
    assert (before.physical, before.logical) == (4, 6)
    assert memory.swap_blocks(group) == 4
    moves = memory.swap_out(group)
    assert len(moves) == 4
    store.swap_out(moves)
    assert memory.usage().free == 20
    assert memory.swap.available == 2
    memory.check()
    moves = memory.swap_in(group)
    assert len(moves) == 4
    store.swap_in(moves)
    assert memory.usage() == before
    assert memory.swap.available == 6
    for seq in group.live:
        store.verify(memory, seq, seq.length)
    memory.check()


def test_a_group_swapped_out_with_a_token_to_write_comes_back_with_room_for_it() -> None:
    memory = PagedMemory(4, 2, host_blocks=4, prefix_cache=False)
    group = enter(memory, [1, 2, 3], n=2)
    compute(memory, group.live[0])
    fork(memory, group.live[0])
    for seq in group.live:
        seq.tokens.append(seq.sample)  # both write in the block that they share: one copy
    memory.swap_out(group)
    hog = enter(memory, [9, 9, 9])
    assert memory.pool.available == 2  # the two blocks of the group, but nothing for the copy
    assert not memory.can_swap_in(group, running=False)
    memory.free(hog.live[0])
    hog = enter(memory, [9])
    assert memory.can_swap_in(group, running=False)
    memory.swap_in(group)
    assert memory.can_append(group)
    assert [len(memory.append(seq)) for seq in group.live] == [1, 0]
    assert memory.pool.available == 0
    memory.check()


def test_blocks_back_from_the_host_can_be_found_again() -> None:
    memory = PagedMemory(4, 2, host_blocks=4, watermark=0)
    group = enter(memory, [1, 2, 3, 4, 5])
    compute(memory, group.live[0])
    memory.swap_out(group)
    hog = enter(memory, [9] * 8)  # evicts what was cached of it
    memory.free(hog.live[0])
    assert memory.prefix.match([1, 2, 3, 4, 5], 2)[0] == []
    memory.swap_in(group)
    assert memory.prefix.match([1, 2, 3, 4, 5], 2)[0] == list(memory.table(group.live[0]))[:2]
    memory.check()


def test_swap_space_is_bounded_and_swap_in_leaves_room_to_grow() -> None:
    memory = PagedMemory(10, 2, host_blocks=2, watermark=0.1, prefix_cache=False)
    big = enter(memory, [1] * 6)
    assert not memory.can_swap_out(big)
    small = enter(memory, [2] * 4)
    assert memory.can_swap_out(small)
    memory.swap_out(small)
    hog = enter(memory, [3] * 6)
    assert memory.pool.available == 4
    assert memory.can_swap_in(small)  # 2 blocks, 1 to grow, 1 watermark
    grow(memory, hog.live[0], 3)
    assert not memory.can_swap_in(small)
    assert memory.can_swap_in(small, running=False)  # with nothing else running, what it really needs is enough
    memory.free(small.live[0])
    assert memory.swap.available == 2
    memory.check()


def test_freeing_works_in_every_state() -> None:
    memory = PagedMemory(10, 2, host_blocks=5)
    waiting = make_group([1, 2])
    memory.free(waiting.live[0])
    running = enter(memory, [1, 2, 3])
    swapped = enter(memory, [4, 5, 6])
    memory.swap_out(swapped)
    for group in (running, swapped, running):
        memory.free(group.live[0])
    memory.check()
    assert memory.usage().free == 20
    assert memory.swap.available == 5


def test_a_sequence_past_its_announced_length_keeps_the_accounts_straight() -> None:
    memory = PagedMemory(10, 4)
    group = enter(memory, [1, 2], output_len=1)
    seq = group.live[0]
    compute(memory, seq)
    usage = memory.usage()
    assert (usage.token, usage.reserved, usage.internal) == (2, 1, 1)
    for token in range(3):
        grow(memory, seq, token)
        memory.check()
    usage = memory.usage()
    assert (usage.token, usage.reserved, usage.internal) == (5, 0, 3)
