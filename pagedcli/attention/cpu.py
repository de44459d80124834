"""Attention on the CPU: Numba kernels over paged blocks, the same bits for a row whatever is computed beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pagedcli.attention import cpu_kernels as kernels
from pagedcli.attention.cpu_shapes import KernelShape, Routines, build_routines, pair_products, vector_budget
from pagedcli.attention.cpu_team import Team, threads
from pagedcli.attention.cpu_vectors import pairs_keys
from pagedcli.attention.host_arrays import aligned_zeros, as_array
from pagedcli.attention.interface import AttentionBackend, BatchLayout, KVLayout, LayerSpec
from pagedcli.core.dtypes import dtype_name
from pagedcli.core.errors import CannotRunError

if TYPE_CHECKING:
    import torch

CACHE_KINDS = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
"""Cache types by name, and what the kernels call them."""
SOURCE_KINDS = ("fp32", "fp16", "bf16")
FOREVER = 1 << 40
"""A window no position reaches."""
SMALL_WRITE, SMALL_WORK = 100_000, 400_000
"""Elements written and multiply-adds (both near 10 microseconds) below which waking other threads costs more."""


@dataclass(slots=True)
class CpuLayer:
    """What one layer's calls share: its shape and its part of the argument block."""

    spec: LayerSpec
    shape: KernelShape
    fields: NDArray[np.int64]

    @property
    def written(self) -> int:
        """Elements a token adds to the cache."""
        return self.spec.kv_heads * (self.spec.key_dim + self.spec.value_dim)

    @property
    def effort(self) -> int:
        """Multiply-adds of one query token over one position."""
        return self.spec.heads * (self.spec.key_dim + self.spec.value_dim)


