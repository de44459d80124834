"""Rank 0's helpers on one machine: started as programs of their own, watched, and never left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from pagedcli.core.errors import CannotRunError, ExitStatus
from pagedcli.core.wording import counted

GRACE_SECONDS = 4.0
"""How long the main thread has, after a rank died, to come out of what it waits in before the process is ended."""

STOP_SECONDS = 5.0
POLL_SECONDS = 0.2


class RankProcesses:
    """Ranks 1 .. size - 1 as child processes.

    A child ends when its standard input does, so none outlives this process however it ends. `check` raises
    CannotRunError once one has died; a thread watches too, since a step may be waiting for the dead one.
    """

    def __init__(self, size: int, orders: Callable[[int], Mapping[str, Any]], threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._closing = threading.Event()
        self._told = threading.Event()
        self.on_death: Callable[[], None] | None = None
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank in range(1, size):
                # -P: a file in the working folder must not stand in for a module of that name.
                child = subprocess.Popen([sys.executable, "-P", "-m", "pagedcli.execution.rank_main"],
                                         stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)
                self.children[rank] = child
                assert child.stdin is not None
                child.stdin.write(json.dumps(orders(rank)).encode() + b"\n")
                child.stdin.flush()
        except OSError as fault:
            self.close()
            raise CannotRunError(f"cannot start {counted(size - 1, 'more process', 'more processes')} for "
                                 f"--tensor-parallel-size {size}: {fault}", "no_ranks") from fault
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def fault(self, wait: float = 0.0) -> CannotRunError | None:
        """What to tell when a rank has died, looking for up to `wait` seconds; None when none has."""
        end = time.monotonic() + wait
        while (found := self._dead()) is None:
            if time.monotonic() >= end:
                return None
            time.sleep(0.02)
        self._told.set()
        return CannotRunError(found, "rank_died")

    def check(self) -> None:
        """Raises CannotRunError when a rank has died."""
        fault = self.fault()
        if fault is not None:
            raise fault

    def close(self) -> None:
        """End all children, at once if need be; idempotent."""
        self._closing.set()
        for child in self.children.values():
            if child.stdin is not None:
                child.stdin.close()
        end = time.monotonic() + STOP_SECONDS
        for child in self.children.values():
            try:
                child.wait(max(end - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _dead(self) -> str | None:
        for rank, child in self.children.items():
            status = child.poll()
            if status is not None:
                how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                return (f"rank {rank} of {len(self.children) + 1} (process {child.pid}) {how}, and the others cannot "
                        "go on without its part of the model. Rows finished before it are kept: run the same command "
                        "again to go on")
        return None

    def _watch(self) -> None:
        while not self._closing.wait(POLL_SECONDS):
            message = self._dead()
            if message is None:
                continue
            if self.on_death is not None:
                self.on_death()
            if self._told.wait(GRACE_SECONDS) or self._closing.is_set():
                return
            # The main thread is stuck in a collective that will never return. Finished rows were handed to the kernel
            # after each step, so ending here loses none of them.
            os.write(2, f"pagedcli: {message}\n".encode())
            for child in self.children.values():
                child.kill()
            os._exit(ExitStatus.CANNOT_RUN)
