"""Sums by which files that this tool keeps in its cache are known again: a disk or a hand may have changed them.

Not against malice, and quick enough for every start: some 30 ms for 300 MB that are in memory.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedcli.core.wording import counted

SEAL = "sums.json"
CHUNK = 1 << 20


def word_sum(data: NDArray[np.uint8]) -> int:
    """A number that changes with any byte of `data` and with the order of its chunks of a MiB."""
    whole = len(data) // CHUNK * CHUNK
    sums = data[:whole].view(np.uint64).reshape(-1, CHUNK // 8).sum(1, dtype=np.uint64)
    rest = np.zeros(CHUNK, np.uint8)
    rest[:len(data) - whole] = data[whole:]
    sums = np.append(sums, rest.view(np.uint64).sum(dtype=np.uint64))
    weights = 2 * np.arange(len(sums), dtype=np.uint64) + np.uint64(1)  # odd, so that no bit of a sum is lost
    return int((sums * weights).sum(dtype=np.uint64)) ^ len(data)


def file_sum(file: Path) -> int:
    """The sum of a file's bytes."""
    if file.stat().st_size == 0:
        return word_sum(np.empty(0, np.uint8))
    return word_sum(np.memmap(file, np.uint8, "r"))


def seal(folder: Path) -> None:
    """Write down the sizes and sums of a folder's files."""
    sums = {file.name: [file.stat().st_size, file_sum(file)] for file in sorted(folder.iterdir())}
    with (folder / SEAL).open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(sums, indent=2) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def broken(folder: Path, most_bytes: int | None = None) -> str | None:
    """The first file that is not as it was sealed, and how; None when all are. Sums of files beyond `most_bytes` are
    left out: their size alone is looked at."""
    try:
        sums: Any = json.loads((folder / SEAL).read_text("utf-8"))
        if not isinstance(sums, dict) or not sums:
            return f"{SEAL} names no files"
        for name, (size, total) in sums.items():
            found = (folder / name).stat().st_size
            if found != size:
                return f"{name} has {counted(found, 'byte')}, not {size:,}"
            if (most_bytes is None or size <= most_bytes) and file_sum(folder / name) != total:
                return f"{name} holds other bytes than were written"
    except (OSError, ValueError, TypeError) as fault:
        return f"{SEAL} or a file that it names cannot be read ({type(fault).__name__})"
    return None
