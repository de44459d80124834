"""Fitted joint distributions of prompt and output lengths.

A fit holds the measured quantiles of each length and one correlation. A pair is drawn through a Gaussian copula: two
normal variables with that correlation, each mapped through its own quantile function. Where the source was cut at a
total length (the paper keeps input + output < 2048), a pair above it trades its output with another pair, so that
each length alone keeps its measured distribution.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedcli.core.errors import UsageError

Lengths = NDArray[np.int64]
Floats = NDArray[np.float64]

KNOTS: tuple[float, ...] = (
    0.0, 0.001, 0.0025, 0.005, *(k / 100 for k in range(1, 100)), 0.9925, 0.995, 0.9975, 0.999, 0.9995, 1.0,
)
"""Probabilities at which a fit stores its quantiles."""

_EDGE = 4.5


@cache
def normal_knots(count: int) -> Floats:
    """Normal quantiles of KNOTS; the ends stand at +-4.5 (7e-6 of all draws lie beyond and take the end value)."""
    inner = [NormalDist().inv_cdf(p) for p in KNOTS[1:-1]]
    return np.array([-_EDGE, *inner, _EDGE])


@dataclass(frozen=True, slots=True)
class Marginal:
    """A length's quantile function: `values[k]` tokens at probability KNOTS[k], never below `least`."""

    values: tuple[float, ...]
    least: int = 1

    def __post_init__(self) -> None:
        if len(self.values) != len(KNOTS) or any(b < a for a, b in zip(self.values, self.values[1:], strict=False)):
            raise UsageError(f"a length fit needs {len(KNOTS)} quantiles in increasing order, "
                             f"got {len(self.values)}")

    def tokens(self, normal: Floats, factor: float = 1.0) -> Lengths:
        """Whole token counts for standard normal draws, same shape."""
        raw = np.interp(normal, normal_knots(len(KNOTS)), self.values) * factor
        return np.maximum(np.rint(raw).astype(np.int64), self.least)

    def mean(self, factor: float = 1.0) -> float:
        """Mean tokens, by quadrature over the quantile function."""
        grid = (np.arange(40_000) + 0.5) / 40_000
        raw = np.interp(grid, KNOTS, self.values) * factor
        return float(np.maximum(np.rint(raw), self.least).mean())

    def factor_for_mean(self, target: float) -> float:
        """The factor on all values that brings the mean to `target` tokens."""
        low, high = 0.1, 10.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.mean(middle) < target else (low, middle)
        return (low + high) / 2


@dataclass(frozen=True, slots=True)
class LengthModel:
    """Joint distribution of (prompt tokens, output tokens) of independent requests.

    `rho` is the copula's correlation; `max_total` the largest prompt + output kept (None: no cut). The factors
    scale both lengths.
    """

    prompt: Marginal
    output: Marginal
    rho: float
    max_total: int | None = None
    prompt_factor: float = 1.0
    output_factor: float = 1.0

    def sample(self, count: int, rng: np.random.Generator) -> Lengths:
        """`count` pairs, int64, shape [count, 2]: prompt tokens, output tokens."""
        normal = spread_normals(rng, count, self.rho)
        pairs = np.stack([self.prompt.tokens(normal[0], self.prompt_factor),
                          self.output.tokens(normal[1], self.output_factor)], axis=1)
        if self.max_total is not None:
            self._fit_under(pairs, self.max_total, rng)
        return pairs

    def _fit_under(self, pairs: Lengths, limit: int, rng: np.random.Generator) -> None:
        """Brings pairs over the limit under it, in place, by trading outputs: both lengths keep their distribution.

        The partner is random among those where both new pairs fit. A pair without one (tiny samples) is redrawn.
        """
        over = np.flatnonzero(pairs.sum(axis=1) > limit)
        for i in over[np.argsort(-pairs[over, 0])]:
            prompt, output = pairs[i]
            if prompt + output <= limit:
                continue
            for candidates in (rng.integers(len(pairs), size=256), np.arange(len(pairs))):
                fits = (prompt + pairs[candidates, 1] <= limit) & (pairs[candidates, 0] + output <= limit)
                if fits.any():
                    j = candidates[np.argmax(fits)]
                    pairs[i, 1], pairs[j, 1] = pairs[j, 1], output
                    break
            else:
                pairs[i] = self._redraw(limit, rng)

    def _redraw(self, limit: int, rng: np.random.Generator) -> Lengths:
        while True:
            normal = spread_normals(rng, 64, self.rho)
            pairs = np.stack([self.prompt.tokens(normal[0], self.prompt_factor),
                              self.output.tokens(normal[1], self.output_factor)], axis=1)
            fitting = pairs[pairs.sum(axis=1) <= limit]
            if len(fitting):
                first: Lengths = fitting[int(rng.integers(len(fitting)))]
                return first

    def scaled_to(self, prompt_mean: float, output_mean: float) -> LengthModel:
        """The same shape with other means, both lengths multiplied by one factor each."""
        return LengthModel(self.prompt, self.output, self.rho, self.max_total,
                           self.prompt.factor_for_mean(prompt_mean), self.output.factor_for_mean(output_mean))


