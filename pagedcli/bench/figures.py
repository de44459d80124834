"""What the charts show, as plain numbers: drawn as SVG for the page (charts.py) and as PNG files (plots.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pagedcli.bench.records import WASTE_CLASSES, Floats
from pagedcli.bench.storage import Results, RunData

Kind = Literal["lines", "curve", "area", "bars"]
MAX_POINTS = 160
PLOT_LATENCY = 1.0
"""Plots of latency against rate end here, s/token, as the paper's do."""

LATENCY_RULE = "Mean over requests of (finish - scheduled arrival) / output tokens."

COLOURS: dict[str, tuple[str, str]] = {
    "paged": ("#0b62a8", "#5aaef0"), "orca-oracle": ("#b85c00", "#f0a04b"), "orca-pow2": ("#8a4fa3", "#c79be0"),
    "orca-max": ("#b3261e", "#f28b82"), "fastertransformer": ("#5f6368", "#bdc1c6"), "tgi": ("#00796b", "#4db6ac"),
    "hf": ("#7a5c00", "#e0c060"), "token": ("#2e7d32", "#66bb6a"), "reserved": ("#f2b134", "#f6c95f"),
    "internal": ("#c62828", "#ef6c6c"), "external": ("#7b6fa6", "#a99fd0"), "free": ("#d7dade", "#454b54"),
}
"""Colour of each policy and waste class on a light and on a dark page; told apart by colour-blind readers too."""

WASTE_TITLES = {"token": "token states", "reserved": "reserved for later", "internal": "internal fragmentation",
                "external": "external fragmentation", "free": "free"}
LATENCY_TITLES = {"ttft": ("Time to first token", "seconds"), "tpot": ("Time per output token", "seconds a token"),
                  "e2el": ("End-to-end latency", "seconds")}


@dataclass(frozen=True, slots=True)
class Series:
    """One line, area or colour of bars. `colour` is a key of COLOURS; for bars `y` has one value a category."""

    label: str
    colour: str
    y: tuple[float, ...]
    x: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure. `lines` have markers, `curve` has none, `area` and `bars` are stacked (bars lie on `categories`).

    `guides` are horizontal lines (value, label); `percent`: y is a share of 1 shown in per cent.
    """

    key: str
    title: str
    kind: Kind
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    categories: tuple[str, ...] = ()
    y_max: float | None = None
    guides: tuple[tuple[float, str], ...] = ()
    percent: bool = False
    log_x: bool = False
    note: str = ""


def rate_text(rate: float) -> str:
    """A rate for people."""
    return "all at once" if math.isinf(rate) else f"{rate:g} req/s"


def focus_rate(results: Results) -> float:
    """The rate that single-rate charts show: the highest at which the most policies ran."""
    counts: dict[float, set[str]] = {}
    for run in results.runs:
        counts.setdefault(run.rate, set()).add(run.policy)
    return max(counts, key=lambda rate: (len(counts[rate]), rate))


def policies(results: Results) -> list[str]:
    """Policies in the order they ran."""
    return list(dict.fromkeys(run.policy for run in results.runs))


def all_charts(results: Results) -> list[Chart]:
    """Every chart of a report."""
    rate = focus_rate(results)
    focused = [run for run in results.runs if run.rate == rate]
    first = {run.policy: run for run in reversed(focused)}
    order = [name for name in policies(results) if name in first]
    charts = [latency_chart(results), waste_chart(focused, order, rate), batch_chart(results)]
    charts += [running_chart([first[name] for name in order], rate)]
    charts += [waste_over_time(first[name], rate) for name in order]
    charts += [distribution(focused, order, name, rate) for name in LATENCY_TITLES]
    return [chart for chart in charts if chart.series]


def latency_chart(results: Results) -> Chart:
    """Normalized latency against request rate, one line a policy (paper Figure 12)."""
    lines = []
    for name in policies(results):
        points: dict[float, list[float]] = {}
        for run in results.runs:
            value = run.figures.get("normalized_latency_s")
            if run.policy == name and math.isfinite(run.rate) and value is not None and not run.figures.get("stopped"):
                points.setdefault(run.rate, []).append(float(value))
        if points:
            rates = sorted(points)
            lines.append(Series(name, name, tuple(float(np.mean(points[r])) for r in rates), tuple(rates)))
    if any(len(line.x) > 1 for line in lines):
        top = max(max(line.y) for line in lines)
        beyond = [line.label for line in lines if min(line.y) > PLOT_LATENCY]
        cut = [f"{run.policy} at {rate_text(run.rate)}" for run in results.runs if run.figures.get("stopped")]
        missing = f" Cut short, so not drawn: {', '.join(cut)}." if cut else ""
        above = f" Above it at every rate: {', '.join(beyond)}." if beyond else ""
        return Chart("latency_vs_rate", "Normalized latency against request rate", "lines", "request rate (req/s)",
                     "normalized latency (s/token)", tuple(lines), y_max=min(PLOT_LATENCY, top * 1.1),
                     guides=((0.5, "0.5 s/token"),), note=f"{LATENCY_RULE} The plot ends at 1 s/token.{above}{missing}")
    return _latency_bars(results)


def _latency_bars(results: Results) -> Chart:
    """With a single rate there is no line to draw: one bar a policy."""
    rate = focus_rate(results)
    found = [(name, [float(run.figures["normalized_latency_s"]) for run in results.runs if run.policy == name
                     and run.rate == rate and run.figures.get("normalized_latency_s") is not None])
             for name in policies(results)]
    kept = [(name, float(np.mean(values))) for name, values in found if values]
    return Chart("latency_vs_rate", f"Normalized latency, {rate_text(rate)}", "bars", "normalized latency (s/token)",
                 "", _one_bar_each(kept), tuple(name for name, _ in kept), note=LATENCY_RULE)


def _one_bar_each(values: Sequence[tuple[str, float]]) -> tuple[Series, ...]:
    """Bars of one value a policy, each in its policy's colour."""
    return tuple(Series(name, name, tuple(value if other == name else 0.0 for other, _ in values))
                 for name, value in values)


