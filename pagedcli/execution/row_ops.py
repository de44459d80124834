"""The small work between a decoder's matrix products, fused and compiled: norms, rotary positions, gated activation.

Every function treats each row alone and in one order, so a row's bits do not depend on the batch. Rows are float32, or
bfloat16 seen as uint16; arithmetic is float32 throughout and each result is rounded once.
Work is shared out over threads in pieces of rows by a counter, on the attention kernels' team of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import overload

from pagedcli.attention.cpu_intrinsics import as_pointer, compiled_intrinsic, fetch_add, load_i64
from pagedcli.attention.kept_code import kept_cfunc, kept_njit

_LN2_INV = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_TERMS = tuple(np.float32(1 / f) for f in (5040, 720, 120, 24, 6, 2))
_ONE = np.float32(1.0)
_HALF = np.float32(0.5)
_EDGE = np.float32(87.0)

ROWS, PIECE, NEXT = 0, 1, 2
"""Places in the argument block (int64 each): rows to do, rows a piece, the counter. The rest is each function's own."""
WORDS = 16


def _widen(x: Any) -> Any:
    """float32 of an element (a bfloat16's bits, or a float32 as it is)."""
    return x


def _narrow(x: Any, like: Any) -> Any:
    """An element of `like`'s array from a float32, rounded to nearest even."""
    del like
    return x


@overload(_widen)
def _widen_overload(x: Any) -> Any:
    def from_bits(x: Any) -> Any:
        return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)

    def as_it_is(x: Any) -> Any:
        return x

    return from_bits if x == types.uint16 else as_it_is


@overload(_narrow)
def _narrow_overload(x: Any, like: Any) -> Any:
    def to_bits(x: Any, like: Any) -> Any:
        bits = np.float32(x).view(np.uint32)
        even = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        return np.uint16(0x7FC0) if x != x else np.uint16(even >> np.uint32(16))

    def as_it_is(x: Any, like: Any) -> Any:
        return x

    return to_bits if like.dtype == types.uint16 else as_it_is


