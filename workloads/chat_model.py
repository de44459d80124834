"""A fitted model of whole chat conversations: how many turns, how long each query and answer is.

Lengths within a conversation are alike (people who get long answers keep getting them), and long conversations have
shorter turns. Each conversation draws one normal for its turn count, one for its queries, one for its answers; each
turn mixes these with its own noise and maps the result through the measured quantiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedcli.workloads.lengths import Floats, Lengths, Marginal

_MARGINALS = ("turns", "first_query", "first_output", "later_query", "later_output")
_CORRELATIONS = ("within_query", "within_output", "turns_query", "turns_output", "pair")


@dataclass(frozen=True, slots=True)
class ChatModel:
    """Marginals of turn counts and of first and later turns, and five correlations of the normals behind them.

    `within_*`: of two turns of one conversation; `turns_*`: of the conversation's share with its turn count;
    `pair`: of a turn's query with its own answer.
    """

    turns: Marginal
    first_query: Marginal
    first_output: Marginal
    later_query: Marginal
    later_output: Marginal
    within_query: float
    within_output: float
    turns_query: float
    turns_output: float
    pair: float

    def to_json(self) -> dict[str, Any]:
        """The `chat` object of a fit file."""
        out: dict[str, Any] = {name: round(float(getattr(self, name)), 4) for name in _CORRELATIONS}
        out.update({name: [round(float(v), 2) for v in getattr(self, name).values] for name in _MARGINALS})
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ChatModel:
        """Reads what `to_json` wrote."""
        parts: dict[str, Any] = {name: Marginal(tuple(data[name])) for name in _MARGINALS}
        parts.update({name: float(data[name]) for name in _CORRELATIONS})
        return cls(**parts)


@dataclass(frozen=True, slots=True)
class DrawnTurns:
    """Turns of many conversations, one array entry per turn, conversations in order."""

    conversation: NDArray[np.int64]
    turn: NDArray[np.int64]
    query: Lengths
    output: Lengths
    query_normal: Floats
    output_normal: Floats


def simulate_turns(model: ChatModel, conversations: int, rng: np.random.Generator) -> DrawnTurns:
    """Draws whole conversations."""
    size = rng.standard_normal(conversations)
    counts = model.turns.tokens(size)

    def shared(correlation: float) -> Floats:
        own = rng.standard_normal(conversations)
        return correlation * size + np.sqrt(1 - correlation**2) * own

    query_share, output_share = shared(model.turns_query), shared(model.turns_output)
    conversation = np.repeat(np.arange(conversations), counts)
    total = len(conversation)
    starts = np.cumsum(counts) - counts
    turn = np.arange(total) - np.repeat(starts, counts)
    noise = rng.standard_normal((2, total))
    # `pair` is the correlation of the two normals; only the turn's own noise carries it.
    spread = np.sqrt((1 - model.within_query) * (1 - model.within_output))
    inner = float(np.clip(model.pair / spread, -0.95, 0.95))
    noise[1] = inner * noise[0] + np.sqrt(1 - inner**2) * noise[1]
    query_normal = np.sqrt(model.within_query) * query_share[conversation] + np.sqrt(1 - model.within_query) * noise[0]
    output_normal = (np.sqrt(model.within_output) * output_share[conversation]
                     + np.sqrt(1 - model.within_output) * noise[1])
    first = turn == 0
    query = np.where(first, model.first_query.tokens(query_normal), model.later_query.tokens(query_normal))
    output = np.where(first, model.first_output.tokens(output_normal), model.later_output.tokens(output_normal))
    return DrawnTurns(conversation, turn, query, output, query_normal, output_normal)
