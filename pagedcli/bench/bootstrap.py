"""Confidence intervals that respect how benchmark data hang together.

Requests of one run share queues and steps share batches, so neighbours are correlated: resampling them one by one
would make intervals far too narrow. What is resampled here is a whole run where runs were repeated, and otherwise
blocks of consecutive requests or steps (circular block bootstrap, Politis and Romano 1992), with a block length that
grows with the measured autocorrelation. With few units a percentile interval is too narrow as well; the bootstrap's
standard error is therefore widened by sqrt(m / (m - 1)) and used with Student's t on m - 1 degrees of freedom
(m: units resampled), as Hesterberg advises ("What Teachers Should Know About the Bootstrap", 2015).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedcli.bench.records import Floats

RESAMPLES = 2000
MIN_BLOCKS = 8
"""Fewest blocks a run is cut into; below this a spread cannot be told from one run."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its two-sided confidence interval; `units` independent pieces stood behind it."""

    estimate: float
    low: float
    high: float
    units: int

    @property
    def width(self) -> float:
        return self.high - self.low


def student_cdf(t: float, freedom: int) -> float:
    """Distribution function of Student's t for whole degrees of freedom (closed form, Abramowitz & Stegun 26.7.3-4)."""
    theta = math.atan2(t, math.sqrt(freedom))
    sine, square = math.sin(theta), math.cos(theta) ** 2
    if freedom % 2:
        total, term = 0.0, math.cos(theta)
        for k in range(1, (freedom - 1) // 2 + 1):
            total += term
            term *= square * (2 * k) / (2 * k + 1)
        inside = 2 / math.pi * (theta + sine * total)
    else:
        total, term = 0.0, 1.0
        for k in range(1, freedom // 2 + 1):
            total += term
            term *= square * (2 * k - 1) / (2 * k)
        inside = sine * total
    return 0.5 + inside / 2


def student_quantile(probability: float, freedom: int) -> float:
    """The t with that distribution function, for probability in (0.5, 1), by bisection."""
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < probability else (low, middle)
    return high


def block_length(series: Floats) -> int:
    """Length of blocks that outlasts the correlation of a series: at least the cube root of n, and four times the
    integrated autocorrelation time (summed to the first lag at or below 0), but always MIN_BLOCKS blocks or more."""
    count = len(series)
    most = max(count // MIN_BLOCKS, 1)
    centred = series - series.mean()
    size = 1 << (2 * count - 1).bit_length()
    spectrum = np.fft.rfft(centred, size)
    covariance = np.fft.irfft(spectrum * np.conj(spectrum), size)[:count]
    if covariance[0] <= 0:
        return min(math.ceil(count ** (1 / 3)), most)
    correlation = covariance / covariance[0]
    ends = np.flatnonzero(correlation <= 0)
    last = int(ends[0]) if len(ends) else count
    time = 1 + 2 * float(correlation[1:last].sum())
    return int(min(max(math.ceil(count ** (1 / 3)), math.ceil(4 * time)), most))


def _t_interval(estimate: float, error: float, units: int, level: float) -> Interval:
    spread = student_quantile(0.5 + level / 2, units - 1) * error * math.sqrt(units / (units - 1))
    return Interval(estimate, estimate - spread, estimate + spread, units)


def mean_of_runs(values: Floats, level: float, seed: int = 0) -> Interval:
    """Interval of the mean of one value per repeated run, by resampling whole runs. One run has no spread: the
    interval is then infinite."""
    estimate, units = float(values.mean()), len(values)
    if units < 2:
        return Interval(estimate, -math.inf, math.inf, units)
    picks = np.random.default_rng(seed).integers(0, units, (RESAMPLES, units))
    return _t_interval(estimate, float(values[picks].mean(axis=1).std(ddof=1)), units, level)


def log_ratio_of_means(pairs: tuple[Floats, ...], level: float, seed: int = 0) -> Interval:
    """Interval of log(mean(top) / mean(bottom)) over series paired by position, from one run each.

    `pairs` is (top, bottom), or (top, bottom, top0, bottom0) for the log of a ratio of two such ratios. All series are
    resampled with the same blocks, so what they share (one arrival sequence, one request list) cancels.
    """
    count = len(pairs[0])
    signs = (1, -1, -1, 1)[: len(pairs)]
    means = [float(series.mean()) for series in pairs]
    if count == 0 or min(means, default=0.0) <= 0:
        return Interval(math.nan, -math.inf, math.inf, 0)
    estimate = sum(sign * math.log(mean) for sign, mean in zip(signs, means, strict=True))
    # First-order influence of each position on the estimate: its autocorrelation sets the block length.
    influence = sum((sign * series / mean for sign, series, mean in zip(signs, pairs, means, strict=True)),
                    np.zeros(count))
    if count < 2 * MIN_BLOCKS:
        return Interval(estimate, -math.inf, math.inf, count)
    length = block_length(influence)
    blocks = math.ceil(count / length)
    starts = np.random.default_rng(seed).integers(0, count, (RESAMPLES, blocks))
    logs = np.zeros(RESAMPLES)
    for sign, series in zip(signs, pairs, strict=True):
        logs += sign * np.log(np.maximum(_block_means(series, starts, length), np.finfo(float).tiny))
    return _t_interval(estimate, float(logs.std(ddof=1)), blocks, level)


def difference_of_means(top: Floats, bottom: Floats, level: float, seed: int = 0) -> Interval:
    """Interval of mean(top) - mean(bottom) of two unpaired series (steps of two runs), each in its own blocks."""
    estimate = float(top.mean() - bottom.mean())
    if min(len(top), len(bottom)) < 2 * MIN_BLOCKS:
        return Interval(estimate, -math.inf, math.inf, min(len(top), len(bottom)))
    rng = np.random.default_rng(seed)
    draws, units = [], []
    for series in (top, bottom):
        length = block_length(series)
        blocks = math.ceil(len(series) / length)
        draws.append(_block_means(series, rng.integers(0, len(series), (RESAMPLES, blocks)), length))
        units.append(blocks)
    return _t_interval(estimate, float((draws[0] - draws[1]).std(ddof=1)), min(units), level)


def _block_means(series: Floats, starts: NDArray[np.int64], length: int) -> Floats:
    """Mean of the circular blocks that begin at `starts` [resamples, blocks], one value per resample."""
    sums = np.concatenate([[0.0], np.cumsum(np.concatenate([series, series[:length]]))])
    totals = sums[starts + length] - sums[starts]
    return np.asarray(totals.sum(axis=1) / (starts.shape[1] * length), dtype=np.float64)