@kept_njit()
def _exp(x: Any) -> Any:
    power = np.float32(np.floor(x * _LN2_INV + _HALF))
    r = (x - power * _LN2_HIGH) - power * _LN2_LOW
    series = _TERMS[1] + r * _TERMS[0]
    series = _TERMS[2] + r * series
    series = _TERMS[3] + r * series
    series = _TERMS[4] + r * series
    series = _TERMS[5] + r * series
    series = _ONE + r * (_ONE + r * series)
    return series * np.int32((np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32)


# "reassoc" lets the sum use the lanes of a vector; the order is that of the compiled loop, the same for every row.
@kept_njit(fastmath={"reassoc", "contract"})
def _square_sum(row: Any) -> Any:
    total = np.float32(0)
    for i in range(row.shape[0]):
        x = _widen(row[i])
        total += x * x
    return total


@kept_njit()
def _scale_row(row: Any, weight: Any, eps: Any, out: Any) -> None:
    factor = _ONE / np.sqrt(_square_sum(row) / np.float32(row.shape[0]) + eps)
    for i in range(row.shape[0]):
        out[i] = _narrow(_widen(row[i]) * factor * _widen(weight[i]), out)


@kept_njit()
def norm_row(row: int, residual: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    """residual[row] += delta[row] (when there is one); out[row] = its root-mean-square norm times weight."""
    line = residual[row, :weight.shape[0]]
    if delta.shape[0]:
        extra = delta[row]
        for i in range(line.shape[0]):
            line[i] = _narrow(_widen(line[i]) + _widen(extra[i]), line)
    _scale_row(line, weight, eps, out[row])


@kept_njit()
def rope_row(row: int, qkv: Any, heads: int, dim: int, position: int, table: Any, weights: Any, eps: Any,
             queries: int) -> None:
    """Norm (when `weights` [2, dim] are given) and turn the first `heads` heads of qkv[row]; queries come first."""
    line = qkv[row]
    half = dim // 2
    for head in range(heads):
        part = line[head * dim:(head + 1) * dim]
        if weights.shape[0]:
            _scale_row(part, weights[0 if head < queries else 1], eps, part)
        for i in range(half):
            a, b = _widen(part[i]), _widen(part[i + half])
            c, s = table[position, i], table[position, half + i]
            part[i] = _narrow(a * c - b * s, part)
            part[i + half] = _narrow(b * c + a * s, part)


@kept_njit(error_model="numpy")
def silu_row(row: int, gate_up: Any, out: Any) -> None:
    """out[row] = silu(gate) * up, where gate_up[row] holds both halves."""
    line, target = gate_up[row], out[row]
    width = target.shape[0]
    for i in range(width):
        gate = _widen(line[i])
        bounded = -gate if gate > -_EDGE else _EDGE
        bounded = bounded if bounded > -_EDGE else -_EDGE
        target[i] = _narrow(gate / (_ONE + _exp(bounded)) * _widen(line[width + i]), target)


def _argument(base: Any, place: int) -> Any:
    """int64 number `place` of the argument block at address `base`."""
    return load_i64(base + 8 * place)


_arg = kept_njit()(_argument)


@compiled_intrinsic
def _address(typing: Any, pointer: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], ir.IntType(64))
    return types.int64(types.voidptr), code


def build_norm(element: Any, stream: Any = None) -> Any:
    """void(block): 3 residual, 4 delta or 0 (its rows are `width` apart), 5 weight, 6 out, 7 width, 8 eps as float
    bits, 9 and 10 elements from row to row of residual and out. `stream`: the residual's type, by default `element`."""
    stream = element if stream is None else stream

    def work(block: Any) -> None:
        base = _address(block)
        rows, piece, width = _arg(base, ROWS), _arg(base, PIECE), _arg(base, 7)
        residual = carray(as_pointer(_arg(base, 3)), (rows, _arg(base, 9)), stream)
        given = rows if _arg(base, 4) else 0
        delta = carray(as_pointer(_arg(base, 4)), (given, width), element)
        weight = carray(as_pointer(_arg(base, 5)), (width,), element)
        out = carray(as_pointer(_arg(base, 6)), (rows, _arg(base, 10)), element)
        eps = np.int32(_arg(base, 8)).view(np.float32)
        first = fetch_add(base + 8 * NEXT, piece)
        while first < rows:
            for row in range(first, min(first + piece, rows)):
                norm_row(row, residual, delta, weight, eps, out)
            first = fetch_add(base + 8 * NEXT, piece)
    return kept_cfunc(types.void(types.voidptr))(work)


def build_rope(element: Any) -> Any:
    """void(block): 3 qkv, 4 positions, 5 table, 6 norm weights or 0, 7 row width, 8 eps bits, 9 heads to turn,
    10 head dim, 11 query heads, 12 positions in the table."""
    def work(block: Any) -> None:
        base = _address(block)
        rows, piece, dim = _arg(base, ROWS), _arg(base, PIECE), _arg(base, 10)
        qkv = carray(as_pointer(_arg(base, 3)), (rows, _arg(base, 7)), element)
        positions = carray(as_pointer(_arg(base, 4)), (rows,), np.int64)
        table = carray(as_pointer(_arg(base, 5)), (_arg(base, 12), dim), np.float32)
        given = 2 if _arg(base, 6) else 0
        weights = carray(as_pointer(_arg(base, 6)), (given, dim), element)
        eps = np.int32(_arg(base, 8)).view(np.float32)
        first = fetch_add(base + 8 * NEXT, piece)
        while first < rows:
            for row in range(first, min(first + piece, rows)):
                rope_row(row, qkv, _arg(base, 9), dim, positions[row], table, weights, eps, _arg(base, 11))
            first = fetch_add(base + 8 * NEXT, piece)
    return kept_cfunc(types.void(types.voidptr))(work)


def build_silu(element: Any) -> Any:
    """void(block): 3 gate and up side by side, 4 out, 5 width of out."""
    def work(block: Any) -> None:
        base = _address(block)
        rows, piece, width = _arg(base, ROWS), _arg(base, PIECE), _arg(base, 5)
        gate_up = carray(as_pointer(_arg(base, 3)), (rows, 2 * width), element)
        out = carray(as_pointer(_arg(base, 4)), (rows, width), element)
        first = fetch_add(base + 8 * NEXT, piece)
        while first < rows:
            for row in range(first, min(first + piece, rows)):
                silu_row(row, gate_up, out)
            first = fetch_add(base + 8 * NEXT, piece)
    return kept_cfunc(types.void(types.voidptr))(work)


def build_take(element: Any, stream: Any = None) -> Any:
    """void(block): 3 places (int64 a row), 4 table, 5 out, 6 width, 7 and 8 elements from row to row of table and out:
    out[row] = table[places[row]]. `stream`: type of out, by default `element`."""
    stream = element if stream is None else stream
    cell = np.dtype(element).itemsize

    def work(block: Any) -> None:
        base = _address(block)
        rows, piece, width = _arg(base, ROWS), _arg(base, PIECE), _arg(base, 6)
        places = carray(as_pointer(_arg(base, 3)), (rows,), np.int64)
        out = carray(as_pointer(_arg(base, 5)), (rows, _arg(base, 8)), stream)
        first = fetch_add(base + 8 * NEXT, piece)
        while first < rows:
            for row in range(first, min(first + piece, rows)):
                start = _arg(base, 4) + places[row] * _arg(base, 7) * cell
                line = carray(as_pointer(start), (width,), element)
                for i in range(width):
                    out[row, i] = _narrow(_widen(line[i]), out)
            first = fetch_add(base + 8 * NEXT, piece)
    return kept_cfunc(types.void(types.voidptr))(work)


def build_unpack(element: Any) -> Any:
    """void(block): 3 places (int64 a row), 4 a packed product's weights (see linear_kernels.pack), 5 out, float32,
    6 width, 7 columns of a group, 8 elements from row to row of out: out[row] = the weights of column places[row]."""
    cells = 4 // np.dtype(element).itemsize

    def work(block: Any) -> None:
        base = _address(block)
        rows, piece, width, columns = _arg(base, ROWS), _arg(base, PIECE), _arg(base, 6), _arg(base, 7)
        places = carray(as_pointer(_arg(base, 3)), (rows,), np.int64)
        out = carray(as_pointer(_arg(base, 5)), (rows, _arg(base, 8)), np.float32)
        steps = width // cells
        first = fetch_add(base + 8 * NEXT, piece)
        while first < rows:
            for row in range(first, min(first + piece, rows)):
                group, column = places[row] // columns, places[row] % columns
                start = _arg(base, 4) + (group * steps * columns + column) * 4
                line = carray(as_pointer(start), ((steps - 1) * columns + 1, cells), element)
                for step in range(steps):
                    for cell in range(cells):
                        out[row, step * cells + cell] = _widen(line[step * columns, cell])
            first = fetch_add(base + 8 * NEXT, piece)
    return kept_cfunc(types.void(types.voidptr))(work)


BUILDERS: dict[str, Callable[[Any], Any]] = {"norm": build_norm, "rope": build_rope, "silu": build_silu,
                                                  "take": build_take, "unpack to stream": build_unpack,
                                                  "norm of stream": partial(build_norm, stream=np.float32),
                                                  "take to stream": partial(build_take, stream=np.float32)}
