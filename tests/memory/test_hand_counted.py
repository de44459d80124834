"""Five requests through every policy, each class of slots counted by hand after each step.

Blocks of 4, 24 of them (96 slots), at most 32 tokens a sequence. Requests as prompt + output: A 5 + 3, B 3 + 6,
C 9 + 2, D 1 + 1, E 6 + 10. A step computes a whole prompt or one token of every running request and ends with one more
token for each; a request leaves after its last. A, B, C enter in step 0; C leaves after step 1; A and D after
step 2. Arrival is A to E, first come first served.
"""

from __future__ import annotations

import pytest

from pagedcli.core.sequence import SequenceGroup
from pagedcli.memory.accounting import others
from pagedcli.memory.budget import TokenBudgetMemory
from pagedcli.memory.contiguous import ContiguousMemory
from pagedcli.memory.interface import MemoryPolicy, Verdict
from pagedcli.memory.paged import PagedMemory
from pagedcli.memory.static import StaticBatchMemory
from tests.memory.memory_kit import compute, make_group, shares_sum

LENGTHS = [(5, 3), (3, 6), (9, 2), (1, 1), (6, 10)]
ARRIVE = [0, 0, 0, 2, 2]

# token, reserved, internal, external, free after steps 0 .. 3
EXPECTED = {
    # blocks: A 2, B 1 then 2, C 3, D 1, E 2; filled 5 3 9 | 6 4 10 | 7 5 1 6 | 6 7; past the end: C 1, D 2
    "paged": [(17, 6, 1, 0, 72), (20, 3, 1, 0, 72), (19, 7, 2, 0, 68), (13, 3, 0, 0, 80)],
    # slots A 8, B 9, C 11, D 2, E 16; chunks 2, 4, 4, 1, 4 blocks
    "orca-oracle": [(17, 11, 0, 12, 56), (20, 8, 0, 12, 56), (19, 16, 0, 9, 52), (13, 12, 0, 7, 64)],
    # slots A 5 + 4, B 3 + 8, C 9 + 2, D 1 + 1, E 6 + 16; chunks 4, 4, 4, 1, 8 blocks
    "orca-pow2": [(17, 11, 3, 17, 48), (20, 8, 3, 17, 48), (19, 16, 9, 24, 28), (13, 12, 8, 15, 48)],
    # 32 slots each, so three at most: E enters only in step 3
    "orca-max": [(17, 11, 68, 0, 0), (20, 8, 68, 0, 0), (13, 6, 77, 0, 0), (12, 13, 39, 0, 32)],
    # prompt + 12 asked for: slots 17, 15, 21, 13, 18; blocks 5, 4, 6, 4, 5
    "tgi": [(17, 11, 25, 7, 36), (20, 8, 25, 7, 36), (19, 16, 28, 9, 24), (13, 12, 8, 3, 60)],
    # one batch of A, B, C: three buffers of 9 + 6 slots in 4 blocks, kept to the end
    "fastertransformer": [(17, 11, 17, 3, 48), (20, 8, 17, 3, 48), (12, 5, 28, 3, 48), (6, 3, 36, 3, 48)],
}


def build(name: str) -> MemoryPolicy:
    if name == "paged":
        return PagedMemory(24, 4, prefix_cache=False)
    if name == "tgi":
        return TokenBudgetMemory(24, 4, max_len=32)
    if name == "fastertransformer":
        return StaticBatchMemory(24, 4, max_len=32)
    reserve = name.removeprefix("orca-")
    assert reserve in ("oracle", "pow2", "max")
    return ContiguousMemory(24, 4, max_len=32, reserve=reserve)


@pytest.mark.parametrize("name", EXPECTED)
def test_five_requests(name: str) -> None:
    memory = build(name)
    assert memory.name == name
    queue = [make_group([order] * prompt, output_len=output, max_tokens=12, order=order)
             for order, (prompt, output) in enumerate(LENGTHS)]
    running: list[SequenceGroup] = []
    if isinstance(memory, StaticBatchMemory):
        assert memory.largest_batch(9, 6) == 6
        memory.open(3, 9, 6)
    for step, expected in enumerate(EXPECTED[name]):
        for group in running:
            assert memory.can_append(group)
            assert memory.append(group.live[0]) == []
        while queue and ARRIVE[queue[0].order] <= step and memory.can_admit(queue[0]) is Verdict.YES:
            group = queue.pop(0)
            memory.admit(group)
            running.append(group)
        for group in running:
            compute(memory, group.live[0])
        usage = memory.usage()
        assert (usage.token, usage.reserved, usage.internal, usage.external, usage.free) == expected, f"step {step}"
        assert usage.total == 96
        assert shares_sum(usage) == pytest.approx(1)
        assert others(usage) == pytest.approx((expected[3] + expected[4]) / 96)
        memory.check()
        for group in list(running):
            group.live[0].tokens.append(7)
            if group.live[0].length == group.final_len:
                memory.free(group.live[0])
                running.remove(group)
    for group in running:
        memory.free(group.live[0])
    assert memory.usage().free == 96
    memory.check()


def test_samples_share_a_prompt_when_paged_and_only_then() -> None:
    """n = 3 over a prompt of 6 tokens (blocks of 4): paged holds it once and copies the half-filled block twice."""
    paged = PagedMemory(24, 4, prefix_cache=False)
    group = make_group([1] * 6, n=3, output_len=4)
    paged.admit(group)
    compute(paged, group.live[0])
    for _ in range(2):
        child = group.live[0].fork(10_000 + len(group.live), len(group.live))
        assert paged.fork(group.live[0], child) == []
        group.live.append(child)
    usage = paged.usage()
    assert (usage.token, usage.logical, usage.physical) == (6, 6, 2)
    for number, seq in enumerate(group.live):
        seq.tokens.append(number)
        copies = paged.append(seq)
        assert len(copies) == (number < 2)  # the last one to write owns the block by then
        compute(paged, seq)
    usage = paged.usage()
    # 4 shared slots, then 3 private blocks with 3 filled of 4; the final length 10 leaves no slot of them unused
    assert (usage.token, usage.reserved, usage.internal) == (4 + 9, 3, 0)
    assert (usage.logical, usage.physical) == (6, 4)
    paged.check()

    orca = ContiguousMemory(24, 4, max_len=32, reserve="oracle")
    group = make_group([1] * 6, n=3, output_len=4, sequences=3)
    assert not orca.shares_prompt
    orca.admit(group)
    for seq in group.live:
        compute(orca, seq)
    usage = orca.usage()
    assert (usage.token, usage.reserved, usage.internal, usage.external, usage.free) == (18, 12, 0, 18, 48)
    assert usage.logical == usage.physical == 12
