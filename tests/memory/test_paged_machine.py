"""Random lives of groups in paged memory, against a store that knows what each slot should hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from pagedcli.core.sequence import Sequence, SequenceGroup
from pagedcli.memory.interface import Verdict
from pagedcli.memory.paged import PagedMemory
from tests.memory.memory_kit import Store, compute, fork, make_group

DONE: Counter[str] = Counter()
# few different tokens, whose hashes collide (hash(-1) == hash(-2)), so that prefixes really meet
TOKEN = st.sampled_from([-1, -2])
WEIGHTS = {"decode": 12, "prefill": 6, "admit": 5, "arrive": 4, "swap_out": 1, "swap_in": 3, "preempt": 1, "finish": 1,
           "abandon_swap": 1, "pin": 1, "unpin": 1, "forget": 1}


def ready(group: SequenceGroup) -> bool:
    """Whether everything is computed, so that a token can be sampled."""
    return not any(seq.remaining for seq in group.live)


def longest(group: SequenceGroup) -> int:
    return group.prompt_len + 7


class PagedMachine(RuleBasedStateMachine):
    """Groups stay within the bound under which the engine accepts them, so a lone one must never get stuck."""

    @initialize(size=st.integers(1, 4), blocks=st.integers(4, 24), host=st.integers(0, 12), cache=st.booleans(),
                watermark=st.sampled_from([0.0, 0.1]))
    def start(self, size: int, blocks: int, host: int, cache: bool, watermark: float) -> None:
        self.memory = PagedMemory(blocks, size, host_blocks=host, watermark=watermark, prefix_cache=cache)
        self.store = Store(self.memory)
        self.cache = cache
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """One of the acts that are possible now, the frequent ones of a real run more often."""
        some = {
            "arrive": [None] * (len(self.waiting) < 3), "admit": self.waiting, "swap_in": self.swapped,
            "prefill": [group for group in self.running if not ready(group)],
            "decode": [group for group in self.running if ready(group)],
            "preempt": self.running, "swap_out": self.running, "finish": self.running + self.swapped,
            "abandon_swap": self.swapped, "pin": [group for group in self.running if self.spare() > 0],
            "unpin": [None] * bool(self.memory.prefix.pinned), "forget": [None] * bool(len(self.memory.prefix)),
        }
        names = [name for name, weight in WEIGHTS.items() if some[name] for _ in range(weight)]
        name = data.draw(st.sampled_from(names))
        DONE[name] += 1
        group = data.draw(st.sampled_from(some[name]))
        method = getattr(self, name)
        method(data) if group is None else method(data, group)

    def bound(self, group: SequenceGroup) -> int:
        size = self.memory.block_size
        full = group.prompt_len // size
        return full + group.params.max_sequences * (-(-longest(group) // size) - full)

    def spare(self) -> int:
        """Blocks that can be pinned without making any group impossible."""
        bounds = [self.bound(group) for group in self.running + self.waiting + self.swapped]
        return self.memory.capacity - max(bounds, default=0)

    def arrive(self, data: st.DataObject) -> None:
        memory = self.memory
        n = min(data.draw(st.sampled_from([1, 2, 3, 4])), max(1, memory.capacity * memory.block_size // 9))
        fits = max(1, (memory.capacity - n * (7 // memory.block_size + 2)) * memory.block_size)
        long = data.draw(st.integers(0, 9)) == 0
        prompt = data.draw(st.lists(TOKEN, min_size=40 if long else 1, max_size=60 if long else min(12, fits)))
        group = make_group(prompt, n=n, output_len=data.draw(st.none() | st.integers(1, 7)))
        if self.bound(group) <= memory.capacity:
            assert memory.blocks_for_ever(group, longest(group)) <= self.bound(group)
            self.waiting.append(group)
        elif group.prompt_len > memory.num_blocks * memory.block_size:
            DONE["never"] += 1
            assert memory.can_admit(group, running=bool(self.running)) is Verdict.NEVER

    def admit(self, data: st.DataObject, group: SequenceGroup) -> None:
        del data
        memory = self.memory
        before = memory.usage()
        verdict = memory.can_admit(group, running=bool(self.running))
        assert memory.usage() == before
        if verdict is not Verdict.YES:
            assert verdict is Verdict.LATER
            assert self.running or self.swapped, "an empty pool keeps a group waiting"
            return
        DONE["several back"] += len(group.live) > 1
        admission = memory.admit(group)
        DONE["cached"] += admission.cached_tokens > 0
        self.waiting.remove(group)
        assert 0 <= admission.cached_tokens <= group.prompt_len
        if self.running:
            assert memory.pool.available >= memory.watermark_blocks
        self.running.append(group)
        for seq in group.live:
            assert 0 <= seq.computed < seq.length
            assert len(memory.table(seq)) == -(-seq.length // memory.block_size)
        self.store.verify(memory, group.live[0], group.live[0].computed)

    def prefill(self, data: st.DataObject, group: SequenceGroup) -> None:
        budget = data.draw(st.integers(1, 20))
        for seq in group.live:  # in order: later ones may count on blocks that earlier ones fill
            took = min(budget, seq.remaining)
            if took:
                assert self.memory.append(seq) == []
                compute(self.memory, seq, self.store, took)
                budget -= took
            if seq.remaining:
                break

    def decode(self, data: st.DataObject, group: SequenceGroup) -> None:
        """Sample (forking and dropping as beams do), grow, and compute the new tokens: a whole decode step."""
        if group.live[0].length == longest(group):
            self.drop(list(group.live))
            self.running.remove(group)
            return
        late = data.draw(st.booleans())
        choices = [data.draw(st.sampled_from([1, 1, 1, 2, 2, 0])) for _ in group.live]
        parents = list(group.live)
        dropped = [seq for seq, many in zip(parents, choices, strict=True) if many == 0][:len(parents) - 1]
        if not late:
            self.drop(dropped)
        for seq, many in zip(parents, choices, strict=True):
            if many == 2 and seq not in dropped and len(group.live) < group.params.max_sequences:
                fork(self.memory, seq, self.store)
                DONE["fork"] += 1
        self.memory.check()
        if late:
            self.drop(dropped)
        for seq in group.live:
            seq.tokens.append(data.draw(TOKEN))
        self.grow(group, swap=data.draw(st.integers(0, 5)) == 0)

    def drop(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            self.memory.free(seq)
            seq.group.live.remove(seq)

    def grow(self, group: SequenceGroup, swap: bool) -> None:
        """Give every sequence the slot for its new token, sending groups away until that is possible."""
        memory = self.memory
        while swap or not memory.can_append(group):
            victim = group if memory.can_append(group) else self.running[-1]
            if memory.can_swap_out(victim):
                DONE["swapped to grow"] += 1
                self.to_host(victim)
            else:
                self.recompute(victim)
            if victim is group:
                return
            swap = False
        before = memory.pool.available
        wanted = memory._growth(group, swapped=False)
        for seq in group.live:
            steady = seq.length <= memory.steady_until(seq)
            copies = memory.append(seq)
            DONE["copies"] += len(copies)
            self.store.copy(copies)
            assert memory.append(seq) == []
            memory.check()
            assert steady <= (copies == [] and memory.steady_until(seq) >= seq.length)
        assert before - memory.pool.available == wanted, "can_append counts other than what append takes"
        for seq in group.live:
            steady, found, usage = memory.steady_until(seq), len(memory.prefix), memory.usage()
            compute(memory, seq, self.store)
            if seq.length <= steady:
                DONE["steady"] += 1
                past_end = seq.group.final_len is not None and seq.length > seq.group.final_len
                assert len(memory.prefix) == found
                assert past_end or memory.usage() == replace(usage, token=usage.token + 1, reserved=usage.reserved - 1)

    def recompute(self, group: SequenceGroup) -> None:
        DONE["recompute"] += 1
        for seq in group.live:
            self.memory.free(seq)
            seq.computed = 0
        (self.swapped if group in self.swapped else self.running).remove(group)
        self.waiting.append(group)

    def preempt(self, data: st.DataObject, group: SequenceGroup) -> None:
        del data
        self.recompute(group)

    def swap_out(self, data: st.DataObject, group: SequenceGroup) -> None:
        del data
        memory = self.memory
        assert memory.can_swap_out(group) == (memory.swap_blocks(group) <= memory.swap.available)
        if memory.can_swap_out(group):
            self.to_host(group)

    def to_host(self, group: SequenceGroup) -> None:
        DONE["swapped"] += 1
        memory = self.memory
        needed = memory.swap_blocks(group)
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

    def swap_in(self, data: st.DataObject, group: SequenceGroup) -> None:
        del data
        memory = self.memory
        if not memory.can_swap_in(group, running=bool(self.running)):
            assert self.running or len(self.swapped) > 1, "an empty pool keeps a swapped group out"
            return
        self.store.swap_in(memory.swap_in(group))
        self.swapped.remove(group)
        self.running.append(group)
        assert memory.can_append(group), "a group came back only to be preempted"
        if all(seq.remaining == 1 and seq.output_len for seq in group.live):
            self.grow(group, swap=False)

    def finish(self, data: st.DataObject, group: SequenceGroup) -> None:
        alone = ready(group) and data.draw(st.booleans())
        gone = [data.draw(st.sampled_from(group.live))] if alone else list(group.live)
        self.drop(gone)
        self.memory.free(gone[0])  # freeing twice is harmless
        if not group.live:
            (self.swapped if group in self.swapped else self.running).remove(group)

    def abandon_swap(self, data: st.DataObject, group: SequenceGroup) -> None:
        del data
        self.recompute(group)

    def pin(self, data: st.DataObject, group: SequenceGroup) -> None:
        self.memory.start_pin()
        seq = group.live[0]
        compute(self.memory, seq, self.store)
        most = data.draw(st.integers(0, self.spare() * self.memory.block_size))
        covered = self.memory.pin(seq.tokens[:most])
        assert covered <= most and covered % self.memory.block_size == 0
        DONE["pinned"] += covered > 0

    def unpin(self, data: st.DataObject) -> None:
        del data
        self.memory.unpin()

    def forget(self, data: st.DataObject) -> None:
        del data
        self.memory.forget_cached()
        assert len(self.memory.prefix) == len(self.memory.prefix.pinned)

    @invariant()
    def sound(self) -> None:
        memory = self.memory
        memory.check()
        assert abs(sum(memory.usage().shares().values()) - 1) < 1e-9
        if not self.cache and not memory.prefix.pinned:
            assert memory.pool.idle == 0
        for group in self.running:
            for seq in group.live:
                if ready(group) or seq is group.live[0]:
                    self.store.verify(memory, seq, seq.computed)

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
        max_examples=250, stateful_step_count=60, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck)))
    assert sum(DONE[name] for name in WEIGHTS) >= 10_000
    for name in (*WEIGHTS, "cached", "copies", "fork", "never", "recompute", "swapped", "swapped to grow",
                 "several back", "pinned", "steady"):
        assert DONE[name] >= 15, f"{name} happened only {DONE[name]} times"
