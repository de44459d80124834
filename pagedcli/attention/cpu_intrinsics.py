"""What the compiled loops of CPU attention say to the machine: loads, stores, atomics, calls by address.

All addresses are int64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from pagedcli.attention.cpu_vectors import F32, I32, I64, Emit


def compiled_intrinsic(function: Callable[..., Any]) -> Any:
    """An intrinsic. Any: it is called from compiled code only, where its Python signature means nothing."""
    return intrinsic(function)


@compiled_intrinsic
def load_i64(typing: Any, address: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return Emit(builder).load(args[0], I64)
    return types.int64(types.int64), code


@compiled_intrinsic
def load_i32(typing: Any, address: Any) -> Any:
    """The int32 at `address`, as int64."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(Emit(builder).load(args[0], I32), I64)
    return types.int64(types.int64), code


@compiled_intrinsic
def load_f32(typing: Any, address: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return Emit(builder).load(args[0], F32)
    return types.float32(types.int64), code


@compiled_intrinsic
def store_i64(typing: Any, address: Any, value: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        Emit(builder).store(args[1], args[0])
        return context.get_dummy_value()
    return types.void(types.int64, types.int64), code


@compiled_intrinsic
def store_f32(typing: Any, address: Any, value: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        Emit(builder).store(args[1], args[0])
        return context.get_dummy_value()
    return types.void(types.int64, types.float32), code


@compiled_intrinsic
def fetch_add(typing: Any, address: Any, value: Any) -> Any:
    """Atomic: adds to the int64 at `address`, returns what was there before."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", Emit(builder).pointer(args[0], I64), args[1], "seq_cst")
    return types.int64(types.int64, types.int64), code


@compiled_intrinsic
def fetch(typing: Any, address: Any) -> Any:
    """Ask for the cache line at `address`."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        Emit(builder).fetch(args[0])
        return context.get_dummy_value()
    return types.void(types.int64), code


@compiled_intrinsic
def call(typing: Any, address: Any, values: Any) -> Any:
    """Call the routine at `address` with a tuple of int64."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given = cgutils.unpack_tuple(builder, args[1])
        numbers = [context.cast(builder, value, kind, types.int64)
                   for value, kind in zip(given, signature.args[1], strict=True)]
        kind = ir.FunctionType(ir.VoidType(), [I64] * len(numbers))
        builder.call(Emit(builder).pointer(args[0], kind), numbers)
        return context.get_dummy_value()
    return types.void(types.int64, values), code


@compiled_intrinsic
def as_pointer(typing: Any, address: Any) -> Any:
    """`address` as the void pointer that carray takes."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())
    return types.voidptr(types.int64), code


@compiled_intrinsic
def load_shared(typing: Any, address: Any) -> Any:
    """The int64 at `address` that another thread changes; what it wrote before that is seen after this."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(Emit(builder).pointer(args[0], I64), "acquire", 8, typ=I64)
    return types.int64(types.int64), code


@compiled_intrinsic
def pause(typing: Any) -> Any:
    """A moment's rest in a loop that waits for another thread (x86 only)."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        Emit(builder).call("llvm.x86.sse2.pause", out=ir.VoidType())
        return context.get_dummy_value()
    return types.void(), code


@compiled_intrinsic
def cycles(typing: Any) -> Any:
    """The processor's clock, in ticks of its own."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return Emit(builder).call("llvm.readcyclecounter", out=I64)
    return types.int64(), code


@compiled_intrinsic
def ask(typing: Any, address: Any) -> Any:
    """The int that the C function at `address`, which takes nothing, returns."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(builder.call(Emit(builder).pointer(args[0], ir.FunctionType(I32, [])), []), I64)
    return types.int64(types.int64), code
