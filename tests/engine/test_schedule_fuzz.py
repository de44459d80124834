"""Random schedules on a cache model: nothing stalls or leaks, each read sees its own tokens, each request ends."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from pagedcli.core.errors import RequestError
from tests.engine.harness import drain, make_engine, random_parents, request

JOBS = int(os.environ.get("PAGEDCLI_FUZZ_JOBS", "5000"))
JOBS_A_RUN = 25


def run_once(seed: int) -> dict[str, int]:
    """One engine with random settings and JOBS_A_RUN random jobs that arrive while it runs."""
    rng = random.Random(seed)
    block = rng.choice([1, 2, 4, 8])
    chunked = rng.random() < 0.6
    engine = make_engine(
        blocks=rng.choice([3, 6, 10, 20, 60]), block_size=block, swap=rng.choice([0, 2, 10, 80]),
        seqs=rng.choice([2, 5, 12, 64]), budget=rng.choice([4, 9, 33, 200]) if chunked else rng.choice([24, 120, None]),
        chunked=chunked, preemption=rng.choice(["auto", "recompute", "swap"]), prefix=rng.random() < 0.6,
        model_len=rng.choice([30, 90]), parents=random_parents(seed))
    shared = [rng.randrange(50) for _ in range(rng.choice([0, 7, 16]))]
    groups, refused, finished = [], 0, 0
    for index in range(JOBS_A_RUN):
        prompt = shared[: rng.randrange(len(shared) + 1)] + [rng.randrange(50) for _ in range(rng.randint(1, 24))]
        kind, width = rng.random(), rng.randint(2, 5)
        fields: dict[str, object] = {}
        if kind < 0.3:
            fields = {"n": width}
        elif kind < 0.55:
            fields = {"use_beam_search": True, "beam_width": width}
        try:
            groups.append(engine.add(request(index, prompt, rng.randint(0 if not fields else 1, 20), **fields)))
        except RequestError as fault:
            refused += 1
            assert fault.code in {"too_long", "exceeds_kv_pool", "too_many_sequences"}, fault
        for _ in range(rng.randrange(6)):
            if engine.has_work():
                finished += len(engine.step())
                engine.memory.check()
        if groups and rng.random() < 0.08:
            victim = rng.choice(groups)
            if not victim.finished:
                engine.abort(victim)
                finished += 1
                engine.memory.check()
    finished += len(drain(engine))
    assert finished + refused == JOBS_A_RUN
    assert all(group.finished for group in groups)
    usage = engine.memory.usage()
    assert usage.physical == usage.logical == usage.token == 0, "blocks leaked"
    assert not engine.lifecycle.sequences
    counters = engine.counters
    return {"recompute": counters.preempt_recompute, "swap": counters.preempt_swap, "copies": counters.block_copies,
            "cached": counters.cached_tokens, "refused": refused, "fallback": counters.swap_fallbacks}


def test_random_jobs_all_end() -> None:
    totals: dict[str, int] = {}
    for seed in range(JOBS // JOBS_A_RUN):
        for name, amount in run_once(seed).items():
            totals[name] = totals.get(name, 0) + amount
    # The schedules must have met what they are meant to prove.
    assert all(amount > 20 for amount in totals.values()), totals


@pytest.mark.slow
def test_a_hundred_thousand_random_jobs() -> None:
    totals: Counter[str] = Counter()
    for seed in range(1_000_000, 1_000_000 + 100_000 // JOBS_A_RUN):
        totals.update(run_once(seed))
    assert all(amount > 400 for amount in totals.values()), totals
