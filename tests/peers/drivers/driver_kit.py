"""What every driver shares: its options, the rows, and the one file that says what came of a run.

Drivers run in the environment of the engine they drive, so this file imports the standard library only.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STARTED = time.monotonic()


def options(about: str, add: Callable[[argparse.ArgumentParser], None] | None = None) -> argparse.Namespace:
    """The options that run.py gives to each driver, and those that one of them has for itself."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--rows", type=Path, required=True, help="JSON Lines of rows")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--model", default="", help="what the engine reads its weights from")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    if add is not None:
        add(parser)
    return parser.parse_args()


def now() -> tuple[float, float]:
    """A moment: seconds on the monotonic clock, and processor seconds that this process has used.

    Little processor time beside the wall time tells that something else held the cores.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.monotonic(), used.ru_utime + used.ru_stime


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def report(given: argparse.Namespace, *, version: str, settings: dict[str, Any], loaded: tuple[float, float],
           done: tuple[float, float], outputs: dict[str, list[list[int]]], peak_mib: float | None = None) -> None:
    """Write what came of a run: outputs first (a row's samples by its id), then figures.

    `loaded` and `done` are moments: monotonic time and processor time, s, as `now` gives them.
    `done_at` is on the machine's monotonic clock, for the time from process start to the last row. `peak_mib` replaces
    what the starter of this process sees, where the engine is a process of its own.
    """
    rows_file = given.out.with_suffix(".rows.jsonl")
    with rows_file.open("w", encoding="utf-8") as file:
        for key, samples in outputs.items():
            file.write(json.dumps({"id": key, "outputs": samples}) + "\n")
    figures = {"version": version, "settings": settings, "load_seconds": loaded[0] - STARTED,
               "wall_seconds": done[0] - loaded[0], "cpu_seconds": done[1] - loaded[1],
               "done_at": time.monotonic(), "peak_mib": peak_mib,
               "own_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    given.out.write_text(json.dumps(figures, indent=1), encoding="utf-8")
