"""Vector code of the CPU attention kernels, emitted as LLVM instructions through Numba intrinsics.

Why not loops left to the vectoriser: the result of a row must not depend on its neighbours, on how a prompt was cut or
on the block size, so every sum needs one order, stated here, whatever shape the loops around it take.
Vectors are 16 floats; LLVM splits them where registers are narrower, which changes no bit. The orders:

* score of a key: fused multiply-adds over the dims, first to last; or over pairs of them, where a processor has that;
* softmax: tiles of TILE positions from position 0 of the sequence, each rescaled by its running maximum;
  the denominator in 16 lanes (position mod 16), first to last, and a fixed tree over the lanes at the end;
* weighted sum of values: fused multiply-adds over the positions, first to last, or over pairs of them.

Addresses travel as int64. Cache kinds: fp32, fp16, bf16, e4m3, e5m2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

TILE = 128
"""Positions a softmax step covers."""
LANES = 16
"""Floats of one vector; also the number of partial denominators."""
CHUNKS = TILE // LANES

F32, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
HALF = ir.HalfType()
FETCH_LEVEL = 2
"""LLVM's locality of a prefetch: 2 asks for the second-level cache; 3, the first, measured 25 % slower."""
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1}
FLOAT8 = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}
"""Mantissa bits, exponent of the least normal number, largest finite number."""

# 2^x on [-1/2, 1/2] as 1 + x * (...), fitted for least relative error (1.9e-9).
EXP2 = (0.6931472057372609, 0.24022646890619462, 0.05550328776976866, 0.009618488958699914,
        0.0013399931215315895, 0.00015345811572498258)
EXP2_SHORT = (0.69312419, 0.24024099, 0.05590642, 0.00958285)
"""To 2.8e-6, where the result is rounded to bfloat16."""
# tanh(x)/x = 1 + t * (...), t = x^2 below 0.4 (1.5e-7 of the second term).
TANH = (-0.33333328438394766, 0.13332719236687884, -0.05384331134499801, 0.02096152008313931,
        -0.006045402371956768)


def pairs_keys(kind: str, key_dim: int) -> bool:
    """Whether a key tile is [dim / 2, slot, 2]: one 32-bit word then holds two dims of a slot, and a shift or a mask
    makes floats of them. Else it is [dim, slot]."""
    return kind == "bf16" and key_dim % 2 == 0


def value_cuts(kind: str, value_dim: int) -> list[int]:
    """Lanes of the loads that cover one value row; 32 are two vectors (even dims, odd dims) from one load."""
    cuts, left = [], value_dim
    while left:
        width = 32 if kind == "bf16" and left >= 32 else min(LANES, 1 << (left.bit_length() - 1))
        cuts.append(width)
        left -= width
    return cuts


def row_counts(group: int, budget: int) -> list[int]:
    """Numbers of query rows that get a kernel of their own, falling. `budget`: vector accumulators that fit."""
    most = 6 if budget >= 24 else 3
    return sorted({most, 3, 2, 1} | ({group % most} - {0}), reverse=True)


def chunk_counts(rows: int, budget: int) -> list[int]:
    """Key chunks a score kernel of `rows` takes at once, falling powers of two.

    Eight sums in flight hide the latency of a fused multiply-add; more only take registers from the keys.
    """
    most = 8 if rows == 1 else 4
    return [n for n in (8, 4, 2, 1) if n == 1 or (n <= most and n * rows <= budget)]


