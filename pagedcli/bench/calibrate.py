"""Fits the cost model to measured requests: the scheduler is simulated, the coefficients are what is looked for.

A trace has, per request, its lengths and the times it arrived, got its first and its last token. All arrivals are
replayed on the simulated device; coefficients are moved until the distributions of TTFT, TPOT, E2E and normalized
latency agree (mean, p50, p90, p99 of each).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import numpy as np

from pagedcli.bench.calibrate_trace import Trace, latencies_of
from pagedcli.bench.least_squares import fit_positive
from pagedcli.bench.records import Floats, RunResult
from pagedcli.bench.simulate import light_requests, simulate
from pagedcli.core.config import CacheConfig, RunConfig, SchedulerConfig
from pagedcli.core.errors import UsageError
from pagedcli.core.wording import counted
from pagedcli.execution.hardware import Coefficients, Hardware
from pagedcli.execution.simulated import Deployment

STATISTICS: Mapping[str, Callable[[Floats], float]] = {
    "mean": lambda values: float(np.mean(values)), "p50": lambda values: float(np.percentile(values, 50)),
    "p90": lambda values: float(np.percentile(values, 90)), "p99": lambda values: float(np.percentile(values, 99)),
}


def statistics(latencies: Mapping[str, Floats]) -> dict[str, float]:
    """`mean_ttft` .. `p99_normalized_latency`: the sixteen figures that are compared, s or s/token."""
    return {f"{name}_{latency}": how(values) for latency, values in latencies.items()
            for name, how in STATISTICS.items()}


def errors(measured: Mapping[str, float], simulated: Mapping[str, float]) -> dict[str, float]:
    """Relative error of each figure, signed."""
    return {name: simulated[name] / value - 1 for name, value in measured.items()}


def mean_error(measured: Mapping[str, float], simulated: Mapping[str, float]) -> float:
    """Mean absolute relative error over all figures."""
    return float(np.mean(np.abs(list(errors(measured, simulated).values()))))


def replay_trace(trace: Trace, config: RunConfig, deployment: Deployment) -> RunResult:
    """The trace's requests on the simulated device."""
    lengths = [(int(prompt), int(output)) for prompt, output in zip(trace.prompt, trace.output, strict=True)]
    return simulate(config, deployment, light_requests(lengths, trace.arrival.tolist()))


def run_latencies(run: RunResult, keep: slice = slice(None)) -> dict[str, Floats]:
    """LATENCIES of a simulated run, in the trace's order."""
    records = list(run.requests)[keep]
    failed = next((record for record in records if not record.ok), None)
    if failed is not None:
        raise UsageError(f"request {failed.index} of the trace cannot run here: {failed.error_message}")
    return latencies_of(np.array([r.arrival for r in records]), np.array([r.first_token for r in records]),
                        np.array([r.finish for r in records]), np.array([float(r.output_len) for r in records]))


def vllm_config(budget: int = 2048, seqs: int = 256) -> RunConfig:
    """vLLM's present scheduler: chunks under a token budget, preemption by recompute, no watermark."""
    return RunConfig(cache=CacheConfig(prefix_cache=False, watermark=0.0),
                     scheduler=SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget, chunked_prefill=True,
                                               preemption="recompute"))


START: Mapping[str, float] = {"weight_efficiency": 0.9, "flop_efficiency": 0.6, "kv_efficiency": 0.8,
                              "step_seconds": 2e-3, "sequence_seconds": 2e-5}
FREE: Mapping[str, tuple[float, float]] = {
    "weight_efficiency": (0.3, 1.0), "flop_efficiency": (0.1, 1.0), "kv_efficiency": (0.1, 1.0),
    "step_seconds": (1e-4, 5e-2), "sequence_seconds": (1e-6, 1e-3),
}
"""Coefficients fitted to a trace, where the search starts, and the range that makes physical sense."""

FIXED = Coefficients(attention_efficiency=0.4, layer_seconds=0.0, token_seconds=0.0, allreduce_seconds=2e-5)
"""What a per-request trace says too little about."""

LEAST_TRAIN = len(FREE)
"""Fewest requests to fit to: one a coefficient that is looked for."""
LEAST_REQUESTS = LEAST_TRAIN + 1
"""Fewest requests of a trace: one more is what the held-out check is judged by."""


TRAIN_SHARE = 4
"""One request in so many is fitted to for the held-out check, unless told otherwise."""

POOL_SCANS: tuple[tuple[float, int], ...] = ((0.3, 7), (0.08, 7), (0.02, 5))
"""Pools tried when their size is not known: how far from the present one at most, and how many."""
POOL_ROUNDS = 3
"""Rounds of the short fit that each of them gets: with another's coefficients it would look worse than it is."""
POOL_GAIN = 1e-3
"""Mean error that another pool must save; a pool that never fills says nothing of its size."""

PRIOR = 1e-3
"""Pull towards START per unit of log squared: a few percent of error for a coefficient off by a factor of e."""


