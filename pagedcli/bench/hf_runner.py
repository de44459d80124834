"""The `hf` baseline: Hugging Face's own `generate` in left-padded static batches, on the weights already loaded.

Requests queue first come, first served. When idle, the earliest ones that have come form a batch: as many as fit when
each row is as long as the longest prompt and the longest output of the batch. The batch runs for its longest output and
all its requests finish together. Its memory is generate's own cache: one slot a row and position, padding included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedcli.bench.records import RequestRecord, RunResult, StepRecord, StepTable
from pagedcli.bench.serve import Observer, Progress, StopRule, out_of_time
from pagedcli.core.clock import WallClock
from pagedcli.core.config import ModelConfig
from pagedcli.core.request import Request

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_OUR_CACHE_NOTE = "hf: KV classes are of generate's own contiguous cache; padding and finished rows count as internal"


def load_module(model: ModelConfig, progress: Callable[[str], None] | None = None) -> Any:
    """The model as transformers runs it (torch.nn.Module, eval mode), weights as the engine's executor reads them.

    Raises CannotRunError or UsageError as the executor's loader does.
    """
    from pagedcli.execution.hf_model import load_config, load_decoder
    from pagedcli.execution.model_hub import resolve_model
    from pagedcli.execution.placement import pick_device, pick_dtype, torch_device, torch_dtype

    source, device = resolve_model(model, progress), torch_device(pick_device(model.device))
    config = load_config(source, trust_remote_code=model.trust_remote_code)
    return load_decoder(source, config, torch_dtype(pick_dtype(model.dtype, device)), device, seed=model.seed,
                        trust_remote_code=model.trust_remote_code).module


@contextmanager
def _as_shipped(module: Any, attention: str) -> Iterator[None]:
    """The module with its library's own attention (ours is a hook by another name) and without generation defaults of
    its own: generate fills what a caller leaves None from them, the end-of-text id among the rest."""
    from transformers import GenerationConfig

    before = module.config._attn_implementation, module.generation_config
    module.config._attn_implementation, module.generation_config = attention, GenerationConfig()
    try:
        yield
    finally:
        module.config._attn_implementation, module.generation_config = before


def generate_batch(module: Any, prompts: Sequence[Sequence[int]], new_tokens: int, pad_id: int,
                   on_token: Callable[[], bool], *, attention: str = "sdpa", **sampling: Any) -> torch.Tensor:
    """Left-pad the prompts, generate exactly `new_tokens` for each; returns ids [rows x samples, new_tokens], int64.

    `on_token` is called after each token of the batch and may return True to end early. `sampling` are generate's own
    arguments (do_sample, num_beams, num_return_sequences ...).
    """
    import torch
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    class Clocked(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            del scores, kwargs
            return torch.full((input_ids.shape[0],), on_token(), dtype=torch.bool, device=input_ids.device)

    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad_id, dtype=torch.int64)
    mask = torch.zeros((len(prompts), width), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt):] = torch.tensor(list(prompt))
        mask[row, width - len(prompt):] = 1
    # No end-of-text id: lengths are forced, as they are in every other system.
    config = GenerationConfig(max_new_tokens=new_tokens, pad_token_id=pad_id, eos_token_id=None, use_cache=True,
                              **{"do_sample": False, **sampling})
    with _as_shipped(module, attention), torch.inference_mode():
        out = module.generate(ids.to(module.device), attention_mask=mask.to(module.device), generation_config=config,
                              stopping_criteria=StoppingCriteriaList([Clocked()]))
    return out[:, width:]


def fitting(lengths: Sequence[tuple[int, int]], pool_slots: int, max_rows: int, samples: int = 1) -> int:
    """How many of the first requests (prompt, output) form a batch: rows x (longest prompt + longest output) slots
    within the pool and at most `max_rows` rows. 0 when not even the first fits."""
    count, prompt, output = 0, 0, 0
    for one_prompt, one_output in lengths:
        prompt, output = max(prompt, one_prompt), max(output, one_output)
        rows = (count + 1) * samples
        if rows * (prompt + output) > pool_slots or rows > max_rows:
            break
        count += 1
    return count


@dataclass(frozen=True)
class HFRunner:
    """Serves requests through a Hugging Face model. `pool_slots`: tokens of KV memory it may use, as the other systems
    have; `max_rows`: most sequences in a batch."""

    module: Any
    pad_id: int
    pool_slots: int
    block_size: int
    max_rows: int = 256
    attention: str = "sdpa"

    def __call__(self, requests: Sequence[Request], deadlines: Sequence[float], *, policy: str, rate: float,
                 observer: Observer | None = None, stop_rule: StopRule | None = None,
                 time_limit: float | None = None, **labels: Any) -> RunResult:
        del stop_rule  # a batch cannot be left midway without losing what the others would have kept
        generate_batch(self.module, [[1, 2, 3], [1, 2]], 3, self.pad_id, lambda: False, attention=self.attention)
        run = _Run(self, requests, [float(when) for when in deadlines], rate, observer, time_limit)
        run.serve()
        records = tuple(run.records[number] for number in range(len(requests)))
        return RunResult(policy=policy, rate=rate, requests=records, steps=run.steps, duration=run.clock.now(),
                         stopped=run.stopped, notes=(_OUR_CACHE_NOTE,), **labels)


@dataclass
class _Run:
    """One run in progress."""

    runner: HFRunner
    requests: Sequence[Request]
    deadlines: list[float]
    rate: float
    observer: Observer | None
    limit: float | None = None
    stopped: str | None = None
    clock: WallClock = field(default_factory=WallClock)
    steps: StepTable = field(default_factory=StepTable)
    records: dict[int, RequestRecord] = field(default_factory=dict)
    dispatched: dict[int, float] = field(default_factory=dict)
    queue: list[int] = field(default_factory=list)
    failed: int = 0

    def serve(self) -> None:
        while len(self.records) < len(self.requests):
            if self._late():
                self._abandon()
                return
            self._dispatch()
            if not self.queue:
                until = self.deadlines[len(self.dispatched)]
                self.clock.sleep_until(until if self.limit is None else min(until, self.limit))
                continue
            samples = self.requests[self.queue[0]].params.max_sequences
            lengths = [(len(self.requests[n].prompt), self.requests[n].output_len or 1) for n in self.queue]
            count = fitting(lengths, self.runner.pool_slots, self.runner.max_rows, samples)
            if count == 0:
                self._refuse(self.queue.pop(0), lengths[0], samples)
            else:
                batch, self.queue = self.queue[:count], self.queue[count:]
                self._batch(batch, samples)

    def _dispatch(self) -> None:
        now = self.clock.now()
        while len(self.dispatched) < len(self.requests) and self.deadlines[len(self.dispatched)] <= now:
            number = len(self.dispatched)
            self.dispatched[number] = now
            self.queue.append(number)

    def _refuse(self, number: int, lengths: tuple[int, int], samples: int) -> None:
        self.failed += 1
        request = self.requests[number]
        self.records[number] = RequestRecord(
            index=request.index, key=request.key, arrival=self.deadlines[number], dispatched=self.dispatched[number],
            prompt_tokens=lengths[0], error="exceeds_kv_pool",
            error_message=f"{samples} x ({lengths[0]} + {lengths[1]}) tokens, above the pool of "
                          f"{self.runner.pool_slots}")

    def _batch(self, batch: Sequence[int], samples: int) -> None:
        requests = [self.requests[number] for number in batch]
        outputs = [request.output_len or 1 for request in requests]
        prompts = [len(request.prompt) for request in requests]
        width, began = max(prompts), self.clock.now()
        times: list[float] = [began]

        def on_token() -> bool:
            times.append(self.clock.now())
            self._dispatch()
            self._step(times[-2], times[-1], width, len(times) - 1, prompts, outputs, samples)
            return self._late()

        generate_batch(self.runner.module, [request.prompt for request in requests], max(outputs), self.runner.pad_id,
                       on_token, attention=self.runner.attention, **_sampling(requests[0]))
        if len(times) - 1 < max(outputs):
            return  # the time limit: nobody has its answer before the batch ends
        finish = self.clock.now()
        for number, request, output in zip(batch, requests, outputs, strict=True):
            self.records[number] = RequestRecord(
                index=request.index, key=request.key, arrival=self.deadlines[number],
                dispatched=self.dispatched[number], prompt_tokens=len(request.prompt), output_len=output,
                output_tokens=output * request.params.n,
                sequences=samples, scheduled=began, finish=finish, token_times=np.array(times[1:output + 1]))

    def _late(self) -> bool:
        return self.limit is not None and self.clock.now() >= self.limit

    def _abandon(self) -> None:
        """The time limit: what is not done, in the batch or in the queue or never sent, counts as failed."""
        assert self.limit is not None
        done = len(self.records)
        self.stopped = out_of_time(self.limit, done, len(self.dispatched), len(self.requests))
        for number, request in enumerate(self.requests):
            if number not in self.records:
                self.records[number] = RequestRecord(
                    index=request.index, key=request.key, arrival=self.deadlines[number],
                    dispatched=self.dispatched.get(number, math.nan), prompt_tokens=len(request.prompt),
                    error="stopped", error_message=self.stopped)

    def _step(self, start: float, end: float, width: int, made: int, prompts: Sequence[int], outputs: Sequence[int],
              samples: int) -> None:
        """Memory during the step that made token number `made` (the cache holds all before it)."""
        cached = made - 1
        rows = len(prompts) * samples
        held = rows * (width + cached)
        token = samples * sum(prompt + min(cached, output) for prompt, output in zip(prompts, outputs, strict=True))
        blocks = math.ceil(held / self.runner.block_size)
        computed = rows if cached else samples * sum(prompts)
        step = StepRecord(start, end - start, len(prompts), len(self.queue), 0, rows, computed, token, 0, held - token,
                          0, max(self.runner.pool_slots - held, 0), blocks, blocks)
        self.steps.append(step)
        if self.observer is not None:
            self.observer(Progress(end, len(self.dispatched), len(self.records) - self.failed, self.failed,
                                   len(self.requests), self.rate, step, 0))


def _sampling(request: Request) -> dict[str, Any]:
    """generate's arguments for a request's samples or beams."""
    params = request.params
    if params.use_beam_search:
        return {"num_beams": params.width, "num_return_sequences": params.n, "length_penalty": params.length_penalty,
                "early_stopping": params.early_stopping}
    if params.greedy:
        return {}
    return {"do_sample": True, "temperature": params.temperature, "top_p": params.top_p, "top_k": max(params.top_k, 0),
            "num_return_sequences": params.samples}
