"""Choosing from rows of logits, in Numba: filters by bisection instead of sorting, draws by inverse CDF.

Like `row_kernels`, whose statistics it starts from: every row is dealt with alone and in one order.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numba import prange

from pagedcli.attention.kept_code import kept_njit
from pagedcli.engine.row_kernels import BLOCK, exp_weight, sum_exp

_PASSES = 8
_WIDE = np.float32(1e4)
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


@kept_njit()
def _key(value: Any) -> Any:
    """An integer that orders as the float does."""
    bits = np.int64(np.float32(value).view(np.int32))
    return bits if bits >= 0 else bits ^ np.int64(0x7FFFFFFF)


@kept_njit()
def _from_key(key: int) -> Any:
    bits = key if key >= 0 else key ^ np.int64(0x7FFFFFFF)
    return np.int32(bits).view(np.float32)


@kept_njit(fastmath={"reassoc"})
def _mass_at_least(values: Any, weights: Any, count: int, bound: Any) -> float:
    total = 0.0
    for i in range(count):
        total += np.float64(weights[i]) if values[i] >= bound else 0.0
    return total


@kept_njit()
def _middle(low: Any, high: Any) -> Any:
    """Between two floats: halves the interval or, when that is very wide, the number of floats in it."""
    if high - low < _WIDE:
        return np.float32((np.float64(low) + np.float64(high)) * 0.5)
    return _from_key((_key(low) + _key(high)) >> 1)


@kept_njit()
def _bound(values: Any, weights: Any, count: int, wanted: float, low: Any, peak: Any, active: Any) -> Any:
    """The highest value such that entries at or above it weigh at least `wanted`; `low` if none above it does.

    Bisects without sorting: each pass is a masked sum that vectorises, and every few passes the entries still in doubt
    are gathered in `active` [2, at least count] so that later passes are short.
    """
    if low == -np.inf:
        low = peak
        for i in range(count):
            low = values[i] if -np.inf < values[i] < low else low
    if _mass_at_least(values, weights, count, peak) >= wanted:
        return peak
    high, base = peak, 0.0
    doubtful, masses = values, weights
    while True:
        for _ in range(_PASSES):
            middle = _middle(low, high)
            if not low < middle < high:
                return low
            if base + _mass_at_least(doubtful, masses, count, middle) >= wanted:
                low = middle
            else:
                high = middle
        base += _mass_at_least(doubtful, masses, count, high)
        kept = 0
        for i in range(count):
            value = doubtful[i]
            active[0, kept] = value
            active[1, kept] = masses[i]
            kept += 1 if (value >= low) & (value < high) else 0
        doubtful, masses, count = active[0], active[1], kept


@kept_njit()
def _sift(row: Any, peaks: Any, bound: Any, values: Any, ids: Any) -> int:
    """Copies entries >= bound, by rising id, skipping blocks whose maximum is below it.

    Without a branch (a mispredicted one costs more than a wasted store), so the arrays are as long as the row.
    """
    width, count = row.shape[0], 0
    for block in range(peaks.shape[0]):
        if peaks[block] >= bound:
            for i in range(block * BLOCK, min(width, (block + 1) * BLOCK)):
                values[count] = row[i]
                ids[count] = i
                count += 1 if row[i] >= bound else 0
    return count


@kept_njit()
def _keep(values: Any, ids: Any, count: int, bound: Any) -> int:
    kept = 0
    for i in range(count):
        value = values[i]
        values[kept] = value
        ids[kept] = ids[i]
        kept += 1 if value >= bound else 0
    return kept


@kept_njit()
def _likely_bound(peaks: Any, k: int) -> Any:
    """A value that at least k entries reach: the k-th largest block maximum, when there are that many blocks."""
    blocks = peaks.shape[0]
    if k > blocks:
        return np.float32(-np.inf)
    return np.sort(peaks)[blocks - k]


@kept_njit()
def _exponentials(values: Any, count: int, peak: Any, inverse: Any, weights: Any) -> None:
    for i in range(count):
        weights[i] = exp_weight((values[i] - peak) * inverse)


@kept_njit(fastmath={"reassoc"})
def _sum(weights: Any, count: int) -> float:
    total = 0.0
    for i in range(count):
        total += np.float64(weights[i])
    return total


@kept_njit()
def _weigh(values: Any, count: int, peak: Any, inverse: Any, weights: Any) -> float:
    """Fills weights with exp((value - peak) / temperature); returns their sum."""
    _exponentials(values, count, peak, inverse, weights)
    return _sum(weights, count)


@kept_njit()
def _pick(weights: Any, count: int, target: float) -> int:
    """Place of the first entry at which the running sum passes `target`."""
    running, last = 0.0, 0
    for i in range(count):
        if weights[i] > _ZERO:
            last = i
            running += np.float64(weights[i])
            if running > target:
                return i
    return last


@kept_njit()
def _draw_filtered(
    row: Any, peaks: Any, peak: Any, inverse: Any, top_k: Any, top_p: float, min_p: float, uniform: float,
    scratch: Any, ids: Any,
) -> int:
    values, weights, active = scratch[0], scratch[1], scratch[2:]
    bound = np.float32(-np.inf)
    if min_p > 0.0:
        bound = np.float32(np.float64(peak) + math.log(min_p) / np.float64(inverse))
    width = row.shape[0]
    limited = 0 < top_k < width
    if limited:
        bound = max(bound, _likely_bound(peaks, top_k))
    wanted = -1.0
    if bound == -np.inf and not limited:
        # Only top_p is left, and most of a nucleus lies near the peak: look for a depth that surely holds it.
        wanted = top_p * _weigh(row, width, peak, inverse, weights)
        for depth in (4.0, 7.0, 11.0, 16.0):
            near = np.float32(np.float64(peak) - depth / np.float64(inverse))
            if _mass_at_least(row, weights, width, near) >= wanted:
                bound = near
                break
    count = _sift(row, peaks, bound, values, ids)
    if limited and count > top_k:
        weights[:count] = _ONE
        count = _keep(values, ids, count, _bound(values, weights, count, float(top_k), bound, peak, active))
    total = _weigh(values, count, peak, inverse, weights)
    if top_p < 1.0:
        wanted = top_p * total if wanted < 0.0 else wanted
        count = _keep(values, ids, count, _bound(values, weights, count, wanted, bound, peak, active))
        total = _weigh(values, count, peak, inverse, weights)
    return ids[_pick(weights, count, uniform * total)]


@kept_njit()
def _draw_plain(row: Any, peak: Any, inverse: Any, sums: Any, uniform: float, weights: Any) -> int:
    total = 0.0
    for block in range(sums.shape[0]):
        total += sums[block]
    target = uniform * total
    running, chosen = 0.0, 0
    for block in range(sums.shape[0]):
        if sums[block] > 0.0:
            chosen = block
            if running + sums[block] > target:
                break
            running += sums[block]
    low, high = chosen * BLOCK, min(row.shape[0], (chosen + 1) * BLOCK)
    _weigh(row[low:high], high - low, peak, inverse, weights)
    return low + _pick(weights, high - low, target - running)


@kept_njit()
def _draw(row: Any, place: int, best: Any, peaks: Any, sums: Any, knobs: Any, scratch: Any, ids: Any) -> int:
    width = row.shape[0]
    peak = row[best[place]]
    inverse = np.float32(1.0 / knobs[0])
    top_k, top_p, min_p, uniform = np.int64(knobs[1]), knobs[2], knobs[3], knobs[4]
    if top_p < 1.0 or min_p > 0.0 or 0 < top_k < width:
        return _draw_filtered(row, peaks[place], peak, inverse, top_k, top_p, min_p, uniform, scratch, ids)
    parts = sums[place]
    if inverse != _ONE:
        parts = np.empty(sums.shape[1], np.float64)
        for block in range(parts.shape[0]):
            part = row[block * BLOCK:min(width, (block + 1) * BLOCK)]
            parts[block] = np.float64(sum_exp(part, peak, inverse))
    return _draw_plain(row, peak, inverse, parts, uniform, scratch[1])


@kept_njit()
def draw_rows(
    values: Any, rows: Any, stats: Any, best: Any, peaks: Any, sums: Any, knobs: Any, scratch: Any, ids: Any,
    tokens: Any,
) -> None:
    """One token a job by inverse CDF over ids in rising order.

    Job j reads row `rows[j]`, whose `row_stats` stand at place `stats[j]`. `knobs` [n, 5] float64: temperature, top_k,
    top_p, min_p, a uniform number in [0, 1). `scratch` [threads, 4, vocabulary] float32, `ids` [threads, vocabulary]
    int64. Entries that tie with the last kept one are kept.
    """
    for job in range(rows.shape[0]):
        tokens[job] = _draw(values[rows[job]], stats[job], best, peaks, sums, knobs[job], scratch[0], ids[0])


@kept_njit(parallel=True)
def draw_rows_threads(
    values: Any, rows: Any, stats: Any, best: Any, peaks: Any, sums: Any, knobs: Any, scratch: Any, ids: Any,
    tokens: Any,
) -> None:
    """`draw_rows` with jobs spread over threads."""
    for job in prange(rows.shape[0]):
        thread = numba.get_thread_id()
        tokens[job] = _draw(values[rows[job]], stats[job], best, peaks, sums, knobs[job], scratch[thread], ids[thread])


@kept_njit()
def top_entries(row: Any, peaks: Any, peak: Any, k: int, ids: Any) -> int:
    """The k largest finite entries, ties by lowest id, as ids by rising id; returns how many there are."""
    width = row.shape[0]
    values = np.empty(width, np.float32)
    places = np.empty(width, np.int64)
    least = _likely_bound(peaks, k)
    count = _sift(row, peaks, least, values, places)
    ones = np.ones(count, np.float32)
    bound = _bound(values, ones, count, float(min(k, count)), least, peak, np.empty((2, count), np.float32))
    above, lowest = 0, peak
    for i in range(count):
        if values[i] >= bound:
            lowest = min(lowest, values[i])
    for i in range(count):
        above += 1 if values[i] > lowest else 0
    spare, kept = k - above, 0
    for i in range(count):
        tie = values[i] == lowest
        if values[i] == -np.inf or values[i] < lowest or (tie and spare <= 0):
            continue
        spare -= 1 if tie else 0
        ids[kept] = places[i]
        kept += 1
    return kept
