"""Each system's memory under a never-empty queue of the paper's ShareGPT lengths, against its Figures 2 and 13.

A loop of its own, with no engine and no time model: memory alone decides how many requests run. The requests are those
of the paper's Figure 2 as its artefact draws them: 4 requests/s for 900 s, seed 0, which takes the first 3,604 of
the lengths and shuffles them. (Over all 79,725 lengths the same loop settles at 7.00, 9.71 and 13.26 requests.)
"""

from __future__ import annotations

import csv
import random
from pathlib import Path

import numpy as np
import pytest

from pagedcli.core.sequence import SequenceGroup
from pagedcli.memory.accounting import others
from pagedcli.memory.contiguous import ContiguousMemory, Reserve
from pagedcli.memory.interface import MemoryPolicy, Verdict
from pagedcli.memory.paged import PagedMemory
from tests.memory.memory_kit import make_group

LENGTHS = Path(__file__).resolve().parents[2].parent / "shared" / "paper" / "sharegpt_lengths.csv"
BLOCKS = 983
RATE, DURATION = 4.0, 900


@pytest.fixture(scope="module")
def lengths() -> list[tuple[int, int]]:
    if not LENGTHS.exists():
        pytest.skip("the paper's ShareGPT lengths (../shared/paper/sharegpt_lengths.csv) are not here")
    with LENGTHS.open() as file:
        rows = [(int(row["input"]), int(row["output"])) for row in csv.DictReader(file)]
    rows = [row for row in rows if sum(row) < 2048]
    count = int(np.random.RandomState(0).poisson(RATE * 0.01, size=DURATION * 100).sum())
    assert (len(rows), count) == (79_725, 3_604)
    rows = rows[:count]
    random.Random(0).shuffle(rows)
    return rows


def saturate(memory: MemoryPolicy, lengths: list[tuple[int, int]]) -> tuple[float, dict[str, float]]:
    """FCFS continuous batching, one token a step for every running request, until the queue runs dry. Returns the
    mean batch and the mean shares of the pool in % {token, reserved, internal, others}."""
    waiting = [make_group([0] * prompt, output_len=output, max_tokens=None, order=order)
               for order, (prompt, output) in enumerate(lengths)]
    waiting.reverse()
    running: list[SequenceGroup] = []
    batch = steps = 0
    sums = [0.0] * 4
    while True:
        preempted = False
        place = 0
        while place < len(running):
            group = running[place]
            while place < len(running) and not memory.can_append(group):
                victim = running.pop()
                memory.free(victim.live[0])
                waiting.append(victim)
                preempted = True
            if place < len(running):
                seq = group.live[0]
                memory.append(seq)
                memory.computed(seq, len(seq.tokens))
            place += 1
        while not preempted and waiting:
            verdict = memory.can_admit(waiting[-1], running=bool(running))
            assert verdict is not Verdict.NEVER
            if verdict is Verdict.LATER:
                break
            group = waiting.pop()
            memory.admit(group)
            memory.computed(group.live[0], len(group.live[0].tokens))
            running.append(group)
        if not waiting:
            break
        usage = memory.usage()
        assert usage.total == BLOCKS * 16
        for index, value in enumerate((usage.token, usage.reserved, usage.internal)):
            sums[index] += value / usage.total
        sums[3] += others(usage)
        batch += len(running)
        steps += 1
        for group in list(running):
            seq = group.live[0]
            seq.tokens.append(0)
            if seq.output_len == group.request.output_len:
                memory.free(seq)
                running.remove(group)
    memory.check()
    names = ("token", "reserved", "internal", "others")
    return batch / steps, {name: 100 * value / steps for name, value in zip(names, sums, strict=True)}


@pytest.mark.parametrize(("reserve", "batch", "token", "reserved", "internal", "rest"), [
    ("max", 7.00, 19.8, 12.6, 58.7, 8.9),
    ("pow2", 9.81, 27.8, 17.6, 14.3, 40.3),
    ("oracle", 13.5, 38.6, 24.3, 0.0, 37.1),
])
def test_orca(lengths: list[tuple[int, int]], reserve: Reserve, batch: float, token: float, reserved: float,
              internal: float, rest: float) -> None:
    mean, shares = saturate(ContiguousMemory(BLOCKS, 16, max_len=2048, reserve=reserve), lengths)
    assert mean == pytest.approx(batch, rel=0.01)
    assert sum(shares.values()) == pytest.approx(100)
    right = {"token": token, "reserved": reserved, "internal": internal, "others": rest}
    assert shares == pytest.approx(right, abs=1.5)


def test_paged(lengths: list[tuple[int, int]]) -> None:
    mean, shares = saturate(PagedMemory(BLOCKS, 16, prefix_cache=False), lengths)
    assert shares["token"] >= 96
    assert sum(shares.values()) == pytest.approx(100)
    assert mean == pytest.approx(32.8, rel=0.06)  # over all lengths; the paper's 30.4 includes times of an empty queue
