"""The vector routines of CPU attention as LLVM instructions (orders of sums: see cpu_vectors)."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from pagedcli.attention.cpu_vectors import (
    BYTES,
    CHUNKS,
    EXP2,
    EXP2_SHORT,
    F32,
    I32,
    I64,
    LANES,
    TILE,
    Emit,
    ValueTile,
    pairs_keys,
    value_cuts,
    value_runs,
)

VECTOR = ir.VectorType(F32, LANES)


def emit_scores(emit: Emit, args: list[Any], kind: str, dim: int, rows: int, chunks: int, dots: bool) -> None:
    """args: q (rows of `dim`; fp32 and scaled, or bf16 as they came when `dots`), addresses of the key chunks, of
    chunks that will be read next, bytes from one dim (pair) to the next, out, the scale (for `dots`)."""
    q, pointers, coming, stride, out, scale_at = args
    b, step = emit.b, 2 if pairs_keys(kind, dim) else 1
    bases = [emit.load(emit.at(pointers, 8 * c), I64) for c in range(chunks)]
    ahead = [emit.load(emit.at(coming, 8 * c), I64) for c in range(chunks)]
    sums = [[cgutils.alloca_once_value(b, emit.splat(0.0, F32, LANES)) for _ in range(chunks)] for _ in range(rows)]
    turns = dim // step
    words = ir.VectorType(I32, LANES)
    unroll = 2 if step == 1 and turns % 2 == 0 else 1
    with cgutils.for_range(b, emit.i64(turns // unroll), intp=I64) as loop:
        offset = b.mul(loop.index, b.mul(stride, emit.i64(unroll)))
        query = b.add(q, b.mul(loop.index, emit.i64((4 if dots else 4 * step) * unroll)))
        for u in range(unroll):
            place = b.add(offset, b.mul(stride, emit.i64(u)))
            if dots:
                pairs = [emit.load(b.add(base, place), words) for base in bases]
                for base in ahead:
                    emit.fetch(b.add(base, place))
                for r in range(rows):
                    given = emit.spread(emit.load(emit.at(query, 2 * r * dim), I32), LANES)
                    for c in range(chunks):
                        b.store(emit.pair_fma(given, pairs[c], b.load(sums[r][c])), sums[r][c])
                continue
            keys = [emit.split_words(b.add(base, place)) if step == 2
                    else (emit.widen(kind, b.add(base, place), LANES),) for base in bases]
            for base in ahead:
                emit.fetch(b.add(base, place))
            for part in range(step):
                for r in range(rows):
                    scalar = emit.load(emit.at(query, 4 * (r * dim + u * step + part)), F32)
                    for c in range(chunks):
                        product = emit.fma(emit.spread(scalar, LANES), keys[c][part], b.load(sums[r][c]))
                        b.store(product, sums[r][c])
    scale = emit.spread(emit.load(scale_at, F32), LANES) if dots else None
    for r in range(rows):
        for c in range(chunks):
            total = b.load(sums[r][c])
            emit.store(total if scale is None else b.fmul(total, scale), emit.at(out, 4 * (r * TILE + c * LANES)))


def emit_weights(emit: Emit, args: list[Any], capped: bool, dots: bool) -> None:
    """One row's scores of a tile become weights in place; with `dots` bf16 ones, side by side from the row's start.

    args: scores, first and last + 1 visible position in the tile, running maximum, the 16 partial denominators, where
    to put what the row's earlier sums are to be scaled by, the cap (in the units of the scores after it).
    """
    row, low, high, maximum, denominator, scaling, cap_at = args
    b = emit.b
    cap = emit.load(cap_at, F32)
    minus = emit.splat(float("-inf"), F32, LANES)
    lane = ir.Constant(ir.VectorType(I32, LANES), list(range(LANES)))
    first = b.lshr(low, emit.i64(4))
    last = b.lshr(b.add(high, emit.i64(LANES - 1)), emit.i64(4))
    least = emit.spread(b.trunc(low, I32), LANES)
    most = emit.spread(b.trunc(high, I32), LANES)
    top = cgutils.alloca_once_value(b, minus)

    def score_at(index: Any, *, seen_all: bool) -> None:
        place = b.add(row, b.mul(index, emit.i64(4 * LANES)))
        score = emit.load(place, VECTOR)
        if capped:
            score = b.fmul(emit.tanh(score), emit.spread(cap, LANES))
        if not seen_all:
            at = b.add(emit.spread(b.trunc(b.mul(index, emit.i64(LANES)), I32), LANES), lane)
            seen = b.and_(b.icmp_signed(">=", at, least), b.icmp_signed("<", at, most))
            score = b.select(seen, score, minus)
        if capped or not seen_all:
            emit.store(score, place)
        b.store(emit.call("llvm.maxnum.v16f32", b.load(top), score), top)

    whole = b.and_(b.icmp_signed("==", low, emit.i64(0)), b.icmp_signed("==", high, emit.i64(TILE)))
    with b.if_else(whole) as (all_seen, some_seen):
        with all_seen, cgutils.for_range(b, emit.i64(CHUNKS), intp=I64) as loop:
            score_at(loop.index, seen_all=True)
        with some_seen, cgutils.for_range_slice(b, first, last, emit.i64(1), I64) as (index, _):
            score_at(index, seen_all=False)
    before = emit.load(maximum, F32)
    peak = emit.call("llvm.vector.reduce.fmax.v16f32", b.load(top), out=F32)
    after = emit.call("llvm.maxnum.f32", before, peak)
    emit.store(after, maximum)
    level = emit.spread(after, LANES)
    scale = b.extract_element(emit.exp2(emit.spread(b.fsub(before, after), LANES)), ir.Constant(I32, 0))
    total = cgutils.alloca_once_value(b, b.fmul(emit.load(denominator, VECTOR), emit.spread(scale, LANES)))
    with cgutils.for_range_slice(b, first, last, emit.i64(1), I64) as (index, _):
        place = b.add(row, b.mul(index, emit.i64(4 * LANES)))
        weight = emit.exp2(b.fsub(emit.load(place, VECTOR), level), EXP2_SHORT if dots else EXP2)
        if dots:  # what is summed is what the values are multiplied by
            short, weight = emit.to_pairs(weight)
            emit.store(short, b.add(row, b.mul(index, emit.i64(2 * LANES))))
        else:
            emit.store(weight, place)
        b.store(b.fadd(b.load(total), weight), total)
    emit.store(b.load(total), denominator)
    emit.store(scale, scaling)


def emit_weighted(emit: Emit, args: list[Any], kind: str, dim: int, rows: int, budget: int) -> None:
    """sums = sums * scale + weights . values over positions low .. high - 1, for `rows` rows.

    args: sums (fp32 rows of `dim`, vectors in load order), weights, scales, block table (int32), address of this
    head's values in block 0, bytes of a block, block size, position of the tile, low, high (both within the tile),
    addresses of chunks of values that will be read next.
    Only these positions are ever read.
    """
    sums, weights, scales, table, base, pitch, size, start, low, high, coming = args
    tile = ValueTile(table, base, pitch, size, start, coming)
    b, cell = emit.b, BYTES[kind]
    pieces: list[tuple[int, int]] = []
    offset = 0
    for width in value_cuts(kind, dim):
        pieces.append((offset, width))
        offset += width
    budget_vectors = max(2 if kind == "bf16" else 1, budget // rows)
    groups: list[list[tuple[int, int]]] = [[]]
    for piece in pieces:
        held = sum(-(-w // LANES) for _, w in groups[-1])
        if held and held + -(-piece[1] // LANES) > budget_vectors:
            groups.append([])
        groups[-1].append(piece)
    for group in groups:
        cuts = [(o + part * LANES, min(w, LANES)) for o, w in group for part in range(-(-w // LANES))]
        held_sums = []
        for r in range(rows):
            scale = emit.load(emit.at(scales, 4 * r), F32)
            held_sums.append([cgutils.alloca_once_value(b, b.fmul(
                emit.load(emit.at(sums, 4 * (r * dim + o)), ir.VectorType(F32, w)), emit.spread(scale, w)))
                for o, w in cuts])
        with (value_runs(emit, tile, low, high, dim * cell) as (begin, stop, address, ahead),
              cgutils.for_range_slice(b, begin, stop, emit.i64(1), I64) as (slot, _)):
            value = b.add(address, b.mul(b.sub(slot, begin), emit.i64(dim * cell)))
            loaded: list[Any] = []
            for o, w in group:
                if w > LANES:
                    loaded.extend(emit.split_words(emit.at(value, o * cell)))
                else:
                    loaded.append(emit.widen(kind, emit.at(value, o * cell), w))
            for line in range(group[0][0] * cell, (group[-1][0] + group[-1][1]) * cell, 64):
                emit.fetch(b.add(ahead, b.add(emit.i64(line), b.mul(
                    b.and_(slot, emit.i64(LANES - 1)), emit.i64(dim * cell)))))
            weight = b.add(weights, b.mul(slot, emit.i64(4)))
            for r in range(rows):
                scalar = emit.load(emit.at(weight, 4 * r * TILE), F32)
                for part, piece in enumerate(loaded):
                    total = emit.fma(emit.spread(scalar, piece.type.count), piece, b.load(held_sums[r][part]))
                    b.store(total, held_sums[r][part])
        for r in range(rows):
            for (o, _), slot_sum in zip(cuts, held_sums[r], strict=True):
                emit.store(b.load(slot_sum), emit.at(sums, 4 * (r * dim + o)))


def emit_finish(emit: Emit, args: list[Any], kind: str, dim: int, out_kind: str) -> None:
    """Sums over denominator, back in natural order, rounded to the output type. args: sums, denominators, out.

    A row that saw no key has denominator 0 and comes out as zeros.
    """
    sums, denominators, out = args
    b, cell = emit.b, BYTES[out_kind]
    part, width = emit.load(denominators, VECTOR), LANES
    while width > 1:
        width //= 2
        halves = [b.shuffle_vector(part, ir.Constant(part.type, ir.Undefined), ir.Constant(
            ir.VectorType(I32, width), list(range(first, first + width)))) for first in (0, width)]
        part = b.fadd(halves[0], halves[1])
    total = b.extract_element(part, ir.Constant(I32, 0))
    none = b.fcmp_ordered("==", total, ir.Constant(F32, 0.0))
    share = b.select(none, ir.Constant(F32, 0.0), b.fdiv(ir.Constant(F32, 1.0), total))
    offset = 0
    for width in value_cuts(kind, dim):
        lanes = min(width, LANES)
        vectors = [b.fmul(emit.load(emit.at(sums, 4 * (offset + n)), ir.VectorType(F32, lanes)),
                          emit.spread(share, lanes)) for n in range(0, width, LANES)]
        if len(vectors) == 2:
            order = [lane for n in range(LANES) for lane in (n, LANES + n)]
            vectors = [b.shuffle_vector(vectors[0], vectors[1], ir.Constant(ir.VectorType(I32, LANES), half))
                       for half in (order[:LANES], order[LANES:])]
        for n, vector in enumerate(vectors):
            emit.narrow(out_kind, vector, emit.at(out, cell * (offset + n * LANES)))
        offset += width


def emit_convert(emit: Emit, args: list[Any], source: str, target: str, dim: int) -> None:
    """One row of `dim` elements from one type to another, times a factor. args: from, to, the factor."""
    here, there, factor_at = args
    factor = emit.load(factor_at, F32)
    offset = 0
    for width in value_cuts("fp32", dim):
        wide = emit.widen(source, emit.at(here, BYTES[source] * offset), width)
        emit.narrow(target, emit.b.fmul(wide, emit.spread(factor, width)), emit.at(there, BYTES[target] * offset))
        offset += width


def emit_move(emit: Emit, args: list[Any], width: int, count: int) -> None:
    """`count` cells of `width` bytes, one by one. args: from, to, bytes between cells there and here."""
    here, there, here_step, there_step = args
    kind = ir.IntType(8 * width) if width <= 8 else ir.VectorType(ir.IntType(8), width)
    with cgutils.for_range(emit.b, emit.i64(count), intp=I64) as loop:
        cell = emit.load(emit.b.add(here, emit.b.mul(loop.index, here_step)), kind)
        emit.store(cell, emit.b.add(there, emit.b.mul(loop.index, there_step)))
