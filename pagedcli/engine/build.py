"""The only place that turns a RunConfig into objects. A new memory system is one line in `_MEMORIES`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagedcli.core.clock import Clock, WallClock
from pagedcli.core.config import RunConfig, SchedulerConfig
from pagedcli.core.errors import CannotRunError, UsageError
from pagedcli.core.wording import counted
from pagedcli.engine.engine import Engine
from pagedcli.engine.interface import Counters, Sampler, Scheduler, TextState
from pagedcli.engine.lifecycle import Lifecycle
from pagedcli.engine.preemption import recovery_policy
from pagedcli.engine.scheduler import IterationScheduler
from pagedcli.engine.scripted import ScriptedSampler
from pagedcli.engine.static_scheduler import StaticScheduler
from pagedcli.engine.trace import TracingExecutor
from pagedcli.execution.interface import Executor, ExecutorLimits
from pagedcli.execution.null_executor import NullExecutor
from pagedcli.execution.startup import without_collection
from pagedcli.memory.budget import TokenBudgetMemory
from pagedcli.memory.contiguous import ContiguousMemory
from pagedcli.memory.interface import MemoryPolicy
from pagedcli.memory.paged import PagedMemory
from pagedcli.memory.static import StaticBatchMemory

NULL_MODEL = "null"
NULL_BLOCKS = 1 << 16
NULL_POSITIONS = 1 << 14

Say = Callable[[str], None]
MemoryMaker = Callable[[RunConfig, ExecutorLimits, int], MemoryPolicy]


def _paged(config: RunConfig, limits: ExecutorLimits, max_len: int) -> MemoryPolicy:
    del max_len
    return PagedMemory(limits.num_blocks, limits.block_size, host_blocks=limits.host_blocks,
                       watermark=config.cache.watermark, prefix_cache=config.cache.prefix_cache,
                       idle_share=config.cache.idle_share if limits.grows else None)


_MEMORIES: dict[str, MemoryMaker] = {
    "paged": _paged,
    "orca-oracle": lambda _, at, most: ContiguousMemory(at.num_blocks, at.block_size, max_len=most, reserve="oracle"),
    "orca-pow2": lambda _, at, most: ContiguousMemory(at.num_blocks, at.block_size, max_len=most, reserve="pow2"),
    "orca-max": lambda _, at, most: ContiguousMemory(at.num_blocks, at.block_size, max_len=most, reserve="max"),
    "tgi": lambda _, at, most: TokenBudgetMemory(at.num_blocks, at.block_size, max_len=most),
    "fastertransformer": lambda _, at, most: StaticBatchMemory(at.num_blocks, at.block_size, max_len=most),
}


def build_engine(config: RunConfig, *, clock: Clock | None = None, executor: Executor | None = None,
                 sampler: Sampler | None = None, tokenizer: Any = None, record_times: bool = False,
                 progress: Say | None = None, trace: Path | None = None) -> Engine:
    """An engine for `config`.

    `executor` (with its `tokenizer`) may be shared by several engines one after another, so that weights load once;
    `sampler` replaces the one that reads logits. `progress` gets a line before slow work; `trace` logs every step plan.
    Raises UsageError or CannotRunError.
    """
    _check_policy(config)
    if executor is None:
        executor, tokenizer = load(config, progress)
    if trace is not None:
        executor = TracingExecutor(executor, trace)
    limits = executor.limits
    max_len = min(limits.max_positions, config.model.max_model_len or limits.max_positions)
    memory = make_memory(config, limits, max_len)
    eos_ids = frozenset(tokenizer.eos_ids) if tokenizer is not None else frozenset()
    if sampler is None:
        sampler = _sampler(config, executor, tokenizer, eos_ids)
    counters = Counters()
    text = _text(tokenizer)
    lifecycle = Lifecycle(memory, sampler, text, eos_ids, record_times)
    scheduler, seats = _scheduler(config, memory, lifecycle, counters)
    return Engine(scheduler=scheduler, executor=executor, sampler=sampler, memory=memory, lifecycle=lifecycle,
                  clock=clock or WallClock(), counters=counters, max_model_len=max_len, max_num_seqs=seats,
                  tokenizer=tokenizer)


def _check_policy(config: RunConfig) -> None:
    if config.policy not in _MEMORIES:
        raise UsageError(f"--policy = {config.policy!r} has no engine of its own; one of {', '.join(_MEMORIES)} has")


def make_memory(config: RunConfig, limits: ExecutorLimits, max_len: int) -> MemoryPolicy:
    """The memory system of a config's policy, for sequences of at most `max_len` tokens."""
    _check_policy(config)
    try:
        return _MEMORIES[config.policy](config, limits, max_len)
    except (MemoryError, OverflowError) as fault:
        raise CannotRunError(f"{counted(limits.num_blocks, 'KV block')} are more than this machine can keep account "
                             "of; lower --num-kv-blocks or --kv-cache-memory", "out_of_memory") from fault


