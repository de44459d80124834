"""The loops of CPU attention, compiled by Numba once a machine: blocks, tiles and rows around the vector routines.

A layer is two functions, `write` (new keys and values into blocks) and then `attend`. One call is one thread's part:
it takes tokens, or (sequence, kv head, run of tokens) items, off a shared counter until none are left. Who takes what
changes no result, because an item is computed whole and its sums have one order.

Arguments: `a` is the argument block of the call, `s` the table of the layer's shape, `scratch` the thread's own memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit, types

from pagedcli.attention import cpu_shapes as shapes
from pagedcli.attention.cpu_intrinsics import (
    call,
    fetch,
    fetch_add,
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i64,
)
from pagedcli.attention.cpu_vectors import CHUNKS, LANES, TILE
from pagedcli.attention.kept_code import kept_cfunc

# Fields of the argument block, int64 each (byte offsets). The counters have a cache line each; the rest are grouped by
# when the backend sets them: once a layer, once a step, once a call.
NEXT_WRITE, WRITERS, NEXT_ITEM, NEXT_THREAD = 0, 64, 128, 192
LAYER_FIELDS = range(256, 256 + 88, 8)
(SHAPE, KV_HEADS, BLOCK, PITCH, KEYS, VALUES, WINDOW, SCALE, CAP, ONE, LOG2E_AT) = LAYER_FIELDS
STEP_FIELDS = range(344, 344 + 64, 8)
(TOKENS, WRITE_STEP, SLOTS, TABLES, TABLE_WIDTH, CONTEXT, QUERY_START, THREADS) = STEP_FIELDS
CALL_FIELDS = range(408, 408 + 112, 8)
(ITEMS, ITEM_COUNT, SCRATCH, SINKS, OUT, Q, Q_TOKEN, Q_HEAD, K, K_TOKEN, K_HEAD, V, V_TOKEN, V_HEAD) = CALL_FIELDS
ARGUMENT_BYTES = 576
COMING = 16 * CHUNKS
"""Bytes from a tile's chunk addresses to those of the tile after it."""

LOG2E = 1.4426950408889634

_compiled = njit(error_model="numpy")


