"""The figures of a run, from its records: latency, throughput, goodput, memory.

Key names follow `vllm bench serve`; ours stand beside them. Latency counts from the scheduled arrival. Requests that
failed are counted and enter no latency figure. Percentiles interpolate linearly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedcli.bench.records import WASTE_CLASSES, Floats, RequestRecord, RunResult, StepTable
from pagedcli.core.errors import UsageError

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
LATENCIES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class Goodput:
    """Limits in milliseconds that a request must meet to count as good; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, items: Iterable[str]) -> Goodput | None:
        """From `ttft:200 tpot:50 e2el:5000` (any of them, milliseconds); None when there are none."""
        limits: dict[str, float] = {}
        for item in (part for text in items for part in text.replace(",", " ").split()):
            name, _, value = item.partition(":")
            try:
                limit = float(value)
            except ValueError:
                limit = math.nan
            if name not in ("ttft", "tpot", "e2el") or not 0 <= limit < math.inf:
                raise UsageError(f"--goodput {item!r}: must be ttft:MS, tpot:MS or e2el:MS with MS finite and at "
                                 "least 0")
            limits[name] = limit
        return cls(**limits) if limits else None

    def met(self, record: RequestRecord) -> bool:
        """Whether a finished request is within every limit (a single token has no TPOT and meets any)."""
        pairs = ((self.ttft, record.ttft), (self.tpot, record.tpot), (self.e2el, record.e2el))
        return all(limit is None or math.isnan(value) or value * 1e3 <= limit for limit, value in pairs)


@dataclass(frozen=True, slots=True)
class Window:
    """What counts: requests that arrive at `arrivals_from` s or later, iterations begun in [steps_from, steps_to) s.

    The paper's Figure 2 averages iterations in 300-900 s, its Figure 13 in 600-3600 s.
    """

    arrivals_from: float = 0.0
    steps_from: float = 0.0
    steps_to: float = math.inf


def finite(value: float) -> float | None:
    """The number, or None where JSON has no word for it."""
    number = float(value)
    return number if math.isfinite(number) else None


def rate_key(rate: float) -> float | str:
    """A rate as results store it: requests/s, or "inf"."""
    return "inf" if math.isinf(rate) else float(rate)


def percentile_name(percentile: float) -> str:
    """`p99`, `p99.9`: the prefix of a percentile's key."""
    return f"p{percentile:g}"


def samples(records: Sequence[RequestRecord], name: str) -> Floats:
    """All values of one latency, seconds, without those which are undefined. ITL is pooled over tokens."""
    if name == "itl":
        gaps = [record.itl for record in records]
        return np.concatenate(gaps) if gaps else np.empty(0)
    values = np.array([getattr(record, name) for record in records], dtype=np.float64)
    return values[~np.isnan(values)]


def latency_keys(records: Sequence[RequestRecord], percentiles: Sequence[float]) -> dict[str, float | None]:
    """`{mean,median,std,pNN}_{ttft,tpot,itl,e2el}_ms` of finished requests; None where there is nothing."""
    keys: dict[str, float | None] = {}
    for name in LATENCIES:
        values = samples(records, name) * 1e3
        some = len(values) > 0
        keys[f"mean_{name}_ms"] = float(np.mean(values)) if some else None
        keys[f"median_{name}_ms"] = float(np.median(values)) if some else None
        keys[f"std_{name}_ms"] = float(np.std(values)) if some else None
        for percentile in percentiles:
            value = float(np.percentile(values, percentile)) if some else None
            keys[f"{percentile_name(percentile)}_{name}_ms"] = value
    return keys


def normalized_latency(records: Iterable[RequestRecord]) -> float:
    """Mean over finished requests of (finish - scheduled arrival) / output length, s/token; NaN for none."""
    values = np.array([r.normalized_latency for r in records if r.ok and r.output_len], dtype=np.float64)
    return float(values.mean()) if len(values) else math.nan


