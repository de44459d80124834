"""The paper's chat workload (section 6.5): requests are turns of many open conversations, history included.

At each arrival a new conversation begins with probability p, otherwise a random open one goes on. The prompt is the
last 1,024 tokens of the history and the new query; the output is at most 1,016 tokens. Nothing is kept between turns
by the paper's systems; a prefix cache may find what two windows share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pagedcli.workloads.spec import TraceRequest, WorkloadOptions


@dataclass(frozen=True, slots=True)
class Turn:
    """One query and its answer, tokens, with their text where known."""

    query_len: int
    answer_len: int
    query: str | None = None
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A whole dialogue in order."""

    name: str
    turns: tuple[Turn, ...]


def pair_turns(turns: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """(query, answer) texts of a dialogue: all that stands before an assistant's turn is its query.

    Each turn is written `speaker: text`, as in the paper's artefact. A tail without an answer is left out.
    """
    pairs: list[tuple[str, str]] = []
    waiting: list[str] = []
    for speaker, text in turns:
        if speaker == "gpt":
            if waiting:
                pairs.append(("".join(waiting) + "gpt: ", text + "\n"))
                waiting = []
        else:
            waiting.append(f"{speaker}: {text}\n")
    return pairs


def schedule(conversations: Iterator[Conversation], count: int | None, options: WorkloadOptions,
             rng: np.random.Generator) -> list[TraceRequest]:
    """Requests in order of arrival; stops at `count` or when no conversation is left."""
    requests: list[TraceRequest] = []
    still_open: list[tuple[Conversation, int, int, str]] = []
    fresh = next(conversations, None)
    while (count is None or len(requests) < count) and (fresh is not None or still_open):
        begin = fresh is not None and (not still_open or rng.random() < options.new_conversation)
        if begin:
            assert fresh is not None
            current, place, seen, text = fresh, 0, 0, ""
            fresh = next(conversations, None)
        else:
            current, place, seen, text = still_open.pop(int(rng.integers(len(still_open))))
        turn = current.turns[place]
        total = seen + turn.query_len
        if turn.query is not None:
            text += turn.query
        requests.append(TraceRequest(
            index=len(requests), prompt_len=min(total, options.history),
            output_len=min(turn.answer_len, options.max_output), prompt=text or None,
            conversation=current.name, offset=max(0, total - options.history)))
        if place + 1 < len(current.turns):
            still_open.append((current, place + 1, total + turn.answer_len, text + (turn.answer or "")))
    return requests
