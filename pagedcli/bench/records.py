"""What a run leaves behind: one record per request, one row per step, kept in columns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
WASTE_CLASSES = ("token", "reserved", "internal", "external", "free")
"""The five uses of a KV slot (paper Figure 2's classes, with free memory told apart from lost memory)."""


def _no_times() -> Floats:
    return np.empty(0, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request of a run. Times are seconds from the start of the run; None where the event never came.

    `arrival` is when the request was *scheduled* to arrive, and every latency counts from it, so time spent waiting
    for the sender is not lost. `token_times` holds one time per generated position (n samples move together, so
    they share it). `output_len` is the length of a sequence, `output_tokens` the tokens of all its sequences.
    """

    index: int
    key: str
    arrival: float
    dispatched: float
    prompt_tokens: int
    output_len: int = 0
    output_tokens: int = 0
    sequences: int = 1
    scheduled: float | None = None
    finish: float | None = None
    token_times: Floats = field(default_factory=_no_times, compare=False, repr=False)
    cached_tokens: int = 0
    preemptions: int = 0
    error: str | None = None
    error_message: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it finished without an error; only such requests enter latency figures."""
        return self.error is None and self.finish is not None

    @property
    def first_token(self) -> float | None:
        return float(self.token_times[0]) if len(self.token_times) else None

    @property
    def dispatch_lag(self) -> float:
        """Seconds between the scheduled arrival and the moment the engine was told of the request."""
        return self.dispatched - self.arrival

    @property
    def e2el(self) -> float:
        """Finish minus scheduled arrival, seconds; NaN when it did not finish."""
        return math.nan if self.finish is None else self.finish - self.arrival

    @property
    def ttft(self) -> float:
        """First token minus scheduled arrival, seconds; NaN when no token came."""
        first = self.first_token
        return math.nan if first is None else first - self.arrival

    @property
    def tpot(self) -> float:
        """(E2E - TTFT) / (n - 1), seconds a token after the first; NaN for fewer than two tokens."""
        return (self.e2el - self.ttft) / (self.output_len - 1) if self.output_len > 1 else math.nan

    @property
    def itl(self) -> Floats:
        """Gaps between consecutive tokens, seconds; the time to the first token is not among them."""
        return np.diff(self.token_times)

    @property
    def normalized_latency(self) -> float:
        """E2E over output length, s/token (paper section 6.1); NaN without output."""
        return self.e2el / self.output_len if self.output_len else math.nan


class StepRecord(NamedTuple):
    """One iteration. `time` is its start (s from the run's start), `seconds` its length.

    `running`, `waiting`, `swapped` count requests; `sequences` those computed in the step; `computed` its tokens.
    The five waste classes are slots of the pool and add to it. `logical` and `physical` are blocks: summed over
    block tables, and distinct. Preemptions and `finished` count events of this step.
    """

    time: float
    seconds: float
    running: int
    waiting: int
    swapped: int
    sequences: int
    computed: int
    token: int
    reserved: int
    internal: int
    external: int
    free: int
    logical: int
    physical: int
    preempt_recompute: int = 0
    preempt_swap: int = 0
    finished: int = 0


_STEP_TYPE = np.dtype([(name, np.float64 if name in ("time", "seconds") else np.int64)
                       for name in StepRecord._fields])


class StepTable:
    """Steps in a growing structured array: 136 bytes a step, so millions fit and columns need no copy."""

    __slots__ = ("_count", "_data")

    def __init__(self, capacity: int = 1024) -> None:
        self._data = np.empty(max(capacity, 1), dtype=_STEP_TYPE)
        self._count = 0

    def append(self, record: StepRecord) -> None:
        if self._count == len(self._data):
            grown = np.empty(2 * len(self._data), dtype=_STEP_TYPE)
            grown[: self._count] = self._data
            self._data = grown
        self._data[self._count] = record
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> StepRecord:
        if not -self._count <= index < self._count:
            raise IndexError(f"step {index} of {self._count}")
        return StepRecord(*self._data[: self._count][index].item())

    def __iter__(self) -> Iterator[StepRecord]:
        return (self[index] for index in range(self._count))

    def column(self, name: str) -> NDArray[Any]:
        """A view of one column, length = number of steps."""
        return self._data[name][: self._count]

    @property
    def pool(self) -> NDArray[np.int64]:
        """Slots of the pool at each step: the sum of the five classes."""
        total = np.zeros(self._count, dtype=np.int64)
        for name in WASTE_CLASSES:
            total += self.column(name)
        return total

    def share(self, waste_class: str) -> Floats:
        """One waste class as a share of the pool at each step, 0..1."""
        return np.asarray(self.column(waste_class) / np.maximum(self.pool, 1), dtype=np.float64)

    def between(self, start: float, end: float) -> StepTable:
        """Steps which began in [start, end) seconds."""
        time = self.column("time")
        return self._of(self._data[: self._count][(time >= start) & (time < end)])

    @classmethod
    def _of(cls, data: NDArray[Any]) -> StepTable:
        table = cls(1)
        table._data = data if len(data) else np.empty(1, dtype=_STEP_TYPE)
        table._count = len(data)
        return table

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> StepTable:
        """A table from one array per field of StepRecord (others are passed over)."""
        data = np.empty(len(columns["time"]), dtype=_STEP_TYPE)
        for name in StepRecord._fields:
            data[name] = columns[name]
        return cls._of(data)


@dataclass(frozen=True, slots=True)
class RunResult:
    """One replay of one workload through one engine under one policy.

    `rate` is what was asked, requests/s (inf: all at once); `duration` seconds from the start to the last event.
    `deterministic`: time was simulated, or arrivals did not depend on it, so that a rerun gives the same schedule.
    `stopped` says why a run was cut short, None when it ran to its end.
    """

    policy: str
    rate: float
    requests: Sequence[RequestRecord]
    steps: StepTable
    duration: float
    burstiness: float = 1.0
    repeat: int = 0
    simulated: bool = False
    synthetic: bool = False
    stopped: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def deterministic(self) -> bool:
        return self.simulated or math.isinf(self.rate)

    @property
    def completed(self) -> list[RequestRecord]:
        return [record for record in self.requests if record.ok]

    @property
    def failed(self) -> list[RequestRecord]:
        return [record for record in self.requests if not record.ok]
