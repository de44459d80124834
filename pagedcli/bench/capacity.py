"""Capacity: the highest request rate that a system serves with normalized latency under a limit.

Found by bisection on the logarithm of the rate. Every probe of every policy uses the same arrival draws, only scaled
(exponential gaps of mean 1 divided by the rate), so two policies are compared on one sequence of events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagedcli.core.errors import UsageError

LIMITS = (0.5, 1.0)
"""Normalized latency limits shown by default, s/token. The paper prints none; its plots end at 1 s/token."""

Measure = Callable[[float], float]
"""Rate (requests/s) to normalized latency (s/token; inf when the run was cut because it could only be worse)."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One measured rate, requests/s, and its normalized latency, s/token."""

    rate: float
    latency: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """The answer for one limit. The true value lies between `rate` (held) and `above` (did not), requests/s.

    `rate` is 0 when even the lowest rate tried was over the limit; `above` is inf when the highest one held.
    `too_few`: at `rate` the requests arrived all but at once, so that no queue could build up: it is no capacity.
    """

    limit: float
    rate: float
    above: float
    probes: tuple[Probe, ...]
    too_few: bool = False

    @property
    def bracketed(self) -> bool:
        return self.rate > 0 and math.isfinite(self.above) and not self.too_few


@dataclass(frozen=True, slots=True)
class Search:
    """How to search: first guess (requests/s), relative width at which to stop, and the most runs per limit."""

    start: float = 1.0
    tolerance: float = 0.05
    max_probes: int = 16

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and self.start > 0):
            raise UsageError(f"first rate of the capacity search = {self.start}: must be a finite number above 0")
        if not 0 < self.tolerance < 1:
            raise UsageError(f"capacity tolerance = {self.tolerance}: must be above 0 and below 1")
        if self.max_probes < 2:
            raise UsageError(f"capacity probes = {self.max_probes}: must be at least 2")


def find_capacity(measure: Measure, limits: Sequence[float] = LIMITS, search: Search | None = None,
                  at_once: Callable[[float], bool] = lambda rate: False) -> list[Capacity]:
    """Capacity at each limit (s/token), in the order given. Runs already made serve the later limits too.

    `at_once` says of a rate measured before whether its arrivals took no time to speak of beside serving them. A
    higher rate would then be served just the same, and the search ends.

    A rate holds when its latency is at or below the limit. Latency is taken to grow with the rate; with noise a lower
    rate may fail where a higher one held, and the result is then the lower end (no rate above a failed one is trusted).
    """
    search = search or Search()
    known: dict[float, float] = {}
    return [_one_limit(measure, limit, search, known, at_once) for limit in limits]


def _one_limit(measure: Measure, limit: float, search: Search, known: dict[float, float],
               at_once: Callable[[float], bool]) -> Capacity:
    if not limit > 0:
        raise UsageError(f"latency limit = {limit} s/token: must be above 0")
    runs = 0

    def bounds() -> tuple[float, float]:
        failed = min((rate for rate, latency in known.items() if not latency <= limit), default=math.inf)
        held = max((rate for rate, latency in known.items() if latency <= limit and rate < failed), default=0.0)
        return held, failed

    while runs < search.max_probes:
        low, high = bounds()
        if low == 0.0 and math.isinf(high):
            rate = search.start
        elif math.isinf(high) and at_once(low):
            break
        elif math.isinf(high):
            rate = low * 2
        elif low == 0.0:
            rate = high / 2
        elif high / low <= 1 + search.tolerance:
            break
        else:
            rate = math.sqrt(low * high)
        known[rate] = measure(rate)
        runs += 1
    low, high = bounds()
    return Capacity(limit, low, high, tuple(Probe(rate, known[rate]) for rate in sorted(known)),
                    low > 0 and at_once(low))