class Emit:
    """A thin layer over IRBuilder: typed loads by address, splats, fused multiply-add."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder

    def i64(self, value: int) -> ir.Constant:
        return ir.Constant(I64, value)

    def splat(self, value: Any, kind: ir.Type, lanes: int) -> Any:
        """A vector whose lanes all hold a Python number."""
        return ir.Constant(ir.VectorType(kind, lanes), [ir.Constant(kind, value)] * lanes)

    def spread(self, scalar: Any, lanes: int) -> Any:
        """A vector whose lanes all hold a run-time scalar."""
        kind = ir.VectorType(scalar.type, lanes)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, ir.Constant(kind, ir.Undefined),
                                     ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))

    def pointer(self, address: Any, kind: ir.Type) -> Any:
        return self.b.inttoptr(address, kind.as_pointer())

    def load(self, address: Any, kind: ir.Type, align: int = 1) -> Any:
        return self.b.load(self.pointer(address, kind), align=align, typ=kind)

    def store(self, value: Any, address: Any, align: int = 1) -> None:
        self.b.store(value, self.pointer(address, value.type), align=align)

    def fetch(self, address: Any) -> None:
        """Ask for the cache line at `address`, which will be read soon; any address is allowed."""
        flags = [ir.Constant(I32, n) for n in (0, FETCH_LEVEL, 1)]
        self.call("llvm.prefetch.p0", self.pointer(address, ir.IntType(8)), *flags, out=ir.VoidType())

    def call(self, name: str, *values: Any, out: ir.Type | None = None) -> Any:
        """An LLVM intrinsic by full name."""
        kind = ir.FunctionType(values[0].type if out is None else out, [v.type for v in values])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), list(values))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        lanes = f"v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "f32"
        return self.call(f"llvm.fma.{lanes}", a, b, c)

    def pair_fma(self, pairs: Any, weights: Any, total: Any) -> Any:
        """total + both products of the bfloat16 pairs in the words of two vectors, in the processor's own order."""
        kind = ir.FunctionType(total.type, [pairs.type, weights.type, total.type])
        code = ir.InlineAsm(kind, "vdpbf16ps $2, $1, $0", "=v,v,v,0")
        return self.b.call(code, [pairs, weights, total])

    def to_pairs(self, value: Any) -> tuple[Any, Any]:
        """16 floats rounded to bfloat16 by the instruction that comes with pair products, and as floats again."""
        b = self.b
        kind = ir.FunctionType(ir.VectorType(I16, LANES), [value.type])
        short = b.call(ir.InlineAsm(kind, "vcvtneps2bf16 $1, $0", "=v,v"), [value])
        wide = b.shl(b.zext(short, ir.VectorType(I32, LANES)), self.splat(16, I32, LANES))
        return short, b.bitcast(wide, value.type)

    def at(self, address: Any, offset: int) -> Any:
        return self.b.add(address, self.i64(offset))

    def horner(self, x: Any, coefficients: tuple[float, ...], lanes: int) -> Any:
        total = self.splat(coefficients[-1], F32, lanes)
        for c in reversed(coefficients[:-1]):
            total = self.fma(total, x, self.splat(c, F32, lanes))
        return total

    def exp2(self, x: Any, terms: tuple[float, ...] = EXP2) -> Any:
        """2^x for x <= 0 or NaN; 0 below 2^-125. `terms` set its precision."""
        b, ints = self.b, ir.VectorType(I32, LANES)
        low = b.fcmp_ordered("<", x, self.splat(-125.0, F32, LANES))
        safe = b.select(low, self.splat(-125.0, F32, LANES), x)
        # Adding 1.5 * 2^23 rounds to a whole number, which the sum's low bits then hold.
        shifted = b.fadd(safe, self.splat(12582912.0, F32, LANES))
        rest = b.fsub(safe, b.fsub(shifted, self.splat(12582912.0, F32, LANES)))
        near = self.fma(self.horner(rest, terms, LANES), rest, self.splat(1.0, F32, LANES))
        power = b.shl(b.bitcast(shifted, ints), self.splat(23, I32, LANES))
        full = b.bitcast(b.add(b.bitcast(near, ints), power), near.type)
        return b.select(low, self.splat(0.0, F32, LANES), full)

    def tanh(self, x: Any) -> Any:
        b = self.b
        size = self.call("llvm.fabs.v16f32", x)
        square = b.fmul(x, x)
        small = self.fma(b.fmul(self.horner(square, TANH, LANES), square), size, size)
        e = self.exp2(b.fmul(size, self.splat(-2.8853900817779268, F32, LANES)))
        one = self.splat(1.0, F32, LANES)
        large = b.fdiv(b.fsub(one, e), b.fadd(one, e))
        near = b.fcmp_ordered("<", square, self.splat(0.4, F32, LANES))
        return self.call("llvm.copysign.v16f32", b.select(near, small, large), x)

    def widen(self, kind: str, address: Any, lanes: int) -> Any:
        """`lanes` stored elements as floats, exactly."""
        b, floats = self.b, ir.VectorType(F32, lanes)
        if kind == "fp32":
            return self.load(address, floats)
        if kind == "fp16":
            return b.fpext(self.load(address, ir.VectorType(HALF, lanes)), floats)
        if kind == "bf16":
            wide = b.zext(self.load(address, ir.VectorType(I16, lanes)), ir.VectorType(I32, lanes))
            return b.bitcast(b.shl(wide, self.splat(16, I32, lanes)), floats)
        shorts, halves = ir.VectorType(I16, lanes), ir.VectorType(HALF, lanes)
        raw = b.zext(self.load(address, ir.VectorType(ir.IntType(8), lanes)), shorts)
        if kind == "e5m2":  # the upper byte of a half
            return b.fpext(b.bitcast(b.shl(raw, self.splat(8, I16, lanes)), halves), floats)
        # e4m3's exponent and mantissa one step lower in a half make a number 2^8 too small, subnormals included.
        size = b.and_(raw, self.splat(0x7F, I16, lanes))
        body = b.select(b.icmp_unsigned("==", size, self.splat(0x7F, I16, lanes)),
                        self.splat(0x7E00, I16, lanes), b.shl(size, self.splat(7, I16, lanes)))
        sign = b.shl(b.and_(raw, self.splat(0x80, I16, lanes)), self.splat(8, I16, lanes))
        half = b.fpext(b.bitcast(b.or_(body, sign), halves), floats)
        return b.fmul(half, self.splat(256.0, F32, lanes))

    def split_words(self, address: Any) -> tuple[Any, Any]:
        """32 bf16 as floats: those at even places, those at odd places."""
        b, floats = self.b, ir.VectorType(F32, LANES)
        words = self.load(address, ir.VectorType(I32, LANES))
        even = b.bitcast(b.shl(words, self.splat(16, I32, LANES)), floats)
        return even, b.bitcast(b.and_(words, self.splat(0xFFFF0000, I32, LANES)), floats)

    def narrow(self, kind: str, value: Any, address: Any) -> None:
        """Store floats as `kind`, rounded to nearest even; 8-bit kinds saturate."""
        b, lanes = self.b, value.type.count
        if kind in FLOAT8:
            value = self._to_float8(kind, value)
        elif kind == "fp16":
            value = b.fptrunc(value, ir.VectorType(HALF, lanes))
        elif kind == "bf16":
            bits = b.bitcast(value, ir.VectorType(I32, lanes))
            odd = b.and_(b.lshr(bits, self.splat(16, I32, lanes)), self.splat(1, I32, lanes))
            near = b.add(b.add(bits, odd), self.splat(0x7FFF, I32, lanes))
            nan = b.or_(bits, self.splat(0x400000, I32, lanes))
            kept = b.select(b.fcmp_unordered("uno", value, value), nan, near)
            value = b.trunc(b.lshr(kept, self.splat(16, I32, lanes)), ir.VectorType(I16, lanes))
        self.store(value, address)

    def _to_float8(self, kind: str, value: Any) -> Any:
        b, lanes = self.b, value.type.count
        ints = ir.VectorType(I32, lanes)
        mantissa, least, most = FLOAT8[kind]
        bias = 1 - least
        size = self.call(f"llvm.fabs.v{lanes}f32", value)
        limit = self.splat(most, F32, lanes)
        size = b.select(b.fcmp_ordered(">", size, limit), limit, size)
        bits = b.bitcast(size, ints)
        odd = b.and_(b.lshr(bits, self.splat(23 - mantissa, I32, lanes)), self.splat(1, I32, lanes))
        near = b.add(b.add(bits, odd), self.splat((1 << (22 - mantissa)) - 1, I32, lanes))
        normal = b.sub(b.lshr(near, self.splat(23 - mantissa, I32, lanes)),
                       self.splat((127 - bias) << mantissa, I32, lanes))
        # Below the least normal number, adding this constant rounds at the subnormals' step.
        step = self.splat(2.0 ** (23 + least - mantissa), F32, lanes)
        small = b.sub(b.bitcast(b.fadd(size, step), ints), b.bitcast(step, ints))
        code = b.select(b.fcmp_ordered("<", size, self.splat(2.0**least, F32, lanes)), small, normal)
        code = b.select(b.fcmp_unordered("uno", value, value), self.splat(0x7F, I32, lanes), code)
        sign = b.and_(b.lshr(b.bitcast(value, ints), self.splat(24, I32, lanes)), self.splat(0x80, I32, lanes))
        return b.trunc(b.or_(code, sign), ir.VectorType(ir.IntType(8), lanes))

    def while_less(self, counter: Any, end: Any) -> AbstractContextManager[None]:
        return _while_less(self.b, counter, end)


