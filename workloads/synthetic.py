"""The shipped sets: lengths drawn from measured distributions, prompts of our own words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count as counting

import numpy as np

from pagedcli.workloads import chat, wmt16
from pagedcli.workloads.arrivals import Gamma, Times
from pagedcli.workloads.chat_model import ChatModel, simulate_turns
from pagedcli.workloads.filters import reason_to_drop
from pagedcli.workloads.lengths import LengthModel, Lengths, load_sample, pair_model
from pagedcli.workloads.readers import Row
from pagedcli.workloads.spec import TraceRequest, WorkloadOptions, WorkloadSpec
from pagedcli.workloads.streams import Purpose, generator, stable_hash
from pagedcli.workloads.text import prompt_text
from pagedcli.workloads.traces import MOONCAKE_BLOCK

DEFAULT_REQUESTS = 1000
"""Requests of a synthetic set when no number is asked for (it has no end of its own)."""

_MAX_EMPTY_DRAWS = 50
_PARENTS_TRIED = 8


def model_of(spec: WorkloadSpec, paper_means: bool) -> LengthModel:
    """The set's fitted length model, stretched to the paper's printed means on request."""
    model = pair_model(load_sample(spec.sample)["pairs"])
    if paper_means and "prompt_mean" in spec.paper:
        return model.scaled_to(spec.paper["prompt_mean"], spec.paper["output_mean"])
    return model


def describe(spec: WorkloadSpec, paper_means: bool) -> str:
    """One line that says what the lengths were fitted to."""
    scaled = (f", then scaled to the paper's printed means {spec.paper['prompt_mean']:g} / "
              f"{spec.paper['output_mean']:g}" if paper_means and "prompt_mean" in spec.paper else "")
    return f"synthetic (fitted to {load_sample(spec.sample)['measured_from']}{scaled})"


def draw_pairs(spec: WorkloadSpec, count: int, seed: int, options: WorkloadOptions, paper_means: bool) -> Lengths:
    """`count` (prompt, output) lengths that pass the set's filter and the model's limit, int64 [count, 2]."""
    rng = generator(seed, Purpose.DATA, spec.sample)
    model = model_of(spec, paper_means)
    rule = options.filter or spec.filter
    kept: list[Lengths] = []
    missing, empty = count, 0
    while missing > 0:
        pairs = model.sample(missing, rng)
        mask = np.array([reason_to_drop(int(p), int(o), rule, options.max_total) is None for p, o in pairs], dtype=bool)
        kept.append(pairs[mask])
        missing -= int(mask.sum())
        empty = 0 if mask.any() else empty + 1
        if empty > _MAX_EMPTY_DRAWS:
            break
    return np.concatenate(kept) if kept else np.empty((0, 2), dtype=np.int64)


def pair_rows(spec: WorkloadSpec, count: int, seed: int, options: WorkloadOptions, paper_means: bool) -> list[Row]:
    """Rows of the pair and translation sets, with text unless switched off."""
    pairs = draw_pairs(spec, count, seed, options, paper_means)
    salt = stable_hash(spec.sample) % 900_000 + 100_000
    return [Row(f"synthetic row {n}", prompt=prompt_text(int(p), seed, salt + n) if options.text else None,
                prompt_len=int(p), output_len=int(o)) for n, (p, o) in enumerate(pairs)]


def trace_rows(spec: WorkloadSpec, count: int, seed: int, options: WorkloadOptions) -> list[Row]:
    """Rows of a trace-like set: arrival times from gamma gaps, and Mooncake's shared blocks."""
    sample = load_sample(spec.sample)
    sessions = sample.get("sessions")
    # Text cannot share blocks as the hashes say, so a set with hashes has none.
    rows = pair_rows(spec, count, seed, replace(options, text=False) if sessions else options, False)
    times: Times = Gamma(sample["arrivals"]["rate"], sample["arrivals"]["burstiness"]).deadlines(len(rows), seed)
    times = times - times[0] if len(times) else times
    hashes = _shared_blocks(rows, sessions, seed) if sessions else [()] * len(rows)
    return [Row(row.where, prompt=row.prompt, prompt_len=row.prompt_len,
                output_len=row.output_len, arrival=float(t), block_hashes=h)
            for row, t, h in zip(rows, times, hashes, strict=True)]


def _shared_blocks(rows: list[Row], sessions: dict[str, float], seed: int) -> list[tuple[int, ...]]:
    """Block ids as in Mooncake's trace: all prompts share the first block, some go on from an earlier prompt.

    Such a continuation takes over every full block of an earlier prompt: the longest of a few random ones that are
    shorter than itself, as a question adds little to the history that it goes on from.
    """
    rng = generator(seed, Purpose.CONVERSATIONS)
    shared = int(sessions["shared_blocks"])
    fresh = counting(shared)
    found: list[tuple[int, ...]] = []
    for row in rows:
        need = -(-row.prompt_len // MOONCAKE_BLOCK)
        ids = list(range(min(shared, need)))
        if found and rng.random() < sessions["continued"]:
            tries = [int(i) for i in rng.integers(len(found), size=_PARENTS_TRIED)]
            full, parent = max(((f, i) for i in tries
                                if shared < (f := rows[i].prompt_len // MOONCAKE_BLOCK) < need), default=(0, 0))
            ids = list(found[parent][:full]) if full else ids
        ids += [next(fresh) for _ in range(need - len(ids))]
        found.append(tuple(ids))
    return found


def conversations(spec: WorkloadSpec, seed: int, options: WorkloadOptions) -> Iterator[chat.Conversation]:
    """Endless synthetic conversations; text is made for queries and answers unless switched off."""
    model = ChatModel.from_json(load_sample(spec.sample)["chat"])
    rng = generator(seed, Purpose.DATA, spec.sample)
    for batch in counting():
        drawn = simulate_turns(model, 500, rng)
        edges = np.flatnonzero(np.diff(drawn.conversation)) + 1
        for number, part in enumerate(np.split(np.arange(len(drawn.turn)), edges)):
            name = f"synthetic-{batch * 500 + number}"
            yield chat.Conversation(name, tuple(
                _turn(int(drawn.query[i]), int(drawn.output[i]), seed, f"{name}/{place}", options.text)
                for place, i in enumerate(part)))


def _turn(query: int, answer: int, seed: int, key: str, text: bool) -> chat.Turn:
    if not text:
        return chat.Turn(query, answer)
    number = stable_hash(key) % 900_000 + 100_000
    texts = (prompt_text(length, seed, number + k) + "\n" for k, length in enumerate((query, answer)))
    return chat.Turn(query, answer, *texts)


def with_prefix(request: TraceRequest, shots: int) -> TraceRequest:
    """A translation request with the shared examples in front; unchanged with 0 shots."""
    if not shots:
        return request
    text = wmt16.prefix_text(shots)
    length = wmt16.prefix_tokens(shots)
    return TraceRequest(
        index=request.index, prompt_len=request.prompt_len + length, output_len=request.output_len,
        prompt=None if request.prompt is None else text + request.prompt, arrival=request.arrival,
        prefix_id=f"wmt16-{shots}shot", prefix_len=length, prefix_text=text)


def prefix_reserve(shots: int) -> int:
    """Tokens to leave free for the shared examples when lengths are drawn under a limit."""
    return wmt16.prefix_tokens(shots)
