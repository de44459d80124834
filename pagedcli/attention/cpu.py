"""Attention on the CPU: Numba kernels over paged blocks, the same bits for a row whatever is computed beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from llvmlite import binding
from numpy.typing import NDArray

from pagedcli.attention import cpu_kernels as kernels
from pagedcli.attention.cpu_kernels import KernelShape, build_kernel
from pagedcli.attention.cpu_team import Team
from pagedcli.attention.interface import AttentionBackend, BatchLayout, KVLayout, LayerSpec

CACHE_KINDS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
               torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
SOURCE_KINDS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
FOREVER = 1 << 40
"""A window no position reaches."""


def vector_budget() -> int:
    """Vectors of 16 floats to keep as sums: 24 of the 32 registers where they are this wide, else a few pairs."""
    return 24 if binding.get_host_cpu_features().get("avx512f", False) else 6


class CpuBackend(AttentionBackend):
    """Key tiles are [dim / 2, slot, 2] in bf16 and [dim, slot] otherwise, value tiles [slot, dim].

    Runs on as many threads as torch does; the number changes no bit of the result.
    """

    name = "cpu"

    def __init__(self) -> None:
        self._team = Team()
        self._built: dict[KernelShape, tuple[object, int]] = {}
        self._layout: KVLayout | None = None
        self._pool: torch.Tensor | None = None
        self._batch: BatchLayout | None = None
        self._block = np.zeros(kernels.ARGUMENT_BYTES // 8 + 8, np.int64)
        # The counters want a cache line to themselves.
        skip = (-self._block.ctypes.data % 64) // 8
        self._arguments = self._block[skip:skip + kernels.ARGUMENT_BYTES // 8]
        self._floats = self._arguments.view(np.float32)
        self._scratch = np.zeros(0, np.uint8)
        self._items: dict[int, NDArray[np.int32]] = {}
        self._threads = 1

    @property
    def threads_of(self) -> str:
        """Whose threads run the kernels."""
        return self._team.threads_of

    def supports(self, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> str | None:
        del block_size
        if dtype not in CACHE_KINDS:
            return f"the cpu attention backend has no cache type {dtype}; it has {', '.join(CACHE_KINDS.values())}"
        if spec.heads % spec.kv_heads:
            return f"{spec.heads} query heads are no multiple of {spec.kv_heads} key/value heads"
        return None

    def bind(self, layout: KVLayout, pool: torch.Tensor) -> None:
        if pool.dtype not in CACHE_KINDS or not pool.is_contiguous() or pool.device.type != "cpu":
            raise ValueError("the pool must be a contiguous CPU tensor of a cache type, "
                             f"not {pool.dtype} on {pool.device}")
        self._layout, self._pool = layout, pool

    def prepare(self, batch: BatchLayout) -> None:
        self._batch = batch
        self._items = {}
        self._threads = torch.get_num_threads()

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               spec: LayerSpec, sinks: torch.Tensor | None = None) -> torch.Tensor:
        assert self._layout is not None and self._pool is not None and self._batch is not None, "bind and prepare first"
        batch, given = self._batch, q.dtype
        if given not in SOURCE_KINDS:
            q = q.float()
        q, k, v = (_rows(tensor, q.dtype) for tensor in (q, k, v))
        shape = self._shape(spec, q.dtype, self._pool.dtype)
        function = self._kernel(shape)
        out = q.new_empty(q.shape[0], spec.heads, spec.value_dim)
        if batch.num_tokens < q.shape[0]:
            out[batch.num_tokens:] = 0
        items = self._items.get(shape.item_tokens * spec.kv_heads)
        if items is None:
            items = work_items(batch, spec.kv_heads, shape.item_tokens)
            self._items[shape.item_tokens * spec.kv_heads] = items
        extra = None if not spec.sinks or sinks is None else sinks.detach().float().contiguous()
        self._fill(layer, shape, spec, batch, (q, k, v, out), items, extra)
        self._team.run(function, self._arguments.ctypes.data, self._threads)
        return out if given == out.dtype else out.to(given)

    def warm_up(self, specs: Sequence[LayerSpec], dtype: torch.dtype) -> float:
        """Builds the kernels for q, k, v of `dtype` (the model's) and the bound pool."""
        assert self._pool is not None, "bind first"
        begin = time.perf_counter()
        for spec in dict.fromkeys(specs):
            self._kernel(self._shape(spec, dtype if dtype in SOURCE_KINDS else torch.float32, self._pool.dtype))
        return time.perf_counter() - begin

    @staticmethod
    def _shape(spec: LayerSpec, source: torch.dtype, cache: torch.dtype) -> KernelShape:
        return KernelShape(SOURCE_KINDS[source], CACHE_KINDS[cache], spec.group, spec.key_dim, spec.value_dim,
                           spec.softcap is not None, vector_budget())

    def _kernel(self, shape: KernelShape) -> int:
        built = self._built.get(shape)
        if built is None:
            function = build_kernel(shape)
            built = self._built[shape] = (function, int(function.address))
        return built[1]

    def _fill(self, layer: int, shape: KernelShape, spec: LayerSpec, batch: BatchLayout,
              tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
              items: NDArray[np.int32], sinks: torch.Tensor | None) -> None:
        """Writes the argument block of one call."""
        assert self._layout is not None and self._pool is not None
        q, k, v, out = tensors
        need = shape.offsets[-1] * self._threads + 64
        if len(self._scratch) < need:
            self._scratch = np.zeros(need, np.uint8)
        pool, cell = self._pool.data_ptr(), self._pool.itemsize
        arguments = self._arguments
        arguments[:32] = 0
        # A score's unit is one in the exponent of 2, so that the softmax is taken in powers of two.
        unit = kernels.LOG2E * (1.0 if spec.softcap is None else spec.softcap)
        values = {
            kernels.TOKENS: batch.num_tokens,
            kernels.WRITE_STEP: max(1, batch.num_tokens // (4 * self._threads)),
            kernels.SLOTS: batch.slots.ctypes.data, kernels.KV_HEADS: spec.kv_heads,
            kernels.BLOCK: self._layout.block_size, kernels.PITCH: self._layout.block_elements * cell,
            kernels.KEYS: pool + self._layout.key_offset(layer) * cell,
            kernels.VALUES: pool + self._layout.value_offset(layer) * cell,
            kernels.TABLES: batch.tables.ctypes.data, kernels.TABLE_WIDTH: batch.tables.shape[1],
            kernels.ITEMS: items.ctypes.data, kernels.ITEM_COUNT: len(items),
            kernels.CONTEXT: batch.context_len.ctypes.data,
            kernels.WINDOW: FOREVER if spec.window is None else spec.window,
            kernels.SINKS: 0 if sinks is None else sinks.data_ptr(),
            kernels.SCRATCH: self._scratch.ctypes.data + -self._scratch.ctypes.data % 64,
            kernels.OUT: out.data_ptr(), kernels.QUERY_START: batch.query_start.ctypes.data,
        }
        for base, tensor in ((kernels.Q, q), (kernels.K, k), (kernels.V, v)):
            values[base] = tensor.data_ptr()
            values[base + 8] = tensor.stride(0) * tensor.itemsize
            values[base + 16] = tensor.stride(1) * tensor.itemsize
        for place, value in values.items():
            arguments[place // 8] = value
        self._floats[kernels.SCALE // 4] = spec.scale * unit if spec.softcap is None else spec.scale / spec.softcap
        self._floats[kernels.CAP // 4] = unit


def _rows(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor itself where each head's row is contiguous and of this type, else a copy that is."""
    tensor = tensor.detach().to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def work_items(batch: BatchLayout, kv_heads: int, most: int) -> NDArray[np.int32]:
    """[items, 4] int32 (sequence, kv head, first token of the batch, tokens), the most work first.

    No item has more than `most` tokens. Neighbours in the list are heads of one sequence, whose blocks lie together.
    """
    counts = np.diff(batch.query_start)
    pieces = -(-counts // most)
    seq = np.repeat(np.arange(len(counts)), pieces)
    part = np.arange(len(seq)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = batch.query_start[:-1][seq] + part * most
    many = np.minimum(most, batch.query_start[1:][seq] - first)
    end = batch.context_len[seq] - (batch.query_start[1:][seq] - first - many)
    order = np.argsort(-(many.astype(np.int64) * end), kind="stable")
    items = np.empty((len(seq), kv_heads, 4), np.int32)
    items[:, :, 0] = seq[order, None]
    items[:, :, 1] = np.arange(kv_heads)
    items[:, :, 2] = first[order, None]
    items[:, :, 3] = many[order, None]
    return items.reshape(-1, 4)