@_compiled
def write_rows(a: int, s: int, scratch: int) -> None:
    """New keys and values into their slots, a few tokens at a time."""
    tokens, step, heads = load_i64(a + TOKENS), load_i64(a + WRITE_STEP), load_i64(a + KV_HEADS)
    size, pitch = load_i64(a + BLOCK), load_i64(a + PITCH)
    key_cell = load_i64(s + shapes.KEY_CELL)
    key_bytes = load_i64(s + shapes.KEY_LINES) * key_cell
    value_bytes = load_i64(s + shapes.VALUE_DIM) * load_i64(s + shapes.VALUE_CELL)
    spare = scratch + load_i64(s + shapes.ROW_AT)
    first = fetch_add(a + NEXT_WRITE, step)
    while first < tokens:
        last = min(first + step, tokens)
        for t in range(first, last):
            slot = load_i64(load_i64(a + SLOTS) + 8 * t)
            if slot < 0:
                continue
            block = slot // size
            place = slot - block * size
            keys = load_i64(a + KEYS) + block * pitch + place * key_cell
            paired = load_i64(s + shapes.QUERY_CELL) == 2 and size % 2 == 0
            values = load_i64(a + VALUES) + block * pitch
            values += (place // 2 * value_bytes + place % 2) * 2 if paired else place * value_bytes
            for h in range(heads):
                here = load_i64(a + K) + t * load_i64(a + K_TOKEN) + h * load_i64(a + K_HEAD)
                if load_i64(s + shapes.CONVERTS) != 0:
                    call(load_i64(s + shapes.STORE_K), (here, spare, a + ONE))
                    here = spare
                call(load_i64(s + shapes.MOVE_K), (here, keys + h * size * key_bytes, key_cell, size * key_cell))
                here = load_i64(a + V) + t * load_i64(a + V_TOKEN) + h * load_i64(a + V_HEAD)
                if paired:
                    call(load_i64(s + shapes.MOVE_V), (here, values + h * size * value_bytes, 2, 4))
                else:
                    call(load_i64(s + shapes.STORE_V), (here, values + h * size * value_bytes, a + ONE))
        first = fetch_add(a + NEXT_WRITE, step)


@_compiled
def read_item(a: int, item: int) -> Any:
    """(kv head, first token, tokens, position of the first token, block table) of an item."""
    where = load_i64(a + ITEMS) + 16 * item
    seq, token = load_i32(where), load_i32(where + 8)
    ends = load_i64(a + QUERY_START) + 4 * seq
    position = load_i32(load_i64(a + CONTEXT) + 4 * seq) - load_i32(ends + 4) + token
    table = load_i64(a + TABLES) + 4 * seq * load_i64(a + TABLE_WIDTH)
    return load_i32(where + 4), token, load_i32(where + 12), position, table


@_compiled
def row_span(a: int, position: int, start: int) -> Any:
    """First and last + 1 position of the tile at `start` that a query at `position` sees; equal when none."""
    low = max(position - load_i64(a + WINDOW) + 1 - start, 0)
    return low, max(min(position + 1 - start, TILE), low)


@_compiled
def chunk_addresses(a: int, s: int, out: int, table: int, h: int, start: int, low: int, high: int) -> None:
    """Addresses of the keys (at `out`) and values (8 * CHUNKS on) of a tile's chunks, positions low .. high - 1."""
    size, key_cell = load_i64(a + BLOCK), load_i64(s + shapes.KEY_CELL)
    value_bytes = load_i64(s + shapes.VALUE_DIM) * load_i64(s + shapes.VALUE_CELL)
    keys = load_i64(a + KEYS) + h * size * load_i64(s + shapes.KEY_LINES) * key_cell
    values = load_i64(a + VALUES) + h * size * value_bytes
    for c in range(low // LANES, (high + LANES - 1) // LANES):
        at = start + c * LANES
        block = at // size
        base = load_i32(table + 4 * block) * load_i64(a + PITCH)
        store_i64(out + 8 * c, keys + base + (at - block * size) * key_cell)
        store_i64(out + 8 * (CHUNKS + c), values + base + (at - block * size) * value_bytes)


@_compiled
def pack_keys(a: int, s: int, scratch: int, table: int, h: int, start: int, low: int, high: int) -> None:
    """Copies a tile's keys side by side where blocks hold no whole chunks; only blocks with seen slots are read."""
    size, cell, lines = load_i64(a + BLOCK), load_i64(s + shapes.KEY_CELL), load_i64(s + shapes.KEY_LINES)
    packed, out = scratch + load_i64(s + shapes.KEYS_AT), scratch + load_i64(s + shapes.POINTERS_AT)
    keys = load_i64(a + KEYS) + h * size * lines * cell
    for c in range(CHUNKS):
        store_i64(out + 8 * c, packed + c * LANES * cell)
    step, routine = (8, load_i64(s + shapes.MOVE_8)) if size % 8 == 0 else (1, load_i64(s + shapes.MOVE_K))
    for at in range(start + low // step * step, start + high, step):
        block = at // size
        here = keys + load_i32(table + 4 * block) * load_i64(a + PITCH) + (at - block * size) * cell
        call(routine, (here, packed + (at - start) * cell, size * cell, TILE * cell))


@_compiled
def pack_values(a: int, s: int, scratch: int, table: int, h: int, start: int, low: int, high: int) -> int:
    """Copies a tile's values into pairs of slots where blocks are of odd size; returns their address."""
    size, value_bytes = load_i64(a + BLOCK), load_i64(s + shapes.VALUE_DIM) * load_i64(s + shapes.VALUE_CELL)
    packed, values = scratch + load_i64(s + shapes.VALUES_AT), load_i64(a + VALUES) + h * size * value_bytes
    for at in range(low, high):
        block = (start + at) // size
        here = values + load_i32(table + 4 * block) * load_i64(a + PITCH) + (start + at - block * size) * value_bytes
        call(load_i64(s + shapes.MOVE_V), (here, packed + (at // 2 * value_bytes + at % 2) * 2, 2, 4))
    return packed


@_compiled
def attend_rows(a: int, s: int, scratch: int, first: int, n: int, position: int, table: int, values: int,
                pitch: int, size: int, value_start: int, start: int, stride: int, coming: int) -> None:
    """`n` query rows, from row `first` of the item on, over one tile, whose values are at `values`, in blocks of `size`
    that are `pitch` apart, from position `value_start` on."""
    group, value_dim = load_i64(s + shapes.GROUP), load_i64(s + shapes.VALUE_DIM)
    low, _ = row_span(a, position + first // group, start)
    _, high = row_span(a, position + (first + n - 1) // group, start)
    high = min(high, TILE)
    if low >= high:
        return
    own, weight = scratch + load_i64(s + shapes.POINTERS_AT), scratch + load_i64(s + shapes.WEIGHTS_AT)
    query = scratch + load_i64(s + shapes.Q_AT) + load_i64(s + shapes.QUERY_CELL) * load_i64(s + shapes.KEY_DIM) * first
    level, c, chunks = 3, low // LANES, (high + LANES - 1) // LANES
    while c < chunks:
        while c + (1 << level) > chunks or load_i64(s + shapes.SCORES + 8 * (4 * n + level)) == 0:
            level -= 1
        call(load_i64(s + shapes.SCORES + 8 * (4 * n + level)),
             (query, own + 8 * c, coming + 8 * c, stride, weight + 4 * LANES * c, a + SCALE))
        c += 1 << level

    scales = scratch + load_i64(s + shapes.SCALES_AT)
    ones = scales + 4 * load_i64(s + shapes.ROWS)
    all_low, all_high, least, most = 0, TILE, TILE, 0
    for r in range(n):
        low, high = row_span(a, position + (first + r) // group, start)
        all_low, all_high = max(all_low, low), min(all_high, high)
        least, most = min(least, low), max(most, high)
        store_f32(scales + 4 * r, 1.0)
        store_f32(ones + 4 * r, 1.0)
        if low < high:
            call(load_i64(s + shapes.WEIGHTS),
                 (weight + 4 * TILE * r, low, high, scratch + load_i64(s + shapes.MAXIMA_AT) + 4 * (first + r),
                  scratch + load_i64(s + shapes.DENOMINATORS_AT) + 4 * LANES * (first + r), scales + 4 * r, a + CAP))

    # Values in the order of positions: what only some rows see before the common run, the run, what some see after it.
    # Where rows differ the cuts lie between pairs, so that no row's pair is ever cut.
    if all_low != least:
        all_low += all_low % 2
    if all_high != most:
        all_high -= all_high % 2
    sums = scratch + load_i64(s + shapes.SUMS_AT) + 4 * value_dim * first
    all_high = max(all_high, all_low)
    for after in range(2):
        for r in range(n):
            low, high = row_span(a, position + (first + r) // group, start)
            low, high = max(low, all_high * after), high if after else min(high, all_low)
            if low < high:
                call(load_i64(s + shapes.WEIGHTED + 8),
                     (sums + 4 * value_dim * r, weight + 4 * TILE * r, scales + 4 * r, table, values, pitch, size,
                      value_start, low, high, own + 8 * CHUNKS))
                store_f32(scales + 4 * r, 1.0)
        if not after and all_low < all_high:
            call(load_i64(s + shapes.WEIGHTED + 8 * n),
                 (sums, weight, scales, table, values, pitch, size, value_start, all_low, all_high,
                  coming + 8 * CHUNKS))
            scales = ones


@_compiled
def start_rows(a: int, s: int, scratch: int, rows: int, h: int, token: int) -> None:
    """Query rows scaled into scratch, their sums emptied."""
    group, key_dim, cell = load_i64(s + shapes.GROUP), load_i64(s + shapes.KEY_DIM), load_i64(s + shapes.QUERY_CELL)
    queries, maxima = scratch + load_i64(s + shapes.Q_AT), scratch + load_i64(s + shapes.MAXIMA_AT)
    sums, denominators = scratch + load_i64(s + shapes.SUMS_AT), scratch + load_i64(s + shapes.DENOMINATORS_AT)
    for n in range(rows * load_i64(s + shapes.VALUE_DIM)):
        store_f32(sums + 4 * n, 0.0)
    for n in range(rows * LANES):
        store_f32(denominators + 4 * n, 0.0)
    for r in range(rows):
        head = h * group + r % group
        here = load_i64(a + Q) + (token + r // group) * load_i64(a + Q_TOKEN) + head * load_i64(a + Q_HEAD)
        call(load_i64(s + shapes.LOAD_Q), (here, queries + cell * key_dim * r, a + ONE if cell == 2 else a + SCALE))
        store_f32(maxima + 4 * r, -np.inf)
        if load_i64(a + SINKS) != 0:
            # A sink is a key of weight one that is seen first and has no value.
            store_f32(maxima + 4 * r, load_f32(load_i64(a + SINKS) + 4 * head) * load_f32(a + LOG2E_AT))
            store_f32(denominators + 4 * LANES * r, 1.0)


@_compiled
def attend_item(a: int, s: int, scratch: int, item: int) -> int:
    """One item; returns the next one if it has claimed it already, else -1."""
    h, token, many, position, table = read_item(a, item)
    group, size = load_i64(s + shapes.GROUP), load_i64(a + BLOCK)
    rows, end = many * group, position + many
    key_cell, key_lines = load_i64(s + shapes.KEY_CELL), load_i64(s + shapes.KEY_LINES)
    value_bytes = load_i64(s + shapes.VALUE_DIM) * load_i64(s + shapes.VALUE_CELL)
    values, pitch, span = load_i64(a + VALUES) + h * size * value_bytes, load_i64(a + PITCH), size
    packs = load_i64(s + shapes.QUERY_CELL) == 2 and size % 2 != 0
    own = scratch + load_i64(s + shapes.POINTERS_AT)
    start_rows(a, s, scratch, rows, h, token)
    begin = max(0, position - load_i64(a + WINDOW) + 1)
    upcoming, count = -1, load_i64(a + ITEM_COUNT)
    whole = size % LANES == 0
    stride = (size if whole else TILE) * key_cell
    for start in range(begin // TILE * TILE, end, TILE):
        low, high = max(begin - start, 0), min(end - start, TILE)
        coming, fresh = own, 0
        chunk_addresses(a, s, own, table, h, start, low, high)
        if not whole:
            pack_keys(a, s, scratch, table, h, start, low, high)
        elif start + TILE < end:
            coming = own + COMING
            chunk_addresses(a, s, coming, table, h, start + TILE, 0, min(end - start - TILE, TILE))
        elif item + 2 * load_i64(a + THREADS) < count:
            # Claim the next item now, so that its first tile is on its way while this one is computed.
            upcoming = fetch_add(a + NEXT_ITEM, 1)
            if upcoming < count:
                coming = own + COMING
                h2, _, many2, position2, table2 = read_item(a, upcoming)
                low2 = max(0, position2 - load_i64(a + WINDOW) + 1)
                start2 = low2 // TILE * TILE
                fresh = min(position2 + many2 - start2, TILE)
                chunk_addresses(a, s, coming, table2, h2, start2, low2 - start2, fresh)
        value_start = start
        if packs:
            values, pitch, span, value_start = pack_values(a, s, scratch, table, h, start, low, high), 0, TILE, 0
        first = 0
        while first < rows:
            n = min(load_i64(s + shapes.ROWS), rows - first)
            while load_i64(s + shapes.WEIGHTED + 8 * n) == 0:
                n -= 1
            attend_rows(a, s, scratch, first, n, position, table, values, pitch, span, value_start, start, stride,
                        coming)
            coming = own
            first += n
        # A short tile could not fetch all of a longer one.
        for c in range((high + LANES - 1) // LANES, (fresh + LANES - 1) // LANES):
            here, there = load_i64(own + COMING + 8 * c), load_i64(own + COMING + 8 * (CHUNKS + c))
            for line in range(key_lines):
                fetch(here + line * stride)
            for byte in range(0, LANES * value_bytes, 64):
                fetch(there + byte)

    heads = load_i64(a + KV_HEADS) * group
    out_row = load_i64(s + shapes.VALUE_DIM) * load_i64(s + shapes.OUT_CELL)
    for r in range(rows):
        place = (token + r // group) * heads + h * group + r % group
        call(load_i64(s + shapes.FINISH),
             (scratch + load_i64(s + shapes.SUMS_AT) + 4 * load_i64(s + shapes.VALUE_DIM) * r,
              scratch + load_i64(s + shapes.DENOMINATORS_AT) + 4 * LANES * r, load_i64(a + OUT) + place * out_row))
    return upcoming


@dataclass(frozen=True, slots=True)
class Loops:
    """The two compiled functions void(address of the argument block); `keep` owns their code."""

    write: int
    attend: int
    keep: tuple[object, ...]


def build_loops() -> Loops:
    """Compiles the loops, or loads them from the disk cache where they were built before."""
    @kept_cfunc(types.void(types.int64), error_model="numpy")
    def write(a: int) -> None:
        s = load_i64(a + SHAPE)
        thread = fetch_add(a + WRITERS, 1)
        write_rows(a, s, load_i64(a + SCRATCH) + thread * load_i64(s + shapes.SCRATCH_BYTES))

    @kept_cfunc(types.void(types.int64), error_model="numpy")
    def attend(a: int) -> None:
        s = load_i64(a + SHAPE)
        scratch = load_i64(a + SCRATCH) + fetch_add(a + NEXT_THREAD, 1) * load_i64(s + shapes.SCRATCH_BYTES)
        item = fetch_add(a + NEXT_ITEM, 1)
        while item < load_i64(a + ITEM_COUNT):
            upcoming = attend_item(a, s, scratch, item)
            item = upcoming if upcoming >= 0 else fetch_add(a + NEXT_ITEM, 1)

    addresses = [made.address for made in (write, attend)]
    return Loops(addresses[0] or 0, addresses[1] or 0, (write, attend))
