"""`pagedcli compare A B`: what changed between two results, and a gate for CI."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedcli.core.errors import ExitStatus, UsageError
from pagedcli.core.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedcli.bench.compare import Comparison, Row
    from pagedcli.bench.storage import Results

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
                  context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Results folder of before (or a folder of several).")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Results folder of after (or a folder of several).")],
    max_regress: Annotated[list[str] | None, typer.Option(
        "--max-regress", metavar="NAME=LIMIT", help="Fail (exit status 1) when this figure is significantly worse by "
        "more than the limit, such as normalized_latency=5%. Repeatable. Shares of the pool (waste.token ...) count in "
        "points.")] = None,
    confidence: Annotated[float, typer.Option(help="Confidence of the whole gate.")] = 0.99,
    against: Annotated[str | None, typer.Option(help="Baseline for in-session ratios. Default: its first.")] = None,
    same_machine: Annotated[bool, typer.Option(
        "--same-machine", help="Both sides ran in turns on one idle machine: compare times directly.")] = False,
    run_noise: Annotated[str, typer.Option(
        help="Standard deviation between runs, assumed where fewer than 3 repeats show it.")] = "3%",
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    every: Annotated[bool, typer.Option("--all", help="Print figures that did not change, too.")] = False,
) -> None:
    """Compare two results of `pagedcli bench`, paired request by request.

    Simulated runs, and memory figures at rate inf, repeat exactly: any difference counts. Measured times are compared
    as the ratio of a policy to a baseline of the same session, since two sessions differ by more than the code does;
    give bench a --baseline and --repeat 5 for a sharp gate.
    """
    from pagedcli.bench.compare import CompareOptions
    from pagedcli.bench.compare import compare as run
    from pagedcli.bench.gates import Gate
    from pagedcli.bench.storage import read_side

    options = CompareOptions(confidence, seed, against, same_machine, _share(run_noise))
    left, right = read_side(a), read_side(b)
    found = run(left, right, [Gate.parse(text) for text in max_regress or []], options)
    _print(found, every, f"A is {_made(left)}, B is {_made(right)}")
    raise typer.Exit(ExitStatus.ROW_ERRORS if found.regressed else ExitStatus.OK)


def _made(side: Sequence[Results]) -> str:
    """Whether the figures of a side come from runs of a model or from a simulation."""
    simulated = {bool(run.figures.get("simulated")) for results in side for run in results.runs}
    return "simulated" if simulated == {True} else "measured" if simulated == {False} else "partly simulated"


def _share(text: str) -> float:
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise UsageError(f"--run-noise {text!r}: must be a share such as 3%") from None


def _print(found: Comparison, every: bool, made: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from pagedcli.bench.figures import rate_text
    from pagedcli.bench.tables import significant

    console = Console(highlight=False, width=None if Console().is_terminal else 150)
    console.print(Text(made))
    for warning in found.warnings:
        console.print(Text(f"note: {warning}"))
    table = Table(pad_edge=False, title=f"B against A, {found.level:.0%} confidence; + is worse", title_justify="left")
    for heading in ("policy", "rate", "figure", "A", "B", "change", "interval", "evidence", "verdict"):
        table.add_column(heading, justify="right" if heading in ("rate", "A", "B", "change", "interval") else "left")
    for row in found.rows:
        if every or row.limit is not None or row.change != 0:
            cells = (row.policy, rate_text(row.rate), row.metric.name, significant(row.a), significant(row.b),
                     _change(row, row.change), _interval(row), _evidence(row), _verdict(row))
            table.add_row(*map(Text, cells), style="bold red" if row.failed else None)
    if table.row_count:
        console.print(table)
    if not found.lost and not any(row.change for row in found.rows):
        console.print(Text(f"nothing changed: all {len(found.rows)} figures are equal in A and B"))
    for policy, rate, was, now in found.lost:
        console.print(Text(f"{policy}, {rate_text(rate)}: {counted(now, 'request')} failed in B, {was} in A"))
    if found.gated:
        console.print(Text("REGRESSION" if found.regressed else "no regression beyond the limits", style="bold"))


def _change(row: Row, value: float) -> str:
    if not math.isfinite(value):
        return f"{value:+}"
    return f"{value * 100:+.2f} " + ("points" if row.metric.unit == "points" else "%")


def _interval(row: Row) -> str:
    if row.kind == "exact":
        return "exact"
    return f"{_change(row, row.low)} .. {_change(row, row.high)}" if row.gateable else "unknown"


def _evidence(row: Row) -> str:
    return f"ratio to {row.against}" if row.against else {"exact": "exact", "in-run": "no baseline",
                                                          "repeats": f"{row.units} units"}[row.kind]


def _verdict(row: Row) -> str:
    if row.limit is None:
        return "worse" if row.significant else ""
    limit = _change(row, row.limit).lstrip("+")
    return f"FAILED (limit {limit})" if row.failed else f"ok (limit {limit})"
