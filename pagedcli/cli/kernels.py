"""`pagedcli kernels`: check and time the attention kernels on the device at hand."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pagedcli.cli.bounds import check_writable
from pagedcli.core.errors import ExitStatus
from pagedcli.core.wording import counted

if TYPE_CHECKING:
    from pagedcli.bench.micro import Bench, Row, Skipped

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
                  context_settings={"help_option_names": ["-h", "--help"]})

QUICK_SECONDS = 40.0
"""Time after which the short list starts no further row."""
QUICK_CYCLE, FULL_CYCLE = 48 << 20, 256 << 20


@app.command()
def kernels(
    full: Annotated[bool, typer.Option("--full/--quick", help="The whole grid (batch 8-256, contexts of 64-16,384 "
                                       "tokens, blocks of 1-256, five models' heads), or a list that takes less than "
                                       "a minute.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write all figures as JSON."),
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to measure.")] = "auto",
    attention_backend: Annotated[Literal["auto", "cpu", "reference", "cuda"],
                                 typer.Option(help="Whose kernels.")] = "auto",
    dtype: Annotated[Literal["auto", "fp32", "bf16", "fp16"],
                     typer.Option(help="Type of queries and cache; auto picks what the device is fast at.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all cores.")] = None,
) -> None:
    """Check and time attention over paged blocks against contiguous memory (torch's scaled_dot_product_attention).

    Both run in turns on the same keys and values, which come from memory, not from caches; outputs are compared. Times
    are of one layer's call, the fastest round. GB/s are of the keys and values that must be read, held against a copy
    (read plus written) measured in the same run. Exit status 1 when an output is wrong.
    """
    if json_file is not None and (json_file.is_file() or not json_file.exists() or json_file.is_dir()):
        check_writable("--json", json_file.absolute())
    began = time.perf_counter()
    import torch

    from pagedcli.bench.micro import copy_bandwidth, run_cases
    from pagedcli.bench.micro_cases import HEADS, figure_18a, full_cases, quick_cases
    from pagedcli.bench.signature import make_signature
    from pagedcli.execution.placement import set_threads

    if threads is not None:
        set_threads(threads)
    bench, backend = _bench(device, attention_backend, dtype, full)
    cuda = bench.device.type == "cuda"
    signature = make_signature(
        {"kernels": "full" if full else "quick", "device": bench.device.type, "attention": backend,
         "dtype": str(bench.dtype).removeprefix("torch.")},
        device=torch.cuda.get_device_name(bench.device) if cuda else "", threads=torch.get_num_threads())
    deadline = time.perf_counter() + (float("inf") if full else QUICK_SECONDS)
    with torch.inference_mode():
        copy = copy_bandwidth(bench)
        typer.echo(f"copy bandwidth, read plus written: {copy / 1e9:.1f} GB/s")
        figure = run_cases(figure_18a(HEADS["opt-13b"]), bench, copy, deadline, against_one_block=True)
        _figure_table(figure.rows)
        rest = run_cases((full_cases if full else quick_cases)(cuda), bench, copy, deadline)
        _table(rest.rows)
    rows, skipped = (*figure.rows, *rest.rows), (*figure.skipped, *rest.skipped)
    _tell_skipped(skipped)
    wrong = [row for row in rows if not row.good]
    typer.echo(f"{counted(len(rows), 'row')}, {len(wrong)} with wrong outputs, {len(skipped)} skipped, in "
               f"{time.perf_counter() - began:.0f} s")
    typer.echo(signature.text)
    if json_file is not None:
        record = {"signature": signature.text, **signature.as_dict(), "copy_gigabytes_per_second": copy / 1e9,
                  "figure_18a": [row.record() for row in figure.rows],
                  "rows": [row.record() for row in rest.rows],
                  "skipped": [{"case": item.case, "why": item.why} for item in skipped]}
        json_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        typer.echo(f"wrote {json_file}")
    if wrong:
        raise typer.Exit(ExitStatus.ROW_ERRORS)


def _bench(device: str, attention: str, dtype: str, full: bool) -> tuple[Bench, str]:
    """Where to measure and the name of the backend. CannotRunError or UsageError as for `generate`."""
    from pagedcli.attention.backends import make_backend
    from pagedcli.bench.micro import Bench
    from pagedcli.execution.host_memory import free_memory
    from pagedcli.execution.placement import pick_device, pick_dtype, torch_device, torch_dtype

    place = torch_device(pick_device(device, attention))
    name = place.type if attention == "auto" else attention

    def make(kernel: str | None) -> Any:
        return make_backend(name) if kernel is None else make_backend(name, decode_kernel=kernel)

    cuda = place.type == "cuda"
    cycle = (FULL_CYCLE if full else QUICK_CYCLE) * (4 if cuda else 1)  # beyond the L2 cache of any GPU
    bench = Bench(place, torch_dtype(pick_dtype(dtype, place)), make, cycle,
                  int(free_memory(place) * (0.8 if cuda else 0.3)), 1.0 if full else 0.25)
    make(None)  # whatever is missing is told before anything is measured
    return bench, name


def _figure_table(rows: Sequence[Row]) -> None:
    """Figure 18a. The paper's kernel took 20-26 % longer than FasterTransformer's on an A100."""
    lines = [(str(row.batch), str(row.context_tokens), f"{row.paged_microseconds:,.0f}",
              f"{row.contiguous_microseconds:,.0f}", f"{row.paged_over_contiguous:.2f}",
              "-" if row.one_block_microseconds is None else f"{row.one_block_microseconds:,.0f}",
              "-" if row.one_block_microseconds is None
              else f"{row.paged_microseconds / row.one_block_microseconds:.2f}") for row in rows]
    _print("Figure 18a: decode attention of one OPT-13B layer, blocks of 16 tokens (the paper: 1.20-1.26x on an A100)",
           ("batch,\nsequences", "context,\ntokens", "paged,\nus", "contiguous,\nus", "paged /\ncontiguous, x",
            "one block\neach, us", "paged /\none block, x"), lines)


def _table(rows: Sequence[Row]) -> None:
    lines = [(row.kernel, f"{row.heads}/{row.kv_heads} x {row.head_dim}", str(row.batch), f"{row.context_tokens:,}",
              str(row.block_tokens), f"{row.paged_microseconds:,.0f}", f"{row.contiguous_microseconds:,.0f}",
              f"{row.paged_over_contiguous:.2f}", f"{row.kv_gigabytes_per_second:,.2f}",
              f"{row.share_of_copy_bandwidth * 100:.0f}", f"{row.gigaflops:,.0f}",
              f"{row.relative_error:.0e}" + ("" if row.good else " WRONG")) for row in rows]
    _print("Attention kernels, one layer a call",
           ("kernel", "heads q/kv\nx head size", "batch,\nseqs", "context,\ntokens", "block,\ntokens", "paged,\nus",
            "contig.,\nus", "paged /\ncontig., x", "K and V,\nGB/s", "of copy\nrate, %", "sums,\nGFLOP/s",
            "error,\nrelative"), lines)


def _print(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", pad_edge=False, box=box.SIMPLE)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place == 0 else "right", no_wrap="\n" in heading)
    for line in lines:
        table.add_row(*line)
    Console(highlight=False, width=None if Console().is_terminal else 130).print(table, markup=False)


def _tell_skipped(skipped: Sequence[Skipped]) -> None:
    """One line a reason, with the first case and how many more."""
    reasons: dict[str, list[str]] = {}
    for item in skipped:
        reasons.setdefault(item.why, []).append(item.case)
    for why, cases in reasons.items():
        more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
        typer.echo(f"skipped: {cases[0]}{more}: {why}")
