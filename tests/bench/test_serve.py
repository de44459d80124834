"""Replay on an engine with known times: scheduled arrivals, dispatch, failures, cold caches, early stops."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from pagedcli.bench.metrics import summarize
from pagedcli.bench.serve import Replay, latency_bound, replay, stop_above, stop_after
from pagedcli.core.clock import VirtualClock, WallClock
from pagedcli.core.errors import UsageError
from pagedcli.workloads.arrivals import Constant, Poisson
from tests.bench.scripted_engine import POOL, ScriptedEngine, requests


def test_latency_counts_from_the_scheduled_arrival():
    """One slot, 10 requests/s, 0.5 s each: the n-th request waits 0.4 s more than the one before."""
    run = replay(ScriptedEngine(0.5), requests([(4, 1)] * 10), Constant(10.0).deadlines(10, 0))
    waits = [record.e2el for record in run.requests]
    assert waits == pytest.approx([0.5 + 0.4 * n for n in range(10)])
    # The loop hands requests over between steps; that wait is in the latency and shown apart.
    assert run.requests[9].dispatched == pytest.approx(1.1)
    assert run.requests[9].dispatch_lag == pytest.approx(0.1)


def test_steps_hold_what_was_held_while_they_ran():
    run = replay(ScriptedEngine(0.25, slots=2), requests([(4, 2), (6, 1)]), [0.0, 0.0])
    first, second = list(run.steps)
    assert (first.time, first.seconds, first.running, first.waiting) == (0.0, 0.25, 2, 0)
    assert (first.token, first.free, first.logical, first.physical) == (10, POOL - 10, 20, 10)
    assert (first.computed, first.sequences, first.finished) == (2, 2, 1)
    assert (second.time, second.running, second.token, second.finished) == (0.25, 1, 5, 1)
    assert run.duration == 0.5


def test_the_engine_sleeps_until_the_next_deadline_without_drift():
    deadlines = [10.0, 10.1, 500.0]
    run = replay(ScriptedEngine(0.01), requests([(1, 1)] * 3), deadlines)
    assert [record.dispatched for record in run.requests] == deadlines
    assert run.duration == pytest.approx(500.01)


def test_a_clock_that_has_run_already_changes_nothing():
    late = ScriptedEngine(0.5, clock=VirtualClock(1234.0))
    run = replay(late, requests([(4, 2)]), [1.0])
    record = run.requests[0]
    assert (record.arrival, record.dispatched, record.first_token, record.finish) == (1.0, 1.0, 1.5, 2.0)
    # 0.2 + 0.5 - 0.2 rounds to less than 0.5: a loop that compares differences would wait for ever.
    awkward = replay(ScriptedEngine(0.5, clock=VirtualClock(0.2)), requests([(4, 2)]), [0.5])
    assert awkward.requests[0].dispatch_lag == 0.0 and awkward.requests[0].ok


def test_refused_requests_are_kept_apart():
    run = replay(ScriptedEngine(0.5, slots=3, max_prompt=10), requests([(4, 2), (11, 2), (4, 2)]), [0.0] * 3)
    assert [record.ok for record in run.requests] == [True, False, True]
    assert run.requests[1].error == "too_long"
    assert "11" in run.requests[1].error_message and "10" in run.requests[1].error_message
    figures = summarize(run)
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert figures["mean_e2el_ms"] == pytest.approx(1000.0)
    assert figures["normalized_latency_s"] == pytest.approx(0.5)


def test_each_run_of_a_fresh_engine_starts_cold():
    """The same requests twice: hits within a run, none across runs; a used engine would show 9 in both."""
    work = requests([(4, 1)])
    same = [work[0]] * 3
    cached = []
    for _ in range(2):
        run = replay(ScriptedEngine(0.1), same, [0.0, 1.0, 2.0])
        cached.append([record.cached_tokens for record in run.requests])
    assert cached == [[0, 3, 3], [0, 3, 3]]


def test_an_early_stop_is_certain_and_told():
    """100 requests at once, 1 s each on one slot: the mean will be 50.5 s/token, so a limit of 10 is soon passed."""
    run = replay(ScriptedEngine(1.0), requests([(1, 1)] * 100), [0.0] * 100, stop_rule=stop_above(10.0, every=1))
    assert run.stopped is not None and "above 10" in run.stopped
    assert 10 <= run.duration <= 12
    assert len(run.completed) + len(run.failed) == 100
    assert {record.error for record in run.failed} == {"stopped"}
    whole = replay(ScriptedEngine(1.0), requests([(1, 1)] * 100), [0.0] * 100, stop_rule=stop_above(51.0, every=1))
    assert whole.stopped is None
    assert summarize(whole)["normalized_latency_s"] == pytest.approx(50.5)


def test_a_time_limit_ends_a_run_and_says_what_was_left():
    """One slot and 1 s each: at 7.5 s the eighth step has ended; the last two requests have not come."""
    deadlines = [*[0.0] * 10, 100.0, 100.0]
    run = replay(ScriptedEngine(1.0), requests([(1, 1)] * 12), deadlines, stop_rule=stop_after(7.5))
    assert run.stopped == ("after 7.5 s (--time-limit) 8 of 12 requests were done, 2 that had come were not, and 2 had "
                           "yet to come")
    assert (len(run.completed), len(run.failed), run.duration) == (8, 4, 8.0)
    other = replay(ScriptedEngine(1.0), requests([(1, 1)] * 100), [0.0] * 100,
                   stop_rule=stop_after(1000.0, stop_above(10.0, every=1)))
    assert other.stopped is not None and "above 10" in other.stopped


def test_latency_bound_never_exceeds_the_final_latency():
    rng = np.random.default_rng(5)
    lengths = [(1, int(n)) for n in rng.integers(1, 30, 60)]
    bounds: list[float] = []

    def watch(run: Replay) -> None:
        bounds.append(latency_bound(run))

    run = replay(ScriptedEngine(0.1, slots=3), requests(lengths), Poisson(1.0).deadlines(60, 1), stop_rule=watch)
    final = summarize(run)["normalized_latency_s"]
    assert all(bound <= final * (1 + 1e-9) for bound in bounds)
    assert bounds[-1] == pytest.approx(final)


def test_mismatched_and_unordered_arrivals_are_refused():
    with pytest.raises(UsageError, match="2 requests and 1 arrival"):
        replay(ScriptedEngine(1.0), requests([(1, 1)] * 2), [0.0])
    with pytest.raises(UsageError, match="increasing"):
        replay(ScriptedEngine(1.0), requests([(1, 1)] * 2), [1.0, 0.0])


def test_arrival_rate_is_met_on_a_simulated_clock():
    """10,000 Poisson arrivals at 200/s: sent exactly when drawn, and the draw itself is within 3 sigma of asked."""
    deadlines = Poisson(200.0).deadlines(10_000, 0)
    figures = summarize(replay(ScriptedEngine(1e-4, slots=64), requests([(1, 1)] * 10_000), deadlines, rate=200.0))
    assert figures["request_rate"] == 200.0
    assert figures["request_rate_achieved"] == pytest.approx(figures["request_rate_drawn"], rel=1e-4)
    assert figures["request_rate_drawn"] == pytest.approx(200.0, rel=3 / math.sqrt(10_000))
    assert figures["p99_dispatch_lag_ms"] <= 0.1 + 1e-6


def _wall_rate(count: int) -> dict[str, float]:
    engine = ScriptedEngine(0.0, slots=64, clock=WallClock())
    return summarize(replay(engine, requests([(1, 1)] * count), Constant(200.0).deadlines(count, 0), rate=200.0))


def test_arrival_rate_is_met_in_real_time():
    begun = time.perf_counter()
    figures = _wall_rate(200)
    assert time.perf_counter() - begun == pytest.approx(1.0, rel=0.2)
    assert figures["request_rate_achieved"] == pytest.approx(200.0, rel=0.05)


@pytest.mark.slow
def test_ten_thousand_arrivals_in_real_time():
    figures = _wall_rate(10_000)
    print(f"\nachieved {figures['request_rate_achieved']:.2f}/s of 200/s, "
          f"p99 dispatch lag {figures['p99_dispatch_lag_ms']:.3f} ms")
    assert figures["request_rate_achieved"] == pytest.approx(200.0, rel=0.01)
