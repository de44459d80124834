"""Is B worse than A? Paired by request, with confidence intervals, and a gate that does not cry wolf.

Three kinds of evidence, by what a figure depends on:
- exact: simulated runs, and memory figures of runs whose arrivals do not depend on time (rate inf). A rerun gives the
  same numbers, so any difference is real and the limit applies to it directly.
- in-run: times measured on a machine. Two sessions differ by more than the code does, so what is compared is the ratio
  of a policy to a baseline of the same session. The machine's speed cancels in it only to first order (near saturation
  a slower machine hurts the fuller system more), so the interval is widened by whatever the baseline itself moved.
- repeats: runs set directly against each other, only when the caller says that both sides ran in turns on one idle
  machine; memory figures of real-time runs likewise.
With three or more repeats a side their spread is the measure of noise. With fewer, blocks of requests or steps show the
noise inside a run, and the noise between runs, which nothing in the data shows, is taken as `run_noise`.
A gate fails only when the change is beyond its limit and its interval excludes "no change". The level is split over all
gated intervals (Bonferroni), so the chance of any false alarm stays at 1 - level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from pagedcli.bench.bootstrap import Interval, difference_of_means, log_ratio_of_means, mean_of_runs
from pagedcli.bench.gates import METRICS, Gate, Metric
from pagedcli.bench.records import Floats
from pagedcli.bench.storage import Results, RunData, all_runs
from pagedcli.core.errors import UsageError

MIN_REPEATS = 3
"""Fewest repeated runs whose spread is trusted."""
EXACT_SLACK = 1e-9

Kind = Literal["exact", "in-run", "repeats"]
Runs = Mapping[tuple[str, float], list[RunData]]


@dataclass(frozen=True, slots=True)
class Row:
    """One compared figure. `change` > 0 is worse; `low`..`high` its interval (equal when exact), relative or points."""

    metric: Metric
    policy: str
    rate: float
    a: float
    b: float
    kind: Kind
    change: float
    low: float
    high: float
    units: int
    limit: float | None = None
    against: str | None = None

    @property
    def significant(self) -> bool:
        """Whether the interval excludes "no change" on the bad side."""
        return self.low > EXACT_SLACK

    @property
    def gateable(self) -> bool:
        """Whether the data can carry a verdict at all."""
        return math.isfinite(self.high)

    @property
    def failed(self) -> bool:
        return self.limit is not None and self.significant and self.change > self.limit + EXACT_SLACK


@dataclass(frozen=True)
class Comparison:
    """All rows, what to mind when reading them, and lost requests: (policy, rate, failed in A, failed in B)."""

    rows: Sequence[Row]
    warnings: Sequence[str]
    lost: Sequence[tuple[str, float, int, int]]
    level: float

    @property
    def gated(self) -> list[Row]:
        return [row for row in self.rows if row.limit is not None]

    @property
    def regressed(self) -> bool:
        """Whether the gate fails: a gated figure is significantly worse than its limit, or B lost requests."""
        return any(row.failed for row in self.rows) or (bool(self.gated) and bool(self.lost))


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """`level`: confidence of the whole gate. `against`: baseline for in-run ratios (None: the first one there is).
    `same_machine`: both sides ran in turns on one idle machine, so times may be compared directly. `run_noise`:
    relative standard deviation from one run to the next, assumed where fewer than three repeats show it."""

    level: float = 0.99
    seed: int = 0
    against: str | None = None
    same_machine: bool = False
    run_noise: float = 0.03

    def __post_init__(self) -> None:
        if not 0.5 < self.level < 1:
            raise UsageError(f"--confidence = {self.level}: must be above 0.5 and below 1, such as 0.99")
        if not 0 <= self.run_noise < 1:
            raise UsageError(f"--run-noise = {self.run_noise}: must be at least 0 and below 1, such as 3%")


def compare(a: Sequence[Results], b: Sequence[Results], gates: Sequence[Gate] = (),
            options: CompareOptions | None = None) -> Comparison:
    """Compare two sides, each one or several results of one experiment.

    Raises UsageError when nothing can be paired, or when a gate asks of the data what they cannot show.
    """
    options = options or CompareOptions()
    left, right = all_runs(a), all_runs(b)
    shared = [group for group in left if group in right]
    if not shared:
        raise UsageError(f"nothing to compare: A has {_groups(left)}, B has {_groups(right)}")
    warnings = [f"different settings: {text}" for text in a[0].signature.differences(b[0].signature)]
    only = [group for group in {**left, **right} if group not in shared]
    if only:
        warnings.append(f"only on one side, left out: {_groups(only)}")
    limits = {gate.metric: gate.limit for gate in gates}
    pairs = {group: _Pair(left, right, group, options) for group in shared}
    # Intervals share the error budget: count those that a gate will look at before computing any.
    gated = sum(1 for pair in pairs.values() for name in limits if pair.kind(METRICS[name]) != "exact"
                and pair.judged(METRICS[name]))
    level = 1 - (1 - options.level) / max(gated, 1)
    rows = [row for pair in pairs.values() for metric in METRICS.values()
            if (row := pair.row(metric, level, limits.get(metric.name))) is not None]
    for name in limits:
        judged = [row for row in rows if row.metric.name == name and row.limit is not None]
        if not any(row.gateable for row in judged):
            raise UsageError(_why_not(METRICS[name]))
    lost = [(policy, rate, was, now) for (policy, rate), pair in pairs.items()
            for was, now in [pair.failures()] if now > was]
    return Comparison(rows, warnings, lost, options.level)


def _groups(groups: Any) -> str:
    return ", ".join(f"{policy} at {rate:g}/s" for policy, rate in groups) or "nothing"


def _why_not(metric: Metric) -> str:
    if metric.time:
        return (f"--max-regress {metric.name}: these results cannot show it. A measured time is gated as a ratio to a "
                "baseline of the same session (run bench with --baseline), on simulated runs (--simulate), or directly "
                "when both sides ran in turns on one idle machine (--same-machine, best with --repeat 5)")
    return (f"--max-regress {metric.name}: these results cannot show it; run at --rate inf or simulated (exact), "
            f"or with {MIN_REPEATS} or more repeats a side (--repeat 5)")


class _Pair:
    """Runs of one policy and rate on both sides, with the baseline of each session when there is one."""

    def __init__(self, left: Runs, right: Runs, group: tuple[str, float], options: CompareOptions) -> None:
        self.group, self.options = group, options
        self.a, self.b = left[group], right[group]
        self.repeats = min(len(self.a), len(self.b))
        for one, other in zip(self.a, self.b, strict=False):
            if list(one.requests["key"]) != list(other.requests["key"]):
                raise UsageError(f"{_groups([group])}: A and B served different requests, so they cannot be paired; "
                                 "use the same workload, --num-requests and seeds")
        policy, rate = group
        bases = [item for item in left if item in right and item[1] == rate and item[0] != policy
                 and left[item][0].figures.get("role") == "baseline"]
        if options.against is not None:
            bases = [item for item in bases if item[0] == options.against]
        is_baseline = self.a[0].figures.get("role") == "baseline"
        self.base = None if is_baseline or not bases else bases[0][0]
        self.base_a = left[bases[0]] if self.base else []
        self.base_b = right[bases[0]] if self.base else []

    def kind(self, metric: Metric) -> Kind:
        simulated = all(run.figures.get("simulated") for run in [*self.a, *self.b])
        if simulated or (not metric.time and math.isinf(self.group[1])):
            return "exact"
        return "in-run" if metric.time and not self.options.same_machine else "repeats"

    def judged(self, metric: Metric) -> bool:
        """Whether a gate looks at this pair: the policy under test, not the baselines it is measured against."""
        return self.a[0].figures.get("role") != "baseline" or (self.kind(metric) == "exact")

    def failures(self) -> tuple[int, int]:
        return (sum(int(run.figures.get("failed", 0)) for run in self.a[: self.repeats]),
                sum(int(run.figures.get("failed", 0)) for run in self.b[: self.repeats]))

    def row(self, metric: Metric, level: float, limit: float | None) -> Row | None:
        a = float(np.mean([metric.value(run) for run in self.a]))
        b = float(np.mean([metric.value(run) for run in self.b]))
        if math.isnan(a) or math.isnan(b):
            return None
        kind = self.kind(metric)
        interval = self._exact(metric, a, b) if kind == "exact" else (
            self._in_run(metric, level) if kind == "in-run" else self._repeats(metric, level))
        change, low, high = interval.estimate, interval.low, interval.high
        if metric.worse < 0:
            change, low, high = 0.0 - change, 0.0 - high, 0.0 - low  # not -x: it would make a zero negative
        if metric.unit == "relative":
            change, low, high = _relative(change), _relative(low), _relative(high)
        return Row(metric, *self.group, a, b, kind, change, low, high, interval.units,
                   limit if self.judged(metric) else None, self.base if kind == "in-run" else None)

    def _exact(self, metric: Metric, a: float, b: float) -> Interval:
        change = b - a if metric.unit == "points" else _log_ratio(b, a)
        return Interval(change, change, change, 1)

    def _in_run(self, metric: Metric, level: float) -> Interval:
        """log of (policy / baseline in B) over (policy / baseline in A)."""
        sides = (self.b, self.base_b, self.a, self.base_a)
        if not self.base_a:
            return _unknown(_log_ratio(_mean(metric, self.b), _mean(metric, self.a)))
        logs = self._logs(metric, sides, (1, -1, -1, 1))
        found = self._few_runs(metric, sides, logs, level) if len(logs) < MIN_REPEATS else (
            mean_of_runs(logs, level, self.options.seed))
        shift = abs(_log_ratio(_mean(metric, self.base_b), _mean(metric, self.base_a)))
        return Interval(found.estimate, found.low - shift, found.high + shift, found.units)

    def _repeats(self, metric: Metric, level: float) -> Interval:
        """Runs set against each other one by one."""
        sides = (self.b, self.a)
        if metric.unit == "points":
            changes = np.array([metric.value(b) - metric.value(a) for b, a in zip(*sides, strict=False)])
        else:
            changes = self._logs(metric, sides, (1, -1))
        if len(changes) >= MIN_REPEATS:
            return mean_of_runs(changes, level, self.options.seed)
        if metric.time:
            return self._few_runs(metric, sides, changes, level)
        return self._steps(metric, float(changes.mean()), level)

    def _logs(self, metric: Metric, sides: Sequence[Sequence[RunData]], signs: Sequence[int]) -> Floats:
        """For each repeat, the signed sum of logs of the metric over the sides."""
        count = min(len(side) for side in sides)
        values = np.array([[metric.value(run) for run in side[:count]] for side in sides])
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.asarray(signs) @ np.log(values)
        return np.where(np.isnan(logs), 0.0, logs)  # 0 against 0 is no change

    def _few_runs(self, metric: Metric, sides: Sequence[Sequence[RunData]], logs: Floats, level: float) -> Interval:
        """Noise inside the runs by blocks of requests (where the metric has them), noise between runs as assumed."""
        count, inside, units = len(logs), 0.0, 1
        estimate = float(logs.mean())
        if metric.series is not None:
            series = [np.concatenate([run.series(metric.series) for run in side[:count]]) for side in sides]
            known = ~np.isnan(np.stack(series)).any(axis=0)
            found = log_ratio_of_means(tuple(values[known] for values in series), level, self.options.seed)
            estimate, inside, units = found.estimate, found.width / 2, found.units
        between = NormalDist().inv_cdf(0.5 + level / 2) * self.options.run_noise * math.sqrt(len(sides) / count)
        half = math.hypot(inside, between)
        return Interval(estimate, estimate - half, estimate + half, units)

    def _steps(self, metric: Metric, estimate: float, level: float) -> Interval:
        """A memory figure of single real-time runs, by blocks of steps."""
        top, bottom = metric.step_series(self.b[0]), metric.step_series(self.a[0])
        if top is None or bottom is None:
            return _unknown(estimate)
        found = difference_of_means(top, bottom, level, self.options.seed)
        if metric.unit == "points":
            return found
        scale = max(float(bottom.mean()), 1e-12)  # to first order a difference over the mean is a log ratio
        return Interval(estimate, estimate + (found.low - found.estimate) / scale,
                        estimate + (found.high - found.estimate) / scale, found.units)


def _mean(metric: Metric, runs: Sequence[RunData]) -> float:
    return float(np.mean([metric.value(run) for run in runs]))


def _unknown(estimate: float) -> Interval:
    return Interval(estimate, -math.inf, math.inf, 1)


def _log_ratio(top: float, bottom: float) -> float:
    if top == bottom:
        return 0.0
    if bottom == 0 or top == 0:
        return math.inf if bottom == 0 else -math.inf
    return math.log(top / bottom)


def _relative(log: float) -> float:
    return math.expm1(log) if log < 700 else math.inf
