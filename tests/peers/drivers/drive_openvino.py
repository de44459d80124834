"""OpenVINO GenAI: its pipeline of continuous batching over paged attention, with its prefix cache."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from driver_kit import now, options, read_rows, report

BATCHED_TOKENS = 2048
"""The engine's default of 256 costs it about a tenth on W1."""
EVERY_TOKEN = 49152
"""top_k that leaves all of the vocabulary in."""


def add(parser: ArgumentParser) -> None:
    parser.add_argument("--batched-tokens", type=int, default=BATCHED_TOKENS)
    parser.add_argument("--cache-gib", type=int, default=1)
    parser.add_argument("--first-alone", action="store_true",
                        help="the first row by itself, then the others: this engine looks for a known prefix only when "
                             "a row is handed over, so rows handed over at once share nothing")


def generation(genai: Any, row: dict[str, Any], number: int) -> Any:
    """Settings of one row: forced length, greedy or plain sampling."""
    config = genai.GenerationConfig()
    config.eos_token_id, config.ignore_eos = 2, True
    config.max_new_tokens = row["max_tokens"]  # a least length would forbid the end token instead
    config.num_return_sequences = row["n"]
    config.do_sample = row["temperature"] > 0
    if config.do_sample:
        config.temperature, config.top_p, config.top_k, config.rng_seed = row["temperature"], 1.0, EVERY_TOKEN, number
    return config


def main() -> None:
    given = options(__doc__ or "", add)
    import numpy as np
    import openvino
    import openvino_genai as genai

    precision = {"bf16": "bf16", "fp32": "f32"}[given.dtype]
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = given.cache_gib, 256
    scheduler.max_num_batched_tokens, scheduler.enable_prefix_caching = given.batched_tokens, True
    pipeline = genai.ContinuousBatchingPipeline(given.model, scheduler, "CPU", {
        "INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision, "INFERENCE_NUM_THREADS": given.threads})
    rows = read_rows(given.rows)
    prompts = [openvino.Tensor(np.array([row["prompt_token_ids"]], np.int64)) for row in rows]
    warm = openvino.Tensor(np.array([[1, 9690, 198]], np.int64))
    pipeline.generate([warm], [generation(genai, {"max_tokens": 2, "n": 1, "temperature": 0.0}, 0)])
    configs = [generation(genai, row, number) for number, row in enumerate(rows)]
    alone = 1 if given.first_alone else 0
    loaded = now()
    found = pipeline.generate(prompts[:alone], configs[:alone]) if alone else []
    found += pipeline.generate(prompts[alone:], configs[alone:]) if len(prompts) > alone else []
    done = now()
    outputs = {row["id"]: [list(map(int, ids)) for ids in result.m_generation_ids]
               for row, result in zip(rows, found, strict=True)}
    report(given, version=f"openvino-genai {genai.__version__}", loaded=loaded,
           done=done, outputs=outputs,
           settings={"precision": precision, "kv": precision, "batched_tokens": given.batched_tokens,
                     "prefix": True, "first_alone": given.first_alone})


if __name__ == "__main__":
    main()
