"""The regression gate: silent on runs of one build against itself, awake to a 3 % slowdown."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pagedcli.bench.bootstrap import block_length, log_ratio_of_means, mean_of_runs, student_cdf, student_quantile
from pagedcli.bench.compare import CompareOptions, compare
from pagedcli.bench.gates import Gate
from pagedcli.bench.metrics import summarize
from pagedcli.bench.serve import replay
from pagedcli.bench.signature import Signature
from pagedcli.bench.storage import Results, run_data
from pagedcli.core.errors import UsageError
from pagedcli.workloads.arrivals import Poisson
from tests.bench.scripted_engine import ScriptedEngine, requests

LENGTHS = [(4, int(n)) for n in np.random.default_rng(3).integers(4, 16, 32)]
DEADLINES = Poisson(5.0).deadlines(len(LENGTHS), 0)


def noisy_steps(rng: np.random.Generator, slowdown: float):
    """Step times as a quiet machine gives them: each run has its own speed (0.3 %), each step 1 % noise that lasts
    for some ten steps. Two such runs of a few hundred steps differ by about 0.7 %."""
    speed = slowdown * math.exp(rng.normal(0, 0.003))
    drift = [0.0]

    def seconds(step: int, running: int) -> float:
        drift[0] = 0.9 * drift[0] + rng.normal(0, 0.004)
        return 0.02 * speed * (1 + 0.1 * running) * math.exp(drift[0])
    return seconds


def measured(rng: np.random.Generator, policies: dict[str, float], repeats: int = 1, name: str = "a",
             simulated: bool = False) -> Results:
    """A bench session: every policy (with its slowdown) on the same requests, `repeats` times."""
    runs = []
    session = math.exp(rng.normal(0, 0.05))  # another day, another machine state
    for repeat in range(repeats):
        for number, (policy, slowdown) in enumerate(policies.items()):
            engine = ScriptedEngine(noisy_steps(rng, session * slowdown), slots=4)
            run = replay(engine, requests(LENGTHS), DEADLINES, policy=policy, rate=5.0, repeat=repeat,
                         simulated=simulated)
            runs.append(run_data(run, summarize(run) | {"role": "baseline" if number else "policy"}))
    return Results(name, Signature({"workload": "scripted"}, {}), runs)


def alternating(rng: np.random.Generator, slowdown: float, pairs: int = 5) -> tuple[Results, Results]:
    """A B A B ... in one session on one machine."""
    sides: tuple[list, list] = ([], [])
    for repeat in range(pairs):
        for side, factor in zip(sides, (1.0, slowdown), strict=True):
            run = replay(ScriptedEngine(noisy_steps(rng, factor), slots=4), requests(LENGTHS), DEADLINES, rate=5.0,
                         repeat=repeat)
            side.append(run_data(run, summarize(run) | {"role": "policy"}))
    signature = Signature({}, {})
    return Results("a", signature, sides[0]), Results("b", signature, sides[1])


ZERO = [Gate.parse("normalized_latency=0%")]


def test_a_build_against_itself_raises_at_most_one_alarm_in_a_hundred():
    rng = np.random.default_rng(11)
    alarms = 0
    for trial in range(100):
        a, b = alternating(rng, 1.0)
        alarms += compare([a], [b], ZERO, CompareOptions(seed=trial, same_machine=True)).regressed
    assert alarms <= 1


def test_sessions_of_one_build_raise_at_most_one_alarm_in_a_hundred():
    """Single sessions whose machine speed differs by 5 %: only ratios to the baseline in the same session count."""
    rng = np.random.default_rng(12)
    alarms = 0
    for trial in range(100):
        a, b = (measured(rng, {"paged": 1.0, "orca-max": 1.3}) for _ in range(2))
        alarms += compare([a], [b], ZERO, CompareOptions(seed=trial)).regressed
    assert alarms <= 1


def test_a_three_percent_slowdown_is_found_in_five_paired_runs():
    rng = np.random.default_rng(13)
    found = 0
    for trial in range(100):
        a, b = alternating(rng, 1.03)
        result = compare([a], [b], ZERO, CompareOptions(seed=trial, same_machine=True))
        found += result.regressed
    assert found >= 95


def test_a_regression_within_the_limit_passes():
    rng = np.random.default_rng(14)
    a, b = alternating(rng, 1.10)
    options = CompareOptions(same_machine=True)
    assert not compare([a], [b], [Gate.parse("normalized_latency=30%")], options).regressed
    assert compare([a], [b], [Gate.parse("normalized_latency=5%")], options).regressed
    assert not compare([b], [a], [Gate.parse("normalized_latency=5%")], options).regressed


def test_a_slow_policy_shows_against_its_baseline_although_the_machine_changed():
    rng = np.random.default_rng(15)
    a = measured(rng, {"paged": 1.0, "orca-max": 1.3}, repeats=5)
    b = measured(rng, {"paged": 1.25, "orca-max": 1.3}, repeats=5)
    result = compare([a], [b], [Gate.parse("normalized_latency=5%")])
    assert result.regressed
    row = next(row for row in result.gated if row.failed)
    assert (row.policy, row.against, row.kind) == ("paged", "orca-max", "in-run")
    assert row.change > 0.2


def test_times_without_a_baseline_are_refused_not_guessed():
    rng = np.random.default_rng(16)
    a, b = measured(rng, {"paged": 1.0}), measured(rng, {"paged": 1.0})
    with pytest.raises(UsageError, match="baseline"):
        compare([a], [b], ZERO)


def test_single_runs_on_one_machine_show_only_what_run_noise_cannot_explain():
    """Two runs of 3 % noise each: a change needs 2.58 * 3 % * sqrt(2) = 11 %, and the noise inside the runs on top."""
    rng = np.random.default_rng(17)
    options = CompareOptions(same_machine=True)
    for slowdown, alarm in ((1.03, False), (1.3, True)):
        a, b = alternating(rng, slowdown, pairs=1)
        result = compare([a], [b], ZERO, options)
        assert result.regressed is alarm
        assert result.gated[0].high - result.gated[0].low >= 2 * 2.5758 * 0.03 * math.sqrt(2)


def test_simulated_runs_gate_on_any_difference():
    a = measured(np.random.default_rng(1), {"paged": 1.0}, simulated=True)
    same = measured(np.random.default_rng(1), {"paged": 1.0}, simulated=True)
    worse = measured(np.random.default_rng(1), {"paged": 1.01}, simulated=True)
    assert not compare([a], [same], [*ZERO, Gate.parse("waste.token=0%"), Gate.parse("steps=0%")]).regressed
    result = compare([a], [worse], ZERO)
    assert result.regressed and result.gated[0].kind == "exact"
    assert not compare([a], [worse], [Gate.parse("normalized_latency=5%")]).regressed


def test_lost_requests_fail_the_gate():
    def run(limit: int) -> Results:
        work = requests(LENGTHS)
        result = replay(ScriptedEngine(0.1, slots=4, max_prompt=limit), work, DEADLINES, rate=5.0, simulated=True)
        return Results("x", Signature({}, {}), [run_data(result, summarize(result))])
    result = compare([run(4)], [run(3)], [Gate.parse("preemptions.swap=5%")])
    assert result.lost == [("paged", 5.0, 0, 32)] and result.regressed


def test_different_requests_cannot_be_paired():
    def run(count: int) -> Results:
        result = replay(ScriptedEngine(0.1, slots=4), requests(LENGTHS[:count]), DEADLINES[:count], rate=5.0)
        return Results("x", Signature({}, {}), [run_data(result, summarize(result))])
    with pytest.raises(UsageError, match="different requests"):
        compare([run(10)], [run(12)])


@pytest.mark.parametrize("text, metric, limit", [
    ("normalized_latency=5%", "normalized_latency", 0.05), ("normalized_latency_s=0.1", "normalized_latency", 0.1),
    ("mean_ttft_ms=10%", "ttft", 0.1), ("batch-size=0", "batch_size", 0.0)])
def test_gates_are_read(text: str, metric: str, limit: float):
    assert Gate.parse(text) == Gate(metric, limit)


@pytest.mark.parametrize("text", ["latency=5%", "normalized_latency", "normalized_latency=x", "normalized_latency=-1%"])
def test_bad_gates_are_named(text: str):
    with pytest.raises(UsageError, match=text.split("=")[0]):
        Gate.parse(text)


def test_student_quantiles_equal_the_tables():
    table = {(0.975, 1): 12.7062, (0.995, 4): 4.6041, (0.975, 10): 2.2281, (0.995, 30): 2.7500, (0.9995, 9): 4.7809}
    for (probability, freedom), value in table.items():
        assert student_quantile(probability, freedom) == pytest.approx(value, abs=1e-4)
        assert student_cdf(value, freedom) == pytest.approx(probability, abs=1e-5)


def test_the_interval_of_run_means_is_students():
    """The bootstrap's standard error of a mean is sd * sqrt((m - 1) / m / m): the interval must be t's."""
    values = np.array([1.0, 2.0, 4.0, 4.5, 6.0])
    found = mean_of_runs(values, 0.99)
    half = 4.6041 * values.std(ddof=1) / math.sqrt(5)
    assert found.estimate == 3.5
    assert found.high - found.estimate == pytest.approx(half, rel=0.05)
    assert mean_of_runs(values[:1], 0.99).low == -math.inf


def test_correlated_series_get_longer_blocks_and_wider_intervals():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=4000)
    smooth = np.convolve(noise, np.ones(50), "same") / math.sqrt(50)
    assert block_length(noise) <= 30
    assert 100 <= block_length(smooth) <= 500
    base = np.ones(4000)
    rough, wide = (log_ratio_of_means((1 + 0.01 * series, base), 0.99) for series in (noise, smooth))
    # An average over windows of 50 varies 50 times as much as independent draws: an interval about 7 times as wide.
    assert 4 <= wide.width / rough.width <= 10
