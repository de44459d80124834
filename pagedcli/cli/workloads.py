"""`pagedcli workloads`: the named sets with their statistics, and histograms of one set's or file's lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from pagedcli.cli.options import requests_within
from pagedcli.core.wording import counted

if TYPE_CHECKING:
    from rich.table import Table

    from pagedcli.workloads import Workload, WorkloadSpec

app = typer.Typer(
    name="workloads",
    help="List the named workloads with their statistics, or show the lengths of one.",
    invoke_without_command=True,
    no_args_is_help=False,
)

_LISTED_REQUESTS = 5000
_BINS = 16
_BAR = 28


@app.callback()
def list_workloads(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List every named workload: lengths of its shipped set, what they were fitted to, and file shapes read."""
    if context.invoked_subcommand is not None:
        return
    from pagedcli.workloads import specs

    rows = [_summary(spec) for spec in specs().values()]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    _print_list(rows)


def _summary(spec: WorkloadSpec) -> dict[str, Any]:
    from pagedcli.workloads import WorkloadOptions, hub, load_workload
    from pagedcli.workloads.lengths import load_sample

    options = WorkloadOptions(synthetic=True, text=False)
    account = _account(load_workload(spec.name, num_requests=_LISTED_REQUESTS, options=options))
    return {
        "name": spec.name, "title": spec.title, "about": spec.about, "filter": spec.filter,
        "shipped": {key: account[key] for key in ("source", "requests", "prompt", "output", "rank_correlation")},
        "measured": load_sample(spec.sample)["measured"], "paper_means": dict(spec.paper),
        "hub": None if spec.hub is None else spec.hub.repo,
        "cached": spec.hub is not None and hub.has_cached(spec.hub),
    }


