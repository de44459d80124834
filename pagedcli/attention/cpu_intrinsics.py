"""The vector routines as Numba intrinsics: what the compiled loops call. All addresses are int64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from pagedcli.attention.cpu_routines import (
    emit_convert,
    emit_finish,
    emit_scatter,
    emit_scores,
    emit_weighted,
    emit_weights,
)
from pagedcli.attention.cpu_vectors import F32, I32, I64, Emit, chunk_counts, routine, row_counts

VOID = ir.VoidType()


def _intrinsic(function: Callable[..., Any]) -> Any:
    """An intrinsic whose constant arguments arrive as literals. Any: it is called from compiled code only."""
    return intrinsic(prefer_literal=True)(function)


def _value(literal: Any) -> Any:
    return literal.literal_value


def _call(context: Any, builder: ir.IRBuilder, name: str, values: list[Any], result: ir.Type,
          body: Callable[[Emit, list[Any]], Any]) -> Any:
    made = routine(builder.module, name, [v.type for v in values], result, body)
    return builder.call(made, values)


def _choose(builder: ir.IRBuilder, number: Any, cases: list[int], emit_case: Callable[[int], None]) -> None:
    """Run the code of the case that equals `number`."""
    after = builder.append_basic_block("after")
    never = builder.append_basic_block("never")
    switch = builder.switch(number, never)
    for case in cases:
        block = builder.append_basic_block(f"case{case}")
        switch.add_case(ir.Constant(I64, case), block)
        builder.position_at_end(block)
        emit_case(case)
        builder.branch(after)
    builder.position_at_end(never)
    builder.branch(after)
    builder.position_at_end(after)


@_intrinsic
def scores(typing: Any, kind: Any, dim: Any, group: Any, budget: Any, rows: Any, chunks: Any,
           q: Any, pointers: Any, coming: Any, stride: Any, out: Any) -> Any:
    """Dot products of `rows` query rows with the keys of `chunks` chunks; see emit_scores."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def with_rows(count: int) -> None:
            def with_chunks(width: int) -> None:
                _call(context, builder, f"scores_{_value(kind)}_{_value(dim)}_{count}_{width}", list(args[6:]), VOID,
                      lambda e, a: emit_scores(e, a, _value(kind), _value(dim), count, width))
            _choose(builder, args[5], chunk_counts(count, _value(budget)), with_chunks)
        _choose(builder, args[4], row_counts(_value(group), _value(budget)), with_rows)
        return context.get_dummy_value()
    whole = [types.int64] * 7
    return types.void(kind, dim, group, budget, *whole), code


@_intrinsic
def weights(typing: Any, capped: Any, row: Any, low: Any, high: Any, maximum: Any, denominator: Any,
            cap: Any) -> Any:
    """Softmax step of one row over one tile; see emit_weights."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(context, builder, f"weights_{_value(capped)}", list(args[1:]), F32,
                     lambda e, a: emit_weights(e, a, bool(_value(capped))))
    return types.float32(capped, *[types.int64] * 5, types.float32), code


@_intrinsic
def weighted(typing: Any, kind: Any, dim: Any, group: Any, budget: Any, rows: Any, sums: Any, weight: Any,
             scales: Any, table: Any, base: Any, pitch: Any, size: Any, start: Any, low: Any, high: Any,
             coming: Any) -> Any:
    """Weighted sums of values for `rows` rows; see emit_weighted."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def with_rows(count: int) -> None:
            _call(context, builder, f"weighted_{_value(kind)}_{_value(dim)}_{count}", list(args[5:]), VOID,
                  lambda e, a: emit_weighted(e, a, _value(kind), _value(dim), count, _value(budget)))
        _choose(builder, args[4], row_counts(_value(group), _value(budget)), with_rows)
        return context.get_dummy_value()
    return types.void(kind, dim, group, budget, *[types.int64] * 12), code


@_intrinsic
def finish(typing: Any, kind: Any, dim: Any, out_kind: Any, sums: Any, denominators: Any, out: Any) -> Any:
    """One row's output; see emit_finish."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(context, builder, "finish", list(args[3:]), VOID,
              lambda e, a: emit_finish(e, a, _value(kind), _value(dim), _value(out_kind)))
        return context.get_dummy_value()
    return types.void(kind, dim, out_kind, *[types.int64] * 3), code


@_intrinsic
def convert(typing: Any, source: Any, target: Any, dim: Any, here: Any, there: Any, factor: Any) -> Any:
    """One row between types; see emit_convert."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(context, builder, f"convert_{_value(source)}_{_value(target)}_{_value(dim)}", list(args[3:]), VOID,
              lambda e, a: emit_convert(e, a, _value(source), _value(target), _value(dim)))
        return context.get_dummy_value()
    return types.void(source, target, dim, types.int64, types.int64, types.float32), code


@_intrinsic
def scatter(typing: Any, width: Any, count: Any, here: Any, there: Any, stride: Any) -> Any:
    """Cells to places a stride apart; see emit_scatter."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(context, builder, f"scatter_{_value(width)}_{_value(count)}", list(args[2:]), VOID,
              lambda e, a: emit_scatter(e, a, _value(width), _value(count)))
        return context.get_dummy_value()
    return types.void(width, count, *[types.int64] * 3), code


@_intrinsic
def move(typing: Any, width: Any, here: Any, there: Any) -> Any:
    """Copy one cell of `width` bytes."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emit(builder)
        emit.store(emit.load(args[1], ir.IntType(8 * _value(width))), args[2])
        return context.get_dummy_value()
    return types.void(width, types.int64, types.int64), code


@_intrinsic
def load_i64(typing: Any, address: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return Emit(builder).load(args[0], I64)
    return types.int64(types.int64), code


@_intrinsic
def load_i32(typing: Any, address: Any) -> Any:
    """The int32 at `address`, as int64."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(Emit(builder).load(args[0], I32), I64)
    return types.int64(types.int64), code


@_intrinsic
def load_f32(typing: Any, address: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return Emit(builder).load(args[0], F32)
    return types.float32(types.int64), code


@_intrinsic
def store_i64(typing: Any, address: Any, value: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        Emit(builder).store(args[1], args[0])
        return context.get_dummy_value()
    return types.void(types.int64, types.int64), code


@_intrinsic
def store_f32(typing: Any, address: Any, value: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        Emit(builder).store(args[1], args[0])
        return context.get_dummy_value()
    return types.void(types.int64, types.float32), code


@_intrinsic
def fetch_add(typing: Any, address: Any, value: Any) -> Any:
    """Atomic: adds to the int64 at `address`, returns what was there before."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", Emit(builder).pointer(args[0], I64), args[1], "seq_cst")
    return types.int64(types.int64, types.int64), code


@_intrinsic
def read_shared(typing: Any, address: Any) -> Any:
    """Atomic read of an int64 that other threads add to; what they stored before adding is visible after it."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(Emit(builder).pointer(args[0], I64), "acquire", 8, typ=I64)
    return types.int64(types.int64), code


@_intrinsic
def fetch(typing: Any, address: Any) -> Any:
    """Ask for the cache line at `address`."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        Emit(builder).fetch(args[0])
        return context.get_dummy_value()
    return types.void(types.int64), code