@dataclass(frozen=True)
class Calibration:
    """A fit and what it was judged by. `measured`, `simulated`: the sixteen figures of the requests fitted on.

    `held_out`: the same for requests that the fit did not see (None when it saw all). `run` replays the whole trace in
    a pool of `blocks`.
    """

    coefficients: Coefficients
    measured: Mapping[str, float]
    simulated: Mapping[str, float]
    held_out: tuple[Mapping[str, float], Mapping[str, float]] | None
    run: RunResult
    blocks: int

    @property
    def error(self) -> float:
        return mean_error(self.measured, self.simulated)

    @property
    def held_out_error(self) -> float | None:
        return None if self.held_out is None else mean_error(*self.held_out)

    @property
    def preemptions(self) -> int:
        return int(self.run.steps.column("preempt_recompute").sum() + self.run.steps.column("preempt_swap").sum())

    def pool_use(self) -> tuple[float, float]:
        """Mean and largest share of the pool's blocks held, over the run's steps."""
        steps = self.run.steps
        held = 1.0 - steps.share("free")
        weights = steps.column("seconds")
        return float(np.average(held, weights=weights)), float(held.max())


def check_split(trace: Trace, train: int | None = None) -> int:
    """`train`, or the usual quarter, when a trace can be fitted by its first so many requests and judged by the rest.

    UsageError for too few requests, for a split that leaves too few on a side, and for a side one of whose figures is
    no time above 0: errors are relative to it.
    """
    total = len(trace)
    if total < LEAST_REQUESTS:
        raise UsageError(f"{trace.name} holds {counted(total, 'request')}: at least {LEAST_REQUESTS} are needed, "
                         f"{LEAST_TRAIN} to fit to and one to judge by; record a longer trace")
    count = max(total // TRAIN_SHARE, LEAST_TRAIN) if train is None else train
    if not LEAST_TRAIN <= count < total:
        raise UsageError(f"--train = {count}: must be from {LEAST_TRAIN} to {total - 1}, one fewer than the {total} "
                         f"requests of {trace.name}")
    for keep, which in ((slice(None, count), f"the first {count}"), (slice(count, None), f"the last {total - count}")):
        for latency, values in trace.latencies(keep).items():
            figures = {name: how(values) for name, how in STATISTICS.items()} if len(values) else {}
            low = next((name for name, value in figures.items() if not (math.isfinite(value) and value > 0)), None)
            if not figures or low is not None:
                fault = (f"{low}_{latency} is {figures[low]:g} s" if low is not None else
                         f"none has two output tokens or more, which {latency} needs")
                raise UsageError(f"{trace.name}: of {which} of {total} requests, {fault}; every figure must be above "
                                 "0 to be fitted: give a longer trace, or another --train")
    return count


def fit_trace(trace: Trace, deployment: Deployment, config: RunConfig, *, train: int | None = None,
              rounds: int = 8, seek_pool: bool = False) -> Calibration:
    """Fit coefficients to the first `train` requests of a trace (None: all of it) and judge them on the others.

    All requests arrive in the simulation either way; only the latencies of the first `train` are looked at.
    `seek_pool`: the server's number of blocks is not known, so it is looked for too, from the deployment's on.
    """
    keep = slice(0, train)
    measured = statistics(trace.latencies(keep))

    def run_with(values: Mapping[str, float], blocks: int) -> RunResult:
        hardware = replace(deployment.hardware, coefficients=replace(FIXED, **values), engines={})
        return replay_trace(trace, config, replace(deployment, hardware=hardware, num_blocks=blocks))

    def fit(blocks: int, rounds: int = rounds) -> dict[str, float]:
        def residuals(values: Mapping[str, float]) -> Floats:
            simulated = statistics(run_latencies(run_with(values, blocks), keep))
            return np.array([math.log(max(simulated[name], 1e-9) / value) for name, value in measured.items()])

        return fit_positive(residuals, START, FREE, prior=PRIOR, rounds=rounds, step=0.03)

    def error(blocks: int) -> float:
        try:
            values = fit(blocks, POOL_ROUNDS)
            return mean_error(measured, statistics(run_latencies(run_with(values, blocks), keep)))
        except UsageError:  # a request does not fit so small a pool, so the server's was larger
            return math.inf

    blocks = deployment.blocks
    for reach, points in POOL_SCANS if seek_pool else ():
        tried = {size: error(size) for size in
                 (max(round(blocks * (1 + share)), 1) for share in np.linspace(-reach, reach, points))}
        best = min(tried, key=lambda size: tried[size])
        if tried[best] < tried[blocks] - POOL_GAIN:
            blocks = best
    found = fit(blocks)
    run = run_with(found, blocks)
    held_out = None
    if train is not None and train < len(trace):
        rest = slice(train, None)
        held_out = statistics(trace.latencies(rest)), statistics(run_latencies(run, rest))
    return Calibration(replace(FIXED, **found), measured, statistics(run_latencies(run, keep)), held_out, run, blocks)


def fit_both(trace: Trace, deployment: Deployment, config: RunConfig, train: int, *,
             seek_pool: bool) -> tuple[Calibration, Calibration]:
    """The fit to all of a trace, and the one to its first `train` requests judged on the others, side by side."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        both = [pool.submit(fit_trace, trace, deployment, config, train=count, seek_pool=seek_pool)
                for count in (None, train)]
        return both[0].result(), both[1].result()


def calibrated_hardware(hardware: Hardware, name: str, result: Calibration, trace: Trace,
                        num_blocks: int | None) -> Hardware:
    """The hardware entry that a calibration amounts to."""
    said = (f"coefficients fitted to {trace.name} ({len(trace)} requests, mean absolute error "
            f"{100 * result.error:.2f} % over sixteen latency figures)")
    return replace(hardware, name=name, title=f"{hardware.title}, calibrated", coefficients=result.coefficients,
                   engines={}, calibrated=said, num_blocks=num_blocks)
