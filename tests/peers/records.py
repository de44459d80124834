"""What came of the runs of a comparison, and what is told from them: medians, ratios to the best other engine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.peers.check import Agreement
from tests.peers.engines import ENGINES, JOB, OURS


@dataclass(frozen=True)
class Run:
    """One run of one engine on one workload.

    Times in s: `wall` from the first row handed over to the last one done, `load` before it, `whole` from process start
    to the last row. `cpu`: processor time within `wall`. `equal` of `compared` greedy rows begin as the reference.
    A run with an `error` has no figures.
    """

    engine: str
    workload: str
    round: int
    wall: float | None = None
    load: float | None = None
    whole: float | None = None
    cpu: float | None = None
    peak_mib: float | None = None
    equal: int = 0
    compared: int = 0
    version: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    error: str | None = None

    def record(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(self).items()}


@dataclass(frozen=True)
class Line:
    """One engine on one workload, over its rounds. Medians; `low` and `high` are the fastest and slowest wall time.

    `busy`: processor time over wall time and threads, the least of its rounds: well below the others' means that
    something else held the cores. `good`: all lengths were as asked.
    """

    engine: str
    workload: str
    rounds: int
    wall: float | None
    low: float | None
    high: float | None
    load: float | None
    whole: float | None
    peak_mib: float | None
    busy: float | None
    agreement: Agreement | None
    good: bool
    version: str
    problem: str | None

    @property
    def title(self) -> str:
        return ENGINES[self.engine].title


def median(values: Sequence[float | None]) -> float | None:
    """Of those that there are."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def summarise(runs: Sequence[Run], threads: int) -> list[Line]:
    """A line for each workload and engine, in the order of the runs. The whole job's runs complete our own lines."""
    keys = list(dict.fromkeys((run.workload, run.engine) for run in runs if run.engine != JOB))
    lines = []
    for workload, engine in keys:
        mine = [run for run in runs if (run.workload, run.engine) == (workload, engine)]
        job = [run for run in runs if (run.workload, run.engine) == (workload, JOB)] if engine == OURS else []
        lines.append(_line(mine, job, threads))
    return lines


def _line(runs: Sequence[Run], job: Sequence[Run], threads: int) -> Line:
    good = [run for run in runs if run.error is None]
    walls = [run.wall for run in good if run.wall is not None]
    problems = [run.error for run in [*runs, *job] if run.error is not None]
    problems += [fault for run in [*runs, *job] for fault in run.faults]
    busy = [run.cpu / run.wall / threads for run in good if run.cpu is not None and run.wall]
    compared = [Agreement(run.equal, run.compared) for run in good if run.compared]
    # Ours is driven twice: the job as a user starts it is what its whole time is, and the larger peak counts.
    whole = [run.whole for run in job if run.error is None] if job else [run.whole for run in good]
    peaks = [median([run.peak_mib for run in group if run.error is None]) for group in (runs, job)]
    known = [peak for peak in peaks if peak is not None]
    return Line(
        engine=runs[0].engine, workload=runs[0].workload, rounds=len(walls), wall=median(walls),
        low=min(walls, default=None), high=max(walls, default=None), load=median([run.load for run in good]),
        whole=median(whole), peak_mib=max(known, default=None), busy=min(busy, default=None),
        agreement=min(compared, key=lambda found: found.equal, default=None),
        good=bool(good) and not any(run.faults for run in [*runs, *job]), version=good[-1].version if good else "",
        problem=problems[0] if problems else None)


@dataclass(frozen=True)
class Standing:
    """Ours against the best other engine on one workload: theirs over ours, so above 1 is better for us. None where
    one side has no figure."""

    workload: str
    best: str | None
    speed: float | None
    whole: float | None
    memory: float | None


def standing(lines: Sequence[Line], workload: str) -> Standing:
    """How we stand on a workload. The best other engine is chosen for each figure by itself."""
    here = [line for line in lines if line.workload == workload]
    mine = next((line for line in here if line.engine == OURS), None)
    others = [line for line in here if not ENGINES[line.engine].ours and line.good]
    fastest = min((line for line in others if line.wall is not None), key=lambda line: line.wall or 0.0, default=None)

    def ratio(name: str) -> float | None:
        theirs = [value for line in others if (value := getattr(line, name)) is not None]
        own = getattr(mine, name) if mine is not None and mine.good else None
        return min(theirs) / own if theirs and own else None

    return Standing(workload, fastest.engine if fastest else None, ratio("wall"), ratio("whole"), ratio("peak_mib"))