class CpuBackend(AttentionBackend):
    """Key tiles are [dim / 2, slot, 2] in bf16 and [dim, slot] otherwise, value tiles [slot, dim].

    The pool may be an array or a CPU tensor. The number of threads changes no bit of the result.
    """

    name = "cpu"

    def __init__(self) -> None:
        self._team = Team()
        self._budget = vector_budget()
        self._pairs = pair_products()
        self._loops: kernels.Loops | None = None
        self._built: dict[KernelShape, Routines] = {}
        self._layers: dict[tuple[int, str], CpuLayer] = {}
        self._layout: KVLayout | None = None
        self._pool: NDArray[Any] | None = None
        self._batch: BatchLayout | None = None
        self._arguments = aligned_zeros([kernels.ARGUMENT_BYTES // 8], np.int64)
        self._address = int(self._arguments.ctypes.data)
        self._scratch = np.zeros(0, np.uint8)
        self._scratch_start = 0
        self._items: dict[int, tuple[NDArray[np.int32], int, int]] = {}
        self._threads = 1

    @property
    def threads_of(self) -> str:
        """Whose threads run the kernels."""
        return self._team.threads_of

    def supports(self, spec: LayerSpec, dtype: Any, block_size: int) -> str | None:
        del block_size
        if _kind(dtype) not in CACHE_KINDS:
            return f"the cpu attention backend has no cache type {dtype}; it has {', '.join(CACHE_KINDS)}"
        if spec.heads % spec.kv_heads:
            return f"{spec.heads} query heads are no multiple of {spec.kv_heads} key/value heads"
        return None

    def bind(self, layout: KVLayout, pool: Any) -> None:
        if _kind(pool.dtype) not in CACHE_KINDS or str(getattr(pool, "device", "cpu")) != "cpu" \
                or not as_array(pool).flags.c_contiguous:
            raise ValueError("the pool must be contiguous, in host memory and of a cache type, "
                             f"not {pool.dtype} on {getattr(pool, 'device', 'cpu')}")
        self._layout, self._pool = layout, as_array(pool)
        self._layers = {}

    def prepare(self, batch: BatchLayout) -> None:
        self._batch = batch
        self._items = {}
        self._threads = threads()
        self._set(kernels.STEP_FIELDS, (
            batch.num_tokens, max(1, batch.num_tokens // (4 * self._threads)), batch.slots.ctypes.data,
            batch.tables.ctypes.data, batch.tables.shape[1], batch.context_len.ctypes.data,
            batch.query_start.ctypes.data, self._threads))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               spec: LayerSpec, sinks: torch.Tensor | None = None) -> torch.Tensor:
        import torch

        assert self._batch is not None, "prepare() comes before attend()"
        given, tokens = q.dtype, self._batch.num_tokens
        kind = given if _kind(given) in SOURCE_KINDS else torch.float32
        q, k, v = _rows(q, kind), _rows(k, kind), _rows(v, kind)
        name = dtype_name(kind)
        own = self._layers.get((layer, name))
        if own is None or (own.spec is not spec and own.spec != spec):
            own = self._layers[layer, name] = self.make_layer(layer, spec, name)
        items, many, work = self.work(own)
        out = torch.empty(q.shape[0], spec.heads, spec.value_dim, dtype=kind)
        if tokens < q.shape[0]:
            out[tokens:] = 0
        extra = None if not spec.sinks or sinks is None else sinks.detach().float().contiguous()
        cell = kind.itemsize
        self._arguments[:32] = 0
        self._set(kernels.LAYER_FIELDS, own.fields)
        self._set(kernels.CALL_FIELDS, (
            items, many, self.scratch_for(own), 0 if extra is None else extra.data_ptr(), out.data_ptr(),
            q.data_ptr(), q.stride(0) * cell, q.stride(1) * cell, k.data_ptr(), k.stride(0) * cell, k.stride(1) * cell,
            v.data_ptr(), v.stride(0) * cell, v.stride(1) * cell))
        assert self._loops is not None
        self._team.run(self._loops.write, self._address, self._threads if tokens * own.written > SMALL_WRITE else 1)
        self._team.run(self._loops.attend, self._address, self._threads if work * own.effort > SMALL_WORK else 1)
        return out if given == kind else out.to(given)

    def warm_up(self, specs: Sequence[LayerSpec], dtype: Any) -> float:
        """Builds or loads the kernels for q, k, v of `dtype` (the model's) and the bound pool; returns seconds."""
        begin = time.perf_counter()
        for spec in dict.fromkeys(specs):
            self._routines(self._shape(spec, name if (name := _kind(dtype)) in SOURCE_KINDS else "fp32"))
        return time.perf_counter() - begin

    def _shape(self, spec: LayerSpec, source: str) -> KernelShape:
        assert self._pool is not None, "bind() comes first"
        kind = CACHE_KINDS[dtype_name(self._pool.dtype)]
        # The instruction's shortest vector has 4 lanes, and a value row is cut into powers of two.
        dots = self._pairs and source == "bf16" and pairs_keys(kind, spec.key_dim) and spec.value_dim % 4 == 0
        return KernelShape(source, kind, spec.group, spec.key_dim, spec.value_dim,
                           spec.softcap is not None, self._budget, dots)

    def _routines(self, shape: KernelShape) -> Routines:
        try:
            if self._loops is None:
                self._loops = kernels.build_loops()
            if shape not in self._built:
                self._built[shape] = build_routines(shape)
        except RuntimeError as fault:  # what Numba raises when it can neither find nor make a cache folder
            if "cannot cache" not in str(fault):
                raise
            raise CannotRunError(f"the CPU attention kernels cannot be cached: {fault}. "
                                 "Set NUMBA_CACHE_DIR to a folder that can be written") from fault
        return self._built[shape]

    @property
    def loops(self) -> kernels.Loops:
        """The compiled loops; warm_up() makes them."""
        if self._loops is None:
            self._loops = kernels.build_loops()
        return self._loops

    @property
    def step_values(self) -> NDArray[np.int64]:
        """STEP_FIELDS of the batch that was prepared."""
        return self._arguments[kernels.STEP_FIELDS.start // 8:kernels.STEP_FIELDS.stop // 8]

    def make_layer(self, layer: int, spec: LayerSpec, source: str) -> CpuLayer:
        """What calls of this layer share, for q, k, v of the type that `source` names."""
        assert self._layout is not None and self._pool is not None, "bind() comes first"
        shape = self._shape(spec, source)
        table = self._routines(shape).table
        pool, cell = int(self._pool.ctypes.data), self._pool.itemsize
        # A score's unit is one in the exponent of 2, so that the softmax is taken in powers of two.
        unit = kernels.LOG2E * (1.0 if spec.softcap is None else spec.softcap)
        scale = spec.scale * unit if spec.softcap is None else spec.scale / spec.softcap
        floats = np.zeros(8, np.float32)
        floats[::2] = scale, unit, 1.0, kernels.LOG2E
        fields = np.array([
            table.ctypes.data, spec.kv_heads, self._layout.block_size, self._layout.block_elements * cell,
            pool + self._layout.key_offset(layer) * cell, pool + self._layout.value_offset(layer) * cell,
            FOREVER if spec.window is None else spec.window, *floats.view(np.int64).tolist()], np.int64)
        return CpuLayer(spec, shape, fields)

    def _set(self, fields: range, values: Sequence[int] | NDArray[np.int64]) -> None:
        self._arguments[fields.start // 8:fields.stop // 8] = values

    def work(self, layer: CpuLayer) -> tuple[int, int, int]:
        """Address and number of the step's items and their work, made once for all layers that cut alike."""
        assert self._batch is not None
        key = layer.shape.item_tokens * 65536 + layer.spec.kv_heads
        if key not in self._items:
            made = work_items(self._batch, layer.spec.kv_heads, layer.shape.item_tokens)
            self._items[key] = made, int(made.ctypes.data), work_of(self._batch)
        made, address, work = self._items[key]
        return address, len(made), work

    def scratch_for(self, layer: CpuLayer) -> int:
        """Address of scratch for all threads, on a cache line; grows when a layer needs more."""
        need = layer.shape.scratch_bytes * self._threads + 64
        if len(self._scratch) < need:
            self._scratch = np.zeros(need, np.uint8)
            start = int(self._scratch.ctypes.data)
            self._scratch_start = start + -start % 64
        return self._scratch_start


def _kind(dtype: object) -> str | None:
    """The short name of a type, None for one that has none."""
    try:
        return dtype_name(dtype)
    except ValueError:
        return None


def _rows(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor itself where each head's row is contiguous and of this type, else a copy that is."""
    if tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def work_of(batch: BatchLayout) -> int:
    """Query tokens times context, summed over the sequences."""
    return int(np.diff(batch.query_start).astype(np.int64) @ batch.context_len.astype(np.int64))


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
