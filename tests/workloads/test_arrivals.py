"""Arrival strategies against the distributions they claim."""

import math

import numpy as np
import pytest

from pagedcli.core.errors import UsageError
from pagedcli.workloads import AllAtOnce, Constant, Gamma, Poisson, TraceTimes, make_arrivals
from pagedcli.workloads.streams import Purpose, generator

SEEDS = range(50)


def ks_statistic(gaps: np.ndarray, rate: float) -> float:
    """Largest distance between the empirical distribution of gaps and the exponential's."""
    ordered = np.sort(gaps)
    cdf = 1.0 - np.exp(-rate * ordered)
    steps = np.arange(len(gaps) + 1) / len(gaps)
    return float(max(np.max(steps[1:] - cdf), np.max(cdf - steps[:-1])))


def ks_p_value(statistic: float, count: int) -> float:
    """Kolmogorov's limit with Stephens' correction for finite samples."""
    x = statistic * (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count))
    return float(min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 101))))


def test_poisson_gaps_are_exponential_over_50_seeds() -> None:
    p_values = [ks_p_value(ks_statistic(np.diff(Poisson(4.0).deadlines(2000, seed), prepend=0.0), 4.0), 2000)
                for seed in SEEDS]
    # At the 1 % level 0.5 of 50 tests fail on average; 4 or more happen once in 600 times.
    assert sum(p < 0.01 for p in p_values) <= 3
    # The p-values themselves are uniform: their mean is 0.5 +- 0.041.
    assert abs(np.mean(p_values) - 0.5) < 0.13


def test_a_constant_rate_fails_the_same_test() -> None:
    gaps = np.diff(Constant(4.0).deadlines(2000, 0), prepend=0.0)
    assert ks_p_value(ks_statistic(gaps, 4.0), 2000) < 1e-6


def test_last_arrival_keeps_its_variance() -> None:
    count, rate = 400, 2.0
    last = np.array([Poisson(rate).deadlines(count, seed)[-1] for seed in range(2000)])
    assert last.mean() == pytest.approx(count / rate, rel=0.005)
    # Var = n / rate^2; over 2,000 seeds its estimate has a relative sd of 3.2 %. Rescaled arrivals would have 0.
    assert last.var() == pytest.approx(count / rate**2, rel=0.13)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_mean_and_spread_asked(burstiness: float) -> None:
    gaps = np.diff(Gamma(5.0, burstiness).deadlines(200_000, 3), prepend=0.0)
    assert gaps.mean() == pytest.approx(0.2, rel=0.02)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.05)


def test_burstiness_one_is_poisson() -> None:
    np.testing.assert_array_equal(Gamma(3.0, 1.0).deadlines(100, 5), Poisson(3.0).deadlines(100, 5))
    assert isinstance(make_arrivals(3.0), Poisson)
    assert isinstance(make_arrivals(3.0, 0.5), Gamma)
    assert isinstance(make_arrivals(math.inf, 0.5), AllAtOnce)


def test_deadlines_are_absolute_sorted_and_extend() -> None:
    short, long = Poisson(10.0).deadlines(5000, 1), Poisson(10.0).deadlines(20_000, 1)
    np.testing.assert_array_equal(short, long[:5000])
    assert (np.diff(long) >= 0).all()
    assert long.dtype == np.float64


def test_constant_and_all_at_once() -> None:
    np.testing.assert_allclose(Constant(4.0).deadlines(4, 9), [0.25, 0.5, 0.75, 1.0])
    np.testing.assert_array_equal(AllAtOnce().deadlines(3, 9), [0, 0, 0])


def test_within_takes_every_arrival_below_the_duration() -> None:
    times = Poisson(50.0).within(20.0, 4)
    longer = Poisson(50.0).deadlines(len(times) + 1, 4)
    np.testing.assert_array_equal(times, longer[:-1])
    assert times[-1] < 20.0 <= longer[-1]
    # Counts over a fixed time are Poisson: mean = variance = 1,000.
    counts = np.array([len(Poisson(50.0).within(20.0, seed)) for seed in range(400)])
    assert counts.mean() == pytest.approx(1000, rel=0.006)
    assert counts.var() == pytest.approx(1000, rel=0.3)


def test_trace_times_scale() -> None:
    trace = TraceTimes((0.0, 1.0, 4.0), 0.5)
    np.testing.assert_allclose(trace.deadlines(3, 0), [0.0, 0.5, 2.0])
    assert trace.rate == pytest.approx(1.0)
    assert TraceTimes.at_rate((0.0, 1.0, 4.0), 8.0).deadlines(3, 0)[-1] == pytest.approx(0.25)
    np.testing.assert_allclose(trace.within(1.0, 0), [0.0, 0.5])


def test_streams_for_different_purposes_do_not_touch() -> None:
    draws = {purpose: generator(7, purpose).random(4).tolist() for purpose in Purpose}
    assert len({tuple(d) for d in draws.values()}) == len(Purpose)
    assert generator(7, Purpose.DATA, "a").random() == generator(7, Purpose.DATA, "a").random()
    assert generator(7, Purpose.DATA, "a").random() != generator(7, Purpose.DATA, "b").random()
    # Known value: a changed stream would silently change every published run.
    assert Poisson(1.0).deadlines(1, 0)[0] == pytest.approx(POISSON_SEED_0, rel=1e-12)


POISSON_SEED_0 = float(np.random.Generator(np.random.PCG64(
    np.random.SeedSequence(entropy=0, spawn_key=(1,)))).gamma(1.0, 1.0, 4096)[0])


@pytest.mark.parametrize(("make", "words"), [
    (lambda: Poisson(0.0), "--rate = 0.0"),
    (lambda: Poisson(float("nan")), "--rate = nan"),
    (lambda: Gamma(1.0, 0.0), "--burstiness = 0.0"),
    (lambda: TraceTimes((2.0, 1.0)), "increasing"),
    (lambda: TraceTimes(()), "give --rate"),
    (lambda: TraceTimes((0.0, 1.0)).deadlines(3, 0), "lower --num-requests to 2"),
    (lambda: AllAtOnce().within(5.0, 0), "finite --rate"),
    (lambda: Poisson(1.0).within(0.0, 0), "--duration = 0.0"),
    (lambda: Poisson(1.0).deadlines(3, -1), "--seed = -1"),
])
def test_faults_name_the_value(make, words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        make()
