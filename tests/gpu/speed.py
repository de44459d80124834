"""Bandwidth of the decode kernels and of a whole decode step, against a copy measured in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from pagedcli.attention.cuda import CudaBackend
from pagedcli.attention.interface import BatchLayout, KVLayout, LayerSpec, build_layout
from pagedcli.core.config import CacheConfig, ModelConfig
from pagedcli.core.plan import Slice, StepPlan

SHAPES: dict[str, tuple[int, int, int]] = {"opt-13b": (40, 40, 128), "llama-8b": (32, 8, 128), "smollm2": (9, 3, 64)}
"""(query heads, kv heads, head size) of known models."""


def gpu_seconds(call: Callable[[], object], times: int = 20) -> float:
    """Median seconds of one call on the current stream, by CUDA events."""
    for _ in range(3):
        call()
    taken = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3)
    return statistics.median(taken)


def copy_bandwidth() -> float:
    """Bytes a second, read plus written, of a device copy far larger than the caches."""
    size = min(4 << 30, torch.cuda.mem_get_info()[0] // 4)
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / gpu_seconds(lambda: target.copy_(source))


def decode_batch(seqs: int, context: int, block_size: int, blocks: int) -> BatchLayout:
    """`seqs` decode rows with `context` tokens each, blocks in random order."""
    per = -(-context // block_size)
    order = np.random.default_rng(0).permutation(blocks)[: seqs * per].reshape(seqs, per)
    plan = StepPlan(slices=[Slice(s, [0], context - 1, order[s].tolist()) for s in range(seqs)])
    return build_layout(plan, block_size)


def kernel_table(peak: float, budget: float) -> list[dict[str, Any]]:
    """Decode attention over models, batches, contexts and cache types; bytes are those of the KV that must be read.

    Four layers take turns, so that little is found in L2. budget: seconds; rows that would exceed it are left out.
    """
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    for name, (heads, kv_heads, dim) in SHAPES.items():
        spec = LayerSpec(heads, kv_heads, dim, dim, dim**-0.5)
        for cache in (torch.bfloat16, torch.float8_e4m3fn):
            for seqs, context in ((1, 16_384), (8, 1024), (8, 16_384), (64, 512), (64, 4096), (256, 512), (256, 2048)):
                layout = KVLayout((spec,) * 4, 16)
                blocks = seqs * -(-context // 16)
                size = blocks * layout.block_elements * cache.itemsize
                if size > 40 << 30 or time.perf_counter() - began > budget:
                    continue
                backend = CudaBackend()
                backend.bind(layout, torch.zeros(blocks, layout.block_elements, dtype=torch.uint8 if cache.itemsize == 1
                                                 else cache, device="cuda").view(cache))
                backend.prepare(decode_batch(seqs, context, 16, blocks))
                q = torch.randn(seqs, heads, dim, device="cuda", dtype=torch.bfloat16)
                k = torch.randn(seqs, kv_heads, dim, device="cuda", dtype=torch.bfloat16)

                def four_layers(backend: CudaBackend = backend, q: torch.Tensor = q, k: torch.Tensor = k,
                                spec: LayerSpec = spec) -> None:
                    for layer in range(4):
                        backend.attend(layer, q, k, k, spec)

                seconds = gpu_seconds(four_layers) / 4
                moved = seqs * context * kv_heads * dim * 2 * cache.itemsize
                rows.append({"model": name, "cache": str(cache).split(".")[-1], "seqs": seqs, "context": context,
                             "microseconds": round(seconds * 1e6, 1), "gb_per_s": round(moved / seconds / 1e9, 1),
                             "share_of_copy": round(moved / seconds / peak, 3)})
                del backend
                torch.cuda.empty_cache()
    return rows


def _waited(call: Callable[[], object]) -> float:
    """Seconds until the device has done what a call gave it."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


STEPS: tuple[tuple[int, int], ...] = ((1, 512), (8, 512), (32, 512), (64, 512), (128, 512), (256, 256))
"""(sequences, context) of the decode steps; the last fits beside the weights at half the context."""


def decode_steps(peak: float, model: str = "opt-13b") -> list[dict[str, Any]]:
    """Whole decode steps of a model with random fp16 weights, from graphs and kernel by kernel, against reading its
    weights and its KV once at the rate of a copy."""
    from pagedcli.execution.cuda_steps import CudaSteps
    from pagedcli.execution.hf_model import HFDecoder
    from pagedcli.execution.loading import load_executor
    from pagedcli.execution.model_hub import resolve_model
    config = ModelConfig(model=model, load_format="dummy", dtype="fp16", device="cuda", attention_backend="cuda")
    executor = load_executor(resolve_model(config), config, CacheConfig(block_size=16, swap_space=0))
    decoder, backend = executor.decoder, executor.backend
    assert isinstance(decoder, HFDecoder) and isinstance(backend, CudaBackend), "what runs on a GPU"
    weights = sum(value.nbytes for value in decoder.module.parameters())
    by_kernel = CudaSteps(decoder, backend, executor.limits, graphs=False)
    graphed, notes = executor.steps, list(executor.info.notes)
    rows = []
    for seqs, context in STEPS:
        per = context // 16
        row: dict[str, Any] = {"model": model, "seqs": seqs, "context": context}
        rows.append(row)
        if seqs * per > executor.limits.num_blocks:
            row["left_out"] = f"needs {seqs * per} blocks, the pool has {executor.limits.num_blocks}"
            continue
        plan = StepPlan(slices=[Slice(s, [1], context - 1, list(range(s * per, (s + 1) * per))) for s in range(seqs)])
        kv = seqs * per * executor.limits.bytes_per_block
        limit = (weights + kv) / peak
        for name, steps in (("graph", graphed), ("by_kernel", by_kernel)):
            executor.steps = steps
            for _ in range(3):
                executor.execute(plan)
            seconds = statistics.median(_waited(partial(executor.execute, plan)) for _ in range(9))
            row[f"{name}_milliseconds"] = round(seconds * 1e3, 3)
            row[f"{name}_share_of_limit"] = round(limit / seconds, 3)
        row |= {"limit_milliseconds": round(limit * 1e3, 3), "weight_bytes": weights, "kv_bytes": kv}
    rows.append({"notes": notes})
    executor.close()
    return rows