def waste_chart(runs: Sequence[RunData], order: Sequence[str], rate: float) -> Chart:
    """Mean use of KV memory, one bar a policy (paper Figure 2)."""
    means = {name: [run.figures["waste"] for run in runs if run.policy == name] for name in order}
    known = [name for name in order if means[name] and means[name][0]["token"] is not None]
    series = tuple(Series(WASTE_TITLES[part], part, tuple(float(np.mean([waste[part] for waste in means[name]]))
                                                          for name in known)) for part in WASTE_CLASSES)
    return Chart("waste_by_system", f"Use of KV cache memory, {rate_text(rate)}", "bars", "share of the KV pool", "",
                 series if known else (), tuple(known), y_max=1.0, percent=True,
                 note="Mean over iterations. The paper's Figure 2 joins the last two as external & others.")


def batch_chart(results: Results) -> Chart:
    """Mean number of requests batched in an iteration (paper Figure 13)."""
    rate = focus_rate(results)
    values = []
    for name in policies(results):
        sizes = [run.figures["batch_size"] for run in results.runs
                 if run.policy == name and run.rate == rate and run.figures["batch_size"] is not None]
        if sizes:
            values.append((name, float(np.mean(sizes))))
    return Chart("batch_size", f"Batched requests, {rate_text(rate)}", "bars", "requests in an iteration (mean)", "",
                 _one_bar_each(values), tuple(name for name, _ in values))


def _sample_steps(run: RunData) -> tuple[Floats, np.ndarray, np.ndarray]:
    """Instants spread over the run, the step under way at each, and whether there was one."""
    time, seconds = run.steps.column("time"), run.steps.column("seconds")
    if not len(time):
        return np.empty(0), np.empty(0, dtype=int), np.empty(0, dtype=bool)
    instants = np.linspace(0.0, float(time[-1] + seconds[-1]), MAX_POINTS)
    which = np.maximum(np.searchsorted(time, instants, side="right") - 1, 0)
    busy = (instants >= time[which]) & (instants <= time[which] + np.maximum(seconds[which], 1e-9) * 1.5 + 1e-3)
    return instants, which, busy


def running_chart(runs: Sequence[RunData], rate: float) -> Chart:
    """Requests running over time, one line a policy."""
    series = []
    for run in runs:
        instants, which, busy = _sample_steps(run)
        if len(instants):
            values = np.where(busy, run.steps.column("running")[which], 0)
            series.append(Series(run.policy, run.policy, tuple(map(float, values)), tuple(map(float, instants))))
    return Chart("running_over_time", f"Running requests over time, {rate_text(rate)}", "curve", "time (s)",
                 "running requests", tuple(series))


def waste_over_time(run: RunData, rate: float) -> Chart:
    """Use of the pool during one run, the five classes stacked to 100 %."""
    instants, which, busy = _sample_steps(run)
    series = []
    for part in WASTE_CLASSES if len(instants) else ():
        idle = 1.0 if part == "free" else 0.0
        values = np.where(busy, run.steps.share(part)[which], idle)
        series.append(Series(WASTE_TITLES[part], part, tuple(map(float, values)), tuple(map(float, instants))))
    return Chart(f"waste_over_time_{run.policy}", f"KV memory over time: {run.policy}, {rate_text(rate)}", "area",
                 "time (s)", "share of the KV pool", tuple(series), y_max=1.0, percent=True)


def distribution(runs: Sequence[RunData], order: Sequence[str], name: str, rate: float) -> Chart:
    """Share of requests served within a time, one curve a policy; runs cut short served the quickest only, so they
    are left out."""
    title, unit = LATENCY_TITLES[name]
    series = []
    for policy in order:
        whole = [run.series(name) for run in runs if run.policy == policy and not run.figures.get("stopped")]
        pooled = np.concatenate([np.empty(0), *whole])
        values = np.sort(pooled[~np.isnan(pooled)])
        if len(values):
            picked = np.unique(np.linspace(0, len(values) - 1, min(len(values), MAX_POINTS)).astype(int))
            series.append(Series(policy, policy, tuple(float(i + 1) / len(values) for i in picked),
                                 tuple(float(v) for v in values[picked])))
    positive = [s.x for s in series if s.x[0] > 0]
    wide = bool(positive) and len(positive) == len(series) and (
        max(x[-1] for x in positive) / min(x[0] for x in positive) > 30)
    return Chart(f"{name}_distribution", f"{title}, {rate_text(rate)}", "curve", unit, "share of requests",
                 tuple(series), y_max=1.0, percent=True, log_x=wide)
