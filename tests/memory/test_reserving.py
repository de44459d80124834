"""Random lives of groups under every baseline, and each one's own rules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcli.core.errors import RequestError
from pagedcli.core.sequence import SequenceGroup
from pagedcli.memory.budget import TokenBudgetMemory
from pagedcli.memory.contiguous import ContiguousMemory, next_power_of_two
from pagedcli.memory.interface import MemoryPolicy, Verdict
from pagedcli.memory.paged import PagedMemory
from pagedcli.memory.reserving import ReservingMemory
from pagedcli.memory.static import StaticBatchMemory
from tests.memory.memory_kit import Store, compute, fork, make_group, shares_sum

MAX_LEN = 24
NAMES = ("paged", "orca-oracle", "orca-pow2", "orca-max", "tgi", "fastertransformer")


def build(name: str, blocks: int, size: int) -> MemoryPolicy:
    if name == "paged":
        return PagedMemory(blocks, size)
    if name == "tgi":
        return TokenBudgetMemory(blocks, size, max_len=MAX_LEN)
    if name == "fastertransformer":
        return StaticBatchMemory(blocks, size, max_len=MAX_LEN)
    reserve = name.removeprefix("orca-")
    assert reserve in ("oracle", "pow2", "max")
    return ContiguousMemory(blocks, size, max_len=MAX_LEN, reserve=reserve)


def sound(memory: MemoryPolicy, running: list[SequenceGroup]) -> None:
    memory.check()
    usage = memory.usage()
    assert shares_sum(usage) == pytest.approx(1)
    if memory.name != "paged":
        assert usage.token == sum(seq.computed for group in running for seq in group.live)
        wanted = sum(group.final_len or 0 for group in running for _ in group.live)
        assert usage.token + usage.reserved == wanted


REQUESTS = st.lists(st.tuples(st.integers(1, 10), st.integers(1, 12), st.integers(1, 3), st.booleans()),
                    min_size=1, max_size=12)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(name=st.sampled_from(NAMES), blocks=st.integers(1, 40), size=st.sampled_from([1, 3, 4]), requests=REQUESTS,
       picks=st.lists(st.integers(0, 5), min_size=30, max_size=30))
def test_shares_add_up_at_every_step(name: str, blocks: int, size: int, requests: list[tuple[int, int, int, bool]],
                                     picks: list[int]) -> None:
    memory = build(name, blocks, size)
    store = Store(memory)
    waiting = []
    for order, (prompt, output, n, beams) in enumerate(requests):
        group = make_group([order] * prompt, n=n, output_len=output, max_tokens=12, beams=beams, order=order,
                           sequences=1 if memory.shares_prompt else n)
        if memory.blocks_for_ever(group, group.final_len or 0) > memory.capacity:
            if not isinstance(memory, StaticBatchMemory):
                assert memory.shares_prompt or memory.can_admit(group) is Verdict.NEVER
            continue
        waiting.append(group)
    running: list[SequenceGroup] = []
    steps = 0
    while waiting or running:
        steps += 1
        assert steps < 2_000, "nothing moves any more"
        for group in list(running):
            if group not in running:
                continue
            while not memory.can_append(group):
                victim = running.pop()
                for seq in victim.live:
                    memory.free(seq)
                    seq.computed = 0
                waiting.insert(0, victim)
                if victim is group:
                    break
            else:
                for seq in group.live:
                    store.copy(memory.append(seq))
        if isinstance(memory, StaticBatchMemory) and not running and waiting:
            first = waiting[0]
            out = first.request.output_len or 0
            assert memory.can_open(len(first.live), first.prompt_len, out) is Verdict.YES
            memory.open(len(first.live), first.prompt_len, out)
        while waiting and memory.can_admit(waiting[0], running=bool(running)) is Verdict.YES:
            group = waiting.pop(0)
            memory.admit(group)
            running.append(group)
        assert running, "an empty pool admits nobody"
        for group in running:
            for seq in group.live:
                compute(memory, seq, store)
        sound(memory, running)
        for group in list(running):
            if memory.shares_prompt and group.live[0].output_len == 0:
                while len(group.live) < group.params.max_sequences:
                    fork(memory, group.live[0], store)
            elif group.params.use_beam_search and len(group.live) > 1 and picks[steps % 30] == 0:
                dropped = group.live.pop()
                memory.free(dropped)
                fork(memory, group.live[0], store)
            for number, seq in enumerate(group.live):
                seq.tokens.append(number)
            if group.live[0].output_len == group.request.output_len or picks[(steps * 7 + group.order) % 30] == 1:
                for seq in group.live:
                    memory.free(seq)
                running.remove(group)
        if memory.name != "paged":
            sound(memory, running)
    memory.check()
    usage = memory.usage()
    assert usage.free == usage.total == blocks * size


def test_reserved_lengths_are_the_papers() -> None:
    group = make_group([0] * 100, output_len=25, max_tokens=200)
    def length(memory: ReservingMemory) -> int:
        return memory.reserved_len(group)
    assert length(ContiguousMemory(983, reserve="oracle")) == 125
    assert length(ContiguousMemory(983, reserve="pow2")) == 132
    assert length(ContiguousMemory(983, reserve="max")) == 2048
    assert length(TokenBudgetMemory(983)) == 300
    assert [next_power_of_two(value) for value in (0, 1, 2, 3, 25, 32, 33)] == [1, 1, 2, 4, 32, 32, 64]
    long = make_group([0] * 1024, output_len=1016)
    assert ContiguousMemory(983, reserve="pow2").reserved_len(long) == 2048  # 1024 + 1024, cut to the model's length
    # a chat prompt of 1024 takes the whole chunk whatever is reserved: the three Orcas are alike there
    assert ContiguousMemory(983, reserve="oracle").blocks_for_ever(long, 0) == 128
    assert ContiguousMemory(983, reserve="max").blocks_for_ever(long, 0) == 128


def test_largest_chunk_follows_the_models_length() -> None:
    assert ContiguousMemory(983, 16, max_len=2048).buddy.max_chunk == 128
    assert ContiguousMemory(983, 16, max_len=2049).buddy.max_chunk == 256
    assert ContiguousMemory(983, 16, max_len=1500).buddy.max_chunk == 128


def test_orca_without_an_output_length_says_so() -> None:
    group = make_group([0] * 4)
    with pytest.raises(RequestError, match="orca-pow2 reserves memory by the true output length") as fault:
        ContiguousMemory(983, reserve="pow2").blocks_for_ever(group, 10)
    assert fault.value.code == "output_len_unknown"
    assert ContiguousMemory(983, reserve="max").blocks_for_ever(group, 10) == 128


def test_never_and_later() -> None:
    memory = ContiguousMemory(12, 4, max_len=32, reserve="oracle")  # chunks 8 and 4
    assert memory.can_admit(make_group([0] * 20, output_len=12)) is Verdict.YES
    assert memory.can_admit(make_group([0] * 20, output_len=13)) is Verdict.NEVER  # past the model's length
    two = make_group([0] * 20, output_len=12, n=2, sequences=2)
    assert memory.can_admit(two) is Verdict.NEVER
    memory.admit(make_group([0] * 10, output_len=2, order=1))
    assert memory.can_admit(make_group([0] * 16, output_len=1)) is Verdict.YES
    memory.admit(make_group([0] * 16, output_len=1, order=2))
    assert memory.can_admit(make_group([0], output_len=1)) is Verdict.LATER


def test_budget_counts_prompt_and_limit_and_nothing_else() -> None:
    memory = TokenBudgetMemory(10, 4, max_len=40)
    first = make_group([0] * 9, max_tokens=11, output_len=2)
    assert memory.can_admit(first) is Verdict.YES
    memory.admit(first)  # 20 slots, 5 blocks
    assert memory.usage().free == 20
    assert memory.can_admit(make_group([0] * 10, max_tokens=10)) is Verdict.YES
    assert memory.can_admit(make_group([0] * 10, max_tokens=11)) is Verdict.LATER
    assert memory.can_admit(make_group([0] * 10, max_tokens=None)) is Verdict.LATER
    assert memory.can_admit(make_group([0] * 10, max_tokens=10, n=3, sequences=3)) is Verdict.NEVER


def test_static_batch_opens_fills_and_closes_as_one() -> None:
    memory = StaticBatchMemory(20, 4, max_len=32)
    groups = [make_group([0] * prompt, output_len=output, order=order)
              for order, (prompt, output) in enumerate([(7, 2), (3, 9), (5, 5)])]
    assert memory.can_admit(groups[0]) is Verdict.LATER  # no batch yet
    assert memory.can_open(6, 7, 9) is Verdict.NEVER  # 6 x 4 blocks
    assert memory.can_open(1, 30, 3) is Verdict.NEVER  # past the model's length
    assert memory.can_open(3, 7, 9) is Verdict.YES
    memory.open(3, 7, 9)
    assert memory.width == 16
    assert memory.can_open(1, 1, 1) is Verdict.LATER
    assert memory.can_admit(make_group([0] * 9, output_len=8)) is Verdict.LATER  # 17 slots, the buffers have 16
    for group in groups:
        assert memory.can_admit(group) is Verdict.YES
        memory.admit(group)
    assert memory.can_admit(make_group([0], output_len=1)) is Verdict.LATER  # no buffer left
    tables = [memory.table(group.live[0]) for group in groups]
    assert sorted(block for table in tables for block in table) == list(range(12))
    memory.free(groups[0].live[0])
    assert memory.usage().free == 32  # its buffer stays with the batch
    memory.check()
    memory.free(groups[1].live[0])
    memory.free(groups[2].live[0])
    assert memory.usage().free == 80
    assert memory.can_open(5, 7, 9) is Verdict.YES


def test_static_buffer_passes_to_a_fork_of_the_batch() -> None:
    memory = StaticBatchMemory(20, 4, max_len=32)
    group = make_group([1] * 6, n=2, beams=True, output_len=4, sequences=2)
    memory.open(2, 6, 4)
    memory.admit(group)
    for seq in group.live:
        compute(memory, seq)
    dropped = group.live.pop()
    place = list(memory.table(dropped))
    memory.free(dropped)
    child = group.live[0].fork(99_999, 1)
    assert memory.fork(group.live[0], child) == list(zip(memory.table(group.live[0])[:2], place[:2], strict=True))
    assert list(memory.table(child)) == place
    assert memory.usage().token == 12
