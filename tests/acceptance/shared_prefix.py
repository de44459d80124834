"""What a shared prefix saves: 64 requests with 341 common tokens, with and without the prefix cache, same bits.

python -m tests.acceptance.shared_prefix [--rounds 3] [--dtype bf16]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from pagedcli.core.request import SamplingParams
from tests.acceptance.kit import Bench, real_prompts, serve
from tests.acceptance.same_bits import bits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bf16")
    options = parser.parse_args()
    texts, origin = real_prompts(400)
    bench = Bench.open(dtype=options.dtype, blocks=4000)
    everything = [token for ids in bench.ids(texts) for token in ids]
    prefix, rest = tuple(everything[:341]), everything[341:]
    prompts = [prefix + tuple(rest[30 * row:30 * row + 30]) for row in range(64)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=0)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    outputs: dict[bool, list[Any]] = {}
    for _ in range(options.rounds):
        for cached in (True, False):
            engine = bench.engine(prefix=cached)
            groups, spent = serve(engine, prompts, params)
            seconds[cached].append(spent)
            outputs.setdefault(cached, [bits(group) for group in groups])
            hits = engine.counters.cached_tokens / engine.counters.prompt_tokens
            print(f"prefix cache {'on ' if cached else 'off'}: {spent:6.2f} s, hit rate {100 * hits:.1f} %", flush=True)
    with_cache, without = (statistics.median(seconds[key]) for key in (True, False))
    same = sum(a == b for a, b in zip(outputs[True], outputs[False], strict=True))
    print(f"64 requests of 341 shared + 30 own tokens ({origin}), 60 out, smollm2-135m {options.dtype}: "
          f"{without:.2f} s without, {with_cache:.2f} s with, {without / with_cache:.2f}x; {same} of 64 bit-equal")
    raise SystemExit(same != 64)


if __name__ == "__main__":
    main()
