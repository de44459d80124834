"""Which device, how many of them and which memory system: the highest rate under a latency target, and its price."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import product
from pathlib import Path

import numpy as np

from pagedcli.bench.metrics import samples, waste_means
from pagedcli.bench.paper_targets import find_rate
from pagedcli.bench.records import RunResult
from pagedcli.bench.simulate import light_requests, simulate
from pagedcli.core.config import CacheConfig, RunConfig, SchedulerConfig
from pagedcli.core.errors import CannotRunError, UsageError
from pagedcli.core.request import Request
from pagedcli.core.wording import counted, form
from pagedcli.execution.hardware import Hardware, find_hardware, known_hardware
from pagedcli.execution.shapes import ModelShape
from pagedcli.execution.simulated import Deployment
from pagedcli.workloads import Poisson

_SLO = re.compile(r"\s*(?:(mean|median|p\d{1,2}(?:\.\d+)?)_)?(normalized_latency|ttft|tpot|itl|e2el)\s*<=?\s*"
                  r"([0-9.eE+-]+)\s*(ms|s)?\s*")
DEGREES = (1, 2, 4, 8)
LEAST_LENGTHS = 100
"""Fewest lengths to plan by: the mean of so many of ShareGPT's outputs has a standard error of 8 % of it."""
MAX_PRICE = 1_000_000
"""Dollars an hour at most: far more than any device costs, and a slip of the keyboard beyond."""
_TOLERANCE = 0.08
_LEAST_LATENCY = 1e-9
_LIGHT = 0.004  # share of the saturated throughput that is taken for "alone"
_FULL = 0.97  # share of it above which no queue is stable
_TURNS = 3  # times that a run fills the whole batch


