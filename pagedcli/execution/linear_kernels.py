"""Matrix products of a decoder's layers on a CPU with 512-bit vectors, with what follows each product fused into it.

Weights are packed once into groups of 64 output columns, each a run of steps of 256 bytes: a step holds one input
element's (float32) or one pair's (bfloat16) weights for the 64 columns. A tile of up to six rows keeps its 64 sums a
row in registers from the first step to the last. So every sum has one order, whatever the batch: a row's bits depend
on nothing but the row; and a product of few rows reads each weight once, in order, which is what bounds it.

Row strides are bytes, multiples of 64 columns, so that stores need no masks.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from pagedcli.attention.cpu_intrinsics import call, fetch_add, load_i64
from pagedcli.attention.cpu_vectors import BYTES, F32, I32, I64, LANES, Emit, routine
from pagedcli.attention.host_arrays import aligned_copy, words_of
from pagedcli.attention.kept_code import kept_cfunc

COLUMNS = 64
"""Output columns of a group: four vectors, which with six rows leaves 24 sums, 4 weights and a spread input."""
VECTORS = COLUMNS // LANES
TILE_ROWS = 6
BLOCK_ROWS, BLOCK_BYTES = 96, 384 << 10
"""Rows that pass over one group of weights before the next, so that their inputs stay in the second-level cache."""
STEP_BYTES = 256
AHEAD = 2048
"""How far before use weights are asked for; a group read for the first time comes from memory."""
LOG2E = 1.4426950408889634

KINDS = ("bf16", "fp32")
EPILOGUES = ("store", "wide", "add", "gate")
"""What becomes of the sums: rounded to the weights' type and stored; stored in float32; added to the float32 that is
there; or, of 32 gates and 32 ups, silu(gate) * up rounded and stored."""

# Argument block, int64 each. The counter has its place in common with the row operations.
(ROWS, _PIECE, NEXT, X, WEIGHTS, OUT, STEPS, GROUPS, BIAS, X_STRIDE, OUT_STRIDE, OUT_GROUP, TILES,
 BLOCK) = range(14)
WORDS = 16


def lacks(dtype: str) -> str | None:
    """None when these kernels run here for the type that `dtype` names and nothing else on this processor is known to
    be faster."""
    if dtype not in KINDS:
        return f"no {dtype} products"
    features = binding.get_host_cpu_features()
    if not features.get("avx512f", False):
        return "no 512-bit vectors"
    if dtype == "bf16" and not features.get("avx512bf16", False):
        return "no bfloat16 instructions"
    if dtype == "bf16" and features.get("amx-bf16", False):
        return "matrix units (AMX), which oneDNN uses"
    return None


def block_rows(row_bytes: int) -> int:
    """Rows of a block, whole tiles, for inputs of `row_bytes` a row."""
    return max(2, min(BLOCK_ROWS, BLOCK_BYTES // row_bytes) // TILE_ROWS) * TILE_ROWS


def padded(width: int, multiple: int = COLUMNS) -> int:
    """The next multiple of a group's columns."""
    return -(-width // multiple) * multiple


def pack(weight: NDArray[Any]) -> NDArray[Any]:
    """[N, K] -> the groups' steps, N padded to a multiple of 64 by zeros. K is even in bfloat16."""
    rows, width = weight.shape
    words = words_of(np.ascontiguousarray(weight))  # whole elements are moved, whatever they are
    if padded(rows) != rows:
        words = np.concatenate([words, np.zeros((padded(rows) - rows, width), words.dtype)])
    pair = (2,) if weight.itemsize == 2 else ()
    steps = words.reshape(-1, COLUMNS, width // (2 if pair else 1), *pair)
    return aligned_copy(steps.swapaxes(1, 2)).view(weight.dtype)


def gated(gate: NDArray[Any], up: NDArray[Any]) -> NDArray[Any]:
    """Gate and up weights [N, K] in one [2 N, K], each group 32 gates and their 32 ups; N padded by zeros."""
    half = COLUMNS // 2
    rows, width = gate.shape
    extra = padded(rows, half) - rows
    parts = [np.concatenate([part, np.zeros((extra, width), part.dtype)]).reshape(-1, half, width)
             for part in (gate, up)]
    return np.stack(parts, axis=1).reshape(-1, width)


def _multiply(emit: Emit, kind: str, total: Any, given: Any, weight: Any) -> Any:
    """total + given * weight; in bfloat16 both products of a pair, by the processor's own order and rounding."""
    if kind == "fp32":
        return emit.fma(given, weight, total)
    return emit.pair_fma(given, weight, total)


def _silu(emit: Emit, gate: Any) -> Any:
    """gate / (1 + exp(-gate)), from the exponential of -|gate|, which cannot overflow."""
    b = emit.b
    one, zero = emit.splat(1.0, F32, LANES), emit.splat(0.0, F32, LANES)
    small = emit.exp2(b.fmul(emit.call("llvm.fabs.v16f32", gate), emit.splat(-LOG2E, F32, LANES)))
    top = b.select(b.fcmp_ordered("<", gate, zero), small, one)
    return b.fdiv(b.fmul(gate, top), b.fadd(one, small))


def emit_tile(emit: Emit, args: list[Any], kind: str, rows: int, epilogue: str) -> None:
    """`rows` rows times one group. args: x, its row stride, the group's weights, steps, out, its row stride, bias."""
    x, x_stride, weights, steps, out, out_stride, bias = args
    b, cell = emit.b, BYTES[kind]
    word = ir.VectorType(F32 if kind == "fp32" else I32, LANES)
    sums = [[cgutils.alloca_once_value(b, emit.splat(0.0, F32, LANES)) for _ in range(VECTORS)] for _ in range(rows)]
    lines = [b.add(x, b.mul(x_stride, emit.i64(r))) for r in range(rows)]
    with cgutils.for_range(b, steps, intp=I64) as loop:
        here = b.add(weights, b.shl(loop.index, emit.i64(8)))
        held = [emit.load(emit.at(here, 64 * n), word, align=64) for n in range(VECTORS)]
        for n in range(VECTORS):
            emit.fetch(emit.at(here, AHEAD + 64 * n))
        offset = b.shl(loop.index, emit.i64(2))
        for r in range(rows):
            given = emit.spread(emit.load(b.add(lines[r], offset), word.element), LANES)
            for n in range(VECTORS):
                b.store(_multiply(emit, kind, b.load(sums[r][n]), given, held[n]), sums[r][n])
    for r in range(rows):
        target = b.add(out, b.mul(out_stride, emit.i64(r)))
        totals = [b.fadd(b.load(sums[r][n]), emit.load(emit.at(bias, 64 * n), ir.VectorType(F32, LANES)))
                  for n in range(VECTORS)]
        if epilogue == "gate":
            half = VECTORS // 2
            totals = [b.fmul(_silu(emit, gate), up) for gate, up in zip(totals[:half], totals[half:], strict=True)]
        for n, total in enumerate(totals):
            place = emit.at(target, n * LANES * 4)
            if epilogue == "add":
                emit.store(b.fadd(total, emit.load(place, ir.VectorType(F32, LANES))), place)
            elif epilogue == "wide":
                emit.store(total, place)
            else:
                emit.narrow(kind, total, emit.at(target, n * LANES * cell))


def _fill_tiles(typing: Any, table: Any, kind: Any, epilogue: Any) -> Any:
    """Stores the addresses of one kind's tiles of 1 to TILE_ROWS rows into a table; the rest are constants."""
    fields = (kind, epilogue)
    kind_name, epilogue_name = (field.literal_value for field in fields)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emit(builder)
        for rows in range(1, TILE_ROWS + 1):
            body = partial(emit_tile, kind=kind_name, rows=rows, epilogue=epilogue_name)
            made = routine(builder.module, f"tile_{rows}", [I64] * 7, ir.VoidType(), body)
            emit.store(builder.ptrtoint(made, I64), emit.at(args[0], 8 * rows))
        return context.get_dummy_value()
    return types.void(types.int64, *fields), code


fill_tiles: Any = intrinsic(prefer_literal=True)(_fill_tiles)
"""Any: it is called from compiled code only, where its Python signature means nothing."""


@cache
def build_tiles(kind: str, epilogue: str) -> Any:
    """void(address of a table of TILE_ROWS + 1 int64): fills it with the addresses of the tiles by their rows."""
    binding.initialize_native_asmparser()  # for the instruction in Emit.pair_fma

    @kept_cfunc(types.void(types.int64), error_model="numpy")
    def fill(table: int) -> None:
        fill_tiles(table, kind, epilogue)

    return fill


@njit(error_model="numpy")
def multiply_block(a: int, group: int, first: int, last: int) -> None:
    """Rows first .. last - 1 times one group, in tiles as even as they come."""
    weights = load_i64(a + 8 * WEIGHTS) + group * load_i64(a + 8 * STEPS) * STEP_BYTES
    x_stride, out_stride = load_i64(a + 8 * X_STRIDE), load_i64(a + 8 * OUT_STRIDE)
    out = load_i64(a + 8 * OUT) + group * load_i64(a + 8 * OUT_GROUP)
    bias = load_i64(a + 8 * BIAS) + group * 4 * COLUMNS
    left = (last - first + TILE_ROWS - 1) // TILE_ROWS
    while first < last:
        rows = (last - first + left - 1) // left
        call(load_i64(load_i64(a + 8 * TILES) + 8 * rows),
             (load_i64(a + 8 * X) + first * x_stride, x_stride, weights, load_i64(a + 8 * STEPS),
              out + first * out_stride, out_stride, bias))
        first += rows
        left -= 1


@cache  # kept for good: programs hold its address
def build_product() -> Any:
    """void(address of an argument block): one thread's part of a product, groups and blocks of rows by the counter."""
    @kept_cfunc(types.void(types.int64), error_model="numpy")
    def product(a: int) -> None:
        rows, groups = load_i64(a + 8 * ROWS), load_i64(a + 8 * GROUPS)
        block = load_i64(a + 8 * BLOCK)
        items = groups * ((rows + block - 1) // block)
        item = fetch_add(a + 8 * NEXT, 1)
        while item < items:
            first = item // groups * block
            multiply_block(a, item % groups, first, min(first + block, rows))
            item = fetch_add(a + 8 * NEXT, 1)

    return product
