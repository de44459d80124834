"""The file below a journal: opened by one process at a time, written whole, and what a disk's refusal is told as."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from pagedcli.core.errors import CannotRunError, UsageError
from pagedcli.core.wording import counted, form


class DiskFaults:
    """Turns a refusal of the disk into one message that says what is kept and how to go on. `kept`: rows that the disk
    took before."""

    def __init__(self, path: Path, kept: Callable[[], int]) -> None:
        self.path = path
        self.kept = kept

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        if not isinstance(fault, OSError):
            return
        full = fault.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full" if full else f"the disk refused: {fault.strerror}"
        way = "make room" if full else "mend that"
        kept = self.kept()
        rows = (f"at least {counted(kept, 'row')} {form(kept, 'is', 'are')} kept there" if kept
                else "rows that it took whole are kept there")
        raise CannotRunError(f"{what} while writing beside {self.path}; {rows}: {way} and run the same command again",
                             "no_space" if full else "disk_error") from fault


def open_locked(path: Path) -> int:
    """A descriptor of the file, made where it is missing, with a lock that is held until it is closed. UsageError:
    another process holds the lock, or the file cannot be written."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as fault:
            raise UsageError(f"cannot write {path}: {fault.strerror}; choose another --output",
                             "unwritable_output") from fault
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                return fd
            os.close(fd)  # the run that held the lock ended between our open and lock, and removed the file
        except OSError as fault:
            os.close(fd)
            if fault.errno in (errno.EAGAIN, errno.EACCES):
                raise UsageError(f"another run is writing {path}: wait for it, or choose another --output",
                                 "journal_in_use") from fault
            raise CannotRunError(f"cannot lock {path}: {fault.strerror}", "disk_error") from fault


def write_all(fd: int, data: bytes) -> None:
    """Write to a descriptor until everything is taken."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view):]


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to the disk: what a rename there needs to outlive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