@dataclass(frozen=True, slots=True)
class Slo:
    """One limit: a statistic of a latency, seconds (normalized latency and TPOT: seconds a token)."""

    statistic: str
    latency: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Slo:
        """From `normalized_latency<0.2`, `p90_ttft<1`, `mean_tpot<50ms`. A latency without a statistic is its mean."""
        match = _SLO.fullmatch(text)
        try:
            limit = float(match[3]) if match else math.nan
        except ValueError:
            limit = math.nan
        if match is None or not limit > 0:
            raise UsageError(f"--slo {text!r}: must be like normalized_latency<0.2, p90_ttft<1 or mean_tpot<50ms "
                             "(normalized_latency, ttft, tpot, itl, e2el; mean, median, pNN; seconds or ms)")
        return cls(match[1] or "mean", match[2], limit / (1000 if match[4] == "ms" else 1))

    @property
    def text(self) -> str:
        return f"{self.statistic}_{self.latency}<{self.limit:g}s"

    def share(self, run: RunResult) -> float:
        """The statistic over its limit: at most 1 when it is met; inf when a request failed."""
        if run.failed:
            return math.inf
        values = samples(run.completed, self.latency)
        if not len(values):
            return 0.0
        quantile = {"median": 50.0}.get(self.statistic)
        if self.statistic == "mean":
            return float(values.mean()) / self.limit
        return float(np.percentile(values, quantile or float(self.statistic[1:]))) / self.limit


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to serve. `rate` is 0 when even a request alone misses the target or nothing fits (`why`).

    `batch`: mean sequences in a step; `pool_blocks` of the KV pool; `tokens_per_s`: output tokens delivered at `rate`
    over the run's time, from its start to the last token; `dollars_per_million`: price of a million output tokens, NaN
    without a price.
    """

    hardware: str
    devices: int
    policy: str
    rate: float = 0.0
    batch: float = 0.0
    pool_blocks: int = 0
    pool_use: float = 0.0
    tokens_per_s: float = 0.0
    dollars_per_million: float = math.nan
    estimate: bool = True
    why: str = ""


@dataclass(frozen=True)
class Question:
    """What is asked. `lengths`: (prompt, output) tokens of the workload, in the order they arrive; runs use as many as
    fill the batch _TURNS times, over and over if need be."""

    shape: ModelShape
    lengths: tuple[tuple[int, int], ...]
    slos: tuple[Slo, ...]
    prices: Mapping[str, float]
    chunked_prefill: bool = True
    max_num_seqs: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.lengths) < LEAST_LENGTHS:
            count = len(self.lengths)
            raise UsageError(f"{counted(count, 'request')} {form(count, 'says', 'say')} too little of a workload's "
                             f"lengths to plan for it: at least {LEAST_LENGTHS} are needed (--num-requests, or a "
                             "longer trace)")

    def requests(self, rate: float, count: int) -> list[Request]:
        """`count` requests at a rate, requests/s; inf: all at once."""
        arrivals = np.zeros(count) if math.isinf(rate) else Poisson(rate).deadlines(count, self.seed)
        return light_requests([self.lengths[place % len(self.lengths)] for place in range(count)], arrivals.tolist())

    def largest_batch(self, deployment: Deployment) -> int:
        """Sequences that run at once when nothing but the pool and the cap on sequences limits them."""
        held = float(np.mean([prompt + output / 2 for prompt, output in self.lengths]))
        return max(1, min(self.max_num_seqs, int(deployment.blocks * deployment.block_size / held)))


@dataclass(frozen=True)
class Option:
    """One cell of the plan, as a value that can be sent to another process."""

    question: Question
    hardware: Hardware
    devices: int
    policy: str

    def solve(self) -> Plan:
        """Search the highest rate that meets every target, below the throughput of a queue that is never empty: more
        cannot be sustained, however a short run looks."""
        question = self.question
        base = Plan(self.hardware.name, self.devices, self.policy,
                    estimate=self.hardware.calibrated is None and not self.hardware.name.startswith("a100"))
        try:
            deployment = Deployment(self.hardware, question.shape, self.devices, policy=self.policy)
            blocks = deployment.blocks
        except (CannotRunError, UsageError) as fault:
            return replace(base, why=fault.message)
        config = RunConfig(policy=self.policy, cache=CacheConfig(prefix_cache=False), scheduler=SchedulerConfig(
            chunked_prefill=question.chunked_prefill, max_num_seqs=question.max_num_seqs, static_batch=None))

        count = max(60, _TURNS * question.largest_batch(deployment))

        def run(rate: float, requests: int = count) -> RunResult:
            return simulate(config, deployment, question.requests(rate, requests), rate=rate)

        def over(rate: float, requests: int = count) -> float:
            found = run(rate, requests)
            return max(_LEAST_LATENCY, max(slo.share(found) for slo in question.slos))

        full = _throughput(run(math.inf))
        if full is None:
            return replace(base, pool_blocks=blocks, why="some requests of the workload can never fit the pool")
        light = _LIGHT * full
        lone = over(light, 40)
        if lone > 1:
            return replace(base, pool_blocks=blocks, why="a request served alone already misses the target")
        rate = find_rate(over, 1.0, 0.8 * full, _TOLERANCE, {light: lone, _FULL * full: math.inf})
        best = run(rate)
        output = sum(record.output_tokens for record in best.completed)
        waste = waste_means(best.steps)
        price = question.prices.get(self.hardware.name, math.nan)
        tokens = output / max(max(record.finish or 0.0 for record in best.completed), 1e-9)
        return replace(base, rate=rate, batch=float(best.steps.column("running").mean()), pool_blocks=blocks,
                       pool_use=1.0 - (waste["free"] or 0.0), tokens_per_s=tokens,
                       dollars_per_million=price * self.devices / 3600 / tokens * 1e6)


def _throughput(run: RunResult) -> float | None:
    """Requests/s of a run whose queue was never empty, over the middle of its requests; None when some failed."""
    if run.failed:
        return None
    finishes = np.sort([record.finish or 0.0 for record in run.completed])
    low, high = int(0.2 * len(finishes)), int(0.7 * len(finishes))
    return float((high - low) / max(finishes[high] - finishes[low], 1e-9))


def read_prices(path: Path | None, machines: Iterable[Hardware] = ()) -> dict[str, float]:
    """Dollars an hour by device. UsageError for a file that is not a table of finite numbers of at least 0, or that
    names a device which is neither known nor one of `machines`."""
    text = ((files("pagedcli.bench") / "prices.toml").read_text("utf-8") if path is None else _text(path))
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise UsageError(f"--prices {path}: not a TOML file ({fault})") from fault
    known = dict.fromkeys([*known_hardware(), *(machine.name for machine in machines)])
    for name, value in data.items():
        if name not in known:
            raise UsageError(f"--prices {path}: {name!r} is no device: must be one of {', '.join(known)}, or the name "
                             "in a file given as --hardware")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_PRICE:
            raise UsageError(f"--prices {path}: {name} = {value}: must be dollars an hour, from 0 to {MAX_PRICE:,}")
    return {name: float(value) for name, value in data.items()}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as fault:
        raise UsageError(f"--prices {path}: not text, byte {fault.start} is not UTF-8") from fault
    except OSError as fault:
        raise UsageError(f"--prices {path}: cannot be read ({fault.strerror})") from fault


def find_machines(devices: Iterable[str]) -> list[Hardware]:
    """The devices of these names or files, each once; all known ones when there are none."""
    found: list[Hardware] = []
    for machine in [find_hardware(name) for name in devices] or known_hardware().values():
        if machine not in found:
            found.append(machine)
    return found


def options(question: Question, machines: Iterable[Hardware], degrees: Iterable[int],
            policies: Iterable[str]) -> list[Option]:
    """Every combination, each once."""
    every = product(machines, dict.fromkeys(degrees), dict.fromkeys(policies))
    return [Option(question, machine, degree, policy) for machine, degree, policy in every]


def solve(option: Option) -> Plan:
    """`Option.solve`, for a process pool."""
    return option.solve()


def make_plan(every: Iterable[Option], spread: Callable[[Callable[[Option], Plan], Iterable[Option]], list[Plan]]
              ) -> list[Plan]:
    """All answers, the cheapest per token first, those that cannot serve last. `spread` maps over processes."""
    answers = spread(solve, every)
    return sorted(answers, key=lambda plan: (plan.rate == 0, plan.dollars_per_million
                                             if math.isfinite(plan.dollars_per_million) else math.inf, -plan.rate))


def draw(plans: Sequence[Plan], path: Path, title: str) -> Path:
    """Highest rate against price of a million tokens, one mark a deployment, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.6), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, policy in enumerate(dict.fromkeys(plan.policy for plan in plans)):
        found = [plan for plan in plans if plan.policy == policy and plan.rate > 0
                 and math.isfinite(plan.dollars_per_million)]
        axes.scatter([plan.rate for plan in found], [plan.dollars_per_million for plan in found], s=26,
                     marker="os^Dv"[place % 5], label=policy)
        for plan in found:
            axes.annotate(f" {plan.devices}x{plan.hardware}", (plan.rate, plan.dollars_per_million), fontsize=6)
    axes.set(xscale="log", yscale="log", xlabel="highest rate under the target, req/s",
             ylabel="dollars per million output tokens")
    axes.set_title(title, fontsize=9, loc="left")
    axes.legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
