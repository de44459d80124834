"""`pagedcli paper`: the tables and figures of the PagedAttention paper, ours beside the printed values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedcli.cli.results_folder import check_folder
from pagedcli.core.errors import UsageError

if TYPE_CHECKING:
    from pagedcli.bench.experiments import Outcome

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
                  context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def paper(
    experiments: Annotated[list[str] | None, typer.Argument(
        help="all, table1, fig2, fig12 (all panels), fig12a .. fig19b.")] = None,
    lengths: Annotated[Path | None, typer.Option(
        metavar="FILE", help="Real ShareGPT lengths (CSV of input,output) in place of the synthetic set.")] = None,
    beams: Annotated[Path | None, typer.Option(
        metavar="FILE", help="Recorded beam parents (JSON) in place of the shipped recording.")] = None,
    results: Annotated[Path, typer.Option(metavar="DIR", help="Where results go.")] = Path("results/paper"),
    workers: Annotated[int | None, typer.Option(help="Processes. Default: one a core.")] = None,
    scale: Annotated[float, typer.Option(help="Shorten all runs by this factor (a smoke test; verdicts then say "
                                         "little).")] = 1.0,
    list_them: Annotated[bool, typer.Option("--list", help="List the experiments and leave.")] = False,
) -> None:
    """Rerun the experiments of the PagedAttention paper on simulated A100s, in minutes.

    The scheduler, the memory systems and every block are real; only time is simulated, by a cost model with one set of
    coefficients for all figures. Lengths are synthetic unless --lengths gives real ones: with those of the paper's
    artefact, in its order, the very requests of the paper are served. Writes a JSON, a PNG (with matplotlib) and a page
    of Markdown.
    """
    from pagedcli.bench.experiments import Setting, choose, default_workers, registry, run_experiments
    from pagedcli.bench.paper_lengths import LengthSource
    from pagedcli.bench.paper_report import write_outcome, write_summary
    from pagedcli.bench.signature import make_signature

    if list_them:
        for name in registry():
            typer.echo(name)
        return
    if not experiments:
        raise UsageError("name the experiments to run: all (minutes on every core), or some of "
                         f"{', '.join(registry())}")
    if not 0 < scale <= 1:
        raise UsageError(f"--scale = {scale}: must be above 0 and at most 1")
    if workers is not None and workers < 1:
        raise UsageError(f"--workers = {workers}: must be at least 1")
    for option, file in (("--lengths", lengths), ("--beams", beams)):
        if file is not None and not file.is_file():
            raise UsageError(f"{option} {file}: there is no such file")
    names = choose(experiments)
    check_folder(results)
    setting = Setting(LengthSource(lengths), workers or default_workers(), scale, beams)
    signature = make_signature({"command": "paper", "lengths": lengths, "beams": beams, "scale": scale})
    judged = held = 0

    def begun(name: str) -> None:
        if len(names) > 1:
            typer.echo(f"{name} has begun", err=True)

    for outcome in run_experiments(names, setting, begun):
        _print(outcome)
        write_outcome(outcome, results, signature)
        judged, held = judged + len(outcome.judged), held + outcome.held
    page = write_summary(results)
    typer.echo(f"{held} of {judged} judged cells hold; {page} and figures written to {results}")


def _print(outcome: Outcome) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from pagedcli.bench.paper_report import rows

    console = Console(highlight=False, width=None if Console().is_terminal else 130)
    took = f"{outcome.seconds:.1f} s, {outcome.cpu_seconds:.1f} s of processors"
    table = Table(title=f"{outcome.title} ({took})", title_justify="left", pad_edge=False)
    for heading in ("cell", "ours", "paper", "rule", "verdict"):
        table.add_column(heading, justify="right" if heading in ("ours", "paper") else "left")
    styles = {"holds": "green", "misses": "bold red", "shown": "dim"}
    for row in rows(outcome.cells):
        table.add_row(*(Text(text) for text in row[:-1]), Text(row[-1], style=styles[row[-1]]))
    console.print(table)
    for note in outcome.notes:
        console.print(Text(f"note: {note}"))
