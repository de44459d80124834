"""What the long checks share: real prompts, engines over one loaded model, drained runs."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from pagedcli.core.config import CacheConfig, ModelConfig, RunConfig, SchedulerConfig
from pagedcli.core.request import Request, SamplingParams
from pagedcli.core.sequence import SequenceGroup
from pagedcli.engine.build import build_engine, load
from pagedcli.engine.engine import Engine

SHARED = Path(__file__).resolve().parents[3] / "shared"


def real_prompts(count: int) -> tuple[list[str], str]:
    """Instructions written by people where the development data is at hand, else texts of the synthetic workload.

    Returns the prompts and what they are.
    """
    file = SHARED / "data" / "alpaca_800.json"
    if file.is_file():
        rows = json.loads(file.read_text())
        texts = [f"{row['instruction']}\n{row['input']}".strip() for row in rows]
        return texts[:count], "alpaca instructions"
    from pagedcli.workloads import load_workload

    workload = load_workload("alpaca", num_requests=count, seed=1)
    return [item.prompt or "" for item in workload.requests], workload.label


@dataclass
class Bench:
    """One loaded model, served by as many engines as a check needs, one after another."""

    config: RunConfig
    executor: Any
    tokenizer: Any

    @classmethod
    def open(cls, *, model: str = "smollm2-135m", dtype: str = "fp32", blocks: int = 4000, block_size: int = 16,
             threads: int | None = None, load_format: str = "auto", swap: int = 1 << 30) -> Bench:
        config = RunConfig(
            model=ModelConfig(model=model, dtype=cast(Literal["fp32", "bf16", "fp16"], dtype), device="cpu",
                              threads=threads, load_format=cast(Literal["auto", "dummy"], load_format)),
            cache=CacheConfig(num_blocks=blocks, block_size=block_size, swap_space=swap))
        executor, tokenizer = load(config)
        return cls(config, executor, tokenizer)

    def engine(self, *, blocks: int | None = None, prefix: bool = True, **scheduler: Any) -> Engine:
        """A fresh engine (cold cache) over the loaded weights. `blocks` uses only part of the pool."""
        cache = replace(self.config.cache, prefix_cache=prefix)
        executor = self.executor
        if blocks is not None:
            executor = Narrowed(executor, blocks)
        config = replace(self.config, cache=cache, scheduler=SchedulerConfig(**scheduler))
        return build_engine(config, executor=executor, tokenizer=self.tokenizer, record_times=True)

    def ids(self, texts: Iterable[str]) -> list[tuple[int, ...]]:
        return [tuple(self.tokenizer.encode(text)) for text in texts]

    def close(self) -> None:
        self.executor.close()


class Narrowed:
    """An executor that admits to only the first blocks of its pool, to put pressure on memory."""

    def __init__(self, inner: Any, blocks: int) -> None:
        self.limits = replace(inner.limits, num_blocks=blocks)
        self.info = inner.info
        self.execute = inner.execute

    def close(self) -> None:
        return


def serve(engine: Engine, prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams] | SamplingParams, *,
          keys: Sequence[str] | None = None, at_once: int | None = None) -> tuple[list[SequenceGroup], float]:
    """Run all prompts, at most `at_once` in the engine at a time. Returns groups in order and seconds."""
    groups: list[SequenceGroup] = []
    start, done, next_row = time.perf_counter(), 0, 0
    while done < len(prompts):
        while next_row < len(prompts) and (at_once is None or next_row - done < at_once):
            param = params if isinstance(params, SamplingParams) else params[next_row]
            key = keys[next_row] if keys else str(next_row)
            groups.append(engine.add(Request(next_row, key, prompts[next_row], param)))
            next_row += 1
        done += len(engine.step())
    return groups, time.perf_counter() - start


def shuffled(count: int, seed: int = 0) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order
