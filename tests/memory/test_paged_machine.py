"""Random lives of groups in paged memory, against a store that knows what each slot should hold."""

from __future__ import annotations

from collections import Counter

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

from pagedcli.core.sequence import Sequence, SequenceGroup
from pagedcli.memory.interface import Verdict
from pagedcli.memory.paged import PagedMemory
from tests.memory.memory_kit import Store, compute, fork, make_group

DONE: Counter[str] = Counter()
PICK = st.integers(0, 1_000)
# few different tokens, whose hashes collide (hash(-1) == hash(-2)), so that prefixes really meet
TOKENS = st.lists(st.sampled_from([-1, -2]), min_size=1, max_size=14)


class PagedMachine(RuleBasedStateMachine):
    @initialize(size=st.sampled_from([1, 2, 3, 4]), blocks=st.integers(2, 24), host=st.integers(0, 12),
                cache=st.booleans(), watermark=st.sampled_from([0.0, 0.1]))
    def start(self, size: int, blocks: int, host: int, cache: bool, watermark: float) -> None:
        self.memory = PagedMemory(blocks, size, host_blocks=host, watermark=watermark, prefix_cache=cache)
        self.store = Store(self.memory)
        self.cache = cache
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []

    def pick(self, groups: list[SequenceGroup], number: int, act: str) -> SequenceGroup:
        DONE[act] += 1
        return groups[number % len(groups)]

    @precondition(lambda self: len(self.waiting) < 4)
    @rule(prompt=TOKENS, n=st.integers(1, 3), output_len=st.none() | st.integers(1, 9))
    def arrive(self, prompt: list[int], n: int, output_len: int | None) -> None:
        DONE["arrive"] += 1
        self.waiting.append(make_group(prompt, n=n, output_len=output_len))

    @precondition(lambda self: self.waiting)
    @rule(number=PICK)
    def admit(self, number: int) -> None:
        group = self.pick(self.waiting, number, "admit")
        memory = self.memory
        before = memory.usage()
        verdict = memory.can_admit(group, running=bool(self.running))
        assert memory.usage() == before
        if verdict is Verdict.NEVER:
            DONE["never"] += 1
            self.waiting.remove(group)
        if verdict is not Verdict.YES:
            if not self.running and not self.swapped:
                assert verdict is Verdict.NEVER, "an empty pool keeps a group waiting"
            return
        admission = memory.admit(group)
        DONE["cached"] += admission.cached_tokens > 0
        self.waiting.remove(group)
        self.running.append(group)
        assert 0 <= admission.cached_tokens <= group.prompt_len
        if self.running[:-1]:
            assert memory.pool.available >= memory.watermark_blocks
        for seq in group.live:
            assert 0 <= seq.computed < seq.length
            assert len(memory.table(seq)) == -(-seq.length // memory.block_size)
        if len(group.live) == 1:
            self.store.verify(memory, group.live[0], group.live[0].computed)

    @precondition(lambda self: self.running)
    @rule(number=PICK, budget=st.integers(1, 40))
    def prefill(self, number: int, budget: int) -> None:
        group = self.pick(self.running, number, "prefill")
        for seq in group.live:  # in order: later ones may count on blocks that earlier ones fill
            if seq.remaining and budget:
                took = min(budget, seq.remaining)
                compute(self.memory, seq, self.store, took)
                budget -= took
            if seq.remaining:
                break

    @precondition(lambda self: self.running)
    @rule(number=PICK, choices=st.lists(st.integers(0, 2), min_size=3, max_size=3), late=st.booleans())
    def decode(self, number: int, choices: list[int], late: bool) -> None:
        """Sample (forking and dropping as beams do), grow, and compute the new tokens: a whole decode step."""
        group = self.pick(self.running, number, "decode")
        if any(seq.remaining for seq in group.live):
            return
        parents = list(group.live)
        dropped = [seq for seq, many in zip(parents, choices, strict=False) if many == 0][:len(parents) - 1]
        if not late:
            self.drop(dropped)
        for seq, many in zip(parents, choices, strict=False):
            if many == 2 and seq not in dropped and len(group.live) < 4:
                fork(self.memory, seq, self.store)
                DONE["fork"] += 1
        if late:
            self.drop(dropped)
        for number, seq in enumerate(group.live):
            seq.tokens.append([-1, -2][number % 2])
        self.grow(group)

    def drop(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            self.memory.free(seq)
            seq.group.live.remove(seq)

    def grow(self, group: SequenceGroup) -> None:
        memory = self.memory
        while not memory.can_append(group):
            victim = self.running[-1]
            self.recompute(victim)
            if victim is group:
                return
        before = memory.pool.available
        tight = memory._growth(group, swapped=False)
        for seq in group.live:
            copies = memory.append(seq)
            DONE["copies"] += len(copies)
            self.store.copy(copies)
            assert memory.append(seq) == []
        assert before - memory.pool.available == tight, "can_append counts other than what append takes"
        for seq in group.live:
            compute(memory, seq, self.store)

    def recompute(self, group: SequenceGroup) -> None:
        DONE["recompute"] += 1
        for seq in group.live:
            self.memory.free(seq)
            seq.computed = 0
        (self.swapped if group in self.swapped else self.running).remove(group)
        self.waiting.append(group)

    @precondition(lambda self: self.running)
    @rule(number=PICK)
    def preempt(self, number: int) -> None:
        self.recompute(self.pick(self.running, number, "preempt"))

    @precondition(lambda self: self.running)
    @rule(number=PICK)
    def swap_out(self, number: int) -> None:
        group = self.pick(self.running, number, "swap_out")
        memory = self.memory
        needed = memory.swap_blocks(group)
        assert memory.can_swap_out(group) == (needed <= memory.swap.available)
        if not memory.can_swap_out(group):
            return
        DONE["swapped"] += 1
        others = [seq for other in self.running if other is not group for seq in other.live]
        shared = {block for seq in others for block in memory.table(seq)} | memory.prefix.pinned
        moves = memory.swap_out(group)
        assert len(moves) == needed == len({source for source, _ in moves}) == len({to for _, to in moves})
        kept = {block: list(self.store.device[block]) for block in range(memory.num_blocks)}
        self.store.swap_out(moves)
        for block, contents in kept.items():
            if block in shared or block in memory.prefix._node_of:
                self.store.device[block] = contents
        self.running.remove(group)
        self.swapped.append(group)

    @precondition(lambda self: self.swapped)
    @rule(number=PICK)
    def swap_in(self, number: int) -> None:
        group = self.pick(self.swapped, number, "swap_in")
        if not self.memory.can_swap_in(group, running=bool(self.running)):
            assert self.running or self.memory.prefix.pinned or len(self.swapped) > 1 or self.memory.pool.held == 0
            return
        self.store.swap_in(self.memory.swap_in(group))
        self.swapped.remove(group)
        self.running.append(group)
        if not self.running[:-1]:
            assert self.memory.can_append(group), "a lone group came back only to be preempted"

    @precondition(lambda self: self.running or self.swapped)
    @rule(number=PICK, swapped=st.booleans())
    def finish(self, number: int, swapped: bool) -> None:
        groups = self.swapped if (swapped and self.swapped) or not self.running else self.running
        group = self.pick(groups, number, "finish")
        seq = group.live[number % len(group.live)]
        self.drop([seq])
        self.memory.free(seq)  # freeing twice is harmless
        if not group.live:
            groups.remove(group)

    @precondition(lambda self: self.swapped)
    @rule(number=PICK)
    def abandon_swap(self, number: int) -> None:
        self.recompute(self.pick(self.swapped, number, "abandon_swap"))

    @precondition(lambda self: self.running and len(self.memory.prefix.pinned) < 3)
    @rule(number=PICK, most=st.integers(0, 6))
    def pin(self, number: int, most: int) -> None:
        group = self.pick(self.running, number, "pin")
        self.memory.start_pin()
        seq = group.live[0]
        if seq.remaining:
            compute(self.memory, seq, self.store)
        else:
            self.memory.computed(seq, seq.length)
        covered = self.memory.pin(seq.tokens[:most])
        assert covered <= most and covered % self.memory.block_size == 0

    @precondition(lambda self: self.memory.prefix.pinned)
    @rule()
    def unpin(self) -> None:
        DONE["unpin"] += 1
        self.memory.unpin()

    @rule()
    def forget(self) -> None:
        DONE["forget"] += 1
        self.memory.forget_cached()
        assert len(self.memory.prefix) == len(self.memory.prefix.pinned)

    @invariant()
    def sound(self) -> None:
        memory = self.memory
        memory.check()
        usage = memory.usage()
        assert abs(sum(usage.shares().values()) - 1) < 1e-9
        if not self.cache and not memory.prefix.pinned:
            assert memory.pool.idle == 0
        for group in self.running:
            for seq in group.live:
                self.store.verify(memory, seq, seq.computed if not any(s.remaining for s in group.live) else 0)

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        for group in self.running + self.swapped + self.waiting:
            for seq in group.live:
                self.memory.free(seq)
        self.memory.unpin()
        self.memory.forget_cached()
        self.memory.check()
        usage = self.memory.usage()
        assert usage.free == usage.total and usage.logical == usage.physical == 0
        assert self.memory.swap.available == self.memory.host_blocks
        assert not self.memory._tables and not self.memory.prefix.root.children


def test_ten_thousand_random_steps() -> None:
    DONE.clear()
    run_state_machine_as_test(PagedMachine, settings=settings(
        max_examples=260, stateful_step_count=60, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck)))
    acts = ("arrive", "admit", "prefill", "decode", "preempt", "swap_out", "swap_in", "finish", "abandon_swap", "pin",
            "unpin", "forget")
    assert sum(DONE[act] for act in acts) >= 10_000
    for act in (*acts, "cached", "copies", "fork", "never", "recompute", "swapped"):
        assert DONE[act] >= 8, f"{act} happened only {DONE[act]} times"
