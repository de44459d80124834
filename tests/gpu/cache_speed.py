"""Rates of the kernels that only move bytes: writing new tokens into the cache, copying blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pagedcli.attention import cuda_launch as plans
from pagedcli.attention.cuda import CudaBackend, Launcher, TorchLauncher
from pagedcli.attention.cuda_shapes import AttentionShape
from pagedcli.attention.interface import KVLayout, LayerSpec
from tests.gpu.speed import gpu_seconds

OPT_13B = AttentionShape("fp16", "fp16", 40, 40, 128, 16, 0.09)
TOKENS = (1, 64, 256, 2048)
"""New tokens of a step: one sequence's, decode batches, a prompt's."""


def cache_table(peak: float, launcher: Launcher | None = None, shape: AttentionShape = OPT_13B, blocks: int = 512,
                seconds: Callable[[Callable[[], object]], float] = gpu_seconds) -> list[dict[str, Any]]:
    """Rows of both kernels: bytes read plus written a second, as a share of `peak`, the rate of a plain copy.
    `seconds` times a call."""
    launcher, layers = launcher or TorchLauncher(), 4
    backend = CudaBackend(launcher)
    spec = LayerSpec(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim, shape.scale)
    layout = KVLayout((spec,) * layers, shape.block_size)
    pool = torch.zeros(blocks, layout.block_elements, dtype=torch.float16, device=launcher.device)
    backend.bind(layout, pool)
    rows = [_row("reshape_and_cache", tokens, 8 * tokens * shape.kv_heads * shape.head_dim,
                 seconds(_writer(launcher, shape, layout, pool, tokens)), peak) for tokens in TOKENS]
    pairs = [(block, blocks // 2 + block) for block in range(blocks // 2)]
    moved = 2 * len(pairs) * layout.block_elements * pool.element_size()
    rows.append(_row("copy_blocks", len(pairs), moved, seconds(lambda: backend.copy_blocks(pairs)), peak))
    return rows


def _writer(launcher: Launcher, shape: AttentionShape, layout: KVLayout, pool: torch.Tensor, tokens: int) -> Any:
    """A call that writes `tokens` new tokens of one layer into slots in random order."""
    kernel, point = plans.reshape_and_cache(shape), launcher.pointer
    new = torch.randn(tokens, shape.kv_heads, shape.head_dim, dtype=torch.float16, device=launcher.device)
    slots = torch.randperm(len(pool) * shape.block_size)[:tokens].to(launcher.device)
    flat, row = pool.view(-1), shape.kv_heads * shape.head_dim
    args = kernel.pack({
        "k": point(new), "v": point(new), "k_cache": point(flat[layout.key_offset(0):]),
        "v_cache": point(flat[layout.value_offset(0):]), "slots": point(slots), "k_scale": None, "v_scale": None,
        "kv_heads": shape.kv_heads, "k_stride": row, "k_head_stride": shape.head_dim, "v_stride": row,
        "v_head_stride": shape.head_dim, "block_stride": layout.block_elements})
    kept = (new, slots)   # alive as long as the call is

    def write() -> None:
        assert kept
        launcher.launch(kernel, (tokens,), args)
    return write


def _row(kernel: str, count: int, moved: int, seconds: float, peak: float) -> dict[str, Any]:
    return {"kernel": kernel, "count": count, "bytes": moved, "microseconds": round(seconds * 1e6, 1),
            "gb_per_s": round(moved / seconds / 1e9, 1), "share_of_copy": round(moved / seconds / peak, 3)}