@contextmanager
def _while_less(b: ir.IRBuilder, counter: Any, end: Any) -> Iterator[None]:
    """A loop for as long as the int64 behind `counter` is below `end`; the body moves it on."""
    test, body, done = (b.append_basic_block(name) for name in ("test", "body", "done"))
    b.branch(test)
    b.position_at_end(test)
    b.cbranch(b.icmp_signed("<", b.load(counter), end), body, done)
    b.position_at_end(body)
    yield
    b.branch(test)
    b.position_at_end(done)


def routine(module: ir.Module, name: str, arguments: list[ir.Type], result: ir.Type,
            body: Callable[[Emit, list[Any]], Any]) -> ir.Function:
    """A private function of this module, made once under `name`; never inlined, so that its registers are its own."""
    known = module.globals.get(name)
    if known is not None:
        return known
    function = ir.Function(module, ir.FunctionType(result, arguments), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    emit = Emit(ir.IRBuilder(function.append_basic_block("entry")))
    value = body(emit, list(function.args))
    if value is None:
        emit.b.ret_void()
    else:
        emit.b.ret(value)
    return function


@dataclass(frozen=True, slots=True)
class ValueTile:
    """Run-time values that say where a tile's values lie: block table (int32), address of the head's values in block 0,
    bytes of a block, block size, position of the tile, addresses of chunks of values that will be read next."""

    table: Any
    base: Any
    pitch: Any
    size: Any
    start: Any
    coming: Any


@contextmanager
def value_runs(emit: Emit, tile: ValueTile, low: Any, high: Any, row_bytes: int) -> Iterator[tuple[Any, Any, Any, Any]]:
    """A loop over positions low .. high - 1 of a tile in runs that stay within a block and a chunk of LANES positions.

    Yields (begin, stop, address of the value at begin, address to fetch ahead).
    """
    b = emit.b
    here = cgutils.alloca_once_value(b, low)
    with emit.while_less(here, high):
        begin = b.load(here)
        position = b.add(tile.start, begin)
        block = b.udiv(position, tile.size)
        edge = b.mul(block, tile.size)
        stop = b.sub(b.add(edge, tile.size), tile.start)
        stop = b.select(b.icmp_signed("<", stop, high), stop, high)
        chunk = b.lshr(begin, emit.i64(4))
        turn = b.shl(b.add(chunk, emit.i64(1)), emit.i64(4))
        stop = b.select(b.icmp_signed("<", stop, turn), stop, turn)
        ahead = emit.load(b.add(tile.coming, b.mul(chunk, emit.i64(8))), I64)
        number = b.sext(emit.load(b.add(tile.table, b.mul(block, emit.i64(4))), I32), I64)
        address = b.add(tile.base, b.add(b.mul(number, tile.pitch),
                                         b.mul(b.sub(position, edge), emit.i64(row_bytes))))
        yield begin, stop, address, ahead
        b.store(stop, here)
