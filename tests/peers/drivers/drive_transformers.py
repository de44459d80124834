"""transformers: `generate` in left-padded static batches, each until its longest row is done; rows sorted by length
so that little is padded."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from driver_kit import now, options, read_rows, report

PAD = 2


def add(parser: ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=32)


def generate(model: Any, rows: list[dict[str, Any]]) -> list[list[list[int]]]:
    """The samples of one batch of rows, which share n and temperature."""
    import torch

    width, n = max(len(row["prompt_token_ids"]) for row in rows), rows[0]["n"]
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        prompt = row["prompt_token_ids"]
        ids[place, width - len(prompt):], mask[place, width - len(prompt):] = torch.tensor(prompt), 1
    how: dict[str, Any] = {"do_sample": False}
    if rows[0]["temperature"] > 0:
        how = {"do_sample": True, "temperature": rows[0]["temperature"], "top_k": 0, "top_p": 1.0,
               "num_return_sequences": n}
    found = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=PAD,
                           max_new_tokens=max(row["max_tokens"] for row in rows), **how)[:, width:].tolist()
    return [[sample[:row["max_tokens"]] for sample in found[place * n:(place + 1) * n]]
            for place, row in enumerate(rows)]


def main() -> None:
    given = options(__doc__ or "", add)
    import torch
    import transformers

    torch.set_num_threads(given.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        given.model, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[given.dtype]).eval()
    model.generation_config.eos_token_id = None
    rows = read_rows(given.rows)
    model.generate(input_ids=torch.tensor([[1, 9690, 198]]), max_new_tokens=2, do_sample=False, pad_token_id=PAD)
    loaded = now()
    order = sorted(rows, key=lambda row: (row["max_tokens"], len(row["prompt_token_ids"])))
    outputs: dict[str, list[list[int]]] = {}
    step = max(1, given.batch // rows[0]["n"])
    for first in range(0, len(order), step):
        batch = order[first:first + step]
        outputs |= {row["id"]: samples for row, samples in zip(batch, generate(model, batch), strict=True)}
    done = now()
    report(given, version=f"transformers {transformers.__version__}, torch {torch.__version__}", loaded=loaded,
           done=done, outputs={row["id"]: outputs[row["id"]] for row in rows},
           settings={"batch": given.batch, "sorted": "output length, then prompt length"})


if __name__ == "__main__":
    main()
