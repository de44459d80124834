"""Books every second of a run under one kind of work, by how many rows its step had; what is left over shows."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BUCKETS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BETWEEN = 0
"""The bucket of what happens between steps."""


def bucket(rows: int) -> int:
    """The least of BUCKETS that holds a step of so many rows. ValueError beyond the last or below 1."""
    if rows < 1 or rows > BUCKETS[-1]:
        raise ValueError(f"a step of {rows} rows has no bucket: they go from 1 to {BUCKETS[-1]} rows")
    return next(edge for edge in BUCKETS if rows <= edge)


class Ledger:
    """Time goes to the innermost kind that is open, so nothing is booked twice.

    `enter` and `leave` nest; `close` ends a step and files what it took. `seconds` is by (kind, bucket), `counts` of
    other things (steps, rows, FLOP, bytes) likewise.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._open: list[str] = []
        self._since = 0.0
        self.step: defaultdict[str, float] = defaultdict(float)
        self.seconds: defaultdict[tuple[str, int], float] = defaultdict(float)
        self.counts: defaultdict[tuple[str, int], float] = defaultdict(float)

    def enter(self, kind: str) -> None:
        self._book()
        self._open.append(kind)

    def leave(self) -> None:
        self._book()
        self._open.pop()

    def timed(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its calls booked under `kind`."""
        def run(*args: Any, **named: Any) -> Any:
            self.enter(kind)
            try:
                return function(*args, **named)
            finally:
                self.leave()
        return run

    def split(self, kind: str, parts: Mapping[str, float]) -> None:
        """Rebook what this step has under `kind` in proportion to `parts`; all zeros leave it where it is."""
        whole = sum(parts.values())
        if whole > 0:
            amount = self.step.pop(kind, 0.0)
            for name, part in parts.items():
                self.step[name] += amount * part / whole

    def move(self, kind: str, parts: Mapping[str, float]) -> None:
        """Rebook these seconds of what this step has under `kind`, which keeps the rest."""
        for name, part in parts.items():
            self.step[name] += part
            self.step[kind] -= part

    def close(self, edge: int, counts: Mapping[str, float] | None = None) -> None:
        """End a step whose rows belong to the bucket `edge`."""
        for kind, spent in self.step.items():
            self.seconds[kind, edge] += spent
        for name, amount in (counts or {}).items():
            self.counts[name, edge] += amount
        self.step.clear()

    def _book(self) -> None:
        now = self._clock()
        if self._open:
            self.step[self._open[-1]] += now - self._since
        self._since = now


@dataclass(frozen=True)
class Account:
    """A closed ledger beside the wall time of what it watched, both in seconds."""

    seconds: Mapping[tuple[str, int], float]
    wall: float
    counts: Mapping[tuple[str, int], float] = field(default_factory=dict)

    @property
    def edges(self) -> list[int]:
        """Buckets that have something, rising."""
        return sorted({edge for _, edge in self.seconds})

    def of(self, kinds: Sequence[str], edge: int | None = None) -> float:
        """Seconds of these kinds, in one bucket or in all."""
        return sum(spent for (kind, where), spent in self.seconds.items()
                   if kind in kinds and edge in (None, where))

    def count(self, name: str, edge: int | None = None) -> float:
        return sum(amount for (kind, where), amount in self.counts.items() if kind == name and edge in (None, where))

    @property
    def kinds(self) -> list[str]:
        """All kinds, the dearest first."""
        return sorted({kind for kind, _ in self.seconds}, key=lambda kind: -self.of([kind]))

    @property
    def unaccounted(self) -> float:
        """Wall seconds that no kind has."""
        return self.wall - sum(self.seconds.values())

    def share_outside(self, inside: Sequence[str], edge: int) -> float:
        """Share of a bucket's step time that is not of the kinds `inside`."""
        whole = sum(spent for (_, where), spent in self.seconds.items() if where == edge)
        return 1 - self.of(inside, edge) / whole


def least_seconds(flop: float, flops: float, moved: float, bandwidth: float) -> float:
    """The time that a machine needs at least: for the arithmetic or for the bytes, whichever is longer."""
    return max(flop / flops, moved / bandwidth)


def markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up as text too; the first is to the left, the others to the right."""
    rows = [list(headings), *map(list, lines)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(headings))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (cell.ljust(width) if place == 0 else cell.rjust(width)
                        for place, (cell, width) in enumerate(zip(cells, widths, strict=True)))
        return "| " + " | ".join([first, *rest]) + " |"

    rule = "|".join(["", "-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:]), ""])
    return "\n".join([line(rows[0]), rule, *map(line, rows[1:])])
