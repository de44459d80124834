"""How fast decode attention reads keys and values, for contexts of 128 to 8k tokens, and which limit binds.

python -m tests.acceptance.attention_table [--threads 2] [--output results/cpu/attention.md]

Each row is `pagedcli kernels`' measurement, checked against torch's attention, on layers that together are larger than
the caches. Of two limits the one that allows less binds: reading memory, for the bytes of keys and values, or
multiply-add instructions, measured by a loop that loads nothing, for the products with them. A copy's rate stands
beside them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pagedcli.attention.backends import make_backend
from pagedcli.bench.micro import Bench, Row, run_cases
from pagedcli.bench.micro_cases import HEADS, Case
from pagedcli.bench.signature import make_signature
from tests.acceptance.ledger import markdown
from tests.acceptance.limits import DTYPES, Limits, measure_limits

FIRST_VERSION_MS = 9.5
"""One layer over 64 sequences of 400 tokens, 9 query and 3 key/value heads of 64, bf16, by this project's first kernels
on a machine of this kind with 2 threads."""
LEAST_GAIN = 3.0
SHAPE = HEADS["smollm2-135m"]
FIRST_CASE = Case("decode", SHAPE, 64, 400)
CASES = (Case("decode", SHAPE, 64, 128), Case("decode", SHAPE, 64, 256), FIRST_CASE, Case("decode", SHAPE, 64, 512),
         Case("decode", SHAPE, 64, 1024), Case("decode", SHAPE, 32, 2048), Case("decode", SHAPE, 16, 4096),
         Case("decode", SHAPE, 8, 8192), Case("decode", SHAPE, 1, 8192))
CYCLE_BYTES = 96 << 20


@dataclass(frozen=True)
class Shares:
    """A kernel's rate as shares of each limit (1 is the limit itself), and the one that binds."""

    copy: float
    read: float
    float32: float
    instructions: float

    @property
    def binds(self) -> str:
        return "memory" if self.read >= self.instructions else "instructions"

    @property
    def of_binding(self) -> float:
        return max(self.read, self.instructions)


def shares(row: Row, dtype: str, limits: Limits) -> Shares:
    """`float32` counts all products as float32 ones; `instructions` as the kernels of this dtype compute them."""
    flops = row.gigaflops * 1e9
    moved = row.kv_gigabytes_per_second * 1e9
    return Shares(moved / limits.copy, moved / limits.read, flops / limits.flops("fp32"), flops / limits.flops(dtype))


def table(rows: Sequence[Row], dtype: str, limits: Limits) -> str:
    own = [] if dtype == "fp32" else [f"of {dtype} instructions, %"]
    lines = []
    for row in rows:
        share = shares(row, dtype, limits)
        lines.append([f"{row.context_tokens:,}", f"{row.batch}", f"{row.paged_microseconds / 1e3:.3f}",
                      f"{row.kv_gigabytes_per_second:.1f}", f"{100 * share.copy:.0f}", f"{100 * share.read:.0f}",
                      f"{row.gigaflops:.0f}",
                      f"{100 * share.float32:.0f}", *(f"{100 * share.instructions:.0f}" for _ in own), share.binds,
                      f"{100 * share.of_binding:.0f}", f"{row.relative_error:.0e}{'' if row.good else ' WRONG'}"])
    return markdown([f"{dtype}: context, tokens", "sequences", "a layer, ms", "K and V, GB/s", "of a copy, %",
                     "of reading, %", "GFLOP/s", "of fp32 instructions, %", *own, "binds",
                     "of what binds, %", "error"], lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("results") / "cpu" / "attention.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    limits = measure_limits()
    found = {}
    with torch.inference_mode():
        for dtype, kind in DTYPES.items():
            place = Bench(torch.device("cpu"), kind, lambda _: make_backend("cpu"), CYCLE_BYTES, 4 << 30, 0.25)
            found[dtype] = run_cases(CASES, place, limits.copy, float("inf"))
    limits = limits.best(measure_limits())
    pages = ["# Decode attention over paged blocks of 16, 9 query and 3 key/value heads of 64", limits.text]
    good = True
    for dtype, made in found.items():
        assert not made.skipped, made.skipped
        pages.append(table(made.rows, dtype, limits))
        good &= all(row.good for row in made.rows)
    spent = found["bf16"].rows[CASES.index(FIRST_CASE)].paged_microseconds / 1e3
    gain = FIRST_VERSION_MS / spent
    good &= gain >= LEAST_GAIN
    pages.append(f"bf16, 64 sequences of 400 tokens: {spent:.2f} ms, the first version {FIRST_VERSION_MS} ms: "
                 f"{gain:.1f} times faster (at least {LEAST_GAIN:g} asked).")
    pages.append(make_signature({"attention": "decode"}, threads=options.threads).text)
    text = "\n\n".join(pages) + "\n"
    print(text)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
