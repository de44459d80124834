"""The loops of CPU attention, compiled by Numba: blocks, tiles and rows around the vector routines.

One call of the compiled function is one thread's part of one layer: it first writes new keys and values, waits until
all threads have, then takes (sequence, kv head, run of tokens) items off a shared counter. Who takes what changes no
result, because an item is computed whole and its sums have one order.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numba import cfunc, njit, types

from pagedcli.attention import cpu_intrinsics, cpu_routines, cpu_vectors
from pagedcli.attention.cpu_intrinsics import (
    convert,
    fetch,
    fetch_add,
    finish,
    load_f32,
    load_i32,
    load_i64,
    move,
    read_shared,
    scatter,
    scores,
    store_f32,
    store_i64,
    weighted,
    weights,
)
from pagedcli.attention.cpu_vectors import BYTES, CHUNKS, LANES, TILE, pairs_keys, row_counts

ITEM_ROWS = 96
"""Query rows (tokens x group) of one item: enough to hide reading a tile, few enough to stay in the L2 cache."""

# Fields of the argument block, int64 each (byte offsets). The counters have a cache line each; the rest are grouped by
# when the backend sets them: once a layer, once a step, once a call.
NEXT_WRITE, WRITTEN, NEXT_ITEM, NEXT_THREAD = 0, 64, 128, 192
LAYER_FIELDS = range(256, 256 + 64, 8)
(KV_HEADS, BLOCK, PITCH, KEYS, VALUES, WINDOW, SCALE, CAP) = LAYER_FIELDS
STEP_FIELDS = range(320, 320 + 64, 8)
(TOKENS, WRITE_STEP, SLOTS, TABLES, TABLE_WIDTH, CONTEXT, QUERY_START, THREADS) = STEP_FIELDS
CALL_FIELDS = range(384, 384 + 112, 8)
(ITEMS, ITEM_COUNT, SCRATCH, SINKS, OUT, Q, Q_TOKEN, Q_HEAD, K, K_TOKEN, K_HEAD, V, V_TOKEN, V_HEAD) = CALL_FIELDS
ARGUMENT_BYTES = 512
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class KernelShape:
    """What one compiled function is made for. `source`: type of q, k, v and the output; `cache`: of the blocks."""

    source: str
    cache: str
    group: int
    key_dim: int
    value_dim: int
    capped: bool
    budget: int

    @cached_property
    def item_tokens(self) -> int:
        """Query tokens of the longest item."""
        return max(1, ITEM_ROWS // self.group)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Bytes to each part of a thread's scratch: q, sums, denominators, maxima, weights, scales, pointers, keys,
        a row; last, the size of it all."""
        rows, most = self.item_tokens * self.group, row_counts(self.group, self.budget)[0]
        sizes = (rows * self.key_dim * 4, rows * self.value_dim * 4, rows * LANES * 4, rows * 4, most * TILE * 4,
                 most * 8, CHUNKS * 32, self.key_dim * TILE * BYTES[self.cache],
                 4 * max(self.key_dim, self.value_dim))
        places = [0]
        for size in sizes:
            places.append(places[-1] + -(-size // 64) * 64)
        return tuple(places)


def source_stamp() -> int:
    """Check sum of the vector code: part of the cache key, since Numba watches only the file of the function itself."""
    total = 0
    for module in (cpu_vectors, cpu_routines, cpu_intrinsics):
        total = zlib.crc32(Path(str(module.__file__)).read_bytes(), total)
    return total


@njit(error_model="numpy")
def chunk_addresses(out: int, table: int, keys: int, values: int, pitch: int, size: int, key_step: int,
                    value_step: int, start: int, low: int, high: int) -> None:
    """Addresses of the keys (at `out`) and values (64 bytes on) of a tile's chunks, positions low .. high - 1."""
    for c in range(low // LANES, (high + LANES - 1) // LANES):
        at = start + c * LANES
        block = at // size
        base = load_i32(table + 4 * block) * pitch
        store_i64(out + 8 * c, keys + base + (at - block * size) * key_step)
        store_i64(out + 64 + 8 * c, values + base + (at - block * size) * value_step)


def build_kernel(shape: KernelShape) -> Any:
    """The compiled function void(address of the argument block), from the disk cache where it has been built before."""
    source, cache, group = shape.source, shape.cache, shape.group
    key_dim, value_dim, capped, budget = shape.key_dim, shape.value_dim, int(shape.capped), shape.budget
    (q_at, sums_at, den_at, max_at, weight_at, scale_at, pointer_at, keys_at, row_at, scratch_bytes) = shape.offsets
    pair = pairs_keys(cache, key_dim)
    key_cell = BYTES[cache] * (2 if pair else 1)
    key_lines = key_dim // 2 if pair else key_dim
    value_bytes = BYTES[cache] * value_dim
    key_tile, out_cell = key_dim * BYTES[cache], BYTES[source]
    same = int(source == cache)
    counts = row_counts(group, budget)
    most_rows = counts[0]
    size_b, size_c, size_d = (*counts, 1, 1)[1:4]
    accumulators = budget
    stamp = source_stamp()

    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def attend(a: int) -> None:
        scratch = load_i64(a + SCRATCH) + fetch_add(a + NEXT_THREAD, 1) * scratch_bytes + 0 * stamp
        heads = load_i64(a + KV_HEADS)
        size, pitch = load_i64(a + BLOCK), load_i64(a + PITCH)
        keys, values = load_i64(a + KEYS), load_i64(a + VALUES)

        # 1. New keys and values into their slots.
        tokens, step, slots = load_i64(a + TOKENS), load_i64(a + WRITE_STEP), load_i64(a + SLOTS)
        first = fetch_add(a + NEXT_WRITE, step)
        while first < tokens:
            last = min(first + step, tokens)
            for t in range(first, last):
                slot = load_i64(slots + 8 * t)
                if slot < 0:
                    continue
                block = slot // size
                place = slot - block * size
                for h in range(heads):
                    here = load_i64(a + K) + t * load_i64(a + K_TOKEN) + h * load_i64(a + K_HEAD)
                    if not same:
                        convert(source, cache, key_dim, here, scratch + row_at, 1.0)
                        here = scratch + row_at
                    scatter(key_cell, key_lines, here,
                            keys + block * pitch + h * key_tile * size + place * key_cell, size * key_cell)
                    here = load_i64(a + V) + t * load_i64(a + V_TOKEN) + h * load_i64(a + V_HEAD)
                    convert(source, cache, value_dim, here,
                            values + block * pitch + (h * size + place) * value_bytes, 1.0)
            fetch_add(a + WRITTEN, last - first)
            first = fetch_add(a + NEXT_WRITE, step)
        while read_shared(a + WRITTEN) < tokens:
            pass

        # 2. Attention, item by item.
        count, spare = load_i64(a + ITEM_COUNT), load_i64(a + THREADS)
        item = fetch_add(a + NEXT_ITEM, 1)
        while item < count:
            where = load_i64(a + ITEMS) + 16 * item
            seq, h = load_i32(where), load_i32(where + 4)
            token, many = load_i32(where + 8), load_i32(where + 12)
            rows = many * group
            ends = load_i64(a + QUERY_START) + 4 * seq
            position = load_i32(load_i64(a + CONTEXT) + 4 * seq) - load_i32(ends + 4) + token
            table = load_i64(a + TABLES) + 4 * seq * load_i64(a + TABLE_WIDTH)
            window = load_i64(a + WINDOW)
            head_keys, head_values = keys + h * key_tile * size, values + h * value_bytes * size
            for r in range(rows):
                head = h * group + r % group
                convert(source, "fp32", key_dim,
                        load_i64(a + Q) + (token + r // group) * load_i64(a + Q_TOKEN) + head * load_i64(a + Q_HEAD),
                        scratch + q_at + 4 * key_dim * r, load_f32(a + SCALE))
                for d in range(value_dim):
                    store_f32(scratch + sums_at + 4 * (value_dim * r + d), 0.0)
                for d in range(LANES):
                    store_f32(scratch + den_at + 4 * (LANES * r + d), 0.0)
                store_f32(scratch + max_at + 4 * r, -np.inf)
                if load_i64(a + SINKS) != 0:
                    # A sink is a key of weight one that is seen first and has no value.
                    store_f32(scratch + den_at + 4 * LANES * r, 1.0)
                    store_f32(scratch + max_at + 4 * r, load_f32(load_i64(a + SINKS) + 4 * head) * np.float32(LOG2E))

            begin, end = max(0, position - window + 1), position + many
            tile_end = (end + TILE - 1) // TILE
            upcoming, left = -1, 0
            for tile in range(begin // TILE, tile_end):
                start = tile * TILE
                seen_low = max(begin, start) - start
                seen_high = min(end, start + TILE) - start
                # Where the tile's keys are: in their blocks, or side by side where a chunk would span blocks.
                own, coming = scratch + pointer_at, scratch + pointer_at
                chunk_addresses(own, table, head_keys, head_values, pitch, size, key_cell, value_bytes, start,
                                seen_low, seen_high)
                if size % LANES == 0:
                    stride = size * key_cell
                    if tile + 1 < tile_end:
                        coming = own + 128
                        chunk_addresses(coming, table, head_keys, head_values, pitch, size, key_cell, value_bytes,
                                        start + TILE, 0, min(end - start - TILE, TILE))
                    elif item + 2 * spare < count:
                        # Claim the next item now, so that its first tile is on its way while this one is computed.
                        upcoming = fetch_add(a + NEXT_ITEM, 1)
                        if upcoming < count:
                            coming = own + 128
                            where = load_i64(a + ITEMS) + 16 * upcoming
                            s2, h2 = load_i32(where), load_i32(where + 4)
                            ends = load_i64(a + QUERY_START) + 4 * s2
                            p2 = (load_i32(load_i64(a + CONTEXT) + 4 * s2) - load_i32(ends + 4)
                                  + load_i32(where + 8))
                            b2 = max(0, p2 - window + 1)
                            t2 = b2 // TILE * TILE
                            left = (min(p2 + load_i32(where + 12) - t2, TILE) + LANES - 1) // LANES
                            chunk_addresses(coming, load_i64(a + TABLES) + 4 * s2 * load_i64(a + TABLE_WIDTH),
                                            keys + h2 * key_tile * size, values + h2 * value_bytes * size, pitch,
                                            size, key_cell, value_bytes, t2, b2 - t2,
                                            min(p2 + load_i32(where + 12) - t2, TILE))
                else:
                    stride = TILE * key_cell
                    for c in range(CHUNKS):
                        store_i64(scratch + pointer_at + 8 * c, scratch + keys_at + c * LANES * key_cell)
                    for at in range(start + seen_low, start + seen_high):
                        block = at // size
                        here = head_keys + load_i32(table + 4 * block) * pitch + (at - block * size) * key_cell
                        there = scratch + keys_at + (at - start) * key_cell
                        for d in range(key_lines):
                            move(key_cell, here + d * size * key_cell, there + d * stride)

                r0 = 0
                while r0 < rows:
                    n = most_rows
                    if n > rows - r0:
                        n = size_b
                    if n > rows - r0:
                        n = size_c
                    if n > rows - r0:
                        n = size_d
                    if n > rows - r0:
                        n = 1
                    row_first = position + r0 // group
                    row_last = position + (r0 + n - 1) // group
                    low = max(row_first - window + 1 - start, 0)
                    high = min(row_last + 1 - start, TILE)
                    if low < high:
                        wide = 8
                        while wide > 1 and wide * n > accumulators:
                            wide //= 2
                        c = low // LANES
                        chunks = (high + LANES - 1) // LANES
                        while c < chunks:
                            while wide > chunks - c:
                                wide //= 2
                            scores(cache, key_dim, group, budget, n, wide, scratch + q_at + 4 * key_dim * r0,
                                   own + 8 * c, coming + 8 * c, stride, scratch + weight_at + 4 * LANES * c)
                            c += wide
                        all_low, all_high = 0, TILE
                        for r in range(n):
                            mine = position + (r0 + r) // group
                            row_low = max(mine - window + 1 - start, 0)
                            row_high = max(min(mine + 1 - start, TILE), row_low)
                            all_low, all_high = max(all_low, row_low), min(all_high, row_high)
                            scale = np.float32(1.0)
                            if row_low < row_high:
                                scale = weights(capped, scratch + weight_at + 4 * TILE * r, row_low, row_high,
                                                scratch + max_at + 4 * (r0 + r),
                                                scratch + den_at + 4 * LANES * (r0 + r), load_f32(a + CAP))
                            store_f32(scratch + scale_at + 4 * r, scale)
                            store_f32(scratch + scale_at + 4 * (most_rows + r), 1.0)
                        # Values in position order: what only some rows see before the common run, the run, the rest.
                        all_high = max(all_high, all_low)
                        sums = scratch + sums_at + 4 * value_dim * r0
                        used = scratch + scale_at
                        for r in range(n):
                            mine = position + (r0 + r) // group
                            row_low = max(mine - window + 1 - start, 0)
                            row_high = min(all_low, min(mine + 1 - start, TILE))
                            if row_low < row_high:
                                weighted(cache, value_dim, group, budget, 1, sums + 4 * value_dim * r,
                                         scratch + weight_at + 4 * TILE * r, used + 4 * r, table, head_values, pitch,
                                         size, start, row_low, row_high, own + 64)
                                store_f32(used + 4 * r, 1.0)
                        if all_low < all_high:
                            weighted(cache, value_dim, group, budget, n, sums, scratch + weight_at, used, table,
                                     head_values, pitch, size, start, all_low, all_high, coming + 64)
                            used += 4 * most_rows
                        for r in range(n):
                            mine = position + (r0 + r) // group
                            row_low = max(all_high, max(mine - window + 1 - start, 0))
                            row_high = min(mine + 1 - start, TILE)
                            if row_low < row_high:
                                weighted(cache, value_dim, group, budget, 1, sums + 4 * value_dim * r,
                                         scratch + weight_at + 4 * TILE * r, used + 4 * r, table, head_values, pitch,
                                         size, start, row_low, row_high, own + 64)
                    r0 += n
                    coming = own
                for c in range((seen_high + LANES - 1) // LANES, left):
                    here, there = load_i64(own + 128 + 8 * c), load_i64(own + 192 + 8 * c)
                    for line in range(key_lines):
                        fetch(here + line * stride)
                    for line in range(0, LANES * value_bytes, 64):
                        fetch(there + line)

            for r in range(rows):
                head = (token + r // group) * heads * group + h * group + r % group
                finish(cache, value_dim, source, scratch + sums_at + 4 * value_dim * r,
                       scratch + den_at + 4 * LANES * r, load_i64(a + OUT) + head * value_dim * out_cell)
            item = upcoming if upcoming >= 0 else fetch_add(a + NEXT_ITEM, 1)

    return attend
