"""The numbers that people read first: one row a run, with the ratio of each policy to each baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedcli.bench.figures import rate_text
from pagedcli.bench.storage import Results

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the results table: heading, unit, and how to get its text from a run's figures."""

    title: str
    unit: str
    text: Callable[[Mapping[str, Any]], str]


def _of(key: str, scale: float = 1.0, digits: int = 3) -> Callable[[Mapping[str, Any]], str]:
    return lambda figures: significant(figures.get(key), scale, digits)


def significant(value: Any, scale: float = 1.0, digits: int = 3) -> str:
    """A number in so many significant digits, without an exponent."""
    if value is None:
        return NOTHING
    number = float(value) * scale
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(number))))
    return f"{number:,.{min(decimals, 6)}f}"


def _share(name: str) -> Callable[[Mapping[str, Any]], str]:
    def text(figures: Mapping[str, Any]) -> str:
        value = figures["waste"].get(name)
        return NOTHING if value is None else f"{value * 100:.1f}"
    return text


def _preemptions(figures: Mapping[str, Any]) -> str:
    counts = figures["preemptions"]
    return f"{counts['recompute']}+{counts['swap']}"


COLUMNS: tuple[Column, ...] = (
    Column("norm. latency", "s/token", _of("normalized_latency_s")),
    Column("TTFT", "s, mean", _of("mean_ttft_ms", 1e-3)),
    Column("TPOT", "ms, mean", _of("mean_tpot_ms")),
    Column("E2E", "s, p99", _of("p99_e2el_ms", 1e-3)),
    Column("output", "tokens/s", _of("output_throughput")),
    Column("batch", "requests", _of("batch_size")),
    Column("KV filled", "% of pool", _share("token")),
    Column("KV wasted", "% of pool", lambda f: _wasted(f)),
    Column("preempted", "recompute+swap", _preemptions),
    Column("done", "requests", lambda f: str(f["completed"]) + (f" ({f['failed']} failed)" if f["failed"] else "")),
)


def _wasted(figures: Mapping[str, Any]) -> str:
    """Held but not filled: reserved, internal and external together."""
    waste = figures["waste"]
    if waste["token"] is None:
        return NOTHING
    return f"{sum(waste[name] for name in ('reserved', 'internal', 'external')) * 100:.1f}"


@dataclass(frozen=True, slots=True)
class TableRow:
    """One run: its policy and rate, the texts of COLUMNS, and whether it was cut short."""

    policy: str
    rate: str
    cells: tuple[str, ...]
    baseline: bool
    stopped: str | None


def run_rows(results: Results) -> list[TableRow]:
    """A row for every run, by rate and then in the order of policies."""
    ordered = sorted(results.runs, key=lambda run: run.rate)
    return [TableRow(run.policy + (f" #{run.figures['repeat'] + 1}" if _repeated(results) else ""), rate_text(run.rate),
                     tuple(column.text(run.figures) for column in COLUMNS), run.figures.get("role") == "baseline",
                     run.figures.get("stopped")) for run in ordered]


def _repeated(results: Results) -> bool:
    return any(run.figures.get("repeat", 0) for run in results.runs)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A policy over a baseline at one rate: each value above 1 speaks for the policy. None: undefined. `cut`: those of
    the two of which every run was cut short."""

    policy: str
    baseline: str
    rate: float
    latency: float | None
    ttft: float | None
    throughput: float | None
    batch: float | None
    filled: float | None
    cut: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """What a person would say."""
        parts = [_phrase(self.latency, "lower", "higher", "normalized latency"),
                 _phrase(self.throughput, "higher", "lower", "output throughput"),
                 _phrase(self.batch, "larger", "smaller", "batch"),
                 _phrase(self.filled, "larger", "smaller", "share of the pool filled")]
        told = ", ".join(part for part in parts if part) or "nothing to compare"
        if self.cut:
            told = f"{' and '.join(self.cut)} {'was' if len(self.cut) == 1 else 'were'} cut short"
        return f"{self.policy} against {self.baseline}, {rate_text(self.rate)}: {told}"


def _phrase(ratio: float | None, good: str, bad: str, what: str) -> str:
    if ratio is None or ratio <= 0:
        return ""
    if 0.995 < ratio < 1.005:
        return f"the same {what}"
    return f"{max(ratio, 1 / ratio):.2f}x {good if ratio > 1 else bad} {what}"


def ratios(results: Results) -> list[Ratio]:
    """Every policy against every baseline at each rate, means over repeats. Runs cut short have no latency."""
    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for run in results.runs:
        groups.setdefault(run.group, []).append(run.figures)
    found = []
    for (policy, rate), own in sorted(groups.items(), key=lambda item: item[0][1]):
        if own[0].get("role") == "baseline":
            continue
        for (baseline, other_rate), theirs in groups.items():
            if other_rate == rate and theirs[0].get("role") == "baseline":
                found.append(Ratio(
                    policy, baseline, rate, _over(theirs, own, "normalized_latency_s"),
                    _over(theirs, own, "mean_ttft_ms"), _over(own, theirs, "output_throughput"),
                    _over(own, theirs, "batch_size"),
                    _over(_pool(own), _pool(theirs), "token"),
                    tuple(name for name, side in ((policy, own), (baseline, theirs))
                          if all(figures.get("stopped") for figures in side))))
    return found


def _pool(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**figures["waste"], "stopped": figures.get("stopped")} for figures in runs]


def _over(top: Sequence[Mapping[str, Any]], bottom: Sequence[Mapping[str, Any]], key: str) -> float | None:
    def mean(items: Sequence[Mapping[str, Any]]) -> float | None:
        values = [item.get(key) for item in items]
        known = [float(value) for value, item in zip(values, items, strict=True)
                 if value is not None and not item.get("stopped")]
        return sum(known) / len(known) if known else None
    high, low = mean(top), mean(bottom)
    return None if high is None or not low else high / low
