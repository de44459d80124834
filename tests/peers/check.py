"""Whether outputs are what was asked for: lengths, and the first greedy tokens against transformers.

The reference is `transformers` in fp32, one row at a time: `python -m tests.peers.check --rows ROWS --out REFERENCE`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.peers.workloads import Row, read

FIRST_TOKENS = 20
END_TOKEN = 2
"""Of SmolLM2 (its generation_config.json); lengths are forced, so it is a token like any other in these rows."""
Outputs = Mapping[str, Sequence[Sequence[int]]]
"""A row's samples, each a list of token ids, by the row's id."""


@dataclass(frozen=True)
class Agreement:
    """Of `compared` greedy rows, `equal` begin with the same FIRST_TOKENS tokens as the reference."""

    equal: int
    compared: int

    @property
    def most(self) -> bool:
        """Whether more than half of the rows agree."""
        return 2 * self.equal > self.compared

    @property
    def text(self) -> str:
        return f"{self.equal}/{self.compared}"


def read_outputs(file: Path) -> dict[str, list[list[int]]]:
    """Outputs as drivers and this module write them."""
    found = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found[row["id"]] = row["outputs"]
    return found


def length_faults(rows: Sequence[Row], outputs: Outputs) -> list[str]:
    """What is wrong with the number of rows, samples or tokens; empty when all are as asked."""
    faults = [f"{key}: not a row that was asked for" for key in sorted(set(outputs) - {row["id"] for row in rows})]
    for row in rows:
        samples = outputs.get(row["id"])
        if samples is None:
            faults.append(f"{row['id']}: no output")
        elif [len(sample) for sample in samples] != [row["max_tokens"]] * row["n"]:
            faults.append(f"{row['id']}: {[len(sample) for sample in samples]} tokens, asked for {row['n']} x "
                          f"{row['max_tokens']}")
    return faults


def agreement(rows: Sequence[Row], outputs: Outputs, reference: Outputs, first: int = FIRST_TOKENS,
              until: int | None = None) -> Agreement:
    """Greedy rows whose first tokens are those of the reference. A row that either side lacks does not agree.

    `until`: the end token, for an engine that forces lengths by forbidding it; only what the reference has before it is
    compared then.
    """
    greedy = [row for row in rows if row["temperature"] == 0]
    equal = 0
    for row in greedy:
        mine, theirs = outputs.get(row["id"]), reference.get(row["id"])
        count = min(first, row["max_tokens"])
        if mine and theirs and len(theirs[0]) >= count:
            if until is not None and until in theirs[0][:count]:
                count = list(theirs[0]).index(until)
            equal += list(mine[0][:count]) == list(theirs[0][:count])
    return Agreement(equal, len(greedy))


def write_reference(rows: Sequence[Row], model: str, out: Path, threads: int) -> None:
    """The first tokens of each greedy row by transformers in fp32, one row at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    decoder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    decoder.generation_config.eos_token_id = None
    partial = out.with_name(out.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows, 1):
            if row["temperature"] == 0:
                print(f"row {number} of {len(rows)}", flush=True)
                prompt = torch.tensor([row["prompt_token_ids"]])
                count = min(FIRST_TOKENS, row["max_tokens"])
                found = decoder.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count,
                                         do_sample=False, pad_token_id=2)[0, prompt.shape[1]:].tolist()
                file.write(json.dumps({"id": row["id"], "outputs": [found]}) + "\n")
    os.replace(partial, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", required=True, help="folder of the model in fp32")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    write_reference(read(given.rows), given.model, given.out, given.threads)


if __name__ == "__main__":
    main()
