"""Memory saved by sharing between the sequences of a request, beside the paper's Figure 15.

python -m tests.acceptance.sharing [--workload alpaca|sharegpt|both] [--requests 48] [--tokens 60]

Saving = 1 - 1 / mean over steps of (logical blocks / physical blocks). The prefix cache is off, so that only samples
and beams of one request share. Blocks of 16 tokens, as in the paper. Alpaca: instructions, and `--tokens` out.
ShareGPT: conversations cut to prompt lengths of that workload, and its output lengths, at most `--tokens`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from pagedcli.core.request import SamplingParams
from pagedcli.workloads import load_workload
from tests.acceptance.kit import SHARED, Bench, real_prompts, serve

PAPER: Mapping[str, Mapping[tuple[str, int], str]] = {
    "alpaca": {("parallel", 2): "6.1 %", ("parallel", 4): "about 8.5 %", ("parallel", 6): "9.8 %",
               ("beam", 2): "37.6 %", ("beam", 4): "about 53.1 %", ("beam", 6): "55.2 %"},
    "sharegpt": {(kind, width): f"{low}-{high} % over widths" for kind, low, high in
                 (("parallel", 16.2, 30.5), ("beam", 44.3, 66.3)) for width in (2, 4, 6)},
}
"""Of OPT-13B: Figure 15 for Alpaca; for ShareGPT the text under it gives only the ends (section 6.3)."""
Job = tuple[tuple[int, ...], int]


def alpaca(bench: Bench, count: int, tokens: int) -> tuple[list[Job], str]:
    texts, origin = real_prompts(count)
    return [(ids, tokens) for ids in bench.ids(texts)], origin


def sharegpt(bench: Bench, count: int, tokens: int) -> tuple[list[Job], str]:
    """Prompts and output lengths; the words are of conversations where the development data is at hand."""
    workload = load_workload("sharegpt", num_requests=count, seed=1)
    file = SHARED / "data" / "sharegpt_toolcall_300.json"
    texts, origin = [item.prompt or "" for item in workload.requests], workload.label
    if file.is_file():
        origin = "turns of conversations at ShareGPT's lengths"
        said = [turn["value"] for row in json.loads(file.read_text()) for turn in row["conversations"]
                if turn["from"] in ("human", "gpt")]
        start = [place * len(said) // count for place in range(count)]
        texts = ["\n".join(said[place:] + said[:place])[:8 * item.prompt_len]
                 for place, item in zip(start, workload.requests, strict=True)]
    return [(ids[:item.prompt_len], min(item.output_len, tokens)) for ids, item in
            zip(bench.ids(texts), workload.requests, strict=True)], origin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=("alpaca", "sharegpt", "both"), default="both")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--dtype", default="bf16")
    options = parser.parse_args()
    bench = Bench.open(dtype=options.dtype, blocks=8000)
    for name, make in (("alpaca", alpaca), ("sharegpt", sharegpt)):
        if options.workload in (name, "both"):
            jobs, origin = make(bench, options.requests, options.tokens)
            table(bench, name, jobs, f"smollm2-135m {options.dtype}, {len(jobs)} prompts ({origin})")


def table(bench: Bench, name: str, jobs: list[Job], what: str) -> None:
    """Print the saving of one workload at every width."""
    prompts = [ids for ids, _ in jobs]
    print(f"{name}: {what}, mean {sum(map(len, prompts)) / len(jobs):.1f} tokens, "
          f"{sum(tokens for _, tokens in jobs) / len(jobs):.1f} out a sequence, blocks of 16")
    print(f"kind      width   saving  {'paper (OPT-13B, ' + name + ')':>28}  block copies")
    for (kind, width), printed in PAPER[name].items():
        fields: dict[str, Any] = {"n": width, "temperature": 1.0} if kind == "parallel" else {
            "use_beam_search": True, "beam_width": width, "temperature": 0.0}
        params = [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1, **fields) for _, tokens in jobs]
        engine = bench.engine(prefix=False)
        serve(engine, prompts, params, at_once=24)
        counters = engine.counters
        saving = 1 - counters.sharing_ratio_steps / counters.sharing_ratio_sum
        print(f"{kind:9} {width:5}  {100 * saving:5.1f} %  {printed:>28}  {counters.block_copies:12}", flush=True)


if __name__ == "__main__":
    main()