def _print_list(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from pagedcli.workloads.readers import known_formats

    console = Console()
    console.print(f"Named workloads: tokens over {_LISTED_REQUESTS:,} requests of each shipped (synthetic) set",
                  highlight=False)
    table = Table(pad_edge=False)
    for column in ("workload", "prompt mean", "median", "p99", "output mean", "median", "p99", "found here"):
        table.add_column(column, justify="left" if column in ("workload", "found here") else "right",
                         no_wrap=column == "workload")
    for row in rows:
        shipped = row["shipped"]
        cells = [_short(shipped[side][key]) for side in ("prompt", "output") for key in ("mean", "median", "p99")]
        table.add_row(row["name"], *cells, "cached" if row["cached"] else "shipped")
    console.print(table)
    for row in rows:
        console.print(f"  [bold]{row['name']}[/bold]  {row['title']}. {row['about']}\n    {row['shipped']['source']}",
                      highlight=False, soft_wrap=True)
    console.print("A named set is read from the first of: --trace FILE, the Hugging Face cache, the Hugging Face Hub, "
                  "the shipped set. `pagedcli workloads show NAME` draws one and says what it used.", highlight=False)
    names = ", ".join(dict.fromkeys(f.name for f in known_formats()))
    console.print(f"Shapes that --trace and --prompts read, found from the content: {names}.", highlight=False)


def _short(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 and value != int(value) else f"{value:,.0f}"


@app.command("show")
def show(
    name: Annotated[str | None, typer.Argument(help="A named workload (left out: the file's own rows).")] = None,
    trace: Annotated[Path | None, typer.Option(help="A trace or data file of any known shape.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A JSON Lines file of prompts.")] = None,
    num_requests: Annotated[int | None, typer.Option(help="Requests to take (default: all; 1,000 synthetic).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the data stream.")] = 0,
    row_filter: Annotated[str | None, typer.Option("--filter", help="paper, vllm or none.")] = None,
    shots: Annotated[int | None, typer.Option(help="Translation examples in the prefix: 0, 1 or 5.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Never touch the network.")] = False,
    synthetic: Annotated[bool, typer.Option("--synthetic", help="Use the shipped set whatever is cached.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of histograms.")] = False,
) -> None:
    """Draw histograms of one workload's prompt and output lengths, and say what was kept and dropped."""
    from pagedcli.core.errors import UsageError
    from pagedcli.workloads import WorkloadOptions, load_workload
    from pagedcli.workloads.spec import FILTERS, Filter

    chosen: Filter | None = next((f for f in get_args(Filter) if f == row_filter), None)
    if row_filter is not None and chosen is None:
        raise UsageError(f"--filter = {row_filter!r}: must be one of {', '.join(FILTERS)}")
    options = WorkloadOptions(filter=chosen, shots=shots, offline=offline, synthetic=synthetic, text=False)
    wanted = None if num_requests is None else requests_within(num_requests)
    workload = load_workload(name, trace=trace, prompts=prompts, num_requests=wanted, seed=seed, options=options)
    if as_json:
        typer.echo(json.dumps(_account(workload), indent=1))
    else:
        _print_workload(workload)


def _account(workload: Workload) -> dict[str, Any]:
    from dataclasses import asdict

    from pagedcli.workloads.lengths import LengthStats, rank_correlation

    prompt = [r.prompt_len for r in workload.requests]
    output = [r.output_len for r in workload.requests]
    # One request, or lengths that are all alike, have no correlation.
    varied = len(set(prompt)) > 1 and len(set(output)) > 1
    return {
        "name": workload.name, "source": workload.source, "synthetic": workload.synthetic,
        "requests": len(workload.requests), "kept": workload.kept, "dropped": dict(workload.dropped),
        "tokenizer": workload.tokenizer, "notes": list(workload.notes),
        "prompt": asdict(LengthStats.of(prompt)), "output": asdict(LengthStats.of(output)),
        "rank_correlation": rank_correlation(prompt, output) if varied else None,
        "seconds": workload.requests[-1].arrival if workload.has_arrivals else None,
    }


def _print_workload(workload: Workload) -> None:
    from rich.console import Console
    from rich.markup import escape

    from pagedcli.workloads.lengths import LengthStats

    console = Console()
    account = _account(workload)
    console.print(f"[bold]{escape(workload.label)}[/bold]: {counted(len(workload.requests), 'request')}",
                  highlight=False)
    lines = [f"source: {workload.source}", f"tokens: {workload.tokenizer}", *(f"note: {n}" for n in workload.notes)]
    if not workload.synthetic:
        dropped = "; ".join(f"{count:,} {why}" for why, count in workload.dropped.items()) or "none"
        lines.append(f"rows kept: {workload.kept:,}; dropped: {dropped}")
    if account["seconds"] is not None:
        lines.append(f"arrival times: {account['seconds']:,.1f} s from first to last")
    if account["rank_correlation"] is not None:
        lines.append(f"rank correlation of prompt and output: {account['rank_correlation']:.3f}")
    for line in lines:
        console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)
    for side, values in (("prompt", [r.prompt_len for r in workload.requests]),
                         ("output", [r.output_len for r in workload.requests])):
        stats = LengthStats.of(values)
        console.print(f"[bold]{side} tokens[/bold], {escape(workload.label)}: mean {stats.mean:,.2f}, median "
                      f"{stats.median:,g}, p99 {stats.p99:,.0f}, largest {stats.largest:,}", highlight=False)
        console.print(histogram(values))


def histogram(values: list[int]) -> Table:
    """A table of bars: equal bins up to the 99th percentile, one more for the rest."""
    from itertools import pairwise

    import numpy as np
    from rich.table import Table

    from pagedcli.workloads.lengths import LengthStats

    stats = LengthStats.of(values)
    width = max(1, -(-int(stats.p99) // _BINS))
    bins = min(_BINS, stats.largest // width + 1)
    edges = [k * width for k in range(bins + 1)]
    inner = np.histogram(values, bins=[*edges[:-1], edges[-1] - 1e-9])[0]
    rest = int(np.sum(np.asarray(values) >= edges[-1]))
    table = Table(show_header=False, box=None)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    top = max(int(inner.max()), rest, 1)
    labels = [f"{low:,}-{high - 1:,}" if high - low > 1 else f"{low:,}" for low, high in pairwise(edges)]
    counts = [int(c) for c in inner]
    if rest:
        labels.append(f"{edges[-1]:,}-{stats.largest:,}")
        counts.append(rest)
    for label, count in zip(labels, counts, strict=True):
        bar = "█" * round(_BAR * count / top) or ("▏" if count else "")
        table.add_row(label, bar, f"{100 * count / len(values):.1f} %")
    return table
