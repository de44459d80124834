"""What a person sees of a benchmark: the live display, one line a run, the table and the ratios."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pagedcli.cli.environment import Environment

if TYPE_CHECKING:
    from rich.table import Table

    from pagedcli.bench.serve import Observer, Progress
    from pagedcli.bench.storage import Results, RunData

_REFRESH = 0.15
_BAR = 40
_SIGNS = (("token", "█", "green"), ("reserved", "▓", "yellow"), ("internal", "▒", "red"), ("external", "░", "magenta"),
          ("free", "·", "dim"))


@contextmanager
def live(environment: Environment, title: str, wanted: bool) -> Iterator[Observer | None]:
    """An observer that draws the state of a run, or None where nobody looks."""
    if not (wanted and environment.interactive):
        yield None
        return
    from rich.console import Console
    from rich.live import Live

    drawn = [0.0]
    with Live(console=Console(file=environment.err), transient=True, auto_refresh=False) as display:
        def draw(now: Progress) -> None:
            if time.monotonic() - drawn[0] >= _REFRESH:
                drawn[0] = time.monotonic()
                display.update(state_table(title, now), refresh=True)

        yield draw


def state_table(title: str, now: Progress) -> Table:
    """Elapsed time, rates, queues and the use of KV memory."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    step = now.step
    asked = "all at once" if now.rate == float("inf") else f"{now.rate:g}"
    table.add_row(Text(title, style="bold"), f"{now.elapsed:.0f} s",
                  f"rate asked {asked}, achieved {now.achieved_rate:.2f} req/s")
    table.add_row("requests", f"{now.finished + now.failed}/{now.total}",
                  f"{now.dispatched} sent, {now.failed} failed, {now.preemptions} preempted")
    if step is not None:
        table.add_row("queue", f"{step.running} running", f"{step.waiting} waiting, {step.swapped} swapped")
        total = max(step.token + step.reserved + step.internal + step.external + step.free, 1)
        wasted = (step.reserved + step.internal + step.external) / total
        table.add_row("KV cache", f"{step.token / total:.0%} filled", _bar(step, total).append(f" {wasted:.0%} wasted"))
    return table


def _bar(step: Any, total: int) -> Any:
    from rich.text import Text

    text, used = Text(), 0
    seen = 0
    for name, sign, style in _SIGNS:
        seen += getattr(step, name)
        upto = round(_BAR * seen / total)
        text.append(sign * (upto - used), style=style)
        used = upto
    return text


def run_line(run: RunData) -> str:
    """One finished run in one line."""
    from pagedcli.bench.figures import rate_text
    from pagedcli.bench.tables import significant

    figures = run.figures
    cut = f" (cut short: {figures['stopped']})" if figures["stopped"] else ""
    token = figures["waste"]["token"]
    filled = "-" if token is None else f"{token:.0%}"
    return (f"{run.policy}, {rate_text(run.rate)}: {significant(figures['normalized_latency_s'])} s/token, "
            f"{significant(figures['output_throughput'])} tokens/s, batch {significant(figures['batch_size'])}, "
            f"KV filled {filled}, {significant(figures['duration'])} s{cut}")


def print_results(results: Results) -> None:
    """The table of all runs and the ratio of the policy to each baseline, on standard output."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from pagedcli.bench.report import badges, capacity_rows
    from pagedcli.bench.tables import COLUMNS, ratios, run_rows

    wide = not sys.stdout.isatty()
    console = Console(width=160 if wide else None, highlight=False)
    marks = "".join(f" [{badge}]" for badge in badges(results))
    table = Table(title=Text(results.name + marks, style="bold"), title_justify="left", pad_edge=False)
    table.add_column("policy")
    table.add_column("rate", justify="right")
    for column in COLUMNS:
        table.add_column(Text(f"{column.title}\n{column.unit}"), justify="right")
    rate = None
    for row in run_rows(results):
        if rate is not None and row.rate != rate:
            table.add_section()
        rate = row.rate
        table.add_row(Text(row.policy + (" (cut short)" if row.stopped else "")), row.rate, *map(Text, row.cells),
                      style=None if row.baseline else "bold")
    console.print(table)
    for ratio in ratios(results):
        console.print(Text(ratio.sentence))
    if results.capacity:
        found = Table(title="capacity, req/s", title_justify="left", pad_edge=False)
        for heading in ("policy", "limit (s/token)", "holds", "does not hold"):
            found.add_column(heading, justify="left" if heading == "policy" else "right")
        for item in capacity_rows(results):
            found.add_row(item["policy"], f"{item['limit']:g}", item["rate"], item["above"])
        console.print(found)
