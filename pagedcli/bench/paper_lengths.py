"""Lengths of the paper's requests: real ones from a file, or drawn from the fitted sets (no dataset is shipped)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from pagedcli.bench.paper_alpaca import alpaca_pairs
from pagedcli.workloads import WorkloadOptions, find_spec
from pagedcli.workloads.chat import Conversation, Turn, schedule
from pagedcli.workloads.readers import read_table
from pagedcli.workloads.spec import PAPER_MAX_TOTAL
from pagedcli.workloads.synthetic import conversations, draw_pairs, model_of

PAPER_SEED = 0
SET_SIZE: Mapping[str, int] = {"sharegpt": 40_000, "alpaca-paper": 52_002, "wmt16": 3_000}
"""Rows drawn of each fitted set; longer runs repeat them, as the paper's did its data."""

NEW_CONVERSATION = 0.1
"""Share of chat arrivals that open a conversation. The artefact has 0.5 for vLLM and 0.1 for the Orcas, but as many
turns as arrivals, so that each turn of its conversations is served once either way; with 0.1 so are ours."""


@dataclass(frozen=True)
class LengthSource:
    """Where request lengths come from. `file`: real ShareGPT lengths (`input,output` rows), else the fitted set."""

    file: Path | None = None
    seed: int = PAPER_SEED

    def exact(self, workload: str) -> bool:
        """Whether the rows are the paper's own, in its order: then its very requests can be served."""
        return workload == "sharegpt" and self.file is not None

    def draw(self, workload: str, draw: int = 0) -> list[tuple[int, int]]:
        """(prompt, output) tokens: a file's rows in their order, else draw number `draw` of the fitted set."""
        if self.exact(workload):
            assert self.file is not None
            return _file_lengths(self.file)
        return _lengths(workload, self.seed + draw)

    def describe(self, workload: str) -> str:
        """One line for reports."""
        if self.exact(workload):
            assert self.file is not None
            return (f"ShareGPT lengths from {self.file.name} (real), requests drawn from them as the paper's artefact "
                    "does: the first rows, as many as arrive, shuffled with seed 0")
        if workload == "alpaca-paper":
            return ("alpaca-paper: synthetic lengths, drawn from the shipped fit and conditioned on four printed "
                    "numbers: the means of Figure 11 and the batches of Orca (Oracle) and (Pow2) in Figure 13")
        return f"{workload}: synthetic lengths, drawn from the shipped fit"


@cache
def _file_lengths(file: Path) -> list[tuple[int, int]]:
    """Rows that pass the paper's filter (sum below 2,048)."""
    rows = [(row.prompt_len, row.output_len) for row in read_table(file).rows()]
    return [(prompt, output) for prompt, output in rows
            if prompt and output and prompt + output <= PAPER_MAX_TOTAL]


WMT_YEAR = 0.868
"""Length of a WMT16 sentence over one of the fit's years, 2017-2020, whose last has whole paragraphs: German references
have 62,669 / 2,999 = 20.9 tokens against (61,287 + 64,276 + 48,746 + 52,383) / 9,417 = 24.1 (as sacrebleu counts; the
last two years' counts from memory)."""

WMT_FACTORS = (1.126 * WMT_YEAR, 0.751 * WMT_YEAR)
"""LLaMA's tokens per token of the WMT fit (SmolLM2's tokenizer, which splits German finely), for English prompts and
German outputs: measured on 300 sentence pairs with both tokenizers, and the year's factor."""


@cache
def _lengths(workload: str, seed: int) -> list[tuple[int, int]]:
    spec = find_spec(workload)
    if workload == "wmt16":
        model = model_of(spec, False)
        model = replace(model, prompt_factor=WMT_FACTORS[0], output_factor=WMT_FACTORS[1])
        pairs = model.sample(SET_SIZE[workload], np.random.default_rng(seed))
    elif workload == "alpaca-paper":
        pairs = alpaca_pairs(SET_SIZE[workload], seed)
    else:
        pairs = draw_pairs(spec, SET_SIZE[workload], seed, WorkloadOptions(text=False, synthetic=True),
                           spec.paper_means)
    return [(int(prompt), int(output)) for prompt, output in pairs]


CHAT_FACTORS = (1.044, 0.764)
"""The chat fit's queries and answers are of another population and tokenizer (Llama 2; answers of 438 tokens on average
where the paper's ShareGPT has 338). Both are scaled so that the means over all turns, as served (speakers counted,
answers cut), are the paper's printed ones, 161.31 and 337.99. Those are of first rounds; that the whole set has them is
an assumption, the only one without a number to choose. The other reading, scaling first rounds to them (0.973 and
0.729, later answers then shorter), had all four rates of Figure 17 15 % too high."""


CHAT_SPEAKERS = (2, 3)
"""Tokens of `human:` and `gpt:`, which stand before each turn of the artefact's chats but not in its first rounds."""


def _scaled(turn: Turn) -> Turn:
    query, answer = (max(1, round(factor * length)) + speaker for factor, length, speaker in
                     zip(CHAT_FACTORS, (turn.query_len, turn.answer_len), CHAT_SPEAKERS, strict=True))
    return Turn(query, answer)


def chat_lengths(count: int, seed: int, new_conversation: float = NEW_CONVERSATION) -> list[tuple[int, int]]:
    """(prompt, output) tokens of `count` chat requests in order of arrival (paper section 6.5): the turns of as many
    conversations as have `count` turns, each served once."""
    options = WorkloadOptions(text=False, synthetic=True, new_conversation=new_conversation)

    def enough() -> Iterator[Conversation]:
        turns = 0
        for conversation in conversations(find_spec("chat"), seed, options):
            if turns >= count:
                return
            turns += len(conversation.turns)
            yield replace(conversation, turns=tuple(map(_scaled, conversation.turns)))

    found = schedule(enough(), count, options, np.random.default_rng(seed))
    return [(request.prompt_len, request.output_len) for request in found]
