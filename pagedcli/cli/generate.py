"""`pagedcli generate`: the order of a batch job's steps, and what the user is told at each."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedcli import __version__
from pagedcli.cli.environment import Environment, environment_of
from pagedcli.cli.fleet import FleetChoice, Ran, RayCommand, fleet_choice, serve_fleet
from pagedcli.cli.options import ENGINE_OPTIONS, SAMPLING_OPTIONS, idle_note, run_config, sampling_fields, with_options
from pagedcli.cli.paths import Target, find_target, summary_path
from pagedcli.cli.publish import publish
from pagedcli.cli.ranks import leading_ranks
from pagedcli.cli.render import progress_bar, summary_lines
from pagedcli.cli.running import Stopwatch, stopping_on_signals
from pagedcli.core.config import RunConfig
from pagedcli.core.errors import CannotRunError, ExitStatus, UsageError
from pagedcli.core.wording import counted

if TYPE_CHECKING:
    from pagedcli.generate.journal import Journal
    from pagedcli.generate.sampling import SamplingDefaults
    from pagedcli.generate.source import InputRows, Scan
    from pagedcli.generate.summary import Summary

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
                  context_settings={"help_option_names": ["-h", "--help"]})
FILES, MANY = "Files", "Many machines"


@dataclass(frozen=True, slots=True)
class Plan:
    """A job as asked for, before anything heavy is loaded."""

    config: RunConfig
    sampling: Mapping[str, Any]
    target: Target
    limit: int | None
    restart: bool
    shared_prefix: str | None
    interactive: bool
    quiet: bool
    fleet: FleetChoice | None = None

    def header(self, scan: Scan) -> dict[str, Any]:
        """What the journal must agree with: all that decides the bytes of a row.

        Settings that only change speed are left out while the engine keeps its promise of the same bits.
        """
        config = asdict(self.config)
        if self.config.model.same_bits:
            del config["model"]["threads"], config["scheduler"]
            for name in ("swap_space", "prefix_cache", "watermark", "gpu_memory_utilization"):
                del config["cache"][name]
        return {"version": __version__, "input": {"content": scan.digest, "rows": scan.rows}, "limit": self.limit,
                "sampling": dict(self.sampling), "shared_prefix": self.shared_prefix, **config}


@app.command(cls=RayCommand)
@with_options(*ENGINE_OPTIONS, *SAMPLING_OPTIONS, config_file=True)
def generate(
    context: typer.Context,
    input: Annotated[str, typer.Argument(metavar="INPUT", help="JSON Lines of prompts; - is standard input.")],
    output: Annotated[str | None, typer.Option(
        "--output", "-o", metavar="OUT", rich_help_panel=FILES, envvar="PAGEDCLI_OUTPUT", show_envvar=False,
        help="Where rows go, in input order; - is standard output. Default: INPUT with .out.jsonl for its .jsonl, or "
             "after any other name.")] = None,
    overwrite: Annotated[bool, typer.Option(
        "--overwrite", rich_help_panel=FILES, envvar="PAGEDCLI_OVERWRITE", show_envvar=False,
        help="Replace an output that exists, once all rows are done.")] = False,
    restart: Annotated[bool, typer.Option(
        "--restart", rich_help_panel=FILES, envvar="PAGEDCLI_RESTART", show_envvar=False,
        help="Throw away the journal (OUT.partial) of an unfinished run instead of going on with it.")] = False,
    limit: Annotated[int | None, typer.Option(
        "--limit", min=1, rich_help_panel=FILES, envvar="PAGEDCLI_LIMIT", show_envvar=False,
        help="Only the first so many rows.")] = None,
    quiet: Annotated[bool, typer.Option(
        "--quiet", "-q", rich_help_panel=FILES, envvar="PAGEDCLI_QUIET", show_envvar=False,
        help="No progress bar and no summary; errors are still told.")] = False,
    json_summary: Annotated[str | None, typer.Option(
        "--json-summary", metavar="FILE", rich_help_panel=FILES, envvar="PAGEDCLI_JSON_SUMMARY", show_envvar=False,
        help="Write the summary as JSON to FILE.")] = None,
    shared_prefix: Annotated[str | None, typer.Option(
        "--shared-prefix", metavar="FILE", rich_help_panel=FILES, envvar="PAGEDCLI_SHARED_PREFIX", show_envvar=False,
        help="Text that many prompts begin with: computed once and kept in the KV cache.")] = None,
    ray: Annotated[str | None, typer.Option(
        "--ray", metavar="[ADDRESS]", rich_help_panel=MANY, envvar="PAGEDCLI_RAY", show_envvar=False,
        help="Run several engines by Ray: at HOST:PORT, ray://..., auto, or (without an address) on this machine.",
    )] = None,
    replicas: Annotated[int | None, typer.Option(
        "--replicas", min=1, rich_help_panel=MANY, envvar="PAGEDCLI_REPLICAS", show_envvar=False,
        help="Engines that --ray runs. Default: as many as there are GPUs for, else one a machine.")] = None,
    settings: dict[str, Any] = {},  # noqa: B006 - filled in by with_options
) -> None:
    """Answer every prompt of INPUT (JSON Lines) and write one row for each, in input order.

    A row is {"prompt": text}, {"prompt_token_ids": [...]}, {"messages": [...]} or an OpenAI batch request; it may set
    any sampling field itself. A bad row gives an error row and the rest go on (exit status 1). Finished rows are kept
    in OUT.partial: a run that was stopped goes on where it was when the same command is given again.

    A row comes out in the shape it went in: an OpenAI request as OpenAI's response row, every other row with the lists
    and numbers of this tool (outputs, usage, error).

    max_tokens that nobody sets is 256, cut to what the model and the KV pool allow; one that is set and cannot fit
    gives an error row. Prompt plus max_tokens may not exceed the model's limit.

    Every option can be set by an environment variable (PAGEDCLI_MAX_TOKENS=16) or in a --config file; the command line
    wins over the environment, that over the file.
    """
    environment = environment_of(context)
    target = find_target(input, output, overwrite)
    summary_file = None if json_summary is None else summary_path(json_summary, input, target, overwrite)
    config = run_config(settings)
    with leading_ranks(config.model.tensor_parallel_size, environment.variables):
        plan = Plan(config, sampling_fields(settings), target, limit, restart,
                    _read_prefix(shared_prefix), environment.interactive and not quiet, quiet,
                    fleet_choice(ray, replicas))
        summary = run(environment, plan, input)
    idle = idle_note(settings)
    if idle is not None:
        summary = replace(summary, notes=(*summary.notes, idle))
    if summary_file is not None:
        _write_summary(summary_file, summary)
    if not quiet:
        for line in summary_lines(summary):
            environment.say(line)
    elif summary.failed:
        environment.say(f"pagedcli: {summary.notes[0]}")
    raise typer.Exit(ExitStatus.ROW_ERRORS if summary.failed else ExitStatus.OK)


def run(environment: Environment, plan: Plan, input_path: str) -> Summary:
    """The job from input to output. Raises PagedError; a journal with rows in it is then kept."""
    from pagedcli.generate.journal import Journal
    from pagedcli.generate.sampling import SamplingDefaults
    from pagedcli.generate.source import InputRows
    from pagedcli.generate.summary import fault_note, models_note

    watch = Stopwatch(environment)
    defaults = SamplingDefaults(plan.sampling)
    watch.lap("import")
    with closing(InputRows.open(input_path, environment.stdin, plan.limit)) as source:
        scan = source.scan()
        header = plan.header(scan)
        watch.lap("scan")
        path = plan.target.journal(header)
        with closing(Journal(path, header, scan.rows, plan.restart)) as journal, _told_how_to_go_on(journal):
            if journal.resumed and not plan.quiet:
                environment.say(f"going on with {path}: {journal.resumed:,} of {counted(scan.rows, 'row')} done")
            summary = _serve(environment, plan, source, scan, journal, defaults, watch)
            notes = fault_note(journal), models_note(scan, summary.signature.get("model", plan.config.model.model))
    return replace(summary, notes=(*(note for note in notes if note is not None), *summary.notes))


def _serve(environment: Environment, plan: Plan, source: InputRows, scan: Scan, journal: Journal,
           defaults: SamplingDefaults, watch: Stopwatch) -> Summary:
    from pagedcli.generate.summary import summarise

    if journal.complete:
        publish(environment, plan.target, journal)
        watch.lap("order")
        return _nothing_run(plan, journal, watch)
    if plan.fleet is not None:
        ran = serve_fleet(environment, plan.fleet, plan.config, plan.sampling, plan.shared_prefix, source, scan,
                          journal, watch, interactive=plan.interactive, quiet=plan.quiet)
    else:
        ran = _serve_one(environment, plan, source, scan, journal, defaults, watch)
    watch.lap("generate")
    publish(environment, plan.target, journal)
    watch.lap("order")
    info, limits = ran.info, ran.limits
    signature = {"version": __version__, "model": info.model, "policy": plan.config.policy, "seed": plan.config.seed,
                 "device": info.device, "dtype": info.dtype, "kv_dtype": info.kv_dtype, "attention": info.attention,
                 "threads": info.threads, "block_size": limits.block_size,
                 **_many(plan), "sampling": dict(plan.sampling)}
    return summarise(rows=journal.rows, failed=journal.failed, resumed=journal.resumed, counters=ran.counters,
                     limits=limits, notes=ran.notes, seconds=watch.seconds(info.load_seconds), signature=signature,
                     peak_memory_bytes=_peak_memory())


def _many(plan: Plan) -> dict[str, int]:
    """What the signature says of a run on more than one device."""
    size = plan.config.model.tensor_parallel_size
    return {"tensor_parallel": size} if size > 1 else {}


def _serve_one(environment: Environment, plan: Plan, source: InputRows, scan: Scan, journal: Journal,
               defaults: SamplingDefaults, watch: Stopwatch) -> Ran:
    """All rows on an engine in this process."""
    from pagedcli.generate.fleet import ran_on
    from pagedcli.generate.job import Job
    from pagedcli.generate.replica import pin_shared_prefix, prefix_tokens
    from pagedcli.generate.tokens import TextCodec

    engine = environment.build_engine(plan.config, None if plan.quiet else environment.say)
    try:
        journal.confirm(ran_on(engine.executor.info, engine.executor.limits.vocab_size))
        codec = None if engine.tokenizer is None else TextCodec(engine.tokenizer)
        notes = () if plan.shared_prefix is None else (pin_shared_prefix(engine, codec, plan.shared_prefix),)
        watch.lap("build")
        with progress_bar(environment, plan.interactive) as observer:
            job = Job(source, scan, engine, codec, journal, defaults, observer, plan.config.finds_prefixes,
                      prefix_tokens(codec, plan.shared_prefix))
            with stopping_on_signals(job.stop):
                job.run()
        info = engine.executor.info
        return Ran(info, engine.executor.limits, engine.counters, (*info.notes, *notes))
    finally:
        engine.close()


def _nothing_run(plan: Plan, journal: Journal, watch: Stopwatch) -> Summary:
    """Every row was in the journal already, or there is none, so no model was loaded."""
    from pagedcli.generate.summary import Summary

    why = "all rows were done already" if journal.rows else "the input has no rows"
    signature = {"version": __version__, "policy": plan.config.policy, "seed": plan.config.seed,
                 **(journal.ran_on or {}), "sampling": dict(plan.sampling)}
    return Summary(rows=journal.rows, good=journal.rows - journal.failed, failed=journal.failed,
                   resumed=journal.resumed, seconds=watch.seconds({}), signature=signature,
                   peak_memory_bytes=_peak_memory(), notes=(f"{why}; nothing was generated",))


@contextmanager
def _told_how_to_go_on(journal: Journal) -> Iterator[None]:
    from pagedcli.generate.job import Interrupted

    try:
        yield
    except (KeyboardInterrupt, Interrupted) as fault:
        journal.flush()
        if journal.finished == 0:
            raise Interrupted("interrupted before any row was done; nothing is kept") from fault
        raise Interrupted(f"interrupted: {journal.finished:,} of {counted(journal.rows, 'row')} done and kept in "
                          f"{journal.path}. Give the same command again to go on; --restart starts anew") from fault


def _read_prefix(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as fault:
        raise UsageError(f"cannot read --shared-prefix {path}: {fault.strerror}") from fault
    except UnicodeDecodeError as fault:
        raise UsageError(f"--shared-prefix {path} is not UTF-8 text (byte {fault.start})") from fault


def _write_summary(path: Path, summary: Summary) -> None:
    text = json.dumps(summary.record(), indent=2, ensure_ascii=False) + "\n"
    whole = not path.exists() or path.is_file()  # else a pipe or a terminal, which no file can take the place of
    draft = path.with_name(f".{path.name}.draft") if whole else path
    try:
        draft.write_text(text, encoding="utf-8")
        if whole:
            draft.replace(path)
    except OSError as fault:
        if whole:
            with suppress(OSError):
                draft.unlink()
        raise CannotRunError(f"cannot write --json-summary {path}: {fault.strerror}; the output is complete",
                             "no_summary") from fault


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
