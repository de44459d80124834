"""`pagedcli generate --ray`: the part of a job that runs on several engines, and what is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pagedcli.cli.environment import Environment
from pagedcli.cli.help_text import GroupedHelp
from pagedcli.cli.render import progress_bar
from pagedcli.cli.running import Stopwatch, stopping_on_signals
from pagedcli.core.config import RunConfig
from pagedcli.core.errors import UsageError

if TYPE_CHECKING:
    from pagedcli.engine.interface import Counters
    from pagedcli.execution.interface import ExecutorInfo, ExecutorLimits
    from pagedcli.generate.journal import Journal
    from pagedcli.generate.source import InputRows, Scan


@dataclass(frozen=True, slots=True)
class FleetChoice:
    """Where replicas run and how many; `replicas` None leaves that to the cluster."""

    address: str
    replicas: int | None


@dataclass(frozen=True, slots=True)
class Ran:
    """What ran a job, for its summary."""

    info: ExecutorInfo
    limits: ExecutorLimits
    counters: Counters
    notes: tuple[str, ...]


class RayCommand(GroupedHelp):
    """Lets --ray stand without an address, which means a cluster of this job's own on this machine."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = []
        for place, word in enumerate(args):
            words.append(word)
            if word == "--ray" and not _is_address(args[place + 1] if place + 1 < len(args) else ""):
                words[-1] = "--ray=local"
        return super().parse_args(ctx, words)


def _is_address(word: str) -> bool:
    """Whether what follows --ray is its address: auto, local, ray://..., or HOST:PORT."""
    if word in ("auto", "local") or word.startswith("ray://"):
        return True
    host, _, port = word.rpartition(":")
    return bool(host) and port.isdigit()


def fleet_choice(ray: str | None, replicas: int | None) -> FleetChoice | None:
    """What --ray and --replicas ask for together; None without them."""
    if ray is None:
        if replicas is not None:
            raise UsageError(f"--replicas = {replicas}: several engines run by Ray only; add --ray, or --ray ADDRESS")
        return None
    return FleetChoice(ray, replicas)


def serve_fleet(environment: Environment, choice: FleetChoice, config: RunConfig, sampling: Mapping[str, Any],
                shared_prefix: str | None, source: InputRows, scan: Scan, journal: Journal, watch: Stopwatch,
                *, interactive: bool, quiet: bool) -> Ran:
    """Run all rows on replicas. Raises PagedError; the journal then holds the rows that finished."""
    from pagedcli.generate.fleet import FleetJob
    from pagedcli.generate.ray_crew import RayCrew
    from pagedcli.generate.reader import RowReader, driver_reader
    from pagedcli.generate.replica import Ready

    say = (lambda line: None) if quiet else environment.say
    def reading(ready: Ready) -> RowReader:
        assert ready.limits is not None, "it has started"
        return driver_reader(config, sampling, shared_prefix, source, scan, journal, ready.limits)

    say(f"starting Ray ({choice.address})")
    with closing(RayCrew(choice.address, choice.replicas, config, sampling, shared_prefix)) as crew:
        watch.lap("build")
        with progress_bar(environment, interactive) as observer:
            job = FleetJob(source, scan, crew, crew.replicas, journal, observer, say,
                           reading if config.finds_prefixes else None)
            with stopping_on_signals(job.stop):
                job.run()
        ready = job.first_ready()
        assert ready is not None and ready.info is not None and ready.limits is not None, "rows were served"
        limits = replace(ready.limits, num_blocks=crew.replicas * ready.limits.num_blocks)
        return Ran(ready.info, limits, job.counters(), (*ready.notes, *job.lines()))
