"""Capacity: bisection against known curves, and against a queue whose capacity is known."""

from __future__ import annotations

import math

import pytest

from pagedcli.bench.capacity import Search, find_capacity
from pagedcli.bench.metrics import summarize
from pagedcli.bench.serve import replay, stop_above
from pagedcli.core.errors import UsageError
from pagedcli.workloads.arrivals import Poisson
from tests.bench.scripted_engine import ScriptedEngine, requests


@pytest.mark.parametrize("start", [0.01, 1.0, 300.0])
def test_a_known_curve_is_solved_from_any_start(start: float):
    """latency = 1 / (10 - rate): under 0.5 up to rate 8, under 1 up to rate 9."""
    asked: list[float] = []

    def curve(rate: float) -> float:
        asked.append(rate)
        return 1 / (10 - rate) if rate < 10 else math.inf

    half, one = find_capacity(curve, (0.5, 1.0), Search(start=start, tolerance=0.01, max_probes=40))
    assert half.rate <= 8.0 <= half.above <= half.rate * 1.0101
    assert one.rate <= 9.0 <= one.above <= one.rate * 1.0101
    assert half.bracketed and one.bracketed
    assert len(set(asked)) == len(asked), "no rate is measured twice"


def test_runs_out_of_probes_honestly():
    never, = find_capacity(lambda rate: 9.0, (0.5,), Search(max_probes=4))
    assert (never.rate, never.above) == (0.0, 0.125) and not never.bracketed
    always, = find_capacity(lambda rate: 0.1, (0.5,), Search(max_probes=4))
    assert (always.rate, always.above) == (8.0, math.inf) and not always.bracketed


def test_a_rate_above_a_failed_one_is_not_trusted():
    """Noise: 2/s fails although 4/s would hold. The answer stays below 2."""
    found, = find_capacity(lambda rate: 0.9 if 1.9 < rate < 2.1 else 0.1, (0.5,), Search(start=2.0, tolerance=0.1))
    assert 1.7 <= found.rate <= 2.0


def test_capacity_of_a_queue_is_its_service_rate():
    """4 slots, 10 tokens of 0.1 s each: 4 requests/s at most. Draws are scaled, so both policies see one sequence."""
    def measure(rate: float) -> float:
        run = replay(ScriptedEngine(0.1, slots=4), requests([(1, 10)] * 400), Poisson(rate).deadlines(400, 0),
                     rate=rate, stop_rule=stop_above(0.5))
        return math.inf if run.stopped else summarize(run)["normalized_latency_s"]
    found, = find_capacity(measure, (0.5,), Search(start=1.0, tolerance=0.05))
    assert 3.0 <= found.rate <= 4.3
    assert (Poisson(2.0).deadlines(50, 7) * 2.0 == pytest.approx(Poisson(5.0).deadlines(50, 7) * 5.0))


def test_doubling_ends_where_all_requests_arrive_at_once():
    asked: list[float] = []

    def flat(rate: float) -> float:
        asked.append(rate)
        return 0.03

    one, two = find_capacity(flat, (0.5, 1.0), Search(), at_once=lambda rate: rate >= 8)
    assert asked == [1.0, 2.0, 4.0, 8.0]
    assert one.too_few and two.too_few and not one.bracketed
    # Where a higher rate fails before arrivals are at once, the answer is one.
    found, = find_capacity(lambda rate: rate, (6.0,), Search(), at_once=lambda rate: rate >= 8)
    assert found.bracketed and not found.too_few


def test_bad_searches_are_named():
    with pytest.raises(UsageError, match="0"):
        find_capacity(lambda rate: 1.0, (0.0,))
    with pytest.raises(UsageError, match=r"tolerance = 1\.5"):
        Search(tolerance=1.5)
