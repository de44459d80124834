"""What this machine can do at most, measured in the run that is held against it: products, multiply-adds, copies.

Each bounds something else: multiply-add instructions in a loop that loads nothing (no kernel can be faster), one large
product by torch (what a tuned library reaches), a copy far beyond the caches, and a loop that only reads (a copy can
move more bytes a second than that, since memory reads and writes at once).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import cfunc
from numba.core import cgutils, types
from numba.extending import intrinsic

from pagedcli.attention.backends import make_backend
from pagedcli.attention.cpu_intrinsics import fetch_add, load_i64
from pagedcli.attention.cpu_shapes import pair_products
from pagedcli.attention.cpu_team import Team
from pagedcli.attention.cpu_vectors import F32, I32, I64, LANES, Emit
from pagedcli.bench.micro import Bench, copy_bandwidth
from tests.timing import seconds_of

CHAINS = 24
"""Sums that go on side by side: more than any processor's latency times its multiply-adds a cycle."""
TURNS = 1_000_000
LARGE = 2048
PIECE = 1 << 20
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FLOP_PER_LANE = {"bf16": 4, "fp32": 2}


@dataclass(frozen=True)
class Limits:
    """FLOP/s by dtype of the large product and of the instructions alone; bytes/s of a copy, read plus written, and of
    reading.

    A dtype without multiply-add instructions of its own here (bf16 without pair products) is computed in float32.
    """

    product: dict[str, float]
    instructions: dict[str, float]
    copy: float
    read: float

    def flops(self, dtype: str) -> float:
        """The instruction limit of a dtype, FLOP/s."""
        return self.instructions.get(dtype, self.instructions["fp32"])

    def best(self, other: Limits) -> Limits:
        """The higher of each of two measurements: whatever else runs only takes away."""
        return Limits({name: max(rate, other.product[name]) for name, rate in self.product.items()},
                      {name: max(rate, other.instructions[name]) for name, rate in self.instructions.items()},
                      max(self.copy, other.copy), max(self.read, other.read))

    @property
    def text(self) -> str:
        products = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in self.product.items())
        loops = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in self.instructions.items())
        return (f"Limits of this machine in this run: multiply-add instructions {loops} GFLOP/s; one product of "
                f"{LARGE} cubed by torch {products} GFLOP/s; copy {self.copy / 1e9:.1f} GB/s, read plus written; "
                f"reading alone {self.read / 1e9:.1f} GB/s.")


def _chains(typing: Any, block: Any, kind: Any) -> Any:
    """Runs CHAINS independent sums of `kind`'s multiply-adds for as many turns as the block's second word says."""
    name = kind.literal_value

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emit(builder)
        turns = emit.load(emit.at(args[0], 8), I64)
        word = ir.VectorType(F32 if name == "fp32" else I32, LANES)
        x, y = (emit.load(emit.at(args[0], 64 * place), word) for place in (1, 2))
        zero = emit.splat(0.0, F32, LANES)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(CHAINS)]
        with cgutils.for_range(builder, turns, intp=I64):
            for total in sums:
                held = builder.load(total)
                builder.store(emit.fma(x, y, held) if name == "fp32" else emit.pair_fma(x, y, held), total)
        result = zero
        for total in sums:
            result = builder.fadd(result, builder.load(total))
        emit.store(result, emit.at(args[0], 192))
        return context.get_dummy_value()
    return types.void(types.int64, kind), code


chains: Any = intrinsic(prefer_literal=True)(_chains)
"""Any: it is called from compiled code only, where its Python signature means nothing."""


@cache
def _loop(kind: str) -> Any:
    binding.initialize_native_asmparser()  # for the instruction in Emit.pair_fma

    @cfunc(types.void(types.int64), error_model="numpy")
    def run(a: int) -> None:
        fetch_add(a, 1)
        chains(a, kind)

    return run


def instruction_rate(kind: str, threads: int, rounds: int = 7) -> float:
    """FLOP/s of multiply-adds over registers alone, on so many threads; the fastest round."""
    raw = np.zeros(40, np.int64)
    block = raw[(-raw.ctypes.data % 64) // 8:][:32]
    team, loop, best = Team(), _loop(kind), 0.0
    for _ in range(rounds):
        block[0], block[1] = 0, TURNS
        begun = time.perf_counter()
        team.run(loop.address, int(block.ctypes.data), threads)
        spent = time.perf_counter() - begun
        best = max(best, int(block[0]) * TURNS * CHAINS * LANES * FLOP_PER_LANE[kind] / spent)
    return best


def _sum_piece(typing: Any, address: Any) -> Any:
    """The sum of PIECE bytes from `address` on, as 64-bit words: eight cache lines a turn."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit, word = Emit(builder), ir.VectorType(I64, 8)
        sums = [cgutils.alloca_once_value(builder, emit.splat(0, I64, 8)) for _ in range(8)]
        with cgutils.for_range(builder, emit.i64(PIECE // 512), intp=I64) as loop:
            here = builder.add(args[0], builder.shl(loop.index, emit.i64(9)))
            for place, total in enumerate(sums):
                builder.store(builder.add(builder.load(total), emit.load(emit.at(here, 64 * place), word)), total)
        result = builder.load(sums[0])
        for total in sums[1:]:
            result = builder.add(result, builder.load(total))
        return emit.call("llvm.vector.reduce.add.v8i64", result, out=I64)
    return types.int64(types.int64), code


sum_piece: Any = intrinsic(_sum_piece)


@cache
def _read_loop() -> Any:
    """void(block of counter, address, pieces, sum): one thread's share of the pieces."""
    @cfunc(types.void(types.int64), error_model="numpy")
    def run(a: int) -> None:
        start, pieces = load_i64(a + 8), load_i64(a + 16)
        piece = fetch_add(a, 1)
        while piece < pieces:
            fetch_add(a + 24, sum_piece(start + piece * PIECE))
            piece = fetch_add(a, 1)

    return run


def read_rate(threads: int, pieces: int = 192, rounds: int = 7) -> float:
    """Bytes/s of reading memory far larger than the caches, on so many threads; the fastest round."""
    held = np.ones(pieces * PIECE // 8, np.int64)
    block, team, loop, best = np.zeros(8, np.int64), Team(), _read_loop(), 0.0
    for _ in range(rounds):
        block[:4] = 0, held.ctypes.data, pieces, 0
        begun = time.perf_counter()
        team.run(loop.address, int(block.ctypes.data), threads)
        best = max(best, held.nbytes / (time.perf_counter() - begun))
        if block[3] != len(held):
            raise RuntimeError(f"the reading loop summed {block[3]} of {len(held)} words")
    return best


def product_rate(dtype: torch.dtype, size: int = LARGE, rounds: int = 5) -> float:
    """FLOP/s of torch's product of two matrices of size x size."""
    made = torch.Generator().manual_seed(0)
    x, y = (torch.randn(size, size, generator=made).to(dtype) for _ in range(2))
    return 2 * size ** 3 / min(seconds_of(lambda: x @ y, rounds))


def measure_limits() -> Limits:
    """On as many threads as torch has now."""
    threads = torch.get_num_threads()
    kinds = ["fp32", "bf16"] if pair_products() else ["fp32"]
    place = Bench(torch.device("cpu"), torch.float32, lambda _: make_backend("cpu"), 0, 0, 0.0)
    return Limits({name: product_rate(dtype) for name, dtype in DTYPES.items()},
                  {kind: instruction_rate(kind, threads) for kind in kinds}, copy_bandwidth(place),
                  read_rate(threads))


if __name__ == "__main__":
    print(measure_limits().text)
