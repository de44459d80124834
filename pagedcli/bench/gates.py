"""Which figures can be compared and gated, and how a limit on one is written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pagedcli.bench.records import WASTE_CLASSES, Floats
from pagedcli.bench.storage import SERIES, RunData
from pagedcli.core.errors import UsageError

Unit = Literal["relative", "points"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure that can be gated. `key` leads to it in a run's summary; `series` names its per-request values.

    Shares of the pool change in points (absolute), all else relatively. `worse`: +1 when larger is worse, else -1.
    """

    name: str
    key: tuple[str, ...]
    worse: int
    time: bool
    unit: Unit = "relative"
    series: str | None = None
    steps: str | None = None

    def value(self, run: RunData) -> float:
        found: Any = run.figures
        for part in self.key:
            found = found.get(part) if isinstance(found, Mapping) else None
        return math.nan if found is None else float(found)

    def step_series(self, run: RunData) -> Floats | None:
        """The figure at each step, where it is a mean over steps."""
        if self.steps is None or not len(run.steps):
            return None
        if self.unit == "points":
            return run.steps.share(self.steps)
        return np.asarray(run.steps.column(self.steps), dtype=np.float64)


def _metrics() -> dict[str, Metric]:
    found = [Metric("normalized_latency", ("normalized_latency_s",), 1, True, series="normalized_latency")]
    found += [Metric(name, (f"mean_{name}_ms",), 1, True, series=name) for name in SERIES[1:]]
    found += [Metric("duration", ("duration",), 1, True), Metric("output_throughput", ("output_throughput",), -1, True),
              Metric("request_throughput", ("request_throughput",), -1, True)]
    found += [Metric(f"waste.{name}", ("waste", name), -1 if name == "token" else 1, False, "points", steps=name)
              for name in WASTE_CLASSES if name != "free"]
    found += [Metric("batch_size", ("batch_size",), -1, False, steps="running"),
              Metric("sharing_saving", ("sharing_saving",), -1, False, "points"),
              Metric("blocks", ("blocks",), 1, False, steps="physical"), Metric("steps", ("steps",), 1, False),
              Metric("preemptions.recompute", ("preemptions", "recompute"), 1, False),
              Metric("preemptions.swap", ("preemptions", "swap"), 1, False)]
    return {metric.name: metric for metric in found}


METRICS: Mapping[str, Metric] = _metrics()


@dataclass(frozen=True, slots=True)
class Gate:
    """The most that a metric may get worse: a share (0.05 = 5 %) or, for shares of the pool, points of it."""

    metric: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Gate:
        """From `normalized_latency=5%`. Summary spellings such as `normalized_latency_s` are understood."""
        name, sign, amount = text.partition("=")
        name = name.strip().replace("-", "_").removesuffix("_s")
        name = name.removeprefix("mean_").removesuffix("_ms")
        try:
            value = float(amount.strip().removesuffix("%")) / (100 if amount.strip().endswith("%") else 1)
        except ValueError:
            value = math.nan
        if name not in METRICS:
            raise UsageError(f"--max-regress {text!r}: no such metric; known are {', '.join(METRICS)}")
        if not sign or not (math.isfinite(value) and value >= 0):
            raise UsageError(f"--max-regress {text!r}: must be NAME=LIMIT with a limit of at least 0, such as 5%")
        return cls(name, value)
