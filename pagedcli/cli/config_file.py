"""`--config FILE`: options from a TOML file, below the command line and the environment, above the defaults."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from pagedcli.cli.known import CONFIGURED, option_names, suggestion
from pagedcli.core.errors import UsageError

_NEVER = {"config", "context", "input"}


def config_parameter(others: Sequence[inspect.Parameter]) -> inspect.Parameter:
    """The --config option of a command with these other parameters; it is read before them so that they find its
    values."""
    kinds = {each.name: _kind(each.annotation) for each in others if each.name not in _NEVER}

    def load(context: typer.Context, value: str | None) -> str | None:
        if value is not None and not context.resilient_parsing:
            found = read_config(value, context.command.name or "", kinds)
            context.default_map = {**(context.default_map or {}), **found}
        return value

    info = typer.Option("--config", callback=load, is_eager=True, metavar="FILE", envvar="PAGEDCLI_CONFIG",
                        show_envvar=False, show_default=False,
                        help="TOML file of options, by their long names; a table named after the command counts more "
                             "than the top level.")
    return inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None,
                             annotation=Annotated[str | None, info])


def _kind(annotation: Any) -> Any:
    """The type of an option's value: `list[x]` for a repeatable one, without Annotated and None around it."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    inner = [each for each in get_args(annotation) if each is not type(None)]
    return inner[0] if type(None) in get_args(annotation) and len(inner) == 1 else annotation


def read_config(path: str, command: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a TOML file for one command, by parameter name. Raises UsageError naming the file and key."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as fault:
        raise UsageError(f"cannot read --config {path}: {fault.strerror}") from fault
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise UsageError(f"--config {path} is not TOML: {fault}") from fault
    values: dict[str, Any] = {}
    tables = {name for name, value in table.items() if isinstance(value, dict) and _name(name) not in kinds}
    for name in sorted(tables - {command}):
        _check_table(path, name, table[name])
    own = table[command] if command in tables else {}
    for name, value in [*((name, value) for name, value in table.items() if name not in tables), *own.items()]:
        if _name(name) not in kinds:
            raise UsageError(f"--config {path}: {command} has no option {name!r}{suggestion(_name(name), kinds)}")
        values[_name(name)] = _convert(path, name, value, kinds[_name(name)])
    return values


def _check_table(path: str, name: str, values: Mapping[str, Any]) -> None:
    """A table of another command counts for nothing now, but a misspelt one would count for nothing ever."""
    if name not in CONFIGURED:
        raise UsageError(f"--config {path}: no table [{name}]{suggestion(name, CONFIGURED)} (there are "
                         f"{' and '.join(f'[{each}]' for each in CONFIGURED)}, by the commands' names)")
    known = option_names(name) - _NEVER
    for key in values:
        if _name(key) not in known:
            raise UsageError(f"--config {path}: [{name}] has no option {key!r}{suggestion(_name(key), known)}")


def _name(key: str) -> str:
    return key.replace("-", "_")


def _convert(path: str, key: str, value: Any, kind: Any) -> Any:
    """A TOML value as its option takes it; numbers and flags are not guessed from other types."""
    if isinstance(value, Mapping):
        value = [f"{name}={amount}" for name, amount in value.items()]
    if get_origin(kind) is list:
        return [_scalar(path, key, item, get_args(kind)[0]) for item in (value if isinstance(value, list) else [value])]
    return _scalar(path, key, value, kind)


def _scalar(path: str, key: str, value: Any, kind: Any) -> Any:
    is_bool = isinstance(value, bool)
    if kind is bool and not is_bool:
        raise UsageError(f"--config {path}: {key} = {value!r}: must be true or false")
    if kind is int and (is_bool or not isinstance(value, int)):
        raise UsageError(f"--config {path}: {key} = {value!r}: must be an integer")
    if kind is float and (is_bool or not isinstance(value, (int, float))):
        raise UsageError(f"--config {path}: {key} = {value!r}: must be a number")
    if kind in (bool, int, float):
        return value
    if not isinstance(value, (str, int, float)):
        raise UsageError(f"--config {path}: {key} = {value!r}: must be a string")
    return str(value).lower() if is_bool else str(value)
