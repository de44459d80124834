"""The promise of the same bits, cell by cell: token ids and log-probabilities of a row whatever surrounds it.

python -m tests.acceptance.same_bits [--full] [--layers N] [--prompts 200] [--tokens 6] [--dtypes bf16,fp32]

A cell is {alone, 8, 64, shuffled} x block {8, 16, 32} x prefix cache {off, cold, hot} x pool {roomy, recompute, swap} x
{whole, chunked} prefill. Every cell must give the bits of the first. `--full` runs all 216 cells; without it a cut in
which every pair of settings occurs. `--layers N` keeps only the first N layers of the real model, so that all cells
fit in minutes: the pool, the scheduler, the sampler and every kernel are the same, and so are the shapes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from pagedcli.core.config import ModelConfig
from pagedcli.core.request import SamplingParams
from pagedcli.core.sequence import SequenceGroup
from pagedcli.execution.model_hub import resolve_model
from tests.acceptance.kit import Bench, real_prompts, serve, shuffled

BATCHES = ("alone", "8", "64", "shuffled")
BLOCKS = (8, 16, 32)
CACHES = ("off", "cold", "hot")
POOLS = ("roomy", "recompute", "swap")
PREFILLS = ("whole", "chunked")
BUILD = Path(__file__).resolve().parents[2] / "build"


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


def first_layers(source: Path, count: int, target: Path) -> Path:
    """`target`, made a model folder with the weights of the first `count` layers of the one in `source`.

    A folder made before is used again, so that what is kept for later starts is kept once.
    """
    if (target / "model.safetensors").is_file():
        return target
    config = json.loads((source / "config.json").read_text())
    if not 1 <= count <= config["num_hidden_layers"]:
        raise SystemExit(f"--layers = {count}: must be between 1 and the model's {config['num_hidden_layers']}")
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count}))
    for file in source.glob("tokenizer*"):
        shutil.copy(file, target)

    def kept(name: str) -> bool:
        _, _, rest = name.partition(".layers.")
        return not rest or int(rest.split(".")[0]) < count

    weights = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as held:
            names = held.keys()
            weights.update({name: held.get_tensor(name) for name in names if kept(name)})
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


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


def run(options: argparse.Namespace, model: str) -> int:
    """Print every cell of every number format; returns how many rows differed."""
    texts, origin = real_prompts(4 * options.prompts)
    cells = all_cells() if options.full else pairwise_cells()
    named = options.model + (f" (its first {options.layers} layers)" if options.layers else "")
    bad = 0
    for dtype in options.dtypes.split(","):
        bench = Bench.open(dtype=dtype, blocks=64)
        prompts = [ids[:options.max_prompt] for ids in bench.ids(texts)][:options.prompts]
        bench.close()
        worst, pressed, start = 0, 0, time.perf_counter()
        for cell, differing, preemptions, seconds in compare(
                cells, model=model, load_format=options.load_format, dtype=dtype, prompts=prompts,
                tokens=options.tokens):
            worst += differing
            pressed += preemptions
            print(f"{dtype} {cell.batch:>8} block {cell.block:2} cache {cell.cache:4} {cell.pool:9} {cell.prefill:7} "
                  f"{differing} of {len(prompts)} rows differ, {preemptions} preemptions, {seconds:.1f} s", flush=True)
        print(f"{dtype}: {len(cells)} cells x {len(prompts)} prompts ({origin}, at most {options.max_prompt} tokens, "
              f"{options.tokens} out), {named}: {worst} rows differ, {pressed} preemptions, "
              f"{time.perf_counter() - start:.0f} s", flush=True)
        bad += worst
    return bad


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-prompt", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="only the first so many layers of the model")
    parser.add_argument("--load-format", default="auto")
    options = parser.parse_args()
    if not options.layers:
        raise SystemExit(run(options, options.model) > 0)
    source = resolve_model(ModelConfig(model=options.model)).weights_folder
    folder = first_layers(source, options.layers, BUILD / f"{source.name}-first-{options.layers}-layers")
    raise SystemExit(run(options, str(folder)) > 0)


if __name__ == "__main__":
    main()
