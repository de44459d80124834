"""Speed of batch generation against `transformers` generate in static batches, in one run.

python -m tests.acceptance.bench_generate [--rounds 3] [--hf-rounds 1] [--rows FILE] [--dtype bf16] [--threads 2]

128 prompts of about 160 tokens with forced output lengths of about 100, greedy. The other side runs the same rows in
left-padded batches of 16 in the order of the file, each until its longest request is done. Load time is outside both.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pagedcli.core.config import ModelConfig
from pagedcli.core.request import Request, SamplingParams
from pagedcli.execution.model_hub import resolve_model
from tests.acceptance.kit import SHARED, Bench, real_prompts

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def rows_of(file: Path | None, bench: Bench) -> tuple[list[tuple[tuple[int, ...], int]], str]:
    """(prompt ids, output length) of each row, and what they are."""
    if file is not None and file.is_file():
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        return [(tuple(row["prompt_token_ids"]), row["max_tokens"]) for row in rows], file.name
    texts, origin = real_prompts(800)
    rng = random.Random(0)
    stream = [token for ids in bench.ids(texts) for token in ids]
    rows, at = [], 0
    for _ in range(128):
        take = max(20, min(570, round(rng.lognormvariate(4.95, 0.5))))
        out = max(8, min(400, round(rng.lognormvariate(4.3, 0.7))))
        rows.append((tuple(stream[at % 20000:at % 20000 + take]), out))
        at += take
    return rows, f"cut from {origin}"


def ours(bench: Bench, rows: list[tuple[tuple[int, ...], int]]) -> tuple[float, dict[str, float]]:
    engine = bench.engine()
    start = time.perf_counter()
    for index, (prompt, out) in enumerate(rows):
        params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
        engine.add(Request(index, str(index), prompt, params, output_len=out))
    while engine.has_work():
        engine.step()
    spent = time.perf_counter() - start
    assert engine.counters.output_tokens == sum(out for _, out in rows)
    parts = {name: part for name, part in engine.counters.seconds.items() if name != "execute"}
    parts["Python outside the step's forward"] = spent - engine.counters.seconds["execute"]
    return spent, parts


def theirs(model: Any, rows: list[tuple[tuple[int, ...], int]]) -> float:
    start = time.perf_counter()
    for first in range(0, len(rows), 16):
        batch = rows[first:first + 16]
        longest = max(len(prompt) for prompt, _ in batch)
        ids = torch.tensor([[2] * (longest - len(prompt)) + list(prompt) for prompt, _ in batch])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
        model.generate(input_ids=ids, attention_mask=mask, do_sample=False, pad_token_id=2,
                       max_new_tokens=max(out for _, out in batch))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hf-rounds", type=int, default=1)
    parser.add_argument("--rows", type=Path, default=SHARED / "peers" / "W1.jsonl")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    bench = Bench.open(dtype=options.dtype, blocks=4000, threads=options.threads)
    rows, origin = rows_of(options.rows, bench)
    generated, prompt_tokens = sum(out for _, out in rows), sum(len(prompt) for prompt, _ in rows)
    print(f"{len(rows)} rows ({origin}): {prompt_tokens} prompt tokens, {generated} output tokens, smollm2-135m "
          f"{options.dtype}, {options.threads} threads", flush=True)
    ours(bench, rows[:4])
    mine: list[float] = []
    for _ in range(options.rounds):
        spent, parts = ours(bench, rows)
        mine.append(spent)
        shares = ", ".join(f"{name} {100 * part / spent:.1f} %" for name, part in parts.items())
        print(f"pagedcli      {spent:7.2f} s  {generated / spent:7.1f} output tokens/s  ({shares})", flush=True)
    print(f"peak memory so far {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB", flush=True)
    folder = resolve_model(ModelConfig()).weights_folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=TORCH_DTYPES[options.dtype]).eval()
    model.generation_config.eos_token_id = None
    other = []
    for _ in range(options.hf_rounds):
        other.append(theirs(model, rows))
        print(f"transformers  {other[-1]:7.2f} s  {generated / other[-1]:7.1f} output tokens/s", flush=True)
    if other:
        we, they = statistics.median(mine), statistics.median(other)
        print(f"median {we:.2f} s against {they:.2f} s: {they / we:.2f} times faster")


if __name__ == "__main__":
    main()
