"""The comparison as a table on the terminal, and as JSON and Markdown on disk."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.peers.engines import OURS
from tests.peers.records import Line, Run, Standing, standing, summarise
from tests.peers.workloads import TITLES, Workload

if TYPE_CHECKING:
    from tests.peers.run import Settings

HEADS = ("engine", "wall s (range)", "out tok/s", "ours faster", "load s", "whole job s", "peak MiB", "cores busy",
         "lengths", "greedy 20")


@dataclass
class Report:
    """Everything that a comparison is told with. `failed`: engines that could not be set up, with reasons;
    `machine`: its limits, measured at the start and at the end."""

    name: str
    command: str
    signature: Any
    settings: Settings
    failed: dict[str, str]
    workloads: list[Workload] = field(default_factory=list)
    machine: list[dict[str, float]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @classmethod
    def start(cls, settings: Settings, name: str | None, failed: dict[str, str]) -> Report:
        """A report without runs, named by type and day unless it has a name."""
        from pagedcli.bench.signature import make_signature

        asked = {"model": "smollm2-135m", "dtype": settings.dtype, "threads": settings.threads,
                 "rounds": settings.rounds, "workloads": list(settings.workloads),
                 "peers": [engine.name for engine in settings.engines], "rows": settings.rows,
                 "tokens": settings.tokens}
        command = (f"python -m tests.peers.run --rounds {settings.rounds} --workloads {','.join(settings.workloads)} "
                   f"--peers {','.join(engine.name for engine in settings.engines)} --dtype {settings.dtype} "
                   f"--threads {settings.threads} --whole-job {','.join(settings.whole_job) or 'none'}")
        cuts = "".join(f" --{key} {value}" for key, value in (("rows", settings.rows), ("tokens", settings.tokens))
                       if value is not None)
        chosen = name or f"{settings.dtype}-{time.strftime('%Y-%m-%d')}{'-cut' if cuts else ''}"
        return cls(chosen, command + cuts, make_signature(asked, device="cpu", threads=settings.threads), settings,
                   dict(failed))

    @property
    def lines(self) -> list[Line]:
        return summarise(self.runs, self.settings.threads)

    def write(self, folder: Path) -> None:
        """Both files, each whole or as it was before."""
        folder.mkdir(parents=True, exist_ok=True)
        data = {
            "command": self.command, "signature": self.signature.as_dict(), "failed": self.failed,
            "workloads": [{"name": workload.name, "rows": len(workload.rows), "prompt_tokens": workload.prompt_tokens,
                           "output_tokens": workload.output_tokens, "origin": workload.origin,
                           "digest": workload.digest} for workload in self.workloads],
            "machine": self.machine, "runs": [run.record() for run in self.runs]}
        for suffix, text in ((".json", json.dumps(data, indent=1) + "\n"), (".md", markdown(self))):
            partial = folder / f"{self.name}{suffix}.partial"
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, folder / f"{self.name}{suffix}")


def number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def cells(line: Line, lines: Sequence[Line], workload: Workload) -> tuple[str, ...]:
    """One line of the table, as HEADS says. `ours faster`: this engine's wall time over ours."""
    mine = next((other.wall for other in lines if (other.engine, other.workload) == (OURS, line.workload)), None)
    faster = line.wall / mine if line.wall and mine and line.engine != OURS else None
    rate = workload.output_tokens / line.wall if line.wall else None
    wall = "-" if line.wall is None else f"{line.wall:.2f} ({number(line.low)}-{number(line.high)})"
    if len(workload.rows) == 1 and line.wall:
        wall += f", {1000 * line.wall / workload.output_tokens:.2f} ms/token"
    lengths = "as asked" if line.good else (line.problem or "-")[:60]
    return (line.title, wall, number(rate, ".0f"), "" if faster is None else f"{faster:.2f}x", number(line.load, ".1f"),
            number(line.whole, ".1f"), number(line.peak_mib, ".0f"), number(line.busy, ".0%"), lengths,
            line.agreement.text if line.agreement else "sampled" if workload.rows[0]["temperature"] > 0 else "-")


def verdict(found: Standing) -> str:
    """Ours against the best other engine, in one line."""
    if found.speed is None:
        return "no other engine to compare with, or no figure of ours"
    parts = [f"{found.speed:.2f}x the speed of the best other ({found.best})"]
    for name, value in (("whole job", found.whole), ("memory", found.memory)):
        if value is not None:
            parts.append(f"{name} {value:.2f}x")
    return ", ".join(parts) + " (above 1: ours is better)"


def markdown(report: Report) -> str:
    """The report as a page."""
    lines, settings = report.lines, report.settings
    parts = [f"# Beside other engines, {settings.dtype}, {settings.threads} threads", "",
             f"`{report.command}`", "", report.signature.text, ""]
    parts += [f"Machine {'before' if place == 0 else 'after'}: "
              + ", ".join(f"{name} {value:g}" for name, value in limits.items()) + "."
              for place, limits in enumerate(report.machine)]
    versions = dict.fromkeys(line.version for line in lines if line.version)
    parts += ["", f"Versions: {'; '.join(versions)}.", ""]
    parts += [f"Not set up: {name}: {reason}." for name, reason in report.failed.items()]
    for workload in report.workloads:
        here = [line for line in lines if line.workload == workload.name]
        if not here:
            continue
        parts += [f"## {workload.name}: {TITLES[workload.name]}", "",
                  f"{workload.prompt_tokens:,} tokens in, {workload.output_tokens:,} out; {workload.origin}. "
                  f"Ours: {verdict(standing(lines, workload.name))}.", "",
                  "| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
        parts += ["| " + " | ".join(cell.replace("|", "/") for cell in cells(line, lines, workload)) + " |"
                  for line in here]
        parts.append("")
    return "\n".join(parts) + "\n"


def show(report: Report, write: Callable[..., None] | None = None) -> None:
    """The tables on the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=150)
    put = write or console.print
    lines = report.lines
    for workload in report.workloads:
        here = [line for line in lines if line.workload == workload.name]
        table = Table(title=f"{workload.name}: {TITLES[workload.name]}, {workload.prompt_tokens:,} tokens in, "
                            f"{workload.output_tokens:,} out", caption=verdict(standing(lines, workload.name)))
        for head in HEADS:
            table.add_column(head, justify="left" if head in ("engine", "lengths") else "right")
        for line in here:
            table.add_row(*cells(line, lines, workload), style="bold" if line.engine == OURS else "")
        put(table)
    for name, reason in report.failed.items():
        put(f"not set up: {name}: {reason}", markup=False)
    for limits in report.machine:
        put("machine: " + ", ".join(f"{name} {value:g}" for name, value in limits.items()), markup=False)
    put(f"{report.signature.text}\n{report.command}", markup=False, soft_wrap=True)