@cache
def _normal_table() -> tuple[Floats, Floats]:
    """Probabilities and standard normal quantiles, dense where the quantile function bends."""
    tail = np.linspace(1e-6, 1e-3, 400)
    grid = np.unique(np.concatenate([tail, np.linspace(1e-3, 0.999, 4000), 1 - tail]))
    inverse = NormalDist().inv_cdf
    return grid, np.array([inverse(float(p)) for p in grid])


def spread_normals(rng: np.random.Generator, count: int, rho: float) -> Floats:
    """Two rows of standard normals with correlation `rho`, shape [2, count], one value in each 1/count quantile.

    Each row alone is a stratified sample: the mean of a heavy-tailed length over 1,000 requests then lies within
    a fraction of a percent of the distribution's, where independent draws would stray by 6 %.
    """
    first = rng.standard_normal(count)
    second = rho * first + np.sqrt(1.0 - rho * rho) * rng.standard_normal(count)
    rows = np.empty((2, count))
    for row, values in zip(rows, (first, second), strict=True):
        row[np.argsort(values)] = np.interp((np.arange(count) + rng.random(count)) / count, *_normal_table())
    return rows


@dataclass(frozen=True, slots=True)
class LengthStats:
    """Statistics of one length over a set of requests, in tokens."""

    mean: float
    median: float
    p99: float
    std: float
    largest: int

    @classmethod
    def of(cls, lengths: Sequence[int] | Lengths) -> LengthStats:
        values = np.asarray(lengths, dtype=np.int64)
        if not len(values):
            raise UsageError("no requests: there are no lengths to describe")
        return cls(float(values.mean()), float(np.median(values)), float(np.percentile(values, 99)),
                   float(values.std()), int(values.max()))


def ranks(values: Sequence[float] | Lengths | Floats) -> Floats:
    """Ranks from 1, ties sharing their mean rank."""
    array = np.asarray(values)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    result: Floats = (last - (counts - 1) / 2.0)[inverse]
    return result


def rank_correlation(first: Sequence[float] | Lengths, second: Sequence[float] | Lengths) -> float:
    """Spearman's rank correlation, ties averaged."""
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


@cache
def load_sample(name: str) -> Mapping[str, Any]:
    """The shipped file `samples/<name>.json` as read: a fit (written by `fit.py`) or the word lists."""
    path = files("pagedcli.workloads") / "samples" / f"{name}.json"
    data: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def pair_model(data: Mapping[str, Any]) -> LengthModel:
    """The length model of a fit's `pairs` object."""
    return LengthModel(Marginal(tuple(data["prompt"]), data["least"]), Marginal(tuple(data["output"]), data["least"]),
                       data["rho"], data["max_total"])
