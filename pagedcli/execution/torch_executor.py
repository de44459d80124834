"""Runs step plans on a real model: moves blocks, then one flattened forward over the paged cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from pagedcli.attention.interface import AttentionBackend, KVLayout
from pagedcli.core.config import CacheConfig, ModelConfig, SchedulerConfig
from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.execution.decoder import Decoder
from pagedcli.execution.device_path import LargestStep, Steps, device_path
from pagedcli.execution.families import position_limit
from pagedcli.execution.flat_batch import flatten
from pagedcli.execution.fused_decoder import FusedDecoder, unfusable
from pagedcli.execution.hf_model import HFDecoder, load_config, load_decoder, pick_device, pick_dtype
from pagedcli.execution.interface import Executor, ExecutorInfo, ExecutorLimits
from pagedcli.execution.kv_store import KVStore, PoolSize, Room, dtype_name, kv_dtype, size_pool
from pagedcli.execution.model_hub import ModelSource
from pagedcli.execution.native_decoder import NativeDecoder, not_native
from pagedcli.execution.probe import probe


class TorchExecutor(Executor):
    """Owns a decoder, its KV pool and an attention backend; `load_executor` makes one from a config.

    `StepResult.logits` is [rows, vocabulary] in the model's dtype in host memory, or None when no row wants any.
    `parts` (seconds): memory (swaps and copies), layout, and on a CPU attention and linear (the rest of the forward);
    on a GPU these two are one, forward, since its work is not done when a call returns. A GPU is waited for where
    there are logits to wait for, so a step without any counts its launches only.
    """

    def __init__(self, decoder: Decoder, backend: AttentionBackend, store: KVStore, steps: Steps,
                 limits: ExecutorLimits, info: ExecutorInfo) -> None:
        self.decoder = decoder
        self.backend = backend
        self.store = store
        self.steps = steps
        self.limits = limits
        self._info = info

    @property
    def info(self) -> ExecutorInfo:
        """Grows notes on how steps run."""
        return replace(self._info, notes=(*self._info.notes, *self.steps.notes)) if self.steps.notes else self._info

    @info.setter
    def info(self, value: ExecutorInfo) -> None:
        self._info = replace(value, notes=tuple(note for note in value.notes if note not in self.steps.notes))

    def execute(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        with torch.inference_mode():
            self.store.swap_out(plan.swap_out)
            self.store.swap_in(plan.swap_in)
            self.store.copy(plan.copies)
            moved = time.perf_counter()
            if not plan.slices:
                return StepResult(None, moved - began, {"memory": moved - began})
            batch = flatten(plan, self.limits.block_size, self.decoder.row_tile)
            laid_out = time.perf_counter()
            logits = self.steps.run(batch)
        ended = time.perf_counter()
        parts = {"memory": moved - began, "layout": laid_out - moved, **self.steps.parts(ended - laid_out)}
        return StepResult(logits, ended - began, parts)

    def close(self) -> None:
        self.store.close()


def choose_decoder(decoder: HFDecoder, backend: AttentionBackend) -> tuple[Callable[[HFDecoder, int], Decoder], str]:
    """What makes the decoder to run from (the loaded one, most positions), the fastest that can, and what it is."""
    unfused = unfusable(decoder)
    if unfused is not None:
        return lambda own, _: own, f"transformers' own modules ({unfused})"
    slower = not_native(decoder, backend)
    if slower is not None:
        return FusedDecoder, f"fused, products by oneDNN ({slower})"
    return NativeDecoder, "one native program for this CPU"


class ModelSplit(Protocol):
    """Cuts a whole model to the part that one of several ranks runs (see tensor_parallel.py)."""

    def device(self, device: torch.device) -> torch.device: ...

    def apply(self, decoder: HFDecoder, device: torch.device, name: str) -> HFDecoder: ...

    def size_pool(self, layout: KVLayout, dtype: torch.dtype, cache: CacheConfig, device: torch.device,
                  max_positions: int, room: Room | None = None) -> PoolSize: ...


def load_executor(source: ModelSource, model: ModelConfig, cache: CacheConfig, split: ModelSplit | None = None, *,
                  step: SchedulerConfig | None = None) -> TorchExecutor:
    """Load the model of `source`, try it against eager attention, make its pool and compile its kernels.

    `info.load_seconds` tells load, probe and compile apart. Raises CannotRunError or UsageError (see
    model_hub, hf_model, probe, kv_store). `split` makes it one rank's part of a model. `step` bounds the steps that
    will be asked for, which is what a GPU's pool leaves room for.
    `model.threads` sets torch's thread count for the whole process.
    """
    started = time.perf_counter()
    device = pick_device(model.device, model.attention_backend)
    if split is not None:
        device = split.device(device)
    if model.threads is not None:
        torch.set_num_threads(model.threads)
    dtype = pick_dtype(model.dtype, device)
    backend_name = model.attention_backend if model.attention_backend != "auto" else device.type
    config = load_config(source, trust_remote_code=model.trust_remote_code)
    max_positions, position_note = position_limit(config.to_dict(), model.max_model_len)
    first = device if split is None else torch.device("cpu")  # a whole model may not fit one device
    decoder = load_decoder(source, config, dtype, first, trust_remote_code=model.trust_remote_code, seed=model.seed)
    weights_at = time.perf_counter()
    with torch.inference_mode():
        if split is not None:
            decoder = split.apply(decoder, device, source.name)
        path = device_path(device, model, graphs=split is None)
        backend = path.backend(backend_name)
        cache_dtype = kv_dtype(cache.dtype, dtype)
        layout = KVLayout(decoder.specs, cache.block_size)
        refine, layers = choose_decoder(decoder, backend)
        trial = probe(decoder, backend, cache_dtype, cache.block_size, source.name,
                      lambda own: refine(own, max_positions))
        probed_at = time.perf_counter()
        room = None
        if cache.num_blocks is None and cache.memory is None:
            bounds = step or SchedulerConfig()
            largest = LargestStep(bounds.token_budget, bounds.max_logit_rows, max_positions)
            room = path.room(trial.decoder, backend, layout, cache_dtype, cache, largest)
        size = (size_pool if split is None else split.size_pool)(layout, cache_dtype, cache, device, max_positions,
                                                                 room)
        store = path.store(layout, cache_dtype, size, backend)
        backend.bind(layout, store.pool)
        trial.decoder.attach(backend)
    notes = [*source.notes, f"KV pool: {size.num_blocks:,} blocks of {cache.block_size} tokens ({size.note})",
             f"attention probe: relative error {trial.error:.2g} against eager"]
    notes.append(f"layers: {layers}")
    if position_note:
        notes.append(position_note)
    limits = ExecutorLimits(num_blocks=size.num_blocks, host_blocks=size.host_blocks, block_size=cache.block_size,
                            max_positions=max_positions, vocab_size=decoder.vocab_size,
                            bytes_per_block=size.block_bytes)
    with torch.inference_mode():
        steps = path.steps(trial.decoder, backend, limits)
    info = ExecutorInfo(
        model=source.name, device=device.type, dtype=dtype_name(dtype), kv_dtype=dtype_name(cache_dtype),
        attention=backend_name, threads=torch.get_num_threads(), notes=tuple(notes),
        load_seconds={"load": weights_at - started, "compile": trial.compile_seconds, "probe": trial.seconds,
                      "pool": time.perf_counter() - probed_at})
    return TorchExecutor(trial.decoder, backend, store, steps, limits, info)
