"""Whether results can be written, asked before anything is served: minutes of work must not end in a refusal."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from pagedcli.cli.options import short
from pagedcli.core.errors import UsageError

MAX_NAME_BYTES = 255
"""Bytes of one name in the file systems of Linux and macOS at most."""


def check_name(name: str) -> str:
    """`name`, when it can be one folder's name. UsageError otherwise."""
    if "/" in name or "\0" in name or name in ("", ".", ".."):
        raise UsageError(f"--name {short(name)!r}: must be a plain folder name (choose where with --results)")
    if len(os.fsencode(name)) > MAX_NAME_BYTES:
        raise UsageError(f"--name {short(name)!r}: must be at most {MAX_NAME_BYTES} bytes, the limit of file systems")
    return name


def check_folder(folder: Path, option: str = "--results") -> None:
    """Make the folder and a file in it, and take away again what was made. UsageError when the system refuses.

    Permission bits are not asked: root may write where they forbid it, and nobody may in /proc.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{option} {folder} is not a folder")
    made: list[Path] = []
    try:
        for path in (*reversed(folder.parents), folder):
            if not path.is_dir():
                path.mkdir(exist_ok=True)
                made.append(path)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as fault:
        raise UsageError(f"{option} {folder}: cannot be written to ({os.strerror(fault.errno or 0)}); "
                         "choose another folder") from fault
    finally:
        for path in reversed(made):
            with suppress(OSError):  # another run has put something there meanwhile
                path.rmdir()
