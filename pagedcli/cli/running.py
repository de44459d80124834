"""While a command runs: stopping on signals, and where its time goes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from pagedcli.cli.environment import Environment


@contextmanager
def stopping_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM lets the step in progress end; a second one ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def handle(number: int, frame: object) -> None:
        del frame
        seen.append(number)
        if len(seen) > 1:
            raise KeyboardInterrupt
        stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stopwatch:
    """Where the time of a run goes, part by part."""

    def __init__(self, environment: Environment) -> None:
        self._laps = {"startup": environment.startup} if environment.startup else {}
        self._begun = self._last = environment.started

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def seconds(self, loading: Mapping[str, float]) -> dict[str, float]:
        """Seconds by part; `build` is split into what the executor says of itself, the rest staying under its name."""
        parts = dict(self._laps)
        if loading and "build" in parts:
            parts["build"] = max(parts["build"] - sum(loading.values()), 0.0)
            for name, value in loading.items():
                parts[name] = parts.get(name, 0.0) + value
        return {**parts, "total": sum(self._laps.values())}
