"""The paper's tables and figures as experiments: ours beside the printed values, with a verdict for every cell."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pagedcli.bench.paper_lengths import LengthSource
from pagedcli.core.errors import UsageError

Job = TypeVar("Job")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Cell:
    """One comparison. `good` None: shown, not judged. `rule` says what counts as good."""

    name: str
    ours: float | None
    paper: float | None
    good: bool | None = None
    rule: str = ""
    unit: str = ""

    @property
    def verdict(self) -> str:
        return "shown" if self.good is None else "holds" if self.good else "misses"


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a figure: points of ours and, where it was read off, of the paper."""

    label: str
    ours: tuple[tuple[float, float], ...]
    paper: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Panel:
    """One set of axes. `kind`: lines over x, or bars (one group a curve, x is the place in `ticks`)."""

    title: str
    x: str
    y: str
    curves: tuple[Curve, ...]
    kind: str = "lines"
    limits: tuple[float | None, float | None] = (None, None)
    ticks: tuple[str, ...] = ()
    logarithmic: bool = False


@dataclass(frozen=True)
class Outcome:
    """What an experiment found, and how long that took: seconds on the wall and of processors."""

    key: str
    title: str
    cells: tuple[Cell, ...]
    panels: tuple[Panel, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def judged(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.good is not None]

    @property
    def held(self) -> int:
        return sum(bool(cell.good) for cell in self.judged)

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON: no infinity, no NaN."""
        cells = [{**asdict(cell), "ours": finite(cell.ours), "verdict": cell.verdict} for cell in self.cells]
        panels = [{**asdict(panel), "curves": [
            {"label": curve.label, "paper": [list(point) for point in curve.paper],
             "ours": [[x, finite(y)] for x, y in curve.ours]} for curve in panel.curves]} for panel in self.panels]
        return {"key": self.key, "title": self.title, "cells": cells, "panels": panels, "notes": list(self.notes),
                "seconds": round(self.seconds, 2), "cpu_seconds": round(self.cpu_seconds, 2)}


def finite(value: float | None) -> float | None:
    """The number to six digits, or None where JSON has no word for it."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


@dataclass(frozen=True)
class Setting:
    """How experiments are run. `scale` shortens runs (1: the paper's durations), for smoke tests. `beams`:
    a recording of beam parents (RecordedBeams.read) in place of the shipped one."""

    source: LengthSource = field(default_factory=LengthSource)
    workers: int = 1
    scale: float = 1.0
    beams: Path | None = None

    def map(self, function: Callable[[Job], Answer], jobs: Iterable[Job]) -> list[Answer]:
        """Answers in order, on `workers` processes."""
        queue: Sequence[Job] = list(jobs)
        if self.workers <= 1 or len(queue) <= 1:
            return [function(job) for job in queue]
        with ProcessPoolExecutor(self.workers) as pool:
            return list(pool.map(function, queue))


def default_workers() -> int:
    """One process a core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def near(name: str, ours: float, paper: float, share: float, unit: str = "") -> Cell:
    """A cell that holds within a share of the paper's value."""
    return Cell(name, ours, paper, abs(ours / paper - 1) <= share, f"within {share:.0%}", unit)


def points(name: str, ours: float, paper: float, width: float, unit: str = "%") -> Cell:
    """A cell that holds within so many points."""
    return Cell(name, ours, paper, abs(ours - paper) <= width, f"within {width:g} points", unit)


def claim(name: str, good: bool, rule: str, ours: float | None = None) -> Cell:
    """A statement of the paper that holds or does not."""
    return Cell(name, ours, None, good, rule)


Experiment = Callable[[Setting], Outcome]


def registry() -> Mapping[str, Experiment]:
    """All experiments by name, in the paper's order."""
    from pagedcli.bench import experiments_blocks, experiments_memory, experiments_rates

    found: dict[str, Experiment] = {}
    for module in (experiments_memory, experiments_rates, experiments_blocks):
        found.update(module.EXPERIMENTS)
    order = ("table1", "fig2", "fig12a", "fig12b", "fig12c", "fig12d", "fig12e", "fig12f", "fig13", "fig14", "fig15",
             "fig16", "fig17", "fig18a", "fig18b", "fig19a", "fig19b")
    return {name: found[name] for name in order}


def choose(names: Sequence[str]) -> list[str]:
    """Experiment names from what a user typed: `all`, names, or the beginning of some (`fig12`)."""
    known = list(registry())
    chosen: list[str] = []
    for name in names or ["all"]:
        matches = known if name == "all" else [item for item in known if item == name] or [
            item for item in known if item.startswith(name)]
        if not matches:
            raise UsageError(f"{name!r} is no experiment; there are all, {', '.join(known)}")
        chosen += [item for item in matches if item not in chosen]
    return chosen


def run_experiment(name: str, setting: Setting) -> Outcome:
    """Run one experiment and time it."""
    begun, spent = time.perf_counter(), _processor_seconds()
    outcome = registry()[name](setting)
    return replace(outcome, seconds=time.perf_counter() - begun, cpu_seconds=_processor_seconds() - spent)


def _processor_seconds() -> float:
    """Of this process and of those it has waited for."""
    return sum(os.times()[:4])


_LONGEST_FIRST = ("fig14", "fig16", "fig15", "fig12d", "fig18b", "fig17", "fig13", "fig12f", "fig19b", "fig12e",
                  "fig12a", "fig12b", "fig12c")
"""Begun in this order, after those of a few seconds, so that no long one is left for the end, when the other processes
have nothing to do."""

_ALONE = frozenset({"fig18a"})
"""Experiments that time this machine: run while nothing else does."""


def run_experiments(names: Sequence[str], setting: Setting,
                    begun: Callable[[str], None] = lambda name: None) -> Iterator[Outcome]:
    """Run experiments at once, `setting.workers` of them; outcomes as they come. Where there are fewer experiments
    than processes, each uses several. `begun` is told the name of each as it starts."""
    def run(name: str) -> Outcome:
        begun(name)
        return run_experiment(name, setting)

    together = [name for name in names if name not in _ALONE]
    if setting.workers <= 1 or len(together) <= 1:
        yield from map(run, names)
        return
    inner = replace(setting, workers=max(1, setting.workers // len(together)))
    begin = deque(sorted(together, key=lambda name: _LONGEST_FIRST.index(name) if name in _LONGEST_FIRST else -1))
    workers = min(setting.workers, len(together))
    running: set[Future[Outcome]] = set()
    with ProcessPoolExecutor(workers) as pool:
        done: set[Future[Outcome]] = set()
        while begin or running:
            while begin and len(running) < workers:  # before what is done is shown, which takes a while
                begun(begin[0])
                running.add(pool.submit(run_experiment, begin.popleft(), inner))
            yield from (each.result() for each in done)
            done, running = wait(running, return_when=FIRST_COMPLETED)
        yield from (each.result() for each in done)
    yield from map(run, (name for name in names if name in _ALONE))
