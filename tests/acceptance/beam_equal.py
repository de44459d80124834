"""Beam search token-equal to `transformers`, with plenty of memory and with pools that force preemption.

python -m tests.acceptance.beam_equal [--prompts 100] [--tokens 24] [--each N] [--every K] [--again R] [--model NAME]

NAME: smollm2-135m, tiny-llama or tiny-opt. Widths 2, 4, 6 x length_penalty 0, 1, 2 x early_stopping false, true,
"never" x with and without a stop string: 54 settings. `--each N` gives every prompt N of them in turn (all 54 by
default), so that all are met when there are more prompts. The two pools that preempt take every K-th search (all by
default; a K that has no factor 2 or 3 meets all 54 settings). `transformers` computes each row of ids once for all
settings of a prompt (`remembered.py`); every R-th batch of searches is also done by plain `generate`.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteriaList, StopStringCriteria

from pagedcli.core.config import ModelConfig
from pagedcli.core.request import SamplingParams
from pagedcli.execution.model_hub import resolve_model
from tests.acceptance.kit import Bench, real_prompts, serve
from tests.acceptance.remembered import remembering

SETTINGS = list(itertools.product((2, 4, 6), (0.0, 1.0, 2.0), (False, True, "never"), (None, " the")))
TOGETHER = 16
"""Prompts in a batch of the other side: what is remembered of them for 54 settings stays near 2 GB."""
PART = 600
FP32_TIE = 5e-5
"""Log-probabilities of whole beams are near -100, where neighbouring float32 numbers are 8e-6 apart."""
Setting = tuple[int, float, Any, str | None]
Job = tuple[tuple[int, ...], Setting]
Stops = dict[str, StopStringCriteria]
"""What `generate` makes of stop_strings=, made once: it reads the whole vocabulary."""


def reference(model: Any, stops: Stops, prompts: list[tuple[int, ...]], setting: Setting, tokens: int,
              **how: Any) -> list[list[int]]:
    """Best beam of each prompt; the prompts are of one length, so that nothing is padded."""
    width, penalty, early, stop = setting
    ids = torch.tensor(prompts)
    found = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=width, length_penalty=penalty,
        early_stopping=early, max_new_tokens=tokens, pad_token_id=2, return_dict_in_generate=True,
        stopping_criteria=StoppingCriteriaList([stops[stop]] if stop else []), **how)
    sizes = (found.beam_indices >= 0).sum(1).tolist()  # the rest pads the batch, with the id that also ends a text
    return [row[:size] for row, size in zip(found.sequences[:, ids.shape[1]:].tolist(), sizes, strict=True)]


@dataclass
class Theirs:
    """The other side's answers, by job; `again` holds those that were also computed without anything remembered."""

    answers: dict[int, list[int]] = field(default_factory=dict)
    again: dict[int, list[int]] = field(default_factory=dict)
    asked: int = 0
    computed: int = 0


def references(model: Any, stops: Stops, jobs: list[Job], tokens: int, again: int = 0) -> Theirs:
    """The other side's answer to every job, in batches of one setting and of prompts of one length."""
    theirs, batches, done = Theirs(), _batches(jobs), 0
    for batch in batches:
        with remembering(model) as memory:
            for setting, members in batch.items():
                rows = [jobs[index][0] for index in members]
                answers = reference(model, stops, rows, setting, tokens, use_cache=False)
                theirs.answers.update(zip(members, answers, strict=True))
        theirs.asked += memory.asked
        theirs.computed += memory.computed
        for setting, members in batch.items():
            done += 1
            if again and done % again == 0:
                rows = [jobs[index][0] for index in members]
                theirs.again.update(zip(members, reference(model, stops, rows, setting, tokens), strict=True))
    return theirs


