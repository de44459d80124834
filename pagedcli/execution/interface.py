"""The contract of executors: a plan of integers in, logits and seconds out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from pagedcli.core.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """What an executor can hold. Sizes in bytes; `max_positions` in tokens (prompt plus output of one sequence).

    `grows`: a block costs memory only once it is used.
    """

    num_blocks: int
    host_blocks: int
    block_size: int
    max_positions: int
    vocab_size: int
    bytes_per_block: int
    grows: bool = False


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What runs where, for signatures and reports. `load_seconds`: where start-up time went, by part."""

    model: str
    device: str
    dtype: str
    kv_dtype: str
    attention: str
    threads: int
    simulated: bool = False
    load_seconds: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Executor(ABC):
    """Runs plans. `execute` may be called from one thread only; `close` is idempotent."""

    limits: ExecutorLimits
    info: ExecutorInfo

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult: ...

    @abstractmethod
    def close(self) -> None: ...
