"""A bench session: every policy at every rate on the same requests, in turns, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pagedcli.bench.capacity import LIMITS, Capacity, Search, find_capacity
from pagedcli.bench.metrics import Goodput, Window, finite, summarize
from pagedcli.bench.records import RunResult
from pagedcli.bench.serve import Observer, Served, StopRule, replay, stop_above, stop_after, warm_up
from pagedcli.bench.signature import Signature
from pagedcli.bench.storage import Results, RunData, run_data
from pagedcli.core.clock import LATEST
from pagedcli.core.errors import UsageError
from pagedcli.core.request import Request, SamplingParams
from pagedcli.core.wording import counted
from pagedcli.workloads.arrivals import Arrivals, TraceTimes, make_arrivals
from pagedcli.workloads.spec import TraceRequest, Workload
from pagedcli.workloads.tokens import Encode, token_ids

AT_ONCE = 0.1
"""Share of a run's time below which the arrivals of all requests count as one moment."""


class Runner(Protocol):
    """Serves one run from cold: a fresh engine (or the like), warmed up, its prefix cache empty."""

    def __call__(self, requests: Sequence[Request], deadlines: Sequence[float], *, policy: str, rate: float,
                 observer: Observer | None, stop_rule: StopRule | None, time_limit: float | None = None,
                 **labels: Any) -> RunResult: ...


@dataclass(frozen=True)
class EngineRunner:
    """Runs a policy on a fresh engine each time. `make` builds one; executors may be shared between them."""

    make: Callable[[str], Served]
    vocab_size: int
    simulated: bool = False

    def __call__(self, requests: Sequence[Request], deadlines: Sequence[float], *, policy: str, rate: float,
                 observer: Observer | None, stop_rule: StopRule | None, time_limit: float | None = None,
                 **labels: Any) -> RunResult:
        engine = self.make(policy)
        if time_limit is not None:
            stop_rule = stop_after(time_limit, stop_rule)
        if not self.simulated:
            warm_up(engine, self.vocab_size)
        return replay(engine, requests, deadlines, policy=policy, rate=rate, observer=observer, stop_rule=stop_rule,
                      simulated=self.simulated, **labels)


@dataclass(frozen=True)
class Experiment:
    """What a session measures. Rates are requests/s (inf: all at once); a rate of None takes the trace's own times.

    `duration` (s) limits arrivals, otherwise every request arrives. `stop_latency` (s/token) ends a run that is sure to
    exceed it, `time_limit` (s) one that lasts longer. Arrival draws depend on `seed` and the rate's scale alone: all
    policies and repeats share them.
    """

    policy: str = "paged"
    baselines: tuple[str, ...] = ()
    rates: tuple[float | None, ...] = (1.0,)
    repeats: int = 1
    burstiness: float = 1.0
    duration: float | None = None
    seed: int = 0
    goodput: Goodput | None = None
    window: Window = field(default_factory=Window)
    stop_latency: float | None = None
    time_limit: float | None = None
    limits: tuple[float, ...] = LIMITS
    search: Search = field(default_factory=Search)

    def __post_init__(self) -> None:
        if self.policy in self.baselines or len(set(self.baselines)) < len(self.baselines):
            raise UsageError(f"--baseline {', '.join(self.baselines)} with --policy {self.policy}: "
                             "name each system once")
        if self.repeats < 1:
            raise UsageError(f"--repeat = {self.repeats}: must be at least 1")
        if not self.rates:
            raise UsageError("--rate is empty: give at least one rate, such as 1 or inf")

    @property
    def policies(self) -> tuple[str, ...]:
        return (self.policy, *self.baselines)


def make_requests(workload: Workload, vocab_size: int, *, seed: int = 0, encode: Encode | None = None,
                  avoid: Collection[int] = (), params: SamplingParams | None = None) -> list[Request]:
    """Requests of a workload with forced output lengths and prompts of exactly the asked length.

    `params` are shared by all (samples, beams, temperature); the workload's lengths replace max_tokens. A row without
    output counts as one token.
    """
    params = params or SamplingParams(temperature=0.0)
    found = []
    for row in workload.requests:
        length = max(row.output_len, 1)
        found.append(Request(row.index, _key(row), token_ids(row, vocab_size, seed, encode, avoid),
                             replace(params, max_tokens=length, min_tokens=0, ignore_eos=True), 0.0, length))
    return found


def _key(row: TraceRequest) -> str:
    return str(row.index) if row.conversation is None else f"{row.index}:{row.conversation}"


