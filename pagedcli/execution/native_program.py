"""A step as a list of native operations that a team of threads runs from end to end, with no Python between them.

Operations share out their own work by counters in their argument blocks; after each one the threads wait for one
another. A wait is a few hundred nanoseconds where starting a team takes microseconds and a Python call takes ten, and a
decode step of a small model is three hundred operations.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from pagedcli.attention.cpu_intrinsics import ask, call, cycles, fetch_add, load_i64, load_shared, pause, store_i64
from pagedcli.attention.cpu_team import Team
from pagedcli.attention.host_arrays import aligned_zeros
from pagedcli.attention.kept_code import kept_cfunc

# The program's own block, int64 each; what threads change has cache lines of its own.
OPERATIONS, COUNT, SIZER, ASKED, CLOCKS, YIELD, ARRIVED, ENTERED = 0, 1, 2, 3, 4, 5, 16, 24
WORDS = 32
PATIENCE = 4000
"""Rounds of waiting before a thread offers its core to others, which may be what the one it waits for lacks."""


@cache  # kept for good: a team may hold its address
def build_run() -> Any:
    """void(address of a program's block): one thread's part of the program."""
    @kept_cfunc(types.void(types.int64), error_model="numpy")
    def run(a: int) -> None:
        operations, count = load_i64(a + 8 * OPERATIONS), load_i64(a + 8 * COUNT)
        sizer, clocks = load_i64(a + 8 * SIZER), load_i64(a + 8 * CLOCKS)
        threads = ask(sizer) if sizer != 0 else load_i64(a + 8 * ASKED)
        keeps_time = fetch_add(a + 8 * ENTERED, 1) == 0
        if keeps_time:
            store_i64(clocks, cycles())
        for i in range(count):
            call(load_i64(operations + 16 * i), (load_i64(operations + 16 * i + 8),))
            if threads > 1:
                fetch_add(a + 8 * ARRIVED, 1)
                waited, goal = 0, threads * (i + 1)
                while load_shared(a + 8 * ARRIVED) < goal:
                    waited += 1
                    if waited < PATIENCE:
                        pause()
                    else:
                        call(load_i64(a + 8 * YIELD), ())
            if keeps_time:
                store_i64(clocks + 8 * (i + 1), cycles())

    return run


class Program:
    """Operations (address of a void(int64), address of its argument block), in order.

    `shares` are the parts of the last run's time that each operation took. Not safe for two threads at once.
    """

    def __init__(self, team: Team, operations: Sequence[tuple[int, int]]) -> None:
        self._team = team
        self._list = np.array(operations, np.int64)
        self._clocks = np.zeros(len(operations) + 1, np.int64)
        self._run = build_run()
        self._libc = ctypes.CDLL(None)
        resting = ctypes.cast(self._libc.sched_yield, ctypes.c_void_p).value or 0
        self._block = aligned_zeros([WORDS], np.int64)
        self._block[:6] = (self._list.ctypes.data, len(self._list), team.sizer, 1, self._clocks.ctypes.data, resting)

    @property
    def shares(self) -> NDArray[np.float64]:
        """float64 [operations], summing to 1; of zeros before the first run."""
        spent = np.diff(self._clocks).astype(np.float64)
        return spent / max(spent.sum(), 1.0)

    def share(self, places: NDArray[np.int64]) -> float:
        """The part of the last run's time that the operations at `places` took together."""
        clocks = self._clocks
        return float((clocks[places + 1] - clocks[places]).sum()) / max(float(clocks[-1] - clocks[0]), 1.0)

    def run(self, threads: int) -> None:
        """Run every operation on up to `threads` threads; returns when the last is done."""
        self._block[ASKED] = threads
        self._block[ARRIVED] = self._block[ENTERED] = 0
        self._team.run(self._run.address, self._block.ctypes.data, threads)