def scheduler_settings(config: RunConfig, memory: MemoryPolicy) -> SchedulerConfig:
    """The settings that a memory system can be scheduled with. Only paged memory can take a prompt in pieces: the
    systems it is compared with computed prompts whole."""
    return config.scheduler if memory.shares_prompt else replace(config.scheduler, chunked_prefill=False)


def load(config: RunConfig, progress: Say | None = None) -> tuple[Executor, Any]:
    """The executor and tokenizer that a config asks for; this is where weights are read."""
    if config.model.model == NULL_MODEL:
        return _null(config)
    with without_collection():
        return _load_model(config, progress)


def _load_model(config: RunConfig, progress: Say | None) -> tuple[Executor, Any]:
    from pagedcli.execution.model_hub import resolve_model

    source = resolve_model(config.model, progress)  # first, so that a wrong name is told without waiting for torch
    resolved = time.perf_counter()
    from pagedcli.execution.loading import load_executor
    from pagedcli.execution.tokenizer import load_tokenizer

    imported = time.perf_counter()
    tokenizer = load_tokenizer(source, trust_remote_code=config.model.trust_remote_code)
    executor: Executor
    if config.model.tensor_parallel_size > 1:
        from pagedcli.execution.tensor_parallel import load_tensor_parallel

        executor = load_tensor_parallel(source, config.model, config.cache)
    else:
        executor = load_executor(source, config.model, config.cache, step=config.scheduler)
    spent = {"import": imported - resolved, **executor.info.load_seconds}
    executor.info = replace(executor.info, load_seconds=spent)
    return executor, tokenizer


def load_tokenizer_of(config: RunConfig) -> Any:
    """The tokenizer of a config's model, without the model; None when it has none."""
    if config.model.model == NULL_MODEL:
        from pagedcli.execution.null_tokenizer import byte_tokenizer

        return byte_tokenizer()
    from pagedcli.execution.model_hub import resolve_model
    from pagedcli.execution.tokenizer import load_tokenizer

    return load_tokenizer(resolve_model(config.model), trust_remote_code=config.model.trust_remote_code)


def _null(config: RunConfig) -> tuple[Executor, Any]:
    from pagedcli.execution.null_tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    cache = config.cache
    positions = config.model.max_model_len or NULL_POSITIONS
    limits = ExecutorLimits(num_blocks=cache.num_blocks or NULL_BLOCKS, host_blocks=NULL_BLOCKS,
                            block_size=cache.block_size, max_positions=positions, vocab_size=tokenizer.vocab_size,
                            bytes_per_block=cache.block_size, grows=True)
    return NullExecutor(limits), tokenizer


def _sampler(config: RunConfig, executor: Executor, tokenizer: Any, eos_ids: frozenset[int]) -> Sampler:
    if config.model.model == NULL_MODEL:
        return ScriptedSampler(executor.limits.vocab_size)
    from pagedcli.engine.sampler import HostSampler

    kind = HostSampler
    if executor.info.device == "cuda":
        from pagedcli.engine.device_sampler import DeviceSampler

        kind = DeviceSampler
    return kind(config.seed, eos_ids=sorted(eos_ids), tokenizer=tokenizer)


def _text(tokenizer: Any) -> TextState | None:
    if tokenizer is None:
        return None
    from pagedcli.engine.text import IncrementalText

    return IncrementalText(tokenizer)


def _scheduler(config: RunConfig, memory: MemoryPolicy, lifecycle: Lifecycle,
               counters: Counters) -> tuple[Scheduler, int]:
    """The scheduler that goes with a memory system, and the most sequences it can run at once."""
    if isinstance(memory, StaticBatchMemory):
        static = StaticScheduler(config.scheduler, memory, lifecycle, counters)
        return static, static.sequence_cap
    settings = scheduler_settings(config, memory)
    recovery = recovery_policy(settings.preemption)
    iteration = IterationScheduler(settings, memory, lifecycle, recovery, counters)
    return iteration, iteration.sequence_cap