class Session:
    """Runs an experiment and collects its results. `runner_of(policy)` gives what serves a policy."""

    def __init__(self, experiment: Experiment, workload: Workload, requests: Sequence[Request],
                 runner_of: Callable[[str], Runner]) -> None:
        self.experiment = experiment
        self.workload = workload
        self.requests = requests
        self.runner_of = runner_of
        self.runs: list[RunData] = []
        self.capacity: list[dict[str, Any]] = []

    def arrivals(self, rate: float | None) -> Arrivals:
        """How requests arrive at this rate."""
        if rate is None:
            times = tuple(row.arrival for row in self.workload.requests if row.arrival is not None)
            if len(times) < len(self.workload.requests):
                raise UsageError(f"--rate trace: {self.workload.label} has no arrival times of its own; give requests "
                                 "per second (inf: all at once), or a --trace or --workload that has times, such as "
                                 "azure")
            return TraceTimes(times)
        return make_arrivals(rate, self.experiment.burstiness)

    def run(self, policy: str, rate: float | None, repeat: int = 0, observer: Observer | None = None,
            stop_latency: float | None = None) -> RunData:
        """One run, kept in `runs`."""
        experiment = self.experiment
        arrivals = self.arrivals(rate)
        requests = self.requests
        if experiment.duration is None:
            deadlines = arrivals.deadlines(len(requests), experiment.seed)
        else:
            deadlines = arrivals.within(experiment.duration, experiment.seed)
            if len(deadlines) > len(requests):
                raise UsageError(f"--duration {experiment.duration:g} at {arrivals.rate:g} req/s brings "
                                 f"{len(deadlines)} requests and there are {len(requests)}: raise --num-requests")
            requests = requests[: len(deadlines)]
        if rate is not None and len(deadlines) and not deadlines[-1] <= LATEST:
            raise UsageError(f"--rate = {rate:g}, --burstiness = {experiment.burstiness:g}: the last of "
                             f"{counted(len(deadlines), 'request')} would arrive after {deadlines[-1]:.3g} s, and a "
                             f"clock tells times apart until {LATEST:g} s; raise --rate")
        limit = stop_latency if stop_latency is not None else experiment.stop_latency
        runner = self.runner_of(policy)
        result = runner(requests, deadlines.tolist(), policy=policy, rate=arrivals.rate, observer=observer,
                        stop_rule=None if limit is None else stop_above(limit), time_limit=experiment.time_limit,
                        burstiness=experiment.burstiness, repeat=repeat, synthetic=self.workload.synthetic)
        figures = summarize(result, goodput=experiment.goodput, window=experiment.window)
        figures["role"] = "policy" if policy == experiment.policy else "baseline"
        data = run_data(result, figures)
        self.runs.append(data)
        return data

    def schedule(self) -> list[tuple[str, float | None, int]]:
        """(policy, rate, repeat) in the order they run: policies take turns, so that drift hits them alike."""
        experiment = self.experiment
        return [(policy, rate, repeat) for rate in experiment.rates for repeat in range(experiment.repeats)
                for policy in experiment.policies]

    def find_capacity(self, policy: str, observer: Observer | None = None) -> list[Capacity]:
        """Capacity of one policy at every limit; its probes join the runs of the session."""
        limits = self.experiment.limits

        spans: dict[float, float] = {}  # rate -> share of the run in which requests arrived

        def measure(rate: float) -> float:
            run = self.run(policy, rate, observer=observer, stop_latency=max(limits))
            figures, arrivals = run.figures, run.requests["arrival"]
            spans[rate] = float(max(arrivals) - min(arrivals)) / max(figures["duration"], 1e-9)
            latency = figures["normalized_latency_s"]
            return math.inf if figures["stopped"] or latency is None else float(latency)

        found = find_capacity(measure, limits, self.experiment.search, lambda rate: spans[rate] < AT_ONCE)
        self.capacity += [{"policy": policy, "limit": item.limit, "rate": item.rate, "above": finite(item.above),
                           "too_few_requests": item.too_few,
                           "probes": [[p.rate, finite(p.latency)] for p in item.probes]} for item in found]
        return found

    def results(self, name: str, signature: Signature, settings: dict[str, Any]) -> Results:
        """All that was run so far."""
        runs = [replace(run, figures={**run.figures, "signature": signature.text}) for run in self.runs]
        return Results(name, signature, runs, settings, self.capacity)
