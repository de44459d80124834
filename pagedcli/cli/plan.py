"""`pagedcli plan`: which device, how many and which memory system serve a workload under a target, for how much."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedcli.cli.bounds import at_least_one, check_writable
from pagedcli.cli.options import requests_within
from pagedcli.cli.results_folder import check_folder
from pagedcli.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedcli.bench.planner import Plan

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
                  context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="Shape name, config.json or a folder with one.")] = "llama3-8b",
    workload: Annotated[str, typer.Option(help="Named workload (synthetic lengths).")] = "sharegpt",
    trace: Annotated[Path | None, typer.Option(help="A trace file for the lengths instead.")] = None,
    slo: Annotated[list[str] | None, typer.Option(help="Target, such as normalized_latency<0.2, p90_ttft<1 or "
                                                  "mean_tpot<50ms. Repeatable: all must hold.")] = None,
    hardware: Annotated[list[str] | None, typer.Option(help="Device, or a file that `calibrate` wrote. Repeatable. "
                                                       "Default: all known.")] = None,
    tensor_parallel_size: Annotated[list[int] | None, typer.Option(help="Devices that share each layer. Repeatable. "
                                                                   "Default 1, 2, 4 and 8.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Memory system. Repeatable. Default paged and orca-max.")]
    = None,
    prices: Annotated[Path | None, typer.Option(help="TOML file of dollars an hour by device. Default: the shipped "
                                                "one, which is meant to be edited.")] = None,
    num_requests: Annotated[int, typer.Option(help="Requests to draw lengths of; runs repeat them as needed.")] = 600,
    plot: Annotated[Path | None, typer.Option(help="Also draw rate against price into this PNG.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of lengths and arrivals.")] = 0,
    workers: Annotated[int | None, typer.Option(help="Processes. Default: one a core.")] = None,
) -> None:
    """Search the highest rate under the target for every device, tensor-parallel degree and memory system.

    All of it is simulated. Devices other than the A100s use coefficients fitted to A100s and are estimates, marked ~;
    calibrate your own machine for better.
    """
    from pagedcli.bench.experiments import Setting, default_workers
    from pagedcli.bench.planner import DEGREES, Question, Slo, draw, find_machines, make_plan, options, read_prices
    from pagedcli.core.config import POLICIES
    from pagedcli.execution.shapes import resolve_shape
    from pagedcli.workloads import WorkloadOptions, load_workload

    at_least_one("--workers", workers)
    if plot is not None:
        _check_plot(plot)
    for degree in tensor_parallel_size or []:
        at_least_one("--tensor-parallel-size", degree)
    machines = find_machines(hardware or [])
    costs = read_prices(prices, machines)
    policies = policy or ["paged", "orca-max"]
    unknown = [name for name in policies if name not in POLICIES or name == "hf"]
    if unknown:
        raise UsageError(f"--policy {unknown[0]!r}: must be one of {', '.join(p for p in POLICIES if p != 'hf')}")
    shape = resolve_shape(model)
    rows = load_workload(None if trace else workload, trace=trace, num_requests=requests_within(num_requests),
                         seed=seed, options=WorkloadOptions(text=False, synthetic=True, max_total=shape.max_positions))
    question = Question(shape, tuple((row.prompt_len, row.output_len) for row in rows.requests),
                        tuple(Slo.parse(text) for text in slo or ["normalized_latency<0.2"]), costs,
                        seed=seed)
    setting = Setting(workers=workers or default_workers())
    found = make_plan(options(question, machines, tensor_parallel_size or DEGREES, policies), setting.map)
    title = f"{shape.name}, {rows.label}, {' and '.join(item.text for item in question.slos)}"
    _print(found, title)
    if plot is not None:
        typer.echo(f"wrote {draw(found, plot, title + ' (simulated)')}")


def _check_plot(plot: Path) -> None:
    """UsageError, before the search, for a file that could not be drawn into. Its folder need not exist yet."""
    if plot.is_dir():
        raise UsageError(f"--plot {plot} is a folder: name a .png file in it")
    if plot.suffix != ".png":
        raise UsageError(f"--plot {plot}: must end in .png, the one format that is drawn")
    if plot.parent.is_dir():
        check_writable("--plot", plot)
    else:
        check_folder(plot.parent, "--plot")


def _print(plans: Sequence[Plan], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if Console().is_terminal else 120)
    table = Table(title=f"{title}: simulated", title_justify="left", pad_edge=False)
    for heading in ("device", "devices", "policy", "rate, req/s", "batch", "KV blocks", "pool held", "output tok/s",
                    "$ per million output tokens"):
        table.add_column(heading, justify="left" if heading in ("device", "policy") else "right")
    for item in plans:
        if item.rate == 0:
            continue
        price = "-" if math.isnan(item.dollars_per_million) else f"{item.dollars_per_million:.2f}"
        mark = "~" if item.estimate else ""
        table.add_row(item.hardware, str(item.devices), item.policy, f"{mark}{item.rate:.3g}", f"{item.batch:.1f}",
                      str(item.pool_blocks), f"{item.pool_use:.0%}", f"{mark}{item.tokens_per_s:,.0f}",
                      f"{mark}{price}")
    console.print(table)
    reasons = {item.why: f"{item.devices} x {item.hardware}, {item.policy}" for item in reversed(plans) if item.why}
    for why, where in list(reasons.items())[:6]:
        console.print(f"not served: {where}: {why}", markup=False)
