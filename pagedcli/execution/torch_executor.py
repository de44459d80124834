"""Runs step plans on a real model: moves blocks, then one flattened forward over the paged cache."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from pagedcli.attention.backends import make_backend
from pagedcli.attention.interface import AttentionBackend, KVLayout
from pagedcli.core.config import CacheConfig, ModelConfig
from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.execution.decoder import Decoder
from pagedcli.execution.families import position_limit
from pagedcli.execution.flat_batch import flatten, forward
from pagedcli.execution.fused_decoder import FusedDecoder, unfusable
from pagedcli.execution.hf_model import HFDecoder, load_config, load_decoder, pick_device, pick_dtype
from pagedcli.execution.interface import Executor, ExecutorInfo, ExecutorLimits
from pagedcli.execution.kv_store import KVStore, PoolSize, dtype_name, kv_dtype, size_pool
from pagedcli.execution.model_hub import ModelSource
from pagedcli.execution.probe import probe


class TorchExecutor(Executor):
    """Owns a decoder, its KV pool and an attention backend; `load_executor` makes one from a config.

    `StepResult.logits` is [rows, vocabulary] in the model's dtype on its device, or None when no row wants any.
    `parts` (seconds): memory (swaps and copies), layout, attention and linear (the rest of the forward); the last two
    are told apart on a CPU only, since a GPU's work is not done when the call returns.
    """

    def __init__(self, decoder: Decoder, backend: AttentionBackend, store: KVStore, limits: ExecutorLimits,
                 info: ExecutorInfo) -> None:
        self.decoder = decoder
        self.backend = backend
        self.store = store
        self.limits = limits
        self.info = info

    def execute(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        with torch.inference_mode():
            self.store.swap_out(plan.swap_out)
            self.store.swap_in(plan.swap_in)
            self.store.copy(plan.copies)
            moved = time.perf_counter()
            if not plan.slices:
                return StepResult(None, moved - began, {"memory": moved - began})
            batch = flatten(plan, self.limits.block_size)
            laid_out = time.perf_counter()
            logits = forward(self.decoder, self.backend, batch)
            if logits.is_cuda:
                torch.cuda.synchronize(logits.device)
        ended = time.perf_counter()
        parts = {"memory": moved - began, "layout": laid_out - moved}
        if logits.is_cuda:
            parts["forward"] = ended - laid_out
        else:
            parts["attention"] = self.decoder.attention_seconds
            parts["linear"] = ended - laid_out - parts["attention"]
        return StepResult(logits if batch.wanted else None, ended - began, parts)

    def close(self) -> None:
        self.store.close()


class ModelSplit(Protocol):
    """Cuts a whole model to the part that one of several ranks runs (see tensor_parallel.py)."""

    def device(self, device: torch.device) -> torch.device: ...

    def apply(self, decoder: HFDecoder, device: torch.device, name: str) -> HFDecoder: ...

    def size_pool(self, layout: KVLayout, dtype: torch.dtype, cache: CacheConfig, device: torch.device,
                  max_positions: int) -> PoolSize: ...


def load_executor(source: ModelSource, model: ModelConfig, cache: CacheConfig,
                  split: ModelSplit | None = None) -> TorchExecutor:
    """Load the model of `source`, try it against eager attention, make its pool and compile its kernels.

    `info.load_seconds` tells load, probe and compile apart. Raises CannotRunError or UsageError (see
    model_hub, hf_model, probe, kv_store). `split` makes it one rank's part of a model.
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
        backend = make_backend(backend_name)
        cache_dtype = kv_dtype(cache.dtype, dtype)
        layout = KVLayout(decoder.specs, cache.block_size)
        why_not = unfusable(decoder)
        trial = probe(decoder, backend, cache_dtype, cache.block_size, source.name,
                      lambda own: own if why_not else FusedDecoder(own, max_positions))
        probed_at = time.perf_counter()
        size = (size_pool if split is None else split.size_pool)(layout, cache_dtype, cache, device, max_positions)
        store = KVStore(layout, cache_dtype, size, device)
        backend.bind(layout, store.pool)
        trial.decoder.attach(backend)
    notes = [*source.notes, f"KV pool: {size.num_blocks:,} blocks of {cache.block_size} tokens ({size.note})",
             f"attention probe: relative error {trial.error:.2g} against eager"]
    notes.append(f"layers: transformers' own modules ({why_not})" if why_not else "layers: fused for this CPU")
    if position_note:
        notes.append(position_note)
    limits = ExecutorLimits(num_blocks=size.num_blocks, host_blocks=size.host_blocks, block_size=cache.block_size,
                            max_positions=max_positions, vocab_size=decoder.vocab_size,
                            bytes_per_block=size.block_bytes)
    info = ExecutorInfo(
        model=source.name, device=device.type, dtype=dtype_name(dtype), kv_dtype=dtype_name(cache_dtype),
        attention=backend_name, threads=torch.get_num_threads(), notes=tuple(notes),
        load_seconds={"load": weights_at - started, "compile": trial.compile_seconds, "probe": trial.seconds,
                      "pool": time.perf_counter() - probed_at})
    return TorchExecutor(trial.decoder, backend, store, limits, info)
