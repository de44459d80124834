"""What an option must keep to before hours of work begin: numbers of at least one, files that can be written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pagedcli.core.errors import UsageError


def at_least_one(option: str, value: int | None) -> None:
    """UsageError naming option, value and limit; None is a number that was not given."""
    if value is not None and value < 1:
        raise UsageError(f"{option} = {value}: must be at least 1")


def check_place(option: str, path: Path) -> None:
    """UsageError when `path` is a folder or lies in none."""
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder: name a file in it", "unwritable_output")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: the folder {path.parent} does not exist; make it first",
                         "unwritable_output")


def check_writable(option: str, path: Path) -> None:
    """UsageError when a file cannot be written at `path`. What is there stays as it is."""
    check_place(option, path)
    try:
        if path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        else:  # permissions do not say it all: a file system may refuse its owner too
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as fault:
        raise UsageError(f"{option} {path}: cannot be written ({fault.strerror or fault}); choose another",
                         "unwritable_output") from fault
