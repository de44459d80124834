"""Times the CPU attention backend: decode at several contexts, prompts, and the limits they are held against.

Run by hand: python -m tests.attention.bench_attention [--threads N] [--quick]. Layers are cycled so that the cache is
read from memory as in a model, not from the processor's caches.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from pagedcli.attention.cpu import CpuBackend
from pagedcli.attention.cpu_vectors import F32, I32, LANES, Emit
from pagedcli.attention.interface import BatchLayout, KVLayout, LayerSpec, build_layout
from pagedcli.core.plan import Slice, StepPlan
from tests.timing import seconds_of

TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}


def copy_rate() -> float:
    """Bytes a second read when summing a buffer far larger than the caches (as int64)."""
    big = torch.ones(64 << 20, dtype=torch.int64)
    return big.nbytes / median(seconds_of(big.sum, 5))


def fma_rate() -> float:
    """fp32 operations a second of a large matrix product: what this machine's vector units reach."""
    a, b = torch.rand(1024, 1024), torch.rand(1024, 1024)
    return 2 * 1024**3 / median(seconds_of(lambda: a @ b, 9))


@intrinsic
def _multiply_add(typing: Any, times: Any) -> Any:
    """24 independent vector sums, `times` fused multiply-adds each, all in registers; returns one of the sums."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emit(builder)
        sums = [cgutils.alloca_once_value(builder, emit.splat(float(n), F32, LANES)) for n in range(24)]
        factor, term = emit.splat(0.5, F32, LANES), emit.splat(1.0, F32, LANES)
        with cgutils.for_range(builder, args[0]):
            for place in sums:
                builder.store(emit.fma(builder.load(place), factor, term), place)
        total = builder.load(sums[0])
        for place in sums[1:]:
            total = builder.fadd(total, builder.load(place))
        return builder.extract_element(total, ir.Constant(I32, 0))
    return types.float32(types.int64), code


@njit
def _multiply_adds(times: int) -> float:
    return float(_multiply_add(times))


def instruction_limit() -> float:
    """fp32 operations a second of one core that does nothing but fused multiply-adds in registers."""
    times = 1_000_000
    return 2 * LANES * 24 * times / median(seconds_of(lambda: _multiply_adds(times), 9))


class Case:
    """`seqs` sequences of `context` tokens, of which the last `fresh` are computed in the step."""

    def __init__(self, spec: LayerSpec, seqs: int, context: int, fresh: int, block: int, dtype: str,
                 layers: int) -> None:
        self.spec, self.layers = spec, layers
        kv, source = TYPES[dtype], TYPES[dtype] if dtype in ("bf16", "fp32", "fp16") else torch.bfloat16
        width = -(-context // block)
        order = np.random.default_rng(0).permutation(seqs * width).reshape(seqs, width)
        plan = StepPlan([Slice(s, [0] * fresh, context - fresh, order[s].tolist()) for s in range(seqs)])
        self.batch: BatchLayout = build_layout(plan, block)
        layout = KVLayout((spec,) * layers, block)
        self.backend = CpuBackend()
        pool = torch.empty(seqs * width, layout.block_elements)
        pool.normal_()
        self.backend.bind(layout, pool.to(kv))
        rows = len(self.batch.slots)
        self.q = torch.randn(rows, spec.heads, spec.key_dim).to(source)
        self.k = torch.randn(rows, spec.kv_heads, spec.key_dim).to(source)
        self.v = torch.randn(rows, spec.kv_heads, spec.value_dim).to(source)
        self.backend.prepare(self.batch)
        self.bytes = seqs * context * spec.kv_heads * (spec.key_dim + spec.value_dim) * kv.itemsize
        pairs = seqs * sum(range(context - fresh + 1, context + 1))
        self.flops = 2 * pairs * spec.heads * (spec.key_dim + spec.value_dim)

    def step(self) -> None:
        for layer in range(self.layers):
            self.backend.attend(layer, self.q, self.k, self.v, self.spec)

    def report(self, label: str, times: int) -> None:
        seconds = median(seconds_of(self.step, times)) / self.layers
        print(f"{label:44s} {seconds * 1e3:8.3f} ms a layer  {self.bytes / seconds / 1e9:7.1f} GB/s of K and V"
              f"  {self.flops / seconds / 1e9:7.1f} GFLOP/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    print(f"threads {torch.get_num_threads()}  read {copy_rate() / 1e9:.1f} GB/s  "
          f"matmul fp32 {fma_rate() / 1e9:.0f} GFLOP/s  multiply-adds in registers, one core "
          f"{instruction_limit() / 1e9:.0f} GFLOP/s")
    spec = LayerSpec(9, 3, 64, 64, 0.125)
    times = 3 if given.quick else 7
    for dtype in ("bf16", "fp32"):
        Case(spec, 64, 400, 1, 16, dtype, 12).report(f"decode 64 x 400, 9/3 x 64, {dtype}", times)
    for dtype in ("bf16", "fp32"):
        Case(spec, 1, 2000, 2000, 16, dtype, 2).report(f"prompt 2000, 9/3 x 64, {dtype}", times)
    if given.quick:
        return
    for context in (128, 512, 2048, 8192):
        for dtype in ("bf16", "fp32", "fp16", "e4m3"):
            Case(spec, max(1, 25600 // context), context, 1, 16, dtype, 12).report(
                f"decode {max(1, 25600 // context)} x {context}, {dtype}", times)
    for block in (8, 16, 32, 64, 128):
        Case(spec, 64, 400, 1, block, "bf16", 12).report(f"decode 64 x 400, blocks of {block}, bf16", times)
    for heads, kv_heads, dim in ((12, 12, 64), (32, 8, 128), (8, 1, 256), (14, 2, 64), (32, 32, 80)):
        other = LayerSpec(heads, kv_heads, dim, dim, dim**-0.5)
        Case(other, 32, 400, 1, 16, "bf16", 4).report(f"decode 32 x 400, {heads}/{kv_heads} x {dim}, bf16", times)
        Case(other, 1, 1000, 1000, 16, "bf16", 1).report(f"prompt 1000, {heads}/{kv_heads} x {dim}, bf16", times)
    Case(spec, 16, 160, 160, 16, "bf16", 4).report("prompts 16 x 160, 9/3 x 64, bf16", times)


if __name__ == "__main__":
    main()
