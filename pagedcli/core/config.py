"""Frozen settings of a run. Sizes are bytes, lengths tokens, unless a name says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pagedcli.core.errors import UsageError

Policy = Literal["paged", "orca-oracle", "orca-pow2", "orca-max", "fastertransformer", "tgi", "hf"]
POLICIES: tuple[str, ...] = ("paged", "orca-oracle", "orca-pow2", "orca-max", "fastertransformer", "tgi", "hf")
Preemption = Literal["auto", "recompute", "swap"]

PAPER_TOKEN_CAP = 2560
"""Batched tokens a step in the paper's artefact, one per running sequence plus whole prompts."""


_OPTIONS = {"num_blocks": "num_kv_blocks", "memory": "kv_cache_memory"}
"""Options whose names say more than their fields, which a class around them explains."""


def _positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        option = "--" + _OPTIONS.get(name, name).replace("_", "-")
        raise UsageError(f"{option} = {value}: must be at least 1")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which weights, where and how they run. `model` is a short name, hub id, folder, .gguf file or shape name."""

    model: str = "smollm2-135m"
    load_format: Literal["auto", "dummy"] = "auto"
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: Literal["auto", "cpu", "reference", "cuda"] = "auto"
    max_model_len: int | None = None
    threads: int | None = None
    trust_remote_code: bool = False
    same_bits: bool = True
    tensor_parallel_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_model_len", "threads", "tensor_parallel_size"):
            _positive(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV pool. `num_blocks` wins over `memory` (bytes); with neither, a share of free memory is taken.

    `idle_share`: where a pool's memory is only made when it is first touched, how many blocks of finished rows may wait
    to be found again, as a share of the most blocks held at once, before one of them is used again instead of an
    untouched one (see memory/pool.py). None: all that the pool has room for.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory: int | None = None
    dtype: Literal["auto", "fp32", "bf16", "fp16", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    swap_space: int = 4 << 30
    prefix_cache: bool = True
    watermark: float = 0.01
    gpu_memory_utilization: float = 0.9
    idle_share: float | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "memory"):
            _positive(name, getattr(self, name))
        if self.swap_space < 0:
            raise UsageError(f"--swap-space = {self.swap_space}: must be at least 0 bytes")
        if not 0 <= self.watermark < 1:
            raise UsageError(f"watermark = {self.watermark}: must be at least 0 and below 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UsageError(f"--gpu-memory-utilization = {self.gpu_memory_utilization}: must be above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Who runs in a step. With `chunked_prefill` off, whole prompts only, under the paper's cap."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    chunked_prefill: bool = True
    preemption: Preemption = "auto"
    max_logit_rows: int = 256
    static_batch: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_logit_rows", "static_batch"):
            _positive(name, getattr(self, name))

    @property
    def token_budget(self) -> int:
        """Tokens a step: as given, else 2048 in chunks or the paper's 2560 for whole prompts."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return 2048 if self.chunked_prefill else PAPER_TOKEN_CAP


@dataclass(frozen=True, slots=True)
class RunConfig:
    """All that `build.py` needs to make an engine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    policy: str = "paged"
    seed: int = 0

    @property
    def finds_prefixes(self) -> bool:
        """Whether requests find the blocks of earlier ones with the same beginning."""
        return self.policy == "paged" and self.cache.prefix_cache

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UsageError(f"--policy = {self.policy!r}: must be one of {', '.join(POLICIES)}")
