"""Swapping a 256-token sequence out and in, at block sizes 1 to 256, against recomputing it (the paper's Figure 19a).

python -m tests.acceptance.swap_table [--rounds 9] [--dtype bf16]

Block-major: one transfer a block, all moved in one call. Per-layer: one copy for each layer, keys and values
apart, and each block, which is what a layout of one tensor a layer asks for (80 a block for the paper's 40 layers).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

from pagedcli.attention.interface import KVLayout
from pagedcli.core.plan import Slice, StepPlan
from tests.acceptance.kit import Bench
from tests.timing import seconds_of

TOKENS = 256


def median_ms(work: Callable[[], object], rounds: int) -> float:
    return 1000 * statistics.median(seconds_of(work, rounds))


def per_layer(layout: KVLayout, pool: torch.Tensor, blocks: list[int]) -> Callable[[], None]:
    """Out and in again by one small copy per layer, K or V, and block."""
    spec, layers = layout.layers[0], len(layout.layers)
    half = spec.elements(layout.block_size) // 2
    device = [torch.empty(pool.shape[0], half, dtype=pool.dtype) for _ in range(2 * layers)]
    host = [torch.empty(len(blocks), half, dtype=pool.dtype) for _ in range(2 * layers)]

    def work() -> None:
        for there, here in zip(host, device, strict=True):
            for place, block in enumerate(blocks):
                there[place].copy_(here[block])
        for there, here in zip(host, device, strict=True):
            for place, block in enumerate(blocks):
                here[block].copy_(there[place])

    return work


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="bf16")
    options = parser.parse_args()
    print(f"smollm2-135m {options.dtype}, {TOKENS} tokens, median of {options.rounds} rounds, milliseconds")
    print("block  swap out+in, block-major  swap out+in, per layer  ratio  recompute")
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        bench = Bench.open(dtype=options.dtype, blocks=2 * TOKENS // size + 2, block_size=size)
        count = TOKENS // size
        blocks = torch.randperm(2 * count, generator=torch.Generator().manual_seed(0))[:count].tolist()
        store = bench.executor.store
        out = [(block, place) for place, block in enumerate(blocks)]
        back = [(place, block) for block, place in out]

        def swap(store: Any = store, out: Any = out, back: Any = back) -> None:
            store.swap_out(out)
            store.swap_in(back)

        plan = StepPlan([Slice(0, list(range(100, 100 + TOKENS)), 0, blocks, 1)])
        fast = median_ms(swap, options.rounds)
        slow = median_ms(per_layer(store.layout, store.pool, blocks), options.rounds)
        again = median_ms(lambda bench=bench, plan=plan: bench.executor.execute(plan), 5)  # type: ignore[misc]
        print(f"{size:5}  {fast:24.2f}  {slow:22.2f}  {slow / fast:5.1f}  {again:9.1f}", flush=True)
        bench.close()


if __name__ == "__main__":
    main()
