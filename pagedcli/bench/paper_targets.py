"""What the paper's curves say, and how to find the same on ours: latency at low load, rate at a latency."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pagedcli.bench.paper_setup import crossing, paper_figures
from pagedcli.core.errors import UsageError

LIMIT = 0.5
"""Normalized latency at which systems are compared, s/token (the paper prints no threshold)."""

PANELS: Mapping[str, tuple[str, str]] = {
    "fig12a": ("opt-13b", "sharegpt"), "fig12b": ("opt-66b", "sharegpt"), "fig12c": ("opt-175b", "sharegpt"),
    "fig12d": ("opt-13b", "alpaca-paper"), "fig12e": ("opt-66b", "alpaca-paper"),
    "fig12f": ("opt-175b", "alpaca-paper"),
}
@dataclass(frozen=True, slots=True)
class Target:
    """What a curve of the paper says: latency at its lowest rate, and the rate at which it passes `level`.

    `level` is LIMIT, or the highest latency plotted where the printed curve ends below LIMIT.
    """

    figure: str
    policy: str
    low_rate: float
    low_latency: float
    level: float
    rate: float

    @property
    def key(self) -> tuple[str, str]:
        return self.figure, self.policy


def target_of(figure: str, policy: str, limit: float = LIMIT) -> Target:
    """The target of one digitised curve."""
    points = [(float(rate), float(latency)) for rate, latency in paper_figures()["curves"][figure][policy]]
    (low_rate, low_latency), last = points[0], points[-1]
    rate = crossing(points, limit)
    if rate is None:
        if last[1] > limit:
            raise UsageError(f"{figure} {policy}: the printed curve begins above {limit} s/token")
        return Target(figure, policy, low_rate, low_latency, last[1], last[0])
    return Target(figure, policy, low_rate, low_latency, limit, rate)


def find_rate(measure: Callable[[float], float], level: float, guess: float, tolerance: float = 0.02,
              known: dict[float, float] | None = None) -> float:
    """The rate at which `measure` (latency at a rate; inf when far above) passes `level`, to `tolerance`. `known` holds
    latencies measured before, and is added to."""
    known = {} if known is None else known

    def at(rate: float) -> float:
        if rate not in known:
            known[rate] = measure(rate)
        return known[rate]

    held = [rate for rate, latency in known.items() if latency <= level]
    failed = [rate for rate, latency in known.items() if latency > level]
    if held and failed and max(held) < min(failed):
        low, high = max(held), min(failed)
        if low < guess < high:
            low, high = (guess, high) if at(guess) <= level else (low, guess)
        return _between(at, level, low, high, tolerance)
    low = high = guess
    if at(guess) <= level:
        while at(high) <= level and high < 64 * guess:
            low, high = high, high * (1.12 if high < 2 * guess else 1.6)
    else:
        while at(low) > level and low > guess / 64:
            high, low = low, low / (1.12 if low > guess / 2 else 1.6)
    return _between(at, level, low, high, tolerance)


def _between(at: Callable[[float], float], level: float, low: float, high: float, tolerance: float) -> float:
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if at(middle) <= level else (low, middle)
    inside = crossing([(low, at(low)), (high, at(high))], level)
    return inside if inside is not None else low
