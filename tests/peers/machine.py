"""What this machine can do at most, in the same run as what engines do with it: `python -m tests.peers.machine`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch

from tests.timing import seconds_of

COPY_BYTES = 256 << 20
SHAPES = ((2048, 2048, 2048), (256, 576, 1536), (64, 576, 1536))
"""[rows, in, out] of the products: a large one, and the widest linear of a 135M model at two sizes of a step."""
WEIGHT_BYTES = 64 << 20
"""Weights gone through in turn, so that they come from memory as they do in a step."""


def fastest(call: Callable[[], object], times: int = 7) -> float:
    """Seconds of the fastest of several calls, after one that warms up."""
    return min(seconds_of(call, times))


def copy_rate() -> float:
    """GB/s, read plus written, of a copy far larger than the caches."""
    source = torch.ones(COPY_BYTES // 8, dtype=torch.int64)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / fastest(lambda: target.copy_(source)) / 1e9


def matrix_rate(rows: int, inner: int, outer: int, dtype: torch.dtype) -> float:
    """GFLOP/s of [rows, inner] x [inner, outer]."""
    count = max(1, WEIGHT_BYTES // (inner * outer * dtype.itemsize))
    inputs = torch.randn(rows, inner).to(dtype)
    weights = [torch.randn(outer, inner).to(dtype) for _ in range(count)]

    def call() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs, weight)

    return 2 * rows * inner * outer * count / fastest(call) / 1e9


def measure(threads: int) -> dict[str, float]:
    """Limits by name: `copy GB/s`, and `<type> <rows>x<in>x<out> GFLOP/s`."""
    torch.set_num_threads(threads)
    found = {"copy GB/s": copy_rate()}
    with torch.inference_mode():
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            for shape in SHAPES:
                found[f"{name} {'x'.join(map(str, shape))} GFLOP/s"] = matrix_rate(*shape, dtype)
    return {name: round(value, 1) for name, value in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    print(json.dumps(measure(parser.parse_args().threads)))
