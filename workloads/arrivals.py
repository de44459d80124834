"""When requests arrive: strategies that give absolute deadlines in seconds from the start of the run.

Poisson arrivals are what the paper uses (section 6.1). Gaps are never rescaled to end on time: the time of the
last arrival keeps its own randomness. Each deadline is a running sum of gaps, so a sender that waits for absolute
times cannot drift.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedcli.core.errors import UsageError
from pagedcli.workloads.streams import Purpose, generator

Times = NDArray[np.float64]
_CHUNK = 4096


def _check_rate(rate: float) -> None:
    if not (math.isfinite(rate) and rate > 0):
        raise UsageError(f"--rate = {rate}: must be a finite number above 0, or inf for all at once")


class Arrivals(ABC):
    """One way for requests to arrive. `rate` is the mean in requests/s (`inf` when all come at once)."""

    name: str

    @property
    @abstractmethod
    def rate(self) -> float: ...

    @abstractmethod
    def deadlines(self, count: int, seed: int) -> Times:
        """Arrival times of the first `count` requests, non-decreasing, float64 seconds, shape [count]."""

    def within(self, duration: float, seed: int) -> Times:
        """All arrival times below `duration` seconds; the first ones equal those of `deadlines`."""
        if not (math.isfinite(duration) and duration > 0):
            raise UsageError(f"--duration = {duration}: must be a finite number of seconds above 0")
        if math.isinf(self.rate):
            raise UsageError("--duration needs a finite --rate: at rate inf no request arrives later than 0 s "
                             "(give --num-requests instead)")
        count = int(self.rate * duration * 1.25) + 64
        while True:
            times = self.deadlines(count, seed)
            if times[-1] >= duration:
                return times[times < duration]
            count *= 2


def _check_count(count: int) -> None:
    if count < 0:
        raise UsageError(f"number of arrivals = {count}: must be at least 0")


def _summed_gamma(count: int, shape: float, scale: float, seed: int) -> Times:
    """Running sums of gamma gaps. Drawn in fixed chunks, so a longer run begins with the shorter one."""
    _check_count(count)
    rng = generator(seed, Purpose.ARRIVALS)
    chunks = [rng.gamma(shape, scale, _CHUNK) for _ in range(-(-count // _CHUNK))]
    gaps = np.concatenate(chunks)[:count] if chunks else np.empty(0)
    return np.cumsum(gaps, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Gamma(Arrivals):
    """Gamma gaps of mean 1/rate; their squared coefficient of variation is 1/burstiness.

    Burstiness 1 is Poisson, below 1 burstier, above 1 more even (the meaning of vLLM's `--burstiness`).
    """

    mean_rate: float
    burstiness: float
    name = "gamma"

    def __post_init__(self) -> None:
        _check_rate(self.mean_rate)
        if not (math.isfinite(self.burstiness) and self.burstiness > 0):
            raise UsageError(f"--burstiness = {self.burstiness}: must be a finite number above 0")

    @property
    def rate(self) -> float:
        return self.mean_rate

    def deadlines(self, count: int, seed: int) -> Times:
        return _summed_gamma(count, self.burstiness, 1.0 / (self.mean_rate * self.burstiness), seed)


@dataclass(frozen=True, slots=True)
class Poisson(Arrivals):
    """Exponential gaps of mean 1/rate: independent users (the paper's arrivals)."""

    mean_rate: float
    name = "poisson"

    def __post_init__(self) -> None:
        _check_rate(self.mean_rate)

    @property
    def rate(self) -> float:
        return self.mean_rate

    def deadlines(self, count: int, seed: int) -> Times:
        return _summed_gamma(count, 1.0, 1.0 / self.mean_rate, seed)


@dataclass(frozen=True, slots=True)
class Constant(Arrivals):
    """One request every 1/rate seconds, the first after one gap."""

    mean_rate: float
    name = "constant"

    def __post_init__(self) -> None:
        _check_rate(self.mean_rate)

    @property
    def rate(self) -> float:
        return self.mean_rate

    def deadlines(self, count: int, seed: int) -> Times:
        _check_count(count)
        return np.arange(1, count + 1, dtype=np.float64) / self.mean_rate


@dataclass(frozen=True, slots=True)
class AllAtOnce(Arrivals):
    """Every request at time 0 (rate inf): offline batch work, the queue is full from the start."""

    name = "all-at-once"

    @property
    def rate(self) -> float:
        return math.inf

    def deadlines(self, count: int, seed: int) -> Times:
        _check_count(count)
        return np.zeros(count, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class TraceTimes(Arrivals):
    """A trace's own arrival times, times `scale` (0.5 replays twice as fast). Not random: the seed is unused."""

    times: tuple[float, ...]
    scale: float = 1.0
    name = "trace"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise UsageError(f"time scale = {self.scale}: must be a finite number above 0")
        values = np.asarray(self.times, dtype=np.float64)
        if not len(values):
            raise UsageError("this workload has no arrival times of its own: give --rate instead")
        if not np.isfinite(values).all() or values[0] < 0 or (np.diff(values) < 0).any():
            raise UsageError("trace arrival times must be finite, at least 0 and in increasing order")

    @classmethod
    def at_rate(cls, times: Sequence[float], rate: float) -> TraceTimes:
        """The trace's pattern stretched so that its mean rate is `rate` requests/s."""
        _check_rate(rate)
        own = cls(tuple(times)).rate
        if math.isinf(own):
            raise UsageError("all requests of this trace arrive at one time: it has no rate to scale")
        return cls(tuple(times), own / rate)

    @property
    def rate(self) -> float:
        span = (self.times[-1] - self.times[0]) * self.scale
        return (len(self.times) - 1) / span if span > 0 else math.inf

    def deadlines(self, count: int, seed: int) -> Times:
        _check_count(count)
        if count > len(self.times):
            raise UsageError(f"{count} arrivals asked of a trace of {len(self.times)} requests: "
                             f"lower --num-requests to {len(self.times)} or give --rate")
        return np.asarray(self.times[:count], dtype=np.float64) * self.scale

    def within(self, duration: float, seed: int) -> Times:
        if not (math.isfinite(duration) and duration > 0):
            raise UsageError(f"--duration = {duration}: must be a finite number of seconds above 0")
        times = self.deadlines(len(self.times), seed)
        return times[times < duration]


def make_arrivals(rate: float, burstiness: float = 1.0) -> Arrivals:
    """The strategy that `--rate` and `--burstiness` name: all at once at rate inf, Poisson, or gamma."""
    if rate == math.inf:
        return AllAtOnce()
    return Poisson(rate) if burstiness == 1.0 else Gamma(rate, burstiness)
