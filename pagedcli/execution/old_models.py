"""What lies in the cache of converted models and is of no use any more: named for the user, never deleted.

A run of another version of this program may be reading it at this moment, and only the user knows.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pagedcli.execution.gguf_cache import (
    CONVERSION,
    FORMAT,
    SCRATCH,
    cache_dir,
    file_identity,
    lock_file,
    place_digest,
    read_origin,
)
from pagedcli.execution.seals import SEAL


@dataclass(frozen=True, slots=True)
class OldModel:
    """A folder of the cache that no run of this version reads, its bytes on disk, and why."""

    folder: Path
    size: int
    why: str


def old_models() -> list[OldModel]:
    """Conversions of older formats or of GGUF files that are gone, what was packed from them, and what killed
    conversions left. Folders that do not bear this program's names are passed over, and so is what cannot be read."""
    found: list[OldModel] = []
    for folder in _inside(cache_dir() / "models"):
        with suppress(OSError):  # a cache may be shared, and another user's folder may be shut
            why = _why_old(folder)
            if why is not None:
                found.append(OldModel(folder, held_bytes(folder), why))
                for copy in _packed_from(folder):
                    found.append(OldModel(copy, held_bytes(copy), f"packed from {folder.name}"))
    return found


def _inside(parent: Path) -> list[Path]:
    try:
        return sorted(parent.iterdir())
    except OSError:  # it is not there, or not for this user
        return []


def _why_old(folder: Path) -> str | None:
    """Why no run of this version will read a folder of the cache; None for one that may be read, or is not ours."""
    if folder.is_symlink() or not folder.is_dir():
        return None
    scratch = SCRATCH.fullmatch(folder.name)
    if scratch is not None:
        return None if _held(lock_file(folder.with_name(scratch[1]))) else "left by a conversion that was killed"
    name = CONVERSION.fullmatch(folder.name)
    if name is None or not (folder / "config.json").is_file():
        return None
    origin = read_origin(folder)
    if origin is not None and origin["format"] > FORMAT:
        return None  # a newer version's, whose rules are not known here
    if not (folder / SEAL).is_file():
        return "converted by an older version"
    if origin is None:
        return None  # made before conversions said where they came from: it may well be in use
    if origin["format"] < FORMAT:
        return f"converted in format {origin['format']}, where this version has {FORMAT}"
    source = Path(origin["source"])
    try:
        if not source.exists() and not any(source.parent.iterdir()):
            return None  # an empty mount point: its disk may come back, as one does whose folder is not there at all
        same = source.is_file() and file_identity(source) == name[1]
    except OSError:
        return None
    return None if same else f"{source} is gone or another file now"


def _packed_from(folder: Path) -> list[Path]:
    """Packed copies of a conversion's weights: their names carry a digest of where it lies (see packed_copy)."""
    return [copy for copy in _inside(cache_dir() / "packed") if f"-{place_digest(folder)}-" in copy.name]


def _held(lock: Path) -> bool:
    """Whether a process holds a lock file, or whether that cannot be told."""
    try:
        with lock.open("r") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


def held_bytes(folder: Path) -> int:
    """What a folder takes on disk; links are not followed, so nothing counts twice."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # another process may be at work in it
                total += (Path(place) / name).lstat().st_size
    return total
