"""Runs one native function on several threads at once, on torch's own threads where it is in use.

A second thread pool beside torch's would fight it for the cores: OpenMP's idle workers spin for a while after each
parallel region, just when the other pool starts. So the OpenMP library that torch has loaded is asked to run the
function on the very same workers; where torch is not in use, or has none (macOS wheels), Python threads do it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any

from pagedcli.core.errors import CannotRunError

CORES = Path("/sys/devices/system/cpu")
_told: list[int] = []
"""What `set_threads` was last given while torch was not in use; torch's own number is the whole process's as well."""


def threads() -> int:
    """How many threads compute: as many as torch uses where it is in use, else as it would by itself."""
    torch: Any = sys.modules.get("torch")
    return _own_threads() if torch is None else int(torch.get_num_threads())


def _own_threads() -> int:
    """As told, else one a core, or fewer where the variable says so. It never makes them more: torch heeds it no
    further, and threads that wait for one another on fewer cores take many times as long, or never end."""
    if _told:
        return _told[-1]
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list has a number for each nesting level
    return min(int(wanted), _cores()) if wanted.isdecimal() and int(wanted) > 0 else _cores()


def set_threads(wanted: int) -> None:
    """For the whole process. Where torch is not in use (yet), also by the variable that it reads when it is imported.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        _told[:] = [wanted]
        os.environ["OMP_NUM_THREADS"] = str(wanted)
    else:
        torch.set_num_threads(wanted)


@cache
def _cores() -> int:
    """Physical cores that this process may use: two threads of one core share its multipliers."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    try:
        return len({(CORES / f"cpu{number}/topology/thread_siblings_list").read_text() for number in allowed}) or (
            os.cpu_count() or 1)
    except OSError:
        return len(allowed)


@cache
def _openmp(torch_in_use: bool) -> ctypes.CDLL | None:
    """The OpenMP library of this process that has GNU's entry point (libgomp, and LLVM's and Intel's under Linux)."""
    if not torch_in_use or not sys.platform.startswith("linux"):
        return None
    loaded = {line.split(maxsplit=5)[5].strip() for line in Path("/proc/self/maps").read_text().splitlines()
              if len(line.split(maxsplit=5)) == 6}
    for name in sorted(p for p in loaded if any(part in Path(p).name for part in ("gomp", "libomp", "libiomp"))):
        library = ctypes.CDLL(name)
        if hasattr(library, "GOMP_parallel"):
            return library
    return None


class Team:
    """`run(function, argument, threads)` calls function(argument) once on each of `threads` threads and waits.

    The function must stand being called fewer times than asked (OpenMP may grant fewer threads).
    """

    def __init__(self) -> None:
        self._library = _openmp("torch" in sys.modules)
        self._pool: ThreadPoolExecutor | None = None
        self._pool_size = 0
        self._known: dict[int, Callable[[int], None]] = {}
        if self._library is not None:
            self._parallel = self._library.GOMP_parallel
            self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            self._parallel.restype = None

    @property
    def threads_of(self) -> str:
        """Whose threads do the work, for reports."""
        return "torch's OpenMP" if self._library is not None else "Python threads"

    @property
    def sizer(self) -> int:
        """Address of the C function that tells a thread how many its team has; 0 where all that are asked for run."""
        if self._library is None or not hasattr(self._library, "omp_get_num_threads"):
            return 0
        return ctypes.cast(self._library.omp_get_num_threads, ctypes.c_void_p).value or 0

    def run(self, function: int, argument: int, threads: int) -> None:
        """`function`: address of a void(void*) that never raises and never takes the GIL."""
        if threads <= 1:
            self._direct(function)(argument)
        elif self._library is not None:
            self._parallel(function, argument, threads, 0)
        else:
            if self._pool_size != threads - 1:
                self.close()
                self._pool, self._pool_size = _started(threads - 1), threads - 1
            assert self._pool is not None
            call = self._direct(function)
            waiting = [self._pool.submit(call, argument) for _ in range(threads - 1)]
            call(argument)
            for one in waiting:
                one.result()

    def _direct(self, function: int) -> Callable[[int], None]:
        if function not in self._known:
            self._known[function] = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        return self._known[function]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool, self._pool_size = None, 0


def _started(count: int) -> ThreadPoolExecutor:
    """A pool whose threads all run already: those of a team wait for one another, for ever where one never comes.

    CannotRunError when the system refuses one.
    """
    pool, gate = ThreadPoolExecutor(count, "attention"), Event()
    try:
        for _ in range(count):
            pool.submit(gate.wait)  # none ends before the last is there, so that each takes a thread of its own
    except RuntimeError as fault:
        pool.shutdown(wait=False)
        raise CannotRunError(f"the system refuses to start {count + 1} threads ({fault}): lower --threads",
                             "too_many_threads") from fault
    finally:
        gate.set()
    return pool
