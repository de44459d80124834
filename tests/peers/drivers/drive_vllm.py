"""vLLM's CPU build: LLM.generate in this process, compiled as it comes or eager."""

from __future__ import annotations

import os
from argparse import ArgumentParser

from driver_kit import now, options, read_rows, report

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def add(parser: ArgumentParser) -> None:
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--batched-tokens", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--kv-gib", type=int, default=1)


def main() -> None:
    given = options(__doc__ or "", add)
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": str(given.kv_gib), "OMP_NUM_THREADS": str(given.threads),
                   "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_LOGGING_LEVEL": "WARNING"}
    import torch
    import vllm

    rows = read_rows(given.rows)
    longest = max(len(row["prompt_token_ids"]) + row["max_tokens"] for row in rows)
    engine = vllm.LLM(model=given.model, dtype=DTYPES[given.dtype], enforce_eager=given.eager,
                      max_num_seqs=given.sequences, max_num_batched_tokens=given.batched_tokens,
                      max_model_len=max(2048, longest), enable_prefix_caching=True, seed=0)
    # A row of its own gets no seed: on a CPU this version cannot seed requests one by one.
    params = [vllm.SamplingParams(temperature=row["temperature"], n=row["n"], max_tokens=row["max_tokens"],
                                  ignore_eos=True) for row in rows]
    prompts = [{"prompt_token_ids": row["prompt_token_ids"]} for row in rows]
    engine.generate([{"prompt_token_ids": [1, 9690, 198]}], vllm.SamplingParams(temperature=0, max_tokens=2),
                    use_tqdm=False)
    loaded = now()
    found = engine.generate(prompts, params, use_tqdm=False)
    done = now()
    outputs = {row["id"]: [list(sample.token_ids) for sample in result.outputs]
               for row, result in zip(rows, found, strict=True)}
    report(given, version=f"vllm-cpu {vllm.__version__}, torch {torch.__version__}", loaded=loaded,
           done=done, outputs=outputs,
           settings={"compiled": not given.eager, "batched_tokens": given.batched_tokens,
                     "sequences": given.sequences, "prefix": True})


if __name__ == "__main__":
    main()
