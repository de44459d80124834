"""Records who forks from whom in real beam searches, for simulations (`pagedcli paper`, Figures 14b and 15b).

python -m tests.acceptance.record_beams [--prompts 32] [--tokens 96] [--output FILE]

The searches run on the real engine with SmolLM2-135M-Instruct. For every step the places of the parents among the live
beams are written down, in order: "0023" says that beam 1 was dropped, beam 0 forked and the others went on. Only these
digits are kept, no text and no token.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import numpy as np

from pagedcli.core.request import Request, SamplingParams
from pagedcli.core.sequence import Sequence, TokenChoice
from pagedcli.engine.beam import BeamState
from tests.acceptance.kit import Bench, real_prompts

WIDTHS = (2, 4, 6)
TARGET = Path(__file__).resolve().parents[2] / "pagedcli" / "bench" / "recorded_beams.json"


class Notes:
    """Parents of every step, by the request's index. `watch` puts itself around `BeamState.step`."""

    def __init__(self) -> None:
        self.steps: dict[int, list[str]] = {}

    def watch(self) -> None:
        inner, steps = BeamState.step, self.steps

        def step(state: Any, live: Items[Sequence], log_probs: np.ndarray, details: Any
                 ) -> dict[int, list[TokenChoice]]:
            choices = inner(state, live, log_probs, details)
            parents = "".join(str(place) * len(choices[seq.id]) for place, seq in enumerate(live))
            if parents:
                steps.setdefault(live[0].group.request.index, []).append(parents)
            return choices

        setattr(BeamState, "step", step)  # noqa: B010  # a recorder looks over the real one's shoulder


def record(bench: Bench, prompts: list[tuple[int, ...]], width: int, tokens: int, notes: Notes) -> list[str]:
    """One string a request: its steps' parents, a blank between steps. At the first the beams are all the prompt's own,
    which is nobody's fork: it is written as one where each goes on."""
    notes.steps.clear()
    engine = bench.engine(max_num_seqs=64)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, n=width, use_beam_search=True,
                            beam_width=width)
    for index, prompt in enumerate(prompts):
        engine.add(Request(index, f"{width}/{index}", prompt, params, 0.0, tokens))
    left = len(prompts)
    while left:
        left -= len(engine.step())
    first = "".join(map(str, range(width)))
    return [" ".join([first, *notes.steps[index][1:]]) for index in range(len(prompts))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, default=TARGET)
    args = parser.parse_args()
    texts, source = real_prompts(args.prompts)
    bench, notes = Bench.open(), Notes()
    notes.watch()
    prompts = bench.ids(texts)
    widths: dict[str, list[str]] = {}
    for width in WIDTHS:
        begun = time.perf_counter()
        widths[str(width)] = record(bench, prompts, width, args.tokens, notes)
        steps = [step for line in widths[str(width)] for step in line.split()]
        same = "".join(map(str, range(width)))
        print(f"width {width}: {len(steps)} steps, a beam changes in {sum(s != same for s in steps) / len(steps):.1%}, "
              f"{sum(width - len(set(s)) for s in steps) / len(steps):.2f} beams dropped a step; "
              f"{time.perf_counter() - begun:.0f} s", flush=True)
    data = {"model": "SmolLM2-135M-Instruct", "prompts": f"{len(prompts)} {source}", "tokens": args.tokens,
            "widths": widths}
    args.output.write_text(json.dumps(data, indent=0) + "\n", "utf-8")
    bench.close()
    print(f"{args.output.name}: {args.output.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
