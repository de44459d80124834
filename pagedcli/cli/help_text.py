"""Help of commands with many options: groups under headings, every name in full however narrow the terminal."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

_GENERAL = "Options"
_HELD = "\N{NON-BREAKING HYPHEN}"
"""Stands for - while lines are broken, so that no name is cut at one."""


class GroupedHelp(TyperCommand):
    """Plain help in the groups that options name. A name that leaves no room beside it gets a line of its own, where
    a table would cut it."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **{**attributes, "rich_markup_mode": None})

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                kind = "Arguments" if param.param_type_name == "argument" else _GENERAL
                name, text = record
                groups.setdefault(getattr(param, "rich_help_panel", None) or kind, []).append(
                    (name, text.replace("-", _HELD)))
        last = groups.pop(_GENERAL, [])
        for heading, records in [*groups.items(), (_GENERAL, last)]:
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
        formatter.buffer[:] = [part.replace(_HELD, "-") for part in formatter.buffer]
