"""Time as the engine sees it: the wall, or a number that a simulation moves forward."""

from __future__ import annotations

import time
from typing import Protocol

LATEST = 1e9
"""Latest time that is asked of a clock, s: almost 32 years. A float64 tells 0.1 us apart there, and less beyond."""


class Clock(Protocol):
    """Seconds since an arbitrary origin. `advance` is how an executor reports the time a step took."""

    def now(self) -> float: ...

    def advance(self, seconds: float) -> None: ...

    def sleep_until(self, when: float) -> None: ...


class WallClock:
    """Real time. `advance` does nothing, since real work has already taken its time."""

    def __init__(self) -> None:
        self._origin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._origin

    def advance(self, seconds: float) -> None:
        del seconds

    def sleep_until(self, when: float) -> None:
        delay = when - self.now()
        if delay > 0:
            time.sleep(delay)


class VirtualClock:
    """Simulated time: only `advance` and `sleep_until` move it, and it never runs backwards."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock cannot advance by {seconds} s")
        self._now += seconds

    def sleep_until(self, when: float) -> None:
        self._now = max(self._now, when)
