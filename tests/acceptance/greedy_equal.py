"""Greedy ids of SmolLM2 in fp32 against `transformers` generate, prompt by prompt, with a pool that forces preemption.

python -m tests.acceptance.greedy_equal [--prompts 64] [--tokens 64]
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM

from pagedcli.core.config import ModelConfig
from pagedcli.core.request import SamplingParams
from pagedcli.execution.model_hub import resolve_model
from tests.acceptance.kit import Bench, real_prompts, serve


def reference(prompts: list[tuple[int, ...]], tokens: int) -> list[list[int]]:
    """transformers' greedy continuation of each prompt alone."""
    folder = resolve_model(ModelConfig()).weights_folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                             max_new_tokens=tokens, pad_token_id=2)
        outputs.append(out[0, len(prompt):].tolist())
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    texts, origin = real_prompts(options.prompts)
    bench = Bench.open(dtype="fp32", blocks=1000, block_size=8)
    prompts = bench.ids(texts)
    engine = bench.engine(blocks=150, max_num_batched_tokens=256, preemption="recompute")
    groups, seconds = serve(engine, prompts, SamplingParams(temperature=0, max_tokens=options.tokens))
    ours = [group.done[0].output_ids for group in groups]
    theirs = reference(prompts, options.tokens)
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    print(f"{same} of {len(prompts)} prompts ({origin}) equal over up to {options.tokens} greedy tokens, fp32; "
          f"{engine.counters.preempt_recompute} preemptions; ours took {seconds:.1f} s")
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            print(f"  prompt {index} differs at token {place}: {a[place:place + 3]} / {b[place:place + 3]}")
    raise SystemExit(same != len(prompts))


if __name__ == "__main__":
    main()
