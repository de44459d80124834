"""Results folders: `summary.json`, `requests.parquet` and `.csv`, `steps.parquet`; written whole, read for compare.

pandas and pyarrow are imported when a table is really written or read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pagedcli.bench.records import WASTE_CLASSES, Floats, RunResult, StepRecord, StepTable
from pagedcli.bench.signature import Signature
from pagedcli.core.errors import UsageError

SUMMARY, REQUESTS, STEPS = "summary.json", "requests.parquet", "steps.parquet"
SERIES = ("normalized_latency", "ttft", "tpot", "e2el")
"""Per-request latencies that are stored and compared, seconds (normalized latency and TPOT: seconds a token)."""


@dataclass(frozen=True)
class RunData:
    """One run as comparisons see it: its summary, per-request columns in order of arrival, its steps.

    `requests` has `key`, `ok` and the SERIES; NaN where a latency is undefined.
    """

    figures: Mapping[str, Any]
    requests: Mapping[str, Any]
    steps: StepTable

    @property
    def policy(self) -> str:
        return str(self.figures["policy"])

    @property
    def rate(self) -> float:
        return float(self.figures["rate"])

    @property
    def group(self) -> tuple[str, float]:
        """Runs with one policy and rate are repeats of each other."""
        return self.policy, self.rate

    def series(self, name: str) -> Floats:
        """One latency for every request, NaN for those that failed."""
        values = np.asarray(self.requests[name], dtype=np.float64)
        return np.where(np.asarray(self.requests["ok"], dtype=bool), values, np.nan)


@dataclass(frozen=True)
class Results:
    """All runs of one bench command."""

    name: str
    signature: Signature
    runs: Sequence[RunData]
    settings: Mapping[str, Any] = field(default_factory=dict)
    capacity: Sequence[Mapping[str, Any]] = ()

    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds."""
        summary: dict[str, Any] = {"signature": self.signature.text, **self.signature.as_dict(), "name": self.name,
                                   "bench": dict(self.settings)}
        if self.capacity:
            summary["capacity"] = [dict(item) for item in self.capacity]
        return summary | {"runs": [dict(run.figures) for run in self.runs]}


def run_data(run: RunResult, figures: Mapping[str, Any]) -> RunData:
    """A run in memory in the form it is compared in."""
    columns: dict[str, Any] = {
        "index": [r.index for r in run.requests], "key": [r.key for r in run.requests],
        "ok": [r.ok for r in run.requests], "arrival": [r.arrival for r in run.requests],
        "dispatched": [r.dispatched for r in run.requests], "scheduled": [_number(r.scheduled) for r in run.requests],
        "first_token": [_number(r.first_token) for r in run.requests],
        "finish": [_number(r.finish) for r in run.requests],
        "prompt_tokens": [r.prompt_tokens for r in run.requests],
        "output_tokens": [r.output_tokens for r in run.requests], "output_len": [r.output_len for r in run.requests],
        "sequences": [r.sequences for r in run.requests], "cached_tokens": [r.cached_tokens for r in run.requests],
        "preemptions": [r.preemptions for r in run.requests], "error": [r.error for r in run.requests],
        "error_message": [r.error_message for r in run.requests],
        "token_times": [r.token_times for r in run.requests],
    }
    for name in SERIES:
        columns[name] = np.array([getattr(r, name) for r in run.requests], dtype=np.float64)
    return RunData(figures, columns, run.steps)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def write_results(results: Results, folder: Path) -> list[Path]:
    """Write the tables and the summary; the summary last, so that a folder with one is whole."""
    import pandas as pd

    folder.mkdir(parents=True, exist_ok=True)
    if not results.runs:
        raise UsageError(f"{folder}: there is no run to write")
    runs = list(enumerate(results.runs))
    requests = pd.concat([pd.DataFrame(_labelled(number, run, run.requests)) for number, run in runs],
                         ignore_index=True)
    steps = pd.concat([pd.DataFrame(_labelled(number, run, _step_columns(run.steps))) for number, run in runs],
                      ignore_index=True)
    paths = [folder / REQUESTS, folder / "requests.csv", folder / STEPS, folder / SUMMARY]
    requests.to_parquet(paths[0], index=False, compression="zstd")
    requests.drop(columns=["token_times"], errors="ignore").to_csv(paths[1], index=False)
    steps.to_parquet(paths[2], index=False, compression="zstd")
    paths[3].write_text(json.dumps(results.summary(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return paths


def _labelled(number: int, run: RunData, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns led by which run they belong to (a scalar fills its column)."""
    values = {name: list(value) if name == "token_times" else value for name, value in columns.items()}
    return {"run": number, "policy": run.policy, "rate": run.rate, "repeat": run.figures.get("repeat", 0), **values}


def _step_columns(steps: StepTable) -> dict[str, Any]:
    columns = {name: steps.column(name) for name in StepRecord._fields}
    return columns | {f"waste_{name}": steps.share(name) for name in WASTE_CLASSES}


def read_results(path: Path) -> Results:
    """Results of a bench command from its folder (or its summary.json). Raises UsageError naming what is missing."""
    import pandas as pd

    folder = path.parent if path.name == SUMMARY else path
    missing = [name for name in (SUMMARY, REQUESTS, STEPS) if not (folder / name).is_file()]
    if missing:
        raise UsageError(f"{path}: not a results folder (missing {', '.join(missing)}); give the folder "
                         "that `pagedcli bench` wrote")
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        requests, steps = pd.read_parquet(folder / REQUESTS), pd.read_parquet(folder / STEPS)
        runs = [_read_run(figures, requests[requests["run"] == number], steps[steps["run"] == number])
                for number, figures in enumerate(summary["runs"])]
    except (ValueError, KeyError, TypeError) as fault:
        raise UsageError(f"{folder}: damaged results ({type(fault).__name__}: {fault})") from fault
    return Results(str(summary.get("name", folder.name)), Signature.from_dict(summary), runs, summary.get("bench", {}),
                   summary.get("capacity", ()))


def _read_run(figures: Mapping[str, Any], requests: Any, steps: Any) -> RunData:
    columns = {name: requests[name].to_numpy() for name in requests.columns}
    table = StepTable.from_columns({name: steps[name].to_numpy() for name in StepRecord._fields})
    return RunData(figures, columns, table)


def read_side(path: Path) -> list[Results]:
    """One side of a comparison: a results folder, or a folder of several (repeats of one experiment), by name."""
    if (path / SUMMARY).is_file() or path.name == SUMMARY:
        return [read_results(path)]
    inner = sorted(item.parent for item in path.glob(f"*/{SUMMARY}")) if path.is_dir() else []
    if not inner:
        raise UsageError(f"{path}: no {SUMMARY} here or one level below; give a folder that `pagedcli bench` wrote")
    return [read_results(item) for item in inner]


def all_runs(side: Iterable[Results]) -> dict[tuple[str, float], list[RunData]]:
    """Runs of one side by (policy, rate), repeats in order."""
    found: dict[tuple[str, float], list[RunData]] = {}
    for results in side:
        for run in results.runs:
            found.setdefault(run.group, []).append(run)
    return found
