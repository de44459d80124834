"""Memory saved by sharing between the sequences of a request, beside the paper's Figure 15.

python -m tests.acceptance.sharing [--requests 48] [--tokens 60]

Saving = 1 - 1 / mean over steps of (logical blocks / physical blocks). The prefix cache is off, so that only samples
and beams of one request share. Blocks of 16 tokens, as in the paper.
"""

from __future__ import annotations

import argparse

from pagedcli.core.request import SamplingParams
from tests.acceptance.kit import Bench, real_prompts, serve

PAPER = {("parallel", 2): "6.1 %", ("parallel", 4): "about 8.5 %", ("parallel", 6): "9.8 %",
         ("beam", 2): "37.6 %", ("beam", 4): "about 53.1 %", ("beam", 6): "55.2 %"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--dtype", default="bf16")
    options = parser.parse_args()
    texts, origin = real_prompts(options.requests)
    bench = Bench.open(dtype=options.dtype, blocks=8000)
    prompts = bench.ids(texts)
    mean = sum(map(len, prompts)) / len(prompts)
    print(f"smollm2-135m {options.dtype}, {len(prompts)} prompts ({origin}, mean {mean:.1f} tokens), "
          f"{options.tokens} output tokens a sequence, blocks of 16")
    print("kind      width  saving   paper (OPT-13B, Alpaca, Fig. 15)   block copies")
    for kind, width in PAPER:
        fields = {"n": width, "temperature": 1.0} if kind == "parallel" else {
            "use_beam_search": True, "beam_width": width, "temperature": 0.0}
        params = SamplingParams(max_tokens=options.tokens, ignore_eos=True, seed=1, **fields)
        engine = bench.engine(prefix=False)
        serve(engine, prompts, params, at_once=24)
        counters = engine.counters
        saving = 1 - counters.sharing_ratio_steps / counters.sharing_ratio_sum
        print(f"{kind:9} {width:5}  {100 * saving:5.1f} %  {PAPER[kind, width]:>15}                  "
              f"{counters.block_copies:6}", flush=True)


if __name__ == "__main__":
    main()
