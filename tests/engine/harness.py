"""A whole engine without a model, for scheduling tests: real scheduler, real memory, scripted tokens."""

from __future__ import annotations

import random

from pagedcli.core.clock import VirtualClock
from pagedcli.core.config import Preemption, SchedulerConfig
from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.core.request import Request, SamplingParams
from pagedcli.core.sequence import SequenceGroup
from pagedcli.engine.engine import Engine
from pagedcli.engine.interface import Counters
from pagedcli.engine.lifecycle import Lifecycle
from pagedcli.engine.preemption import recovery_policy
from pagedcli.engine.scheduler import IterationScheduler
from pagedcli.engine.scripted import ParentRule, ScriptedSampler, keep_all
from pagedcli.execution.interface import ExecutorLimits
from pagedcli.execution.null_executor import NullExecutor
from pagedcli.memory.interface import MemoryPolicy
from pagedcli.memory.paged import PagedMemory


class CacheModel(NullExecutor):
    """Runs no model but remembers which (token, position) each slot holds, and checks that each step reads back exactly
    the tokens of its sequence: the functional meaning of a block table, whatever was copied, swapped or shared."""

    def __init__(self, limits: ExecutorLimits) -> None:
        super().__init__(limits)
        self.device: dict[tuple[int, int], tuple[int, ...]] = {}
        self.host: dict[tuple[int, int], tuple[int, ...]] = {}
        self.sequences = None
        self.plans: list[dict] | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        if self.plans is not None:
            self.plans.append(plan.frozen())
        size = self.limits.block_size
        assert not (plan.swap_in and plan.swap_out), "swap-in and swap-out in one step"
        out = {(dst, off): self.device[src, off] for src, dst in plan.swap_out for off in range(size)
               if (src, off) in self.device}
        self._replace(self.host, out, [dst for _, dst in plan.swap_out])
        back = {(dst, off): self.host[src, off] for src, dst in plan.swap_in for off in range(size)
                if (src, off) in self.host}
        self._replace(self.device, back, [dst for _, dst in plan.swap_in])
        copied = {(dst, off): self.device[src, off] for src, dst in plan.copies for off in range(size)
                  if (src, off) in self.device}
        self._replace(self.device, copied, [dst for _, dst in plan.copies])
        seen = set()
        for item in plan.slices:
            assert item.seq not in seen, "one slice a sequence a step"
            seen.add(item.seq)
            for offset, token in enumerate(item.tokens):
                place = item.start + offset
                self.device[item.blocks[place // size], place % size] = (token, place)
        for item in plan.slices:
            end = item.start + len(item.tokens)
            tokens = self.sequences[item.seq].tokens
            for place in range(end):
                held = self.device.get((item.blocks[place // size], place % size))
                assert held == (tokens[place], place), f"sequence {item.seq} reads {held} at {place}"
        return StepResult(None, 0.01)

    def _replace(self, store: dict, fresh: dict, blocks: list[int]) -> None:
        for block in blocks:
            for offset in range(self.limits.block_size):
                store.pop((block, offset), None)
        store.update(fresh)


def make_engine(*, blocks: int, block_size: int = 4, swap: int = 0, seqs: int = 64, budget: int | None = None,
                chunked: bool = True, preemption: Preemption = "auto", prefix: bool = True, model_len: int = 10_000,
                parents: ParentRule = keep_all, memory: MemoryPolicy | None = None) -> Engine:
    config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget, chunked_prefill=chunked,
                             preemption=preemption)
    memory = memory or PagedMemory(num_blocks=blocks, block_size=block_size, host_blocks=swap, prefix_cache=prefix)
    executor = CacheModel(ExecutorLimits(memory.num_blocks, memory.host_blocks, memory.block_size, model_len, 1000, 1))
    sampler, counters = ScriptedSampler(1000, parents=parents), Counters()
    lifecycle = Lifecycle(memory, sampler, None, frozenset(), record_times=True)
    executor.sequences = lifecycle.sequences
    scheduler = IterationScheduler(config, memory, lifecycle, recovery_policy(preemption), counters)
    return Engine(scheduler=scheduler, executor=executor, sampler=sampler, memory=memory, lifecycle=lifecycle,
                  clock=VirtualClock(), counters=counters, max_model_len=model_len,
                  max_num_seqs=scheduler.sequence_cap)


def request(index: int, prompt: list[int], out: int, **fields: object) -> Request:
    return Request(index, str(index), tuple(prompt), SamplingParams(max_tokens=out, **fields))  # type: ignore[arg-type]


def random_parents(seed: int) -> ParentRule:
    rng = random.Random(seed)

    def rule(group: SequenceGroup, made: int) -> list[int]:
        del made
        return [rng.randrange(len(group.live)) for _ in range(group.params.width)]

    return rule


def drain(engine: Engine, limit: int = 100_000, check: bool = True) -> list[SequenceGroup]:
    """Step until done, proving the memory's invariants after each step; fails on a stall."""
    finished = []
    for _ in range(limit):
        if not engine.has_work():
            return finished
        before = engine.counters.steps
        finished += engine.step()
        assert engine.counters.steps == before + 1, f"stall at {engine.depth} with {engine.usage()}"
        if check:
            engine.memory.check()
    raise AssertionError(f"not done after {limit} steps: {engine.depth}")
