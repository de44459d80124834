"""Tokens of 2, 3 and 4 ranks equal to those of one, with preemption, swaps, beams and shared prefixes.

python -m tests.acceptance.tensor_parallel [--prompts 50] [--tokens 12] [--models tiny-llama,tiny-opt,...,smollm2-135m]

Each model runs at every size that its heads divide by. A third of the prompts run with beams, and all begin alike; the
pool is so small that groups are preempted, by recomputation and by swapping in turn.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pagedcli.core.config import CacheConfig, ModelConfig, RunConfig, SchedulerConfig
from pagedcli.core.request import SamplingParams
from pagedcli.engine.build import build_engine, load
from tests.acceptance.kit import real_prompts, serve
from tests.execution.tiny_models import save_model

HEADS: dict[str, dict[str, int]] = {
    "llama": {"num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 48},
    "mistral": {"num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 48},
    "opt": {"num_attention_heads": 12, "hidden_size": 48, "word_embed_proj_dim": 48},
    "gpt2": {"n_head": 12, "n_embd": 48},
}
"""Tiny models with heads that divide by 2, 3 and 4."""
MODELS = ("tiny-llama", "tiny-opt", "tiny-gpt2", "tiny-mistral", "smollm2-135m")
BLOCK = 8


def folder_of(name: str, folder: Path) -> str:
    if not name.startswith("tiny-"):
        return name
    family = name.removeprefix("tiny-")
    positions = {"gpt2": "n_positions"}.get(family, "max_position_embeddings")
    return str(save_model(family, folder / family, vocab_size=512, **{positions: 256}, **HEADS[family]))


def run(config: RunConfig, executor: Any, tokenizer: Any, prompts: list[tuple[int, ...]], tokens: int,
        preemption: Literal["recompute", "swap"]) -> tuple[list[list[int]], Any]:
    scheduler = SchedulerConfig(max_num_seqs=24, max_num_batched_tokens=128, preemption=preemption)
    engine = build_engine(replace(config, scheduler=scheduler), executor=executor, tokenizer=tokenizer)
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    params = [replace(greedy, use_beam_search=True, beam_width=3) if index % 3 == 0 else greedy
              for index in range(len(prompts))]
    groups, _ = serve(engine, prompts, params)
    return [seq.output_ids for group in groups for seq in group.done], engine.counters


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args()
    texts, origin = real_prompts(4 * options.prompts)
    print(f"{options.prompts} prompts ({origin}), {options.tokens} tokens, fp32, every third with 3 beams")
    print(f"{'model':<14} {'ranks':>5} {'tokens equal':>14} {'recomputed':>10} {'swapped':>8} {'cached':>7} "
          f"{'KV bytes/rank':>14} {'plan B/step':>12} {'steps':>6} {'load s':>7} {'run s':>6}")
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        for model in options.models.split(","):
            wrong += check(model, folder_of(model, Path(name)), texts, options)
    raise SystemExit(wrong > 0)


def check(label: str, model: str, texts: list[str], options: argparse.Namespace) -> int:
    """Lines of the table for one model; returns how many sizes gave other tokens."""
    base = RunConfig(model=ModelConfig(model=model, dtype="fp32", device="cpu", threads=1),
                     cache=CacheConfig(num_blocks=48, block_size=BLOCK, swap_space=1 << 27))
    expected: list[list[int]] = []
    whole = wrong = 0
    for size in (1, 2, 3, 4):
        config = replace(base, model=replace(base.model, tensor_parallel_size=size))
        start = time.perf_counter()
        try:
            parts: tuple[Any, Any] = load(config)
        except Exception as fault:
            print(f"{label:<14} {size:>5} refused: {fault}", flush=True)
            continue
        executor, tokenizer = parts
        loaded = time.perf_counter()
        prompts = ids(tokenizer, texts, options.prompts, executor.limits.vocab_size)
        found, totals = [], []
        ways: tuple[Literal["recompute", "swap"], ...] = ("recompute", "swap")
        for preemption in ways:
            tokens, counters = run(config, executor, tokenizer, prompts, options.tokens, preemption)
            found += tokens
            totals.append(counters)
        store = executor.store if size == 1 else executor.inner.store
        held, sent = store.pool.nbytes, 0.0 if size == 1 else executor.plan_bytes_per_step
        executor.close()
        if size == 1:
            expected, whole = found, held
        same = sum(ours == theirs for ours, theirs in zip(found, expected, strict=True))
        wrong += same < len(expected) or held * size != whole
        print(f"{label:<14} {size:>5} {f'{same} of {len(expected)}':>14} {totals[0].preempt_recompute:>10} "
              f"{totals[1].preempt_swap:>8} {sum(item.cached_tokens for item in totals):>7} "
              f"{f'{held:,} ({held / whole:.3f})':>14} {sent:>12,.0f} {sum(item.steps for item in totals):>6} "
              f"{loaded - start:>7.1f} {time.perf_counter() - loaded:>6.1f}", flush=True)
    return wrong


def ids(tokenizer: Any, texts: list[str], count: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Prompts of at most 40 tokens that all begin alike; bytes stand for tokens where the model has no tokenizer."""
    encode = tokenizer.encode if tokenizer is not None else lambda text: [byte % vocabulary for byte in text.encode()]
    head = encode("Answer the question of the user.")[:2 * BLOCK]
    return [tuple((head + encode(text))[:40]) for text in texts[:count]]


if __name__ == "__main__":
    main()
