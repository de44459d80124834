"""The head of a journal: which run its rows belong to, and how another run is told from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pagedcli.core.errors import UsageError

FORMAT = 1
CONTENT = "input.content"
"""A hash of the rows, which says nothing to a reader."""
Settings = Mapping[str, Any]


def differences(ours: Settings, theirs: Settings) -> list[str]:
    """What differs between two headers, one phrase each: `name: journal's value, this run's value`."""
    mine, other = dict(_flat(ours)), dict(_flat(theirs))
    missing = object()
    found = []
    for name in sorted(mine.keys() | other.keys()):
        if mine.get(name, missing) != other.get(name, missing):
            if name == CONTENT:
                found.append(f"{name}: the rows are other ones")
                continue
            found.append(f"{name}: journal {_shown(other, name)}, this run {_shown(mine, name)}")
    return found


def _shown(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name], ensure_ascii=False) if name in values else "unset"


def _flat(settings: Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def check_header(path: Path, head: bytes, settings: Settings) -> None:
    """Raises UsageError unless `head` is the header of a journal with these settings."""
    try:
        found = json.loads(head)
        version = found.pop("pagedcli_journal")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as fault:
        raise UsageError(f"{path} is in the way and is not a journal of this program: move it away, or use --restart "
                         "to write over it", "foreign_journal") from fault
    differ = differences(settings, found)
    if settings.get("limit") != found.get("limit"):  # other rows are read then, which is said by that alone
        differ = [phrase for phrase in differ if not phrase.startswith("input.")]
    if version != FORMAT:
        differ.insert(0, f"journal format: journal {version}, this version {FORMAT}")
    refuse_differences(path, differ)


def refuse_differences(path: Path, differ: list[str]) -> None:
    """Raises UsageError naming what differs and the ways out, if anything does."""
    if differ:
        raise UsageError(f"{path} holds the rows of another run, which differs in: {'; '.join(differ)}. Run again with "
                         "those settings to go on with it, use --restart to throw its rows away, or choose another "
                         "--output", "journal_differs")


def torn_header(head: bytes) -> bool:
    """Whether the only line is a header that was cut while it was being written."""
    start = b'{"pagedcli_journal": '
    return not head.endswith(b"\n") and (head.startswith(start) or start.startswith(head))


def read_ran_on(line: bytes) -> dict[str, Any] | None:
    """What a journal's second line says its rows were computed on; None when it is something else."""
    if not (line.startswith(b'{"ran_on": ') and line.endswith(b"}\n")):
        return None
    try:
        found = json.loads(line)["ran_on"]
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