def waste_means(steps: StepTable) -> dict[str, float | None]:
    """Mean over iterations of each class's share of the pool; the five add to 1."""
    if not len(steps):
        return dict.fromkeys(WASTE_CLASSES)
    return {name: float(steps.share(name).mean()) for name in WASTE_CLASSES}


def sharing_saving(steps: StepTable) -> float | None:
    """1 - 1/mean(logical / physical) over iterations that hold blocks (paper Figure 15's rule in its artefact)."""
    physical = steps.column("physical")
    held = physical > 0
    if not held.any():
        return None
    return 1.0 - 1.0 / float(np.mean(steps.column("logical")[held] / physical[held]))


def memory_keys(steps: StepTable) -> dict[str, Any]:
    """Figures of the iterations: waste, batch, blocks, sharing, preemptions."""
    some = len(steps) > 0

    def mean(name: str) -> float | None:
        return float(steps.column(name).mean()) if some else None

    return {
        "waste": waste_means(steps),
        "batch_size": mean("running"),
        "batch_sequences": mean("sequences"),
        "sharing_saving": sharing_saving(steps),
        "preemptions": {"recompute": int(steps.column("preempt_recompute").sum()),
                        "swap": int(steps.column("preempt_swap").sum())},
        "blocks": mean("physical"),
        "peak_blocks": int(steps.column("physical").max()) if some else None,
        "steps": len(steps),
        "computed_tokens": int(steps.column("computed").sum()),
        "step_seconds": mean("seconds"),
    }


def arrival_keys(records: Sequence[RequestRecord], rate: float) -> dict[str, Any]:
    """Rate asked, drawn and achieved (requests/s), and how late requests were handed over (ms)."""
    def over(last: float) -> float | None:
        return len(records) / last if records and last > 0 else None

    records = [record for record in records if not math.isnan(record.dispatched)]  # others were never sent
    lags = np.array([record.dispatch_lag for record in records]) * 1e3
    return {
        "request_rate": rate_key(rate),
        "request_rate_drawn": over(max((r.arrival for r in records), default=0.0)),
        "request_rate_achieved": over(max((r.dispatched for r in records), default=0.0)),
        "mean_dispatch_lag_ms": float(lags.mean()) if len(lags) else None,
        "p99_dispatch_lag_ms": float(np.percentile(lags, 99)) if len(lags) else None,
        "max_dispatch_lag_ms": float(lags.max()) if len(lags) else None,
    }


def summarize(run: RunResult, *, goodput: Goodput | None = None, window: Window | None = None,
              percentiles: Sequence[float] = PERCENTILES) -> dict[str, Any]:
    """Every figure of one run as a flat dictionary fit for JSON (no NaN, no infinity).

    Throughputs divide by `duration`, seconds from the window's start to the last event of the run.
    """
    window = window or Window()
    kept = [record for record in run.requests if record.arrival >= window.arrivals_from]
    done = [record for record in kept if record.ok]
    duration = max(run.duration - window.arrivals_from, 0.0)
    inputs = sum(record.prompt_tokens for record in done)
    outputs = sum(record.output_tokens for record in done)

    def per_second(count: float) -> float | None:
        return count / duration if duration > 0 else None

    return {
        "policy": run.policy, "rate": rate_key(run.rate), "repeat": run.repeat,
        **arrival_keys(run.requests, run.rate),
        "burstiness": run.burstiness, "duration": duration,
        "completed": len(done), "failed": len(kept) - len(done),
        "total_input_tokens": inputs, "total_output_tokens": outputs,
        "cached_tokens": sum(record.cached_tokens for record in done),
        "request_throughput": per_second(len(done)),
        "request_goodput": None if goodput is None else per_second(sum(map(goodput.met, done))),
        "output_throughput": per_second(outputs),
        "total_token_throughput": per_second(inputs + outputs),
        "normalized_latency_s": finite(normalized_latency(done)),
        **latency_keys(done, percentiles),
        **memory_keys(run.steps.between(window.steps_from, window.steps_to)),
        "simulated": run.simulated, "synthetic": run.synthetic, "stopped": run.stopped,
        "notes": list(run.notes),
    }
