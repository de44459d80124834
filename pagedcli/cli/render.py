"""What a person sees of a job: the progress bar and the summary, on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pagedcli.cli.environment import Environment
from pagedcli.core.wording import counted

if TYPE_CHECKING:
    from pagedcli.generate.job import Observer, Progress
    from pagedcli.generate.summary import Summary


@contextmanager
def progress_bar(environment: Environment, wanted: bool) -> Iterator[Observer | None]:
    """An observer that draws a bar, or None where nobody looks."""
    if not (wanted and environment.interactive):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(file=environment.err, force_terminal=True)
    bar = Bar(TextColumn("{task.completed}/{task.total} rows"), BarColumn(), TimeRemainingColumn(),
              TextColumn("{task.fields[state]}"), console=console, transient=True)
    with bar:
        task = bar.add_task("rows", total=None, state="")

        def draw(now: Progress) -> None:
            bar.update(task, completed=now.rows, total=now.total, state=state_line(now))

        yield draw


def state_line(now: Progress) -> str:
    """Rates, KV use and queue in one line."""
    seconds = max(now.seconds, 1e-9)
    failed = f" · {now.failed} failed" if now.failed else ""
    replicas = "".join(f"\n{line}" for line in now.replicas)
    return (f"in {now.prompt_tokens / seconds:,.0f} tok/s · out {now.output_tokens / seconds:,.0f} tok/s · "
            f"KV {now.kv_used:.0%} · {now.running} running, {now.waiting} waiting{failed}{replicas}")


def summary_lines(summary: Summary) -> list[str]:
    """The summary as aligned lines of text."""
    seconds, waste = summary.seconds, summary.waste
    unused = 1 - waste.get("token", 0.0) - waste.get("free", 0.0) if waste else 0.0
    resumed = f", {summary.resumed} of them from the journal" if summary.resumed else ""
    ahead = f" ({counted(summary.warmed_tokens, 'token')} computed ahead)" if summary.warmed_tokens else ""
    lines = [
        ("rows", f"{summary.good} good, {summary.failed} failed{resumed}"),
        ("tokens", f"{summary.prompt_tokens:,} in at {summary.prompt_tokens_per_s:,.1f}/s, "
                   f"{summary.output_tokens:,} out at {summary.output_tokens_per_s:,.1f}/s"),
        ("KV cache", f"peak {summary.peak_kv_use:.1%} of {counted(summary.kv_blocks, 'block')} "
                     f"({_size(summary.kv_bytes)}), waste {unused:.1%} of the pool on average"),
        ("sharing", f"prefix hit rate {summary.prefix_hit_rate:.1%}{ahead}, blocks saved by sharing "
                    f"{summary.sharing_saving:.1%}, {summary.block_copies} copied"),
        ("preemptions", f"{summary.preemptions.get('recompute', 0)} by recompute, {summary.preemptions.get('swap', 0)} "
                        f"by swap ({summary.preemptions.get('swap_fallbacks', 0)} fell back)"),
        ("time", ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())),
        ("signature", signature_line(summary.signature)),
    ]
    width = max(len(name) for name, _ in lines)
    return [f"{name:<{width}}  {text}" for name, text in lines] + [f"note: {note}" for note in summary.notes]


def signature_line(signature: Any) -> str:
    """What the run was, in one line fit to stand beside its figures."""
    parts = [f"pagedcli {signature.get('version')}"]
    parts += [f"{name}={value}" for name, value in signature.items() if name not in ("version", "sampling")]
    parts += [f"{name}={value}" for name, value in signature.get("sampling", {}).items()]
    return " ".join(parts)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
