"""Which settings there are, so that a misspelt one is refused and not passed over."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping

import typer

from pagedcli.core.errors import UsageError

PREFIX = "PAGEDCLI_"
CONFIGURED = ("generate", "bench")
"""Commands whose options can be set by the environment and by a --config file."""

_VARIABLES = ("CACHE", "CUDA_CACHE", "DEBUG", "EMULATOR_CACHE", "FUZZ_JOBS")
"""Variables that are no options: folders of caches, tracebacks, and what the tests read."""

_NEAR = 0.75
"""Least likeness (difflib's ratio) of a name that is worth suggesting; at its 0.6, `input` is like `min_p`."""


def option_names(command: str) -> frozenset[str]:
    """Parameter names of one of CONFIGURED's options."""
    found = typer.main.get_command(importlib.import_module(f"pagedcli.cli.{command}").app)
    return frozenset(param.name or "" for param in found.params if param.param_type_name == "option")


def suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`; did you mean ...?` when something known is near, else nothing. `prefix` begins every name, and says nothing
    of how near two are."""
    close = difflib.get_close_matches(name, list(known), 1, _NEAR)
    return f"; did you mean {prefix + close[0]!r}?" if close else ""


def check_variables(variables: Mapping[str, str]) -> None:
    """UsageError for a variable that begins with PAGEDCLI_ and is no setting of any command."""
    given = [name for name in variables if name.startswith(PREFIX)]
    if not given:
        return
    options = frozenset().union(*map(option_names, CONFIGURED))
    known = {name.upper() for name in (*options, *_VARIABLES)}
    for name in given:
        own = name.removeprefix(PREFIX)
        if own not in known:
            raise UsageError(f"the environment variable {name} is no setting of pagedcli"
                             f"{suggestion(own, known, PREFIX) or ': unset it'}")
