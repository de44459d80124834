"""`pagedcli calibrate`: fit the simulator to a measured trace, or to this machine's own engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedcli.cli.bounds import at_least_one, check_writable
from pagedcli.cli.options import MAX_BLOCK_SIZE
from pagedcli.core.errors import UsageError
from pagedcli.core.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagedcli.bench.calibrate import Calibration

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
                  context_settings={"help_option_names": ["-h", "--help"]})


_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""What TOML takes for a table's name without quotes."""


@app.command()
def calibrate(
    context: typer.Context,
    trace: Annotated[Path | None, typer.Argument(help="Per-request trace: JSON Lines or CSV with lengths, arrival, "
                                                 "first and last token times (vLLM's field names).")] = None,
    from_run: Annotated[Path | None, typer.Option(help="Fit to the steps of this `pagedcli bench` results folder "
                                                  "instead.")] = None,
    hardware: Annotated[str, typer.Option(help="Device that the trace was measured on.")] = "rtx4090",
    model: Annotated[str, typer.Option(help="Model that the trace was measured with.")] = "llama3-8b",
    tensor_parallel_size: Annotated[int, typer.Option(help="Devices that shared each layer.")] = 1,
    num_kv_blocks: Annotated[int | None, typer.Option(help="Blocks of the measured server's pool (its log has it). "
                                                      "Default: fitted too.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens a KV block.")] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Token budget of a step on the server.")] = 2048,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences at once on the server.")] = 256,
    train: Annotated[int | None, typer.Option(help="Requests of the held-out check's fit. Default: a quarter.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Hardware file to write, for --simulate.")]
    = Path("calibrated.toml"),
) -> None:
    """Fit the cost model and write a hardware file that `bench --simulate FILE` and `plan --hardware FILE` take.

    With a trace, the scheduler is simulated under all its arrivals; the error is the mean over mean, p50, p90 and p99
    of TTFT, TPOT, E2E and normalized latency. It is printed for a fit to all requests, and for one to the first quarter
    judged on the rest, which it never saw.
    """
    if (trace is None) == (from_run is None):
        raise UsageError("give a TRACE, or --from-run with a results folder")
    if from_run is not None:
        sources = {name: context.get_parameter_source(name) for name in context.params}
        idle = [name for name, source in sources.items() if name not in ("trace", "from_run", "output")
                and source is not None and source.name == "COMMANDLINE"]
        if idle:
            raise UsageError(f"--{idle[0].replace('_', '-')} describes a trace's server: --from-run knows what its run "
                             "was made with; leave it out")
    for option, number in (("--tensor-parallel-size", tensor_parallel_size), ("--num-kv-blocks", num_kv_blocks),
                           ("--block-size", block_size)):
        at_least_one(option, number)
    if block_size > MAX_BLOCK_SIZE:
        raise UsageError(f"--block-size = {block_size}: must be at most {MAX_BLOCK_SIZE}")
    _check_output(output, trace)
    if from_run is not None:
        _from_run(from_run, output)
        return
    from dataclasses import replace

    from pagedcli.bench.calibrate import calibrated_hardware, check_split, fit_both, vllm_config
    from pagedcli.bench.calibrate_trace import read_trace
    from pagedcli.execution.hardware import find_hardware, hardware_toml
    from pagedcli.execution.shapes import resolve_shape
    from pagedcli.execution.simulated import Deployment

    assert trace is not None
    measured, device = read_trace(trace), find_hardware(hardware)
    count = check_split(measured, train)
    deployment = Deployment(device, resolve_shape(model), tensor_parallel_size, block_size, num_blocks=num_kv_blocks,
                            utilization=0.9)
    deployment = replace(deployment, num_blocks=deployment.blocks)
    config = vllm_config(max_num_batched_tokens, max_num_seqs)
    seek = num_kv_blocks is None
    if seek:
        typer.echo("the server's KV pool is fitted too, some minutes; --num-kv-blocks N saves that", err=True)
    whole, part = fit_both(measured, deployment, config, count, seek_pool=seek)
    _print_fit(whole, part, count, len(measured), fitted_pool=seek)
    entry = calibrated_hardware(device, output.stem, whole, measured, whole.blocks)
    output.write_text(hardware_toml(entry, f"Written by `pagedcli calibrate`; {entry.calibrated}."), "utf-8")
    typer.echo(f"wrote {output}: use it with --simulate {output}")


