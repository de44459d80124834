"""`--config FILE`: options from a TOML file, below the command line and the environment, above the defaults."""

from __future__ import annotations

import difflib
import inspect
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from pagedcli.core.errors import UsageError

_NEVER = {"config", "help", "input"}


def config_parameter() -> inspect.Parameter:
    """The --config option; read before the others so that they find its values."""
    info = typer.Option("--config", callback=_load, is_eager=True, metavar="FILE", envvar="PAGEDCLI_CONFIG",
                        show_envvar=False, show_default=False,
                        help="TOML file of options, by their long names; a table named after the command counts more "
                             "than the top level.")
    return inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None,
                             annotation=Annotated[str | None, info])


def _load(context: typer.Context, value: str | None) -> str | None:
    if value is not None and not context.resilient_parsing:
        context.default_map = {**(context.default_map or {}), **read_config(value, context.command)}
    return value


def read_config(path: str, command: Any) -> dict[str, Any]:
    """Values of a TOML file for one command, by parameter name. Raises UsageError naming the file and key."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as fault:
        raise UsageError(f"cannot read --config {path}: {fault.strerror}") from fault
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise UsageError(f"--config {path} is not TOML: {fault}") from fault
    options = {option.name: option for option in command.params if option.name not in _NEVER}
    values: dict[str, Any] = {}
    tables = {name: value for name, value in table.items() if isinstance(value, dict) and _name(name) not in options}
    for name, value in [*((k, v) for k, v in table.items() if k not in tables), *tables.get(command.name, {}).items()]:
        option = options.get(_name(name))
        if option is None:
            close = difflib.get_close_matches(_name(name), options, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"--config {path}: {command.name} has no option {name!r}{hint}")
        values[_name(name)] = _convert(path, name, value, option)
    return values


def _name(key: str) -> str:
    return key.replace("-", "_")


def _convert(path: str, key: str, value: Any, option: Any) -> Any:
    """A TOML value as its option takes it; numbers and flags are not guessed from other types."""
    if isinstance(value, Mapping):
        value = [f"{name}={amount}" for name, amount in value.items()]
    if option.multiple:
        return [_scalar(path, key, item, option) for item in (value if isinstance(value, list) else [value])]
    return _scalar(path, key, value, option)


def _scalar(path: str, key: str, value: Any, option: Any) -> Any:
    kind = "boolean" if getattr(option, "is_flag", False) else option.type.name
    numbers: dict[str, tuple[type, ...]] = {"boolean": (bool,), "integer": (int,), "float": (int, float)}
    allowed = numbers.get(kind, (str, int, float, bool))
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        rule = {"boolean": "true or false", "integer": "an integer", "float": "a number"}.get(kind, "a string")
        raise UsageError(f"--config {path}: {key} = {value!r}: must be {rule}")
    if kind in ("boolean", "integer", "float"):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)
