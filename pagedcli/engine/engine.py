"""The engine: one loop over plan, execute, choose, commit."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from pagedcli.core.clock import Clock
from pagedcli.core.errors import RequestError
from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.core.request import NO_ROW, Request, SamplingParams
from pagedcli.core.sequence import SequenceGroup
from pagedcli.core.wording import counted
from pagedcli.engine.interface import Counters, Sampler, Scheduler
from pagedcli.engine.lifecycle import Lifecycle
from pagedcli.execution.interface import Executor
from pagedcli.memory.interface import MemoryPolicy, Usage

StepObserver = Callable[[StepPlan, StepResult, Usage], None]
"""Told of each step after it has run and before its choices are applied: what it held is then still held."""


class Engine:
    """Serves requests step by step. Made by `build.build_engine`; not thread-safe.

    `max_model_len`: tokens of prompt plus output that one sequence may have. `on_step`, when set, sees every step that
    ran, with the memory's use during it (before finished sequences leave).
    """

    def __init__(self, *, scheduler: Scheduler, executor: Executor, sampler: Sampler, memory: MemoryPolicy,
                 lifecycle: Lifecycle, clock: Clock, counters: Counters, max_model_len: int, max_num_seqs: int,
                 tokenizer: Any = None) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.sampler = sampler
        self.memory = memory
        self.lifecycle = lifecycle
        self.clock = clock
        self.counters = counters
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.tokenizer = tokenizer
        self.on_step: StepObserver | None = None
        self._arrivals = 0

    def add(self, request: Request) -> SequenceGroup:
        """Queue a request. Raises RequestError, with the numbers, for one that can never run here."""
        self.sampler.check(request, self.executor.limits.vocab_size)
        group = SequenceGroup(request, self._arrivals)
        group.max_output = self._output_limit(group)
        self._arrivals += 1
        self.scheduler.add(group)
        return group

    def step(self) -> list[SequenceGroup]:
        """Run one iteration; returns the groups that finished in it."""
        plan = self.scheduler.plan(self.clock.now())
        if plan is None:
            return []
        result = self.executor.execute(plan)
        self.clock.advance(result.seconds)
        choices = self.sampler.choose(plan, result, self.lifecycle.sequences)
        self._account(plan, result)
        finished = self.scheduler.commit(plan, choices, self.clock.now())
        self.counters.output_tokens += sum(seq.output_len for group in finished for seq in group.done)
        return finished

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def abort(self, group: SequenceGroup) -> None:
        """Drop a request in any state; what it held is free at once."""
        self.scheduler.abort(group)

    def pin_prefix(self, tokens: Seq[int]) -> int:
        """Compute a prefix that later prompts begin with and keep its full blocks on the device for good.

        Call while the engine is idle. Returns how many tokens are kept (whole blocks only). Raises RequestError when
        the prefix cannot fit, UsageError when the memory policy shares nothing.
        """
        self.memory.start_pin()
        self.add(Request(NO_ROW, "shared prefix", tuple(tokens), SamplingParams(max_tokens=0)))
        while self.has_work():
            self.step()
        return self.memory.pin(tokens)

    @property
    def depth(self) -> tuple[int, int, int]:
        """(running, waiting, swapped) groups."""
        return self.scheduler.depth

    def usage(self) -> Usage:
        return self.memory.usage()

    def close(self) -> None:
        self.executor.close()

    def _output_limit(self, group: SequenceGroup) -> int:
        """Output tokens at which the group ends at the latest, or a RequestError when it can never fit."""
        request, limit = group.request, self.max_model_len
        params, prompt = group.params, group.prompt_len
        vocab = self.executor.limits.vocab_size
        bad = next((token for token in request.prompt if not 0 <= token < vocab), None)
        if bad is not None:
            raise RequestError("token_out_of_range",
                               f"prompt token id {bad} is outside the model's vocabulary of {vocab}")
        if params.max_sequences > self.max_num_seqs:
            raise RequestError(
                "too_many_sequences", f"the request needs {counted(params.max_sequences, 'sequence')} at once, above "
                f"the {self.max_num_seqs:,} that --max-num-seqs and --max-num-batched-tokens allow; raise the smaller "
                "of these, or lower n, best_of or beam_width")
        wanted = request.output_len if request.output_len is not None else params.max_tokens
        if prompt + (1 if wanted is None else wanted) > limit:
            asked = "at least 1 output token" if wanted is None else f"max_tokens {wanted}"
            raise RequestError(
                "too_long", f"the prompt has {counted(prompt, 'token')} and asks for {asked}: "
                f"{prompt + (wanted or 1)} in all, above the model's limit of {limit}; shorten the prompt or "
                "lower max_tokens")
        most = limit - prompt if wanted is None else wanted
        return self._fit_pool(group, most, may_cut=wanted is None)

    def _fit_pool(self, group: SequenceGroup, most: int, may_cut: bool) -> int:
        """`most`, or less when the pool is smaller and the user set no number."""
        memory, prompt = self.memory, group.prompt_len
        # The last token's keys are never read, so a sequence of length L needs slots for L - 1 of them.
        need = memory.blocks_for_ever(group, prompt + max(most, 1) - 1)
        if need <= memory.capacity:
            return most
        low = 1
        if may_cut and memory.blocks_for_ever(group, prompt) <= memory.capacity:
            high = most
            while high - low > 1:
                middle = (low + high) // 2
                fits = memory.blocks_for_ever(group, prompt + middle - 1) <= memory.capacity
                low, high = (middle, high) if fits else (low, middle)
            return low
        raise RequestError(
            "exceeds_kv_pool", f"the request can need {counted(need, 'KV block')} of "
            f"{counted(memory.block_size, 'token')} (prompt {prompt:,}, up to {counted(most, 'output token')}, "
            f"{counted(group.params.max_sequences, 'sequence')}) and the pool has "
            f"{memory.capacity:,}; raise --kv-cache-memory or --num-kv-blocks, or lower max_tokens")

    def _account(self, plan: StepPlan, result: StepResult) -> None:
        counters = self.counters
        usage = self.memory.usage()
        counters.steps += 1
        counters.computed_tokens += plan.num_tokens
        counters.block_copies += len(plan.copies)
        counters.blocks_swapped += len(plan.swap_in) + len(plan.swap_out)
        counters.logical_block_steps += usage.logical
        counters.physical_block_steps += usage.physical
        if usage.physical:
            counters.sharing_ratio_sum += usage.logical / usage.physical
            counters.sharing_ratio_steps += 1
        counters.peak_used_blocks = max(counters.peak_used_blocks, usage.physical)
        for name, share in usage.shares().items():
            counters.waste_sum[name] = counters.waste_sum.get(name, 0.0) + share
        counters.seconds["execute"] = counters.seconds.get("execute", 0.0) + result.seconds
        for name, seconds in result.parts.items():
            counters.seconds[name] = counters.seconds.get(name, 0.0) + seconds
        if self.on_step is not None:
            self.on_step(plan, result, usage)