def _check_output(output: Path, trace: Path | None) -> None:
    """UsageError, before the fit, for a file that cannot be written or not be read back."""
    if output.suffix != ".toml" and not output.is_dir():
        raise UsageError(f"--output {output}: must end in .toml, by which --simulate and --hardware tell a file from "
                         "a device's name")
    check_writable("--output", output)
    if not _NAME.fullmatch(output.stem) or output.stem == "default":
        raise UsageError(f"--output {output}: {output.stem!r} names the device in it: must be letters, digits, _ and "
                         "- only, and not 'default'")
    if trace is not None and trace.exists() and output.exists() and trace.samefile(output):
        raise UsageError(f"--output {output} is the trace itself: choose another file", "unwritable_output")


def _print_fit(whole: Calibration, part: Calibration, count: int, total: int, *, fitted_pool: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if Console().is_terminal else 120)
    assert part.held_out is not None
    columns: list[tuple[str, Mapping[str, float], Mapping[str, float]]] = [
        (f"fitted on all {total}", whole.measured, whole.simulated),
        (f"fitted on {count}, judged on {total - count}", *part.held_out)]
    table = Table(pad_edge=False, title="simulated against measured", title_justify="left")
    table.add_column("figure")
    for title, _, _ in columns:
        for heading in (f"measured\n({title})", "simulated", "error"):
            table.add_column(heading, justify="right")
    for name in whole.measured:
        cells = [name]
        for _, measured, simulated in columns:
            cells += [f"{measured[name]:.4g}", f"{simulated[name]:.4g}", f"{simulated[name] / measured[name] - 1:+.1%}"]
        table.add_row(*cells)
    console.print(table)
    mean, most = whole.pool_use()
    console.print(f"mean absolute error, fitted on all {total}: {whole.error:.2%}")
    console.print(f"mean absolute error, fitted on the first {count}, judged on the other {total - count}: "
                  f"{part.held_out_error:.2%}")
    pool = counted(whole.blocks, "block") + (f" (fitted; {part.blocks} by the first {count})" if fitted_pool else "")
    console.print(f"preemptions: {whole.preemptions}; KV pool of {pool}: {mean:.1%} held on average, "
                  f"{most:.1%} at most")
    for name, value in whole.coefficients.as_dict().items():
        console.print(f"  {name} = {value:.6g}")


def _from_run(folder: Path, output: Path) -> None:
    from pagedcli.bench.calibrate_run import fit_run, replay_runs, settings_of
    from pagedcli.bench.storage import read_results
    from pagedcli.execution.hardware import hardware_toml
    from pagedcli.execution.shapes import resolve_shape

    results = read_results(folder)
    shape = resolve_shape(settings_of(results)["model"])
    fit = fit_run(results, shape, output.stem)
    typer.echo(f"fitted to {counted(fit.steps, 'step')}: median error of a step {fit.median_error:.1%}, of all time "
               f"together {fit.total_error:+.1%}")
    for run in replay_runs(results, fit.hardware):
        typer.echo(f"rate {run.rate:g} req/s: normalized latency measured {run.measured:.4f}, simulated "
                   f"{run.simulated:.4f} s/token ({run.error:+.1%}); output {run.measured_throughput:.1f} and "
                   f"{run.simulated_throughput:.1f} tokens/s")
    output.write_text(hardware_toml(fit.hardware, f"Written by `pagedcli calibrate --from-run`; "
                                    f"{fit.hardware.calibrated}."), "utf-8")
    typer.echo(f"wrote {output}: use it with --simulate {output}")
