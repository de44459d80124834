"""Paged attention problems: random caches with everything unwritten poisoned, the launches that solve them, and what
float64 says. Used on the emulator and, with device pointers, on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagedcli.attention import cuda_launch as plans
from pagedcli.attention.cuda_launch import Kernel
from pagedcli.attention.cuda_shapes import H200, AttentionShape
from tests.emulator.numbers import STORAGE, attend, decode, encode, poison, worst_error


class Launch(Protocol):
    """Runs a kernel now. only: the blockIdx.x that matter to the caller; others may be left out."""

    def __call__(self, kernel: Kernel, grid: tuple[int, ...], args: tuple[Any, ...],
                 only: Sequence[int] = ()) -> None: ...


ABSENT_BLOCK = 0x7FFFFFF0
"""Stands in table entries past a sequence's end: reading the cache there cannot go unnoticed."""


def make_shape(dtype: str = "fp16", head_dim: int = 64, block_size: int = 16, group: int = 1, kv_heads: int = 2,
               cache: str | None = None, window: int = 0, softcap: float = 0.0) -> AttentionShape:
    return AttentionShape(dtype, cache or dtype, group * kv_heads, kv_heads, head_dim, block_size, head_dim**-0.5,
                          window, softcap)


@dataclass
class Problem:
    """Sequences with `contexts` tokens in the cache, the last `queries[s]` of which are queries.

    layers: the cache holds that many, this problem reads the last, so that block_stride is not the tile size.
    spread: block numbers are drawn from this many (default: three more than needed).
    scales: per-kv-head factors of 8-bit caches. sharp: multiplies queries, for large logits.
    """

    shape: AttentionShape
    contexts: Sequence[int]
    queries: Sequence[int] | None = None
    sinks: bool = False
    scales: bool = False
    layers: int = 2
    spread: int | None = None
    sharp: float = 1.0
    level: float = 0.0
    seed: int = 0
    table_width: int | None = None
    pool: NDArray[Any] = field(init=False)

    def __post_init__(self) -> None:
        s, rng = self.shape, np.random.default_rng(self.seed)
        self.query_lens = [min(1, c) for c in self.contexts] if self.queries is None else list(self.queries)
        counts = [-(-c // s.block_size) for c in self.contexts]
        blocks = self.spread or sum(counts) + 3
        used = rng.choice(blocks, sum(counts), replace=False) if self.spread is None else np.array(
            [blocks - 1 - i for i in range(sum(counts))])
        width = self.table_width or max(1, *counts)
        self.tables = np.full((len(counts), width), ABSENT_BLOCK, np.int32)
        self.tile = s.kv_heads * s.block_size * s.head_dim
        self.block_stride = self.layers * 2 * self.tile
        store = STORAGE[s.cache_dtype]
        self.pool = np.empty(blocks * self.block_stride, store)   # pages never touched cost no memory
        grid = self.pool.reshape(blocks, self.layers, 2, s.kv_heads, s.block_size, s.head_dim)
        for block in range(blocks) if self.spread is None else used:
            grid[block] = poison(s.cache_dtype)
        self.k_scale = rng.uniform(0.5, 2, s.kv_heads).astype(np.float32) if self.scales else None
        self.v_scale = rng.uniform(0.5, 2, s.kv_heads).astype(np.float32) if self.scales else None
        self.keys: list[NDArray[np.float64]] = []
        self.values: list[NDArray[np.float64]] = []
        at = 0
        for row, (context, count) in enumerate(zip(self.contexts, counts, strict=True)):
            self.tables[row, :count] = used[at:at + count]
            at += count
            drawn = rng.standard_normal((2, context, s.kv_heads, s.head_dim)).astype(np.float32)
            if self.level:
                drawn[0] = 64 + drawn[0] / 16
            stored = [encode(part, s.cache_dtype) for part in drawn]
            for token in range(context):
                block, slot = self.tables[row, token // s.block_size], token % s.block_size
                for part in range(2):
                    grid[block, -1, part, :, slot] = stored[part][token]
            for part, (scale, kept) in enumerate([(self.k_scale, self.keys), (self.v_scale, self.values)]):
                wide = decode(stored[part], s.cache_dtype)
                kept.append(wide if scale is None else wide * scale[None, :, None].astype(np.float64))
            low = max(0, context - self.query_lens[row] + 1 - s.window) // s.block_size if s.window else 0
            for dead in range(low):   # wholly behind every query's window: freed, and reused by somebody
                grid[self.tables[row, dead]] = poison(s.cache_dtype)
                self.tables[row, dead] = ABSENT_BLOCK
        self.tokens = sum(self.query_lens)
        q = rng.standard_normal((max(1, self.tokens), s.heads, s.head_dim)).astype(np.float32) * self.sharp
        if self.level:
            q = q / 1024 + np.float32(self.level / (64 * s.head_dim * s.scale))
        self.q = encode(q, s.dtype)
        self.sink_logits = rng.standard_normal(s.heads).astype(np.float32) * 2 + 2 if self.sinks else None
        self.context_array = np.array(self.contexts, np.int32)
        self.grid = grid

    @property
    def base(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values of the layer, as views into the pool."""
        k = (self.layers - 1) * 2 * self.tile
        return self.pool[k:], self.pool[k + self.tile:]

    def want(self) -> NDArray[np.float64]:
        """[query tokens, heads, dim] in float64."""
        s, q = self.shape, decode(self.q, self.shape.dtype)
        rows, at = [], 0
        for context, count, keys, values in zip(self.contexts, self.query_lens, self.keys, self.values, strict=True):
            for i in range(count):
                sinks = None if self.sink_logits is None else self.sink_logits.astype(np.float64)
                rows.append(attend(q[at], keys, values, context - count + i, s.scale, s.window, s.softcap, sinks))
                at += 1
        return np.array(rows).reshape(-1, s.heads, s.head_dim)

    def common(self) -> dict[str, Any]:
        """Arguments that decode and prompt kernels share."""
        s, (k, v) = self.shape, self.base
        return {"q": self.strided(self.q), "k_cache": k, "v_cache": v, "tables": self.tables, "sinks": self.sink_logits,
                "k_scale": self.k_scale, "v_scale": self.v_scale, "max_blocks": self.tables.shape[1],
                "group": s.group, "window": s.window, "scale": s.scale, "softcap": s.softcap,
                "q_stride": s.heads * (s.head_dim + 8), "q_head_stride": s.head_dim + 8,
                "block_stride": self.block_stride}

    def strided(self, q: NDArray[Any]) -> NDArray[Any]:
        """Queries as a fused projection leaves them: eight elements of something else behind each head's."""
        wide = np.full((*q.shape[:2], self.shape.head_dim + 8), poison(self.shape.dtype), q.dtype)
        wide[..., : self.shape.head_dim] = q
        return wide

    def decode_plan(self, choice: str, splits: int | None = None) -> plans.DecodePlan:
        """The planner's choice, or as many splits as asked for of at least 64 tokens."""
        plan = plans.plan_decode(self.shape, len(self.contexts), max(self.contexts), H200, choice)
        if splits is None or choice == "v1":
            return plan
        return replace(plan, grid=(*plan.grid[:2], splits), splits=splits, min_split=64,
                       reduce=plans.reduce_splits(self.shape) if splits > 1 else None,
                       partials=len(self.contexts) * self.shape.heads * splits)

    def run_decode(self, launch: Launch, plan: plans.DecodePlan) -> NDArray[Any]:
        """Output [sequences, heads, dim] as stored elements. Query rows must be one per sequence with any context."""
        s, seqs = self.shape, len(self.contexts)
        q = np.zeros((seqs, s.heads, s.head_dim), self.q.dtype)
        q[self.context_array > 0] = self.q[: self.tokens]
        out = np.full_like(q, poison(s.dtype))
        values = {**self.common(), "q": self.strided(q), "out": out, "ctx_lens": self.context_array}
        if plan.kernel.base == "decode_v1":
            launch(plan.kernel, plan.grid, plan.kernel.pack(values))
            return out
        part_o = np.full((max(1, plan.partials), s.head_dim), np.nan, np.float32)
        part_ml = np.full((max(1, plan.partials), 2), np.nan, np.float32)
        values |= {"part_o": part_o, "part_ml": part_ml, "min_split": plan.min_split}
        launch(plan.kernel, plan.grid, plan.kernel.pack(values))
        if plan.reduce is not None:
            launch(plan.reduce, (seqs, s.heads), plan.reduce.pack(
                {"out": out, "part_o": part_o, "part_ml": part_ml, "ctx_lens": self.context_array,
                 "sinks": self.sink_logits, "splits": plan.splits, "window": s.window, "min_split": plan.min_split}))
        return out

    def run_prefill(self, launch: Launch) -> NDArray[Any]:
        """Output [query tokens, heads, dim] as stored elements."""
        s = self.shape
        kernel, rows = plans.prefill(s, H200)
        tiles = plans.prefill_tiles(self.query_lens, s.group, rows)
        out = np.full_like(self.q, poison(s.dtype))
        starts = np.cumsum([0, *self.query_lens], dtype=np.int32)
        positions = self.context_array - np.array(self.query_lens, np.int32)
        values = {**self.common(), "out": out, "starts": starts, "positions": positions, "tiles": tiles}
        launch(kernel, (len(tiles), s.kv_heads), kernel.pack(values))
        return out[: self.tokens]

    def decode_error(self, launch: Launch, choice: str, splits: int | None = None) -> float:
        out = decode(self.run_decode(launch, self.decode_plan(choice, splits)), self.shape.dtype)
        empty = self.context_array == 0
        if np.any(out[empty] != 0):
            return float("inf")
        return worst_error(out[~empty], self.want())

    def prefill_error(self, launch: Launch) -> float:
        return worst_error(decode(self.run_prefill(launch), self.shape.dtype), self.want())


def write_error(launch: Launch, shape: AttentionShape, slots: Sequence[int], blocks: int, scales: bool = False,
                strided: bool = True, seed: int = 0, rows: int | None = None, separate: bool = False) -> float:
    """Writes rows to slots (-1: none) and compares every element of the cache; 0 when all are as they must be.

    strided: keys and values are slices of a wider row and head, as views of a fused projection are.
    rows: rows of k and v when there are more than slots.
    """
    s, rng = shape, np.random.default_rng(seed)
    count, pad = rows or len(slots), 8 if strided else 0
    wide = encode(rng.standard_normal((2, count, s.kv_heads, s.head_dim + pad)).astype(np.float32) * 3, s.dtype)
    tile, layers = s.kv_heads * s.block_size * s.head_dim, 2
    store = STORAGE[s.cache_dtype]
    before = rng.integers(0, 120, blocks * layers * 2 * tile).astype(store)
    pool, want = before.copy(), before.copy().reshape(blocks, layers, 2, s.kv_heads, s.block_size, s.head_dim)
    factors = [rng.uniform(0.5, 2, s.kv_heads).astype(np.float32) if scales else None for _ in range(2)]
    for row, slot in enumerate(slots):
        for part in range(2):
            if slot < 0:
                continue
            value = wide[part, row, :, : s.head_dim]
            if s.cache_dtype != s.dtype:
                plain = decode(value, s.dtype).astype(np.float32)
                factor = factors[part]
                if factor is not None:
                    plain = plain * (np.float32(1) / factor)[:, None]
                value = encode(plain, s.cache_dtype)
            want[slot // s.block_size, 1, part, :, slot % s.block_size] = value
    kernel = plans.reshape_and_cache(s)
    at = 2 * tile
    k_cache, v_cache = pool[at:], pool[at + tile:]
    if separate:
        k_cache, v_cache = k_cache.copy(), v_cache.copy()
    stride = s.head_dim + pad
    launch(kernel, (len(slots),), kernel.pack({
        "k": wide[0], "v": wide[1], "k_cache": k_cache, "v_cache": v_cache, "slots": np.array(slots, np.int64),
        "k_scale": factors[0], "v_scale": factors[1], "kv_heads": s.kv_heads, "k_stride": s.kv_heads * stride,
        "k_head_stride": stride, "v_stride": s.kv_heads * stride, "v_head_stride": stride,
        "block_stride": layers * 2 * tile}))
    if separate:   # each copy was meant to change in its own half only
        original = before.reshape(want.shape)
        merged = original.copy()
        for part, copy in enumerate((k_cache, v_cache)):
            whole = np.concatenate([before[: at + part * tile], copy]).reshape(want.shape)
            if not np.array_equal(whole[:, :, 1 - part], original[:, :, 1 - part]):
                return float("inf")
            merged[:, :, part] = whole[:, :, part]
        pool = merged.reshape(-1)
    return float(np.count_nonzero(pool.reshape(want.shape) != want))


def copy_error(launch: Launch, pairs: Sequence[tuple[int, int]], blocks: int, block_bytes: int,
               waves: bool = True, seed: int = 0) -> float:
    """Copies blocks within one pool; bytes that differ from copying one after the other."""
    rng = np.random.default_rng(seed)
    pool = rng.integers(0, 256, blocks * block_bytes).astype(np.uint8)
    want = pool.copy().reshape(blocks, block_bytes)
    for src, dst in pairs:
        want[dst] = want[src]
    kernel = plans.COPY_BLOCKS
    piece = 4096
    for wave in plans.copy_waves(pairs) if waves else [np.array(pairs, np.int64)]:
        launch(kernel, (len(wave), -(-block_bytes // piece)), kernel.pack(
            {"dst": pool, "src": pool, "pairs": wave, "block_bytes": block_bytes, "piece_bytes": piece}))
    return float(np.count_nonzero(pool.reshape(want.shape) != want))
