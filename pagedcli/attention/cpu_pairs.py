"""Weighted sums of values by bfloat16 pair products: two slots of a value tile [slot / 2, dim, 2] at a time."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from pagedcli.attention.cpu_vectors import F32, I32, I64, LANES, TILE, Emit, ValueTile, value_cuts, value_runs


def emit_weighted(emit: Emit, args: list[Any], dim: int, rows: int, budget: int) -> None:
    """sums = sums * scale + weights . values over positions low .. high - 1, for `rows` rows.

    args: sums (fp32 rows of `dim`), weights (bf16, a row every 4 * TILE bytes), scales, block table (int32), address of
    this head's values in block 0, bytes of a block, block size (even), position of the tile, low, high (both within the
    tile), addresses of chunks of values that will be read next.
    A pair of which only one slot is within the span is masked, since the other may hold anything. A sum's order is that
    of the pairs, wherever a span is cut between two.
    """
    sums, weights, scales, table, base, pitch, size, start, low, high, coming = args
    tile = ValueTile(table, base, pitch, size, start, coming)
    b = emit.b
    cuts: list[tuple[int, int]] = []
    offset = 0
    for width in value_cuts("fp32", dim):
        cuts.append((offset, width))
        offset += width
    many = max(1, budget // rows)
    for group in (cuts[first:first + many] for first in range(0, len(cuts), many)):
        held = []
        for r in range(rows):
            scale = emit.load(emit.at(scales, 4 * r), F32)
            held.append([cgutils.alloca_once_value(b, b.fmul(
                emit.load(emit.at(sums, 4 * (r * dim + o)), ir.VectorType(F32, w)), emit.spread(scale, w)))
                for o, w in group])
        with (value_runs(emit, tile, b.and_(low, emit.i64(-2)), high, dim * 2) as (begin, stop, address, ahead),
              cgutils.for_range_slice(b, begin, stop, emit.i64(2), I64) as (slot, _)):
            value = b.add(address, b.mul(b.sub(slot, begin), emit.i64(dim * 2)))
            first = b.select(b.icmp_signed(">=", slot, low), ir.Constant(I32, 0xFFFF), ir.Constant(I32, 0))
            second = b.select(b.icmp_signed("<", emit.at(slot, 1), high), ir.Constant(I32, 0xFFFF0000),
                              ir.Constant(I32, 0))
            seen = b.or_(first, second)
            pairs = [b.and_(emit.load(emit.at(value, 4 * o), ir.VectorType(I32, w)), emit.spread(seen, w))
                     for o, w in group]
            for line in range(group[0][0] * 4, (group[-1][0] + group[-1][1]) * 4, 64):
                emit.fetch(b.add(ahead, b.add(emit.i64(line), b.mul(b.and_(slot, emit.i64(LANES - 1)),
                                                                    emit.i64(dim * 2)))))
            weight = b.add(weights, b.mul(slot, emit.i64(2)))
            for r in range(rows):
                word = emit.load(emit.at(weight, 4 * r * TILE), I32)
                for part, pair in enumerate(pairs):
                    total = emit.pair_fma(emit.spread(word, pair.type.count), pair, b.load(held[r][part]))
                    b.store(total, held[r][part])
        for r in range(rows):
            for (o, _), total in zip(group, held[r], strict=True):
                emit.store(b.load(total), emit.at(sums, 4 * (r * dim + o)))
