"""The `pagedcli` command: finds sub-commands lazily, turns faults into one message and an exit status."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from pagedcli import __version__
from pagedcli.cli.environment import Environment
from pagedcli.core.errors import ExitStatus, PagedError

_ClickError = typer.BadParameter.__mro__[2]  # ClickException, of whichever click this Typer brings


class Entry(NamedTuple):
    """Where a sub-command lives: an attribute of a module that holds a `typer.Typer`."""

    module: str
    attribute: str
    help: str


COMMANDS: dict[str, Entry] = {
    "generate": Entry("pagedcli.cli.generate", "app", "Answer every prompt of a file: JSON Lines in, JSON Lines out."),
    "bench": Entry("pagedcli.cli.bench", "app", "Measure serving under load: rates, memory policies, capacity."),
    "paper": Entry("pagedcli.cli.paper", "app", "Rerun the experiments of the PagedAttention paper."),
    "compare": Entry("pagedcli.cli.compare", "app", "Compare two results and say what changed beyond noise."),
    "kernels": Entry("pagedcli.cli.kernels", "app", "Check and time the attention kernels."),
    "plan": Entry("pagedcli.cli.plan", "app", "Work out memory and capacity for a model and a machine."),
    "calibrate": Entry("pagedcli.cli.calibrate", "app", "Fit the cost model to measured steps."),
    "workloads": Entry("pagedcli.cli.workloads", "app", "List the request workloads, or show the lengths of one."),
    "doctor": Entry("pagedcli.cli.doctor", "app", "Say what this machine can run."),
}
"""Sub-commands by name; one whose module is absent from the installation is not offered."""


class LazyGroup(TyperGroup):
    """Lists sub-commands from COMMANDS without importing them; imports the one that is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, entry in COMMANDS.items():
            if importlib.util.find_spec(entry.module) is not None:
                self.commands[name] = TyperCommand(name=name, help=entry.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name in COMMANDS and name in self.commands:
            entry = COMMANDS[name]
            command = typer.main.get_command(getattr(importlib.import_module(entry.module), entry.attribute))
            command.name = name
            self.commands[name] = command
        return super().resolve_command(ctx, args)

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, complete_var: str | None = None,
             standalone_mode: bool = True, windows_expand_args: bool = True, **extra: Any) -> Any:
        """As click's `main`, but every fault ends in one message and the status of conventions, never a traceback
        unless --debug stands somewhere on the command line."""
        words = list(sys.argv[1:] if args is None else args)
        words, debug = _take_debug(words)
        try:
            result = super().main(args=words, prog_name=prog_name or "pagedcli", complete_var=complete_var,
                                  standalone_mode=False, windows_expand_args=windows_expand_args, **extra)
            status = result if isinstance(result, int) else ExitStatus.OK
        except Exception as fault:
            if debug:
                traceback.print_exc()
            status = report(fault)
        if not standalone_mode:
            return status
        sys.exit(int(status))


def report(fault: Exception) -> int:
    """Tell the user about a fault on standard error; returns the exit status."""
    if isinstance(fault, _ClickError):
        if isinstance(fault, typer.BadParameter):
            name_value(fault)
        fault.show()  # type: ignore[attr-defined]  # click's own class, known only at run time
        return ExitStatus.USAGE
    if isinstance(fault, typer.Abort):
        _say("interrupted")
        return ExitStatus.INTERRUPTED
    if isinstance(fault, PagedError):
        _say(fault.message)
        return fault.exit_status
    if _out_of_memory(fault):
        details = f" ({fault})" if isinstance(fault, MemoryError) and str(fault) else ""
        _say(f"this machine ran out of memory{details}; lower --num-kv-blocks, --kv-cache-memory, "
             "--max-num-batched-tokens or --max-num-seqs")
    elif isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EDQUOT):
        _say(f"the disk is full: {fault}")
    else:
        _say(f"internal error: {type(fault).__name__}: {fault}; run again with --debug for the traceback, and please "
             "report it")
    return ExitStatus.CANNOT_RUN


def _out_of_memory(fault: Exception) -> bool:
    """Whether an allocation failed; torch's own errors are looked for only where torch is loaded."""
    if isinstance(fault, MemoryError) or "torch" not in sys.modules:
        return isinstance(fault, MemoryError)
    from pagedcli.execution.host_memory import is_out_of_memory

    return is_out_of_memory(fault)


def name_value(fault: typer.BadParameter) -> None:
    """Make the parser's message say which value it refused, and the environment variable where it came from one.

    The parser keeps the value in the error that it wraps; an error of ours wraps none and says it all itself.
    """
    cause: Any = fault.__cause__
    if fault.param is None or fault.ctx is None or not hasattr(cause, "errors"):
        return
    found = cause.errors()[0]
    value, reason = found.get("input"), found["msg"].removeprefix("Value error, ")
    if repr(value) not in reason:
        reason = f"{value!r}: {reason}"
    source = fault.ctx.get_parameter_source(fault.param.name or "")
    if source is not None and source.name == "ENVIRONMENT":
        reason += f" (from the environment variable {fault.param.envvar})"
    fault.message = reason


def _say(message: str) -> None:
    print(f"pagedcli: {message}", file=sys.stderr, flush=True)


def _take_debug(words: list[str]) -> tuple[list[str], bool]:
    """--debug is understood wherever it stands before `--`."""
    end = words.index("--") if "--" in words else len(words)
    kept = [word for word in words[:end] if word != "--debug"]
    debug = len(kept) < end or os.environ.get("PAGEDCLI_DEBUG", "") not in ("", "0", "false")
    return kept + words[end:], debug


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pagedcli {__version__}")
        raise typer.Exit()


app = typer.Typer(cls=LazyGroup, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True,
                                          help="Print the version and leave.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback with errors; may stand anywhere.")] = False,
) -> None:
    """Offline LLM batch generation on a paged KV cache, and the measurement of KV-cache memory.

    Exit status: 0 all rows good, 1 finished with error rows, 2 bad usage, 3 cannot run here, 130 interrupted.
    """
    del version, debug
    if context.obj is None:
        context.obj = Environment()


def main() -> None:
    """Entry point of the console script."""
    typer.main.get_command(app).main(prog_name="pagedcli", obj=Environment(startup=_since_process_start()))


def _since_process_start() -> float:
    """Seconds since the process began, from the kernel's books; 0 where they cannot be read."""
    try:
        with open("/proc/self/stat", "rb") as stream:
            ticks = int(stream.read().rpartition(b")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
