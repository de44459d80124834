"""Reads what `calibrate` fits to: the lengths and times of measured requests, every row of which is checked."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagedcli.bench.records import Floats
from pagedcli.core.clock import LATEST
from pagedcli.core.errors import UsageError

LATENCIES = ("ttft", "tpot", "e2el", "normalized_latency")
MAX_LENGTH = 10_000_000
"""Tokens of a prompt or an output at most: more than any model takes, and what a simulated prompt can still hold."""

_NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("input_toks", "input_tokens", "prompt_tokens", "prompt_len", "num_prefill_tokens", "input_len"),
    "output": ("output_toks", "output_tokens", "output_len", "num_decode_tokens", "completion_tokens"),
    "arrival": ("arrival_time", "arrival", "arrival_ts", "arrived_at"),
    "queued": ("queued_ts", "queued"),
    "first": ("first_token_ts", "first_token", "first_token_time"),
    "last": ("last_token_ts", "finish", "finished_ts", "last_token_time"),
}


@dataclass(frozen=True)
class Trace:
    """Measured requests in order of arrival; times in seconds from the first arrival, lengths in tokens."""

    name: str
    prompt: Floats
    output: Floats
    arrival: Floats
    first: Floats
    last: Floats

    def __len__(self) -> int:
        return len(self.arrival)

    def latencies(self, keep: slice = slice(None)) -> dict[str, Floats]:
        """Each of LATENCIES for the requests in `keep`."""
        return latencies_of(self.arrival[keep], self.first[keep], self.last[keep], self.output[keep])


def latencies_of(arrival: Floats, first: Floats, last: Floats, output: Floats) -> dict[str, Floats]:
    """Each of LATENCIES, seconds (a token): [requests], TPOT only of those with two output tokens or more."""
    several = output > 1
    return {"ttft": first - arrival, "tpot": ((last - first)[several] / (output[several] - 1)),
            "e2el": last - arrival, "normalized_latency": (last - arrival) / output}


def read_trace(path: Path) -> Trace:
    """A per-request trace as vLLM's tools write it: JSON Lines (or CSV) with lengths and times.

    When arrivals are on another clock than tokens (wall time and a monotonic one), `queued_ts` ties them together: the
    request that was queued fastest is taken to have been queued at once. Raises UsageError naming file, line, field and
    value of what is no request: a number that is not finite, a length that is no whole number of at least 1, a first
    token before the arrival or after the last one, a time past what a clock can tell.
    """
    rows = _rows(path)
    if not rows:
        raise UsageError(f"{path.name}: holds no requests")
    fields = [{name: _field(row, name, f"{path.name}, line {line}") for name in _NAMES} for line, row in rows]
    data = {name: np.array([row[name][1] for row in fields], dtype=np.float64) for name in _NAMES}
    arrival, tied = data["arrival"], False
    if np.isfinite(data["queued"]).all():
        arrival, tied = arrival + float(np.min(data["queued"] - arrival)), True
    for earlier, times, later in (("arrival", arrival, "first"), ("first", data["first"], "last")):
        for place in np.flatnonzero(data[later] < times)[:1].tolist():
            early, late = fields[place][earlier], fields[place][later]
            clock = f" ({times[place]:.15g} on the clock of queued_ts)" if tied and earlier == "arrival" else ""
            raise UsageError(f"{path.name}, line {rows[place][0]}: {late[0]} = {late[1]:.15g}: must not be before "
                             f"{early[0]} = {early[1]:.15g}{clock}")
    order = np.argsort(arrival, kind="stable")
    start = arrival[order[0]]
    for place in np.flatnonzero(data["last"] - start > LATEST)[:1].tolist():
        alias, value = fields[place]["last"]
        raise UsageError(f"{path.name}, line {rows[place][0]}: {alias} = {value:.15g}: is {value - start:.3g} s after "
                         f"the first arrival, and at most {LATEST:g} can be simulated; times must be in seconds")
    return Trace(path.name, data["prompt"][order], data["output"][order], arrival[order] - start,
                 data["first"][order] - start, data["last"][order] - start)


def _field(row: Mapping[str, Any], name: str, where: str) -> tuple[str, float]:
    """The alias under which a row has a field, and its number; NaN where `queued` is left out."""
    aliases = _NAMES[name]
    alias = next((alias for alias in aliases if row.get(alias) not in (None, "")), None)
    if alias is None:
        if name == "queued":
            return aliases[0], math.nan
        raise UsageError(f"{where}: no number in {' or '.join(aliases)}")
    value = row[alias]
    said = value if isinstance(value, str) else json.dumps(value)
    said = f"{where}: {alias} = {said if len(said) <= 40 else said[:40] + '...'}"
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{said}: must be a finite number")
    if name in ("prompt", "output") and not (1 <= number <= MAX_LENGTH and number.is_integer()):
        raise UsageError(f"{said}: must be a whole number of tokens, from 1 to {MAX_LENGTH:,}")
    return alias, number


def _rows(path: Path) -> list[tuple[int, Mapping[str, Any]]]:
    """Each row with the line that it ends on."""
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise UsageError(f"the trace {path} is not text: byte {fault.start} is not UTF-8") from fault
    except OSError as fault:
        raise UsageError(f"cannot read the trace {path}: {fault.strerror or fault}") from fault
    if path.suffix == ".csv":
        table = csv.DictReader(io.StringIO(text, newline=""))
        try:
            return [(table.line_num, row) for row in table]
        except csv.Error as fault:
            raise UsageError(f"{path.name}, line {table.line_num}: not CSV ({fault})") from fault
    rows: list[tuple[int, Mapping[str, Any]]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as fault:
                raise UsageError(f"{path.name}, line {number}: not JSON ({getattr(fault, 'msg', fault)})") from fault
            if not isinstance(row, dict):
                raise UsageError(f"{path.name}, line {number}: must be an object")
            rows.append((number, row))
    return rows
