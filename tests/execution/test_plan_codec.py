"""Plans come out of the coder as they went in, and a growing table costs only what was added to it."""

from __future__ import annotations

import random

from pagedcli.core.plan import Slice, StepPlan
from pagedcli.execution.plan_codec import PlanDecoder, PlanEncoder


def random_plans(seed: int, count: int) -> list[StepPlan]:
    """Plans of sequences that grow, change blocks, lose blocks, come and go."""
    rng = random.Random(seed)
    tables: dict[int, list[int]] = {}
    plans = []
    for _ in range(count):
        for seq in rng.sample(range(12), 5):
            table = tables.setdefault(seq, [])
            for _ in range(rng.randrange(3)):
                table.append(rng.randrange(1000))
            if table and rng.random() < 0.2:
                table[rng.randrange(len(table))] = rng.randrange(1000)
            if rng.random() < 0.1:
                del table[len(table) // 2:]
        chosen = rng.sample(sorted(tables), min(len(tables), rng.randrange(7)))
        plans.append(StepPlan(
            [Slice(seq, [rng.randrange(50_000) for _ in range(rng.randrange(1, 9))], rng.randrange(99),
                   list(tables[seq]), rng.randrange(3)) for seq in chosen],
            *([(rng.randrange(99), rng.randrange(99)) for _ in range(rng.randrange(3))] for _ in range(3))))
    return plans


def test_what_goes_in_comes_out() -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    for plan in random_plans(3, 300):
        assert decoder.decode(encoder.encode(plan)).frozen() == plan.frozen()


def test_a_decode_step_costs_bytes_not_tables() -> None:
    encoder = PlanEncoder()
    table = list(range(100))
    first = encoder.encode(StepPlan([Slice(1, [7], 1599, table)])).nbytes
    table.append(555)
    second = encoder.encode(StepPlan([Slice(1, [8], 1600, table)])).nbytes
    assert first == 4 * (4 + 6 + 1 + 100)
    assert second == 4 * (4 + 6 + 1 + 1)
