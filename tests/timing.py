"""Seconds of calls, for checks that measure on a machine that others use too: take the fastest or the median."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds_of(call: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each of `rounds` calls, after one that is not counted."""
    call()
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return taken
