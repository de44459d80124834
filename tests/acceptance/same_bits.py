"""The promise of the same bits, cell by cell: token ids and log-probabilities of a row whatever surrounds it.

python -m tests.acceptance.same_bits [--full] [--prompts 200] [--dtypes fp32,bf16] [--model ...]

A cell is {alone, 8, 64, shuffled} x block {8, 16, 32} x prefix cache {off, cold, hot} x pool {roomy, recompute, swap} x
{whole, chunked} prefill. Every cell must give the bits of the first. `--full` runs all 216 cells; without it a cut in
which every pair of settings occurs.
"""

from __future__ import annotations

import argparse
import itertools
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from pagedcli.core.request import SamplingParams
from pagedcli.core.sequence import SequenceGroup
from tests.acceptance.kit import Bench, real_prompts, serve, shuffled

BATCHES = ("alone", "8", "64", "shuffled")
BLOCKS = (8, 16, 32)
CACHES = ("off", "cold", "hot")
POOLS = ("roomy", "recompute", "swap")
PREFILLS = ("whole", "chunked")
MAX_PROMPT = 40


@dataclass(frozen=True)
class Cell:
    batch: str
    block: int
    cache: str
    pool: str
    prefill: str


def all_cells() -> list[Cell]:
    return [Cell(*choice) for choice in itertools.product(BATCHES, BLOCKS, CACHES, POOLS, PREFILLS)]


def pairwise_cells() -> list[Cell]:
    """A greedy cover: every pair of settings of two axes occurs in some cell."""
    def pairs(cell: Cell) -> set[tuple[object, ...]]:
        values = (("batch", cell.batch), ("block", cell.block), ("cache", cell.cache), ("pool", cell.pool),
                  ("prefill", cell.prefill))
        return set(itertools.combinations(values, 2))

    left = set().union(*(pairs(cell) for cell in all_cells()))
    chosen = []
    while left:
        best = max(all_cells(), key=lambda cell: len(pairs(cell) & left))
        chosen.append(best)
        left -= pairs(best)
    return chosen


def bits(group: SequenceGroup) -> tuple[object, ...]:
    """Everything that must not change, floats by their bits."""
    rows = []
    for seq in group.done:
        logprobs = [struct.pack("<d", choice.logprob) for choice in seq.logprobs or []]
        rows.append((tuple(seq.output_ids), tuple(logprobs), seq.finish_reason))
    return tuple(rows)


def parameters(count: int, tokens: int) -> list[SamplingParams]:
    """Every other row greedy, the others seeded at temperature 1, a few with n = 2."""
    greedy = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0)
    seeded = SamplingParams(temperature=1, max_tokens=tokens, seed=11, logprobs=0)
    pair = SamplingParams(temperature=1, max_tokens=tokens, seed=12, logprobs=0, n=2)
    return [(greedy, seeded, greedy, pair)[index % 4] for index in range(count)]


def run_cell(bench: Bench, cell: Cell, prompts: list[tuple[int, ...]], params: list[SamplingParams]) -> tuple[
        list[tuple[object, ...]], int]:
    """Bits of every row in the order of the prompts, and how many preemptions the cell had."""
    tight = {8: 40, 16: 22, 32: 14}[cell.block]
    engine = bench.engine(
        prefix=cell.cache != "off", blocks=None if cell.pool == "roomy" else tight,
        preemption="swap" if cell.pool == "swap" else "recompute", chunked_prefill=cell.prefill == "chunked",
        max_num_batched_tokens=64 if cell.prefill == "chunked" else None)
    order = shuffled(len(prompts)) if cell.batch == "shuffled" else list(range(len(prompts)))
    width = {"alone": 1, "8": 8}.get(cell.batch, 64)
    rows, settings, keys = [prompts[i] for i in order], [params[i] for i in order], [str(i) for i in order]
    if cell.cache == "hot":
        serve(engine, rows, settings, keys=keys, at_once=width)
    groups, _ = serve(engine, rows, settings, keys=keys, at_once=width)
    result: list[tuple[object, ...]] = [()] * len(prompts)
    for place, group in zip(order, groups, strict=True):
        result[place] = bits(group)
    return result, engine.counters.preempt_recompute + engine.counters.preempt_swap


def compare(cells: list[Cell], *, model: str, load_format: str, dtype: str, prompts: list[tuple[int, ...]],
            tokens: int, threads: int | None = None) -> Iterator[tuple[Cell, int, int, float]]:
    """(cell, rows whose bits differ from the first cell's, preemptions, seconds) for each cell."""
    params = parameters(len(prompts), tokens)
    expected: list[tuple[object, ...]] | None = None
    for block in BLOCKS:
        bench = Bench.open(model=model, dtype=dtype, blocks=16384 // block, block_size=block, threads=threads,
                           load_format=load_format)
        for cell in [cell for cell in cells if cell.block == block]:
            start = time.perf_counter()
            got, preemptions = run_cell(bench, cell, prompts, params)
            if expected is None:
                expected = got
            differing = sum(a != b for a, b in zip(got, expected, strict=True))
            yield cell, differing, preemptions, time.perf_counter() - start
        bench.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto")
    options = parser.parse_args()
    texts, origin = real_prompts(4 * options.prompts)
    cells = all_cells() if options.full else pairwise_cells()
    bad = 0
    for dtype in options.dtypes.split(","):
        bench = Bench.open(dtype=dtype, blocks=64)
        prompts = [ids[:MAX_PROMPT] for ids in bench.ids(texts)][:options.prompts]
        bench.close()
        worst, pressed = 0, 0
        for cell, differing, preemptions, seconds in compare(
                cells, model=options.model, load_format=options.load_format, dtype=dtype, prompts=prompts,
                tokens=options.tokens):
            worst += differing
            pressed += preemptions
            print(f"{dtype} {cell.batch:>8} block {cell.block:2} cache {cell.cache:4} {cell.pool:9} {cell.prefill:7} "
                  f"{differing} of {len(prompts)} rows differ, {preemptions} preemptions, {seconds:.1f} s", flush=True)
        print(f"{dtype}: {len(cells)} cells x {len(prompts)} prompts ({origin}), {options.model}: {worst} rows differ, "
              f"{pressed} preemptions", flush=True)
        bad += worst
    raise SystemExit(bad > 0)


if __name__ == "__main__":
    main()
