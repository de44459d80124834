"""What a command touches of the outside, in one object that tests replace."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TextIO

from pagedcli.core.config import RunConfig

Say = Callable[[str], None]
EngineFactory = Callable[[RunConfig, Say | None], Any]
"""(config, where to announce slow work) -> engine."""


def _default_factory(config: RunConfig, say: Say | None) -> Any:
    from pagedcli.engine.build import build_engine

    return build_engine(config, progress=say)


@dataclass(slots=True)
class Environment:
    """Streams, variables and the engine factory of a command.

    `startup` is the time in seconds between the start of the process and the first line of the program.
    """

    build_engine: EngineFactory = _default_factory
    variables: Mapping[str, str] = field(default_factory=lambda: os.environ)
    startup: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    @property
    def stdin(self) -> BinaryIO:
        return sys.stdin.buffer

    @property
    def stdout(self) -> BinaryIO:
        return sys.stdout.buffer

    @property
    def err(self) -> TextIO:
        return sys.stderr

    @property
    def interactive(self) -> bool:
        """Whether a person watches standard error."""
        return self.err.isatty()

    def say(self, message: str) -> None:
        """One line for the user, on standard error."""
        print(message, file=self.err, flush=True)


def environment_of(context: Any) -> Environment:
    """The Environment that the command was invoked with, or the real one."""
    found = context.find_object(Environment)
    if found is None:
        found = context.find_root().obj = Environment()
        context.obj = found
    return found