def _batches(jobs: list[Job]) -> list[dict[Setting, list[int]]]:
    """Jobs by prompts that go together, then by setting."""
    lengths: dict[int, dict[tuple[int, ...], None]] = {}
    for prompt, _ in jobs:
        lengths.setdefault(len(prompt), {})[prompt] = None
    place: dict[tuple[int, ...], int] = {}
    count = 0
    for prompts in lengths.values():
        for order, prompt in enumerate(prompts):
            place[prompt] = count + order // TOGETHER
        count += -(-len(prompts) // TOGETHER)
    batches: list[dict[Setting, list[int]]] = [{} for _ in range(count)]
    for index, (prompt, setting) in enumerate(jobs):
        batches[place[prompt]].setdefault(setting, []).append(index)
    return batches


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


def explained(exact: Any, job: Job, tokens: int, sides: dict[str, list[int]]) -> bool:
    """Print two sides' different answers to a job; whether the choice between them is a tie in fp32."""
    margin = closest_choice(exact, *job, tokens)
    tie = margin < FP32_TIE
    print(f"  {job[1]}, prompt of {len(job[0])}: kept and dropped beams come within {margin:.1e} in float64"
          f"{': a tie in fp32' if tie else ''}")
    for name, ids in sides.items():
        print(f"   {name:12} {ids}")
    return tie


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--each", type=int, default=len(SETTINGS))
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--again", type=int, default=35, help="0 for never")
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(ModelConfig()).folder)
    texts, origin = real_prompts(8 * options.prompts)
    lengths = dict.fromkeys(ids for ids in (tuple(tokenizer(text)["input_ids"]) for text in texts) if len(ids) <= 48)
    prompts = commonest_lengths(list(lengths), options.prompts)
    with tempfile.TemporaryDirectory() as name:
        folder = _model(options.model, Path(name), tokenizer)
        jobs: list[Job] = [(prompt, SETTINGS[(index * options.each + k) % len(SETTINGS)])
                for index, prompt in enumerate(prompts) for k in range(options.each)]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        stops = {stop: StopStringCriteria(tokenizer, [stop]) for *_, stop in SETTINGS if stop}
        start = time.perf_counter()
        theirs = references(model, stops, jobs, options.tokens, options.again)
        print(f"transformers: {len(jobs)} searches in {time.perf_counter() - start:.0f} s, {theirs.computed} of "
              f"{theirs.asked} rows computed", flush=True)
        wrong = ties = 0
        if options.again:
            odd = [index for index, ids in theirs.again.items() if ids != theirs.answers[index]]
            print(f"transformers without the memory: {len(theirs.again) - len(odd)} of {len(theirs.again)} the same",
                  flush=True)
            for index in odd:
                sides = {"remembered": theirs.answers[index], "plain": theirs.again[index]}
                wrong += not explained(exact, jobs[index], options.tokens, sides)
        bench = Bench.open(model=str(folder), dtype="fp32", blocks=4000, block_size=8, swap=1 << 30)
        pools = (("roomy", None, "auto"), ("recompute", 90, "recompute"), ("swap", 90, "swap"))
        for label, blocks, preemption in pools:
            chosen = range(0, len(jobs), options.every if blocks else 1)
            engine = bench.engine(blocks=blocks, preemption=preemption)
            bad, met, seconds = 0, 0, 0.0
            for part in (chosen[place:place + PART] for place in range(0, len(chosen), PART)):
                groups, spent = serve(engine, [jobs[index][0] for index in part],
                                      [params(jobs[index][1], options.tokens) for index in part], at_once=64)
                met, seconds = met + len(part), seconds + spent
                for index, group in zip(part, groups, strict=True):
                    ours, other = group.done[0].output_ids, theirs.answers[index]
                    if ours != other:
                        bad += 1
                        tie = explained(exact, jobs[index], options.tokens, {"ours": ours, "transformers": other})
                        ties += tie
                        wrong += not tie
                print(f"  {label}: {met - bad} of {met} so far, {seconds:.0f} s", flush=True)
            counters = engine.counters
            print(f"{options.model} {label}: {met - bad} of {met} searches ({len(prompts)} prompts, {origin}) "
                  f"token-equal, {counters.preempt_recompute} recomputed, {counters.preempt_swap} swapped, "
                  f"{seconds:.0f} s", flush=True)
    print(f"{options.model}: {ties} ties in fp32, {wrong} faults")
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
