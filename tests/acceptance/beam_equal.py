"""Beam search token-equal to `transformers`, with plenty of memory and with pools that force preemption.

python -m tests.acceptance.beam_equal [--prompts 100] [--tokens 24] [--each N] [--every K] [--model NAME]

NAME: smollm2-135m, tiny-llama or tiny-opt. Widths 2, 4, 6 x length_penalty 0, 1, 2 x early_stopping false, true,
"never" x with and without a stop string: 54 settings. `--each N` gives every prompt N of them in turn (all 54 by
default), so that all are met when there are more prompts. The two pools that preempt take every K-th search (all by
default; a K that has no factor 2 or 3 meets all 54 settings).
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedcli.core.config import ModelConfig
from pagedcli.core.request import SamplingParams
from pagedcli.execution.model_hub import resolve_model
from tests.acceptance.kit import Bench, real_prompts, serve

SETTINGS = list(itertools.product((2, 4, 6), (0.0, 1.0, 2.0), (False, True, "never"), (None, " the")))
FP32_TIE = 5e-5
"""Log-probabilities of whole beams are near -100, where neighbouring float32 numbers are 8e-6 apart."""
Setting = tuple[int, float, Any, str | None]
Job = tuple[tuple[int, ...], Setting]


def reference(model: Any, tokenizer: Any, prompts: list[tuple[int, ...]], setting: Setting,
              tokens: int) -> list[list[int]]:
    """Best beam of each prompt; the prompts are of one length, so that nothing is padded."""
    width, penalty, early, stop = setting
    ids = torch.tensor(prompts)
    extra = {"stop_strings": [stop], "tokenizer": tokenizer} if stop else {}
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=width,
                         length_penalty=penalty, early_stopping=early, max_new_tokens=tokens, pad_token_id=2, **extra)
    rows = out[:, ids.shape[1]:].tolist()
    for row in rows:
        while len(row) > 1 and row[-1] == row[-2] == 2:
            row.pop()
    return rows


def references(model: Any, tokenizer: Any, jobs: list[Job], tokens: int) -> list[list[int]]:
    """The other side's answer to every job, in batches of one setting and one prompt length."""
    batches: dict[tuple[Setting, int], list[int]] = {}
    for index, (prompt, setting) in enumerate(jobs):
        batches.setdefault((setting, len(prompt)), []).append(index)
    found: dict[int, list[int]] = {}
    for (setting, _), members in batches.items():
        answers = reference(model, tokenizer, [jobs[index][0] for index in members], setting, tokens)
        found.update(zip(members, answers, strict=True))
    return [found[index] for index in range(len(jobs))]


def commonest_lengths(prompts: list[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """`count` prompts of the lengths that occur most, so that the other side's batches are large."""
    sizes = Counter(len(prompt) for prompt in prompts)
    order = sorted(prompts, key=lambda prompt: (-sizes[len(prompt)], len(prompt)))
    return order[:count]


@torch.inference_mode()
def closest_choice(model: Any, prompt: tuple[int, ...], setting: Setting, tokens: int) -> float:
    """How near the last beam kept and the first dropped ever come, in a plain search in float64 (no ends, no stops)."""
    width, closest = setting[0], float("inf")
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(tokens):
        found = []
        for score, tail in beams:
            logits = model(torch.tensor([[*prompt, *tail]])).logits[0, -1]
            top = torch.log_softmax(logits, -1).topk(width + 1)
            found += [(score + float(value), [*tail, int(token)]) for value, token in zip(*top, strict=True)]
        found.sort(key=lambda item: -item[0])
        closest = min(closest, found[width - 1][0] - found[width][0])
        beams = found[:width]
    return closest


def params(setting: Setting, tokens: int) -> SamplingParams:
    width, penalty, early, stop = setting
    return SamplingParams(temperature=0, max_tokens=tokens, use_beam_search=True, beam_width=width,
                          length_penalty=penalty, early_stopping=early, stop=(stop,) if stop else ())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--each", type=int, default=len(SETTINGS))
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(ModelConfig()).folder)
    texts, origin = real_prompts(8 * options.prompts)
    lengths = [ids for ids in (tuple(tokenizer(text)["input_ids"]) for text in texts) if len(ids) <= 48]
    prompts = commonest_lengths(lengths, options.prompts)
    with tempfile.TemporaryDirectory() as name:
        folder = _model(options.model, Path(name), tokenizer)
        jobs: list[Job] = [(prompt, SETTINGS[(index * options.each + k) % len(SETTINGS)])
                for index, prompt in enumerate(prompts) for k in range(options.each)]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        start = time.perf_counter()
        theirs = references(model, tokenizer, jobs, options.tokens)
        print(f"transformers: {len(jobs)} searches in {time.perf_counter() - start:.0f} s", flush=True)
        bench = Bench.open(model=str(folder), dtype="fp32", blocks=4000, block_size=8, swap=1 << 30)
        wrong = 0
        pools = (("roomy", None, "auto"), ("recompute", 90, "recompute"), ("swap", 90, "swap"))
        for label, blocks, preemption in pools:
            chosen = range(0, len(jobs), options.every if blocks else 1)
            engine = bench.engine(blocks=blocks, preemption=preemption)
            groups, seconds = serve(engine, [jobs[index][0] for index in chosen],
                                    [params(jobs[index][1], options.tokens) for index in chosen], at_once=64)
            ours = {index: group.done[0].output_ids for index, group in zip(chosen, groups, strict=True)}
            bad = [index for index in chosen if ours[index] != theirs[index]]
            counters = engine.counters
            print(f"{options.model} {label}: {len(ours) - len(bad)} of {len(ours)} searches ({len(prompts)} prompts, "
                  f"{origin}) token-equal, {counters.preempt_recompute} recomputed, {counters.preempt_swap} swapped, "
                  f"{seconds:.0f} s", flush=True)
            for index in bad:
                margin = closest_choice(exact, *jobs[index], options.tokens)
                tie = margin < FP32_TIE
                print(f"  {jobs[index][1]}: kept and dropped beams come within {margin:.1e} in float64"
                      f"{': a tie in fp32' if tie else ''}\n   ours   {ours[index]}\n   theirs {theirs[index]}")
                wrong += not tie
    raise SystemExit(wrong > 0)


def _model(name: str, folder: Path, tokenizer: Any) -> Path:
    if not name.startswith("tiny-"):
        return Path(resolve_model(ModelConfig(model=name)).folder or "")
    from tests.execution.tiny_models import save_model

    family = name.removeprefix("tiny-")
    saved = save_model(family, folder / family, vocab_size=len(tokenizer), max_position_embeddings=256,
                       bos_token_id=1, eos_token_id=2, pad_token_id=2)
    tokenizer.save_pretrained(saved)
    return saved


if __name__ == "__main__":
    main()
