"""`pagedcli bench`: replay a workload under several memory systems and report what each made of it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pagedcli.cli.bench_setup import BENCH_OPTIONS, Backend, Setup, load_backend, load_work, read_setup
from pagedcli.cli.bench_view import live, print_results, run_line
from pagedcli.cli.environment import Environment, environment_of
from pagedcli.cli.help_text import GroupedHelp
from pagedcli.cli.options import ENGINE_OPTIONS, SAMPLING_OPTIONS, with_options
from pagedcli.cli.ranks import leading_ranks
from pagedcli.cli.results_folder import check_folder, check_name
from pagedcli.core.errors import ExitStatus
from pagedcli.core.wording import counted

if TYPE_CHECKING:
    from pagedcli.bench.session import Session
    from pagedcli.bench.storage import Results, RunData
    from pagedcli.workloads.spec import Workload

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
                  context_settings={"help_option_names": ["-h", "--help"]})


@app.command(cls=GroupedHelp)
@with_options(*BENCH_OPTIONS, *ENGINE_OPTIONS, *SAMPLING_OPTIONS, config_file=True)
def bench(
    context: typer.Context,
    settings: dict[str, Any] = {},  # noqa: B006 - filled in by with_options
) -> None:
    """Serve a workload in real time through paged memory and through baselines, and compare them.

    Requests arrive at --rate whether or not the system keeps up; output lengths are forced to the workload's. Every
    policy gets the same requests at the same times, the same weights and the same KV pool, and starts with a cold
    prefix cache. By default the pool is small (4 sequences of the longest length), so that memory is what runs out.

    Writes summary.json, tables, plots and report.html into RESULTS/NAME.
    """
    environment = environment_of(context)
    setup = read_setup(settings)
    with leading_ranks(setup.config.model.tensor_parallel_size if setup.simulate is None else 1, environment.variables):
        _bench(environment, setup, settings)


def _bench(environment: Environment, setup: Setup, settings: dict[str, Any]) -> None:
    folder = Path(settings.get("results", "results"))
    name = settings.get("name")
    check_folder(folder)
    if name is not None:
        check_folder(folder / check_name(name), "--results and --name:")
    interrupted = False
    backend = load_backend(setup, environment.say)
    try:
        workload = load_work(setup, backend)
        environment.say(f"workload {workload.label}: {counted(len(workload.requests), 'request')}. {workload.source}")
        for note in (*workload.notes, *backend.executor.info.notes):
            environment.say(f"note: {note}")
        session = _session(setup, backend, workload)
        try:
            _run(environment, setup, session)
        except KeyboardInterrupt:
            interrupted = True
            if not session.runs:
                raise
            environment.say("interrupted: reporting the runs that ended")
        results = _results(setup, backend, workload, session)
    finally:
        backend.executor.close()
    print_results(results)
    _write(environment, results, folder, not settings.get("no_plots", False))
    # A run that was cut short is told, not failed, but one that measured nothing is.
    empty = [run for run in results.runs if not run.figures["completed"]]
    for run in empty:
        environment.say(f"{run.policy} measured nothing: no request was done; {_why_none(run)}")
    failed = bool(empty) or any(run.figures["failed"] and not run.figures["stopped"] for run in results.runs)
    raise typer.Exit(ExitStatus.INTERRUPTED if interrupted else ExitStatus.ROW_ERRORS if failed else ExitStatus.OK)


def _why_none(run: RunData) -> str:
    """What kept every request of a run from being done: its own fault, where it was not the end of the run."""
    faults = [(error, message) for error, message in zip(run.requests["error"], run.requests["error_message"],
                                                         strict=True) if error not in (None, "stopped")]
    if faults:
        return f"the first failed: {faults[0][1]}"
    if not len(run.requests["error"]):
        return "none arrived; raise --duration, --num-requests or --rate"
    if any(run.requests["ok"]):
        return "all that were done arrived before --drop-before; lower it"
    return "raise --time-limit, or lower --rate"


def _session(setup: Setup, backend: Backend, workload: Workload) -> Session:
    from pagedcli.bench.session import Session, make_requests

    tokenizer = backend.tokenizer
    avoid: frozenset[int] = frozenset() if tokenizer is None else getattr(tokenizer, "special_ids", frozenset())
    requests = make_requests(workload, backend.vocab_size, seed=setup.config.seed,
                             encode=None if tokenizer is None else tokenizer.encode, avoid=avoid, params=setup.params)
    return Session(setup.experiment, workload, requests, backend.runner_of)


def _run(environment: Environment, setup: Setup, session: Session) -> None:
    """All runs, or the search for capacity, told as they go."""
    from pagedcli.bench.figures import rate_text

    watched = not setup.settings.get("quiet", False)
    if setup.settings.get("find_capacity"):
        for policy in setup.experiment.policies:
            with live(environment, policy, watched) as observer:
                found = session.find_capacity(policy, observer)
            for item in found:
                if item.too_few:
                    environment.say(f"{policy}: {counted(len(session.requests), 'request')} served at {item.limit:g} "
                                    "s/token or less even when they arrive all but at once: too few to show a "
                                    "capacity: raise --num-requests")
                    continue
                environment.say(f"{policy}: {item.rate:.3g} req/s at {item.limit:g} s/token or less "
                                f"({len(item.probes)} rates tried)")
        return
    schedule = session.schedule()
    for number, (policy, rate, repeat) in enumerate(schedule, 1):
        asked = "trace times" if rate is None else rate_text(rate)
        with live(environment, f"{policy}, {asked} ({number}/{len(schedule)})", watched) as observer:
            run = session.run(policy, rate, repeat, observer)
        environment.say(run_line(run))


def _results(setup: Setup, backend: Backend, workload: Workload, session: Session) -> Results:
    from pagedcli.bench.signature import make_signature

    info, limits, config, experiment = backend.executor.info, backend.executor.limits, setup.config, setup.experiment
    asked: dict[str, Any] = {
        "workload": workload.label, "requests": len(workload.requests), "policy": experiment.policy,
        "baselines": list(experiment.baselines) or None,
        "rates": ["trace" if rate is None else rate for rate in experiment.rates], "burstiness": experiment.burstiness,
        "duration_s": experiment.duration, "repeats": experiment.repeats, "seed": experiment.seed,
        "model": info.model, "load_format": config.model.load_format, "dtype": info.dtype, "kv_dtype": info.kv_dtype,
        "attention": info.attention, "max_model_len": backend.max_len, "block_size": limits.block_size,
        "kv_blocks": limits.num_blocks, "prefix_cache": config.cache.prefix_cache,
        "idle_kv_share": config.cache.idle_share,
        "chunked_prefill": config.scheduler.chunked_prefill, "max_num_seqs": config.scheduler.max_num_seqs,
        "token_budget": config.scheduler.token_budget, "preemption": config.scheduler.preemption,
        "n": setup.params.n, "beam_width": setup.params.width if setup.params.use_beam_search else None,
        "temperature": setup.params.temperature, "simulate": setup.simulate,
        "swap_space": config.cache.swap_space if "swap_space" in setup.settings else None,
        "tensor_parallel": config.model.tensor_parallel_size if config.model.tensor_parallel_size > 1 else None,
    }
    signature = make_signature(asked, device=info.device, threads=info.threads)
    pool = limits.num_blocks * limits.bytes_per_block / 2**20
    told: dict[str, Any] = {
        "source": workload.source, "tokens counted by": workload.tokenizer, "load_format": config.model.load_format,
        "KV pool": f"{counted(limits.num_blocks, 'block')} of {counted(limits.block_size, 'token')} ({pool:.0f} MiB)",
        "mean prompt": _mean([row.prompt_len for row in workload.requests]),
        "mean output": _mean([row.output_len for row in workload.requests]),
        "rows dropped": ", ".join(f"{count} {why}" for why, count in workload.dropped.items()),
        "notes": _notes(config.model.load_format, workload, info.notes),
    }
    return session.results(_name(setup.settings, experiment.policies, workload), signature, told)


def _mean(lengths: list[int]) -> str:
    return f"{sum(lengths) / max(len(lengths), 1):.1f} tokens"


def _notes(load_format: str, workload: Workload, more: tuple[str, ...]) -> list[str]:
    notes = [note.replace(str(Path.home()), "~") for note in (workload.source, *workload.notes, *more)]
    if load_format == "dummy":
        notes.append("weights are random: output lengths are forced, so times and memory do not depend on them")
    return notes


def _name(settings: Mapping[str, Any], policies: tuple[str, ...], workload: Workload) -> str:
    given = settings.get("name")
    if given is not None:
        return str(given)
    return f"{workload.name}-{'-'.join(policies)}-{datetime.now():%Y%m%d-%H%M%S}"


def _write(environment: Environment, results: Results, folder: Path, plots: bool) -> None:
    from pagedcli.bench.report import PAGE, write_report

    _, remarks = write_report(results, folder / results.name, with_plots=plots)
    for remark in remarks:
        environment.say(remark)
    environment.say(f"report: {folder / results.name / PAGE}")
