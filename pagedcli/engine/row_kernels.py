"""Passes over rows of logits, in Numba. Every row is dealt with alone and in one order, so its bits cannot depend on
how many rows there are, on their order, or on the number of threads.

Rows are float32, C-contiguous, [rows, vocabulary]. A row is cut into blocks of `BLOCK` entries; sums are float32 within
a block and float64 across blocks.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import carray, types

from pagedcli.attention.cpu_intrinsics import as_pointer, fetch_add, load_i64
from pagedcli.attention.kept_code import kept_cfunc, kept_njit

BLOCK = 256
LOWEST = np.float32(-87.0)
"""Below this exponent a weight counts as zero: exp(-87) is the last normal float32 but one power of two."""

THREAD_ENTRIES, TEAM_ENTRIES = 1 << 23, 1 << 19
"""Entries below which one thread is faster: waking Numba's threads costs more, the more so on a machine that is busy;
torch's own, which have computed the rows where it is in use, are still awake."""

GOOD, NOT_A_NUMBER, NO_MASS = 0, 1, 2
"""What `row_stats` says of a row: fit to use; holds NaN or +inf; has no finite entry."""

_INV_LN2 = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_C2, _C3, _C4 = np.float32(1 / 2), np.float32(1 / 6), np.float32(1 / 24)
_C5, _C6, _C7 = np.float32(1 / 120), np.float32(1 / 720), np.float32(1 / 5040)
_SIGN_SHIFT, _MAGNITUDE, _INFINITY = np.int32(31), np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_HALF, _ONE, _ZERO = np.float32(0.5), np.float32(1.0), np.float32(0.0)


# Numba has no vector exp without Intel's SVML, and calling libm for each of 49k entries would cost more than all else.
# Range reduction to |r| <= ln(2)/2 and a degree 7 Taylor sum keep the error near one unit in the last place; "contract"
# lets each of its steps be one fused multiply-add.
@kept_njit(fastmath={"contract"})
def exp_weight(x: Any) -> Any:
    clamped = x if x > LOWEST else LOWEST
    power = np.float32(np.floor(clamped * _INV_LN2 + _HALF))
    r = (clamped - power * _LN2_HIGH) - power * _LN2_LOW
    series = _C6 + r * _C7
    series = _C5 + r * series
    series = _C4 + r * series
    series = _C3 + r * series
    series = _C2 + r * series
    series = _ONE + r * (_ONE + r * series)
    scale = np.int32((np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32)
    return _ZERO if x < LOWEST else series * scale


# A maximum of floats does not vectorise (NaN and signed zeros have no order); one of order-preserving integers does.
@kept_njit()
def _look(bits: Any) -> Any:
    """The largest of some floats given as their bits, and how many of them are no number."""
    best, odd = np.int32(-2147483648), np.int32(0)
    for i in range(bits.shape[0]):
        word = bits[i]
        best = max(best, np.int32(word ^ ((word >> _SIGN_SHIFT) & _MAGNITUDE)))
        odd += np.int32(np.int32(word & _MAGNITUDE) > _INFINITY)
    return np.int32(best ^ ((best >> _SIGN_SHIFT) & _MAGNITUDE)).view(np.float32), odd


# "reassoc" gives the sum as many lanes as a vector register has: another order, but the same one for every row.
@kept_njit(fastmath={"reassoc", "contract"})
def sum_exp(part: Any, peak: Any, inverse: Any) -> Any:
    total = _ZERO
    for i in range(part.shape[0]):
        total += exp_weight((part[i] - peak) * inverse)
    return total


# Each block is looked at and summed while it is in the first-level cache, relative to its own largest entry; its sum is
# brought to the row's afterwards. So a row that comes from memory is read once, behind the arithmetic.
@kept_njit()
def _row_stats(row: Any, job: int, status: Any, best: Any, peaks: Any, sums: Any, log_sum: Any) -> None:
    width, blocks, odd = row.shape[0], peaks.shape[1], 0
    for block in range(blocks):
        part = row[block * BLOCK:min(width, (block + 1) * BLOCK)]
        peaks[job, block], found = _look(part.view(np.int32))
        odd += found
        sums[job, block] = np.float64(sum_exp(part, peaks[job, block], _ONE))
    peak, _ = _look(peaks[job].view(np.int32))
    best[job] = -1
    if odd > 0 or peak == np.inf:
        status[job] = NOT_A_NUMBER
    elif peak == -np.inf:
        status[job] = NO_MASS
    else:
        status[job] = GOOD
        total = 0.0
        for block in range(blocks):
            if best[job] < 0 and peaks[job, block] == peak:
                for i in range(block * BLOCK, min(width, (block + 1) * BLOCK)):
                    if best[job] < 0 and row[i] == peak:
                        best[job] = i
            below = np.float32(peaks[job, block] - peak)
            sums[job, block] = sums[job, block] * math.exp(below) if below >= LOWEST else 0.0
            total += sums[job, block]
        log_sum[job] = np.float64(peak) + math.log(total)


@kept_njit()
def row_stats(values: Any, rows: Any, status: Any, best: Any, peaks: Any, sums: Any, log_sum: Any) -> None:
    """For each of `rows`: the first index of its maximum, block maxima, block sums of exp(x - max), and logsumexp.

    Out: status [n] int64, best [n] int64, peaks [n, blocks] float32, sums [n, blocks] float64, log_sum [n] float64.
    """
    for job in range(rows.shape[0]):
        _row_stats(values[rows[job]], job, status, best, peaks, sums, log_sum)


@cache  # kept for good: a team may hold its address
def row_stats_part() -> Any:
    """void(address of a block of int64): one thread's part of `row_stats`, rows taken off a counter.

    The block: jobs, entries a row, blocks a row, addresses of values, rows, status, best, peaks, sums, log_sum; the
    counter, 0, stands at place 16.
    """
    @kept_cfunc(types.void(types.int64))
    def part(a: int) -> None:
        jobs, width, blocks = load_i64(a), load_i64(a + 8), load_i64(a + 16)
        rows = carray(as_pointer(load_i64(a + 32)), (jobs,), np.int64)
        status = carray(as_pointer(load_i64(a + 40)), (jobs,), np.int64)
        best = carray(as_pointer(load_i64(a + 48)), (jobs,), np.int64)
        peaks = carray(as_pointer(load_i64(a + 56)), (jobs, blocks), np.float32)
        sums = carray(as_pointer(load_i64(a + 64)), (jobs, blocks), np.float64)
        log_sum = carray(as_pointer(load_i64(a + 72)), (jobs,), np.float64)
        job = fetch_add(a + 128, 1)
        while job < jobs:
            row = carray(as_pointer(load_i64(a + 24) + 4 * width * rows[job]), (width,), np.float32)
            _row_stats(row, job, status, best, peaks, sums, log_sum)
            job = fetch_add(a + 128, 1)

    return part
