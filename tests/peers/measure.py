"""Runs one process to its end and tells how long it took and how much memory it and its children held."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

SAMPLE_SECONDS = 0.1
"""Between two looks at the memory: seldom enough to cost the measured process nothing that shows."""


HEED_SECONDS = 20.0
END_SECONDS = 20.0


@dataclass(frozen=True)
class Finished:
    """`started`: on the monotonic clock. `seconds`: process start to exit. `peak_mib`: the most that the process and
    its children held in memory at once; each one's own high-water mark counts where it is more. `error`: why it failed.
    """

    started: float
    seconds: float
    peak_mib: float
    error: str | None


class _Memory:
    """A process and its children: their high-water mark, from samples."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self.peak_kib = 0

    def tree(self) -> list[psutil.Process]:
        """The process and those that it started, directly or not; empty once it is gone."""
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def end(self) -> None:
        """End them all, those in sessions of their own too."""
        tree = self.tree()
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs([process for process in tree if process != self._root], timeout=END_SECONDS)

    def look(self) -> None:
        tree = self.tree()
        if not tree:
            return
        marks = [_status(process.pid) for process in tree]
        self.peak_kib = max(self.peak_kib, sum(now for now, _ in marks), *(most for _, most in marks))


def _status(pid: int) -> tuple[int, int]:
    """(resident, most ever resident) of a process, KiB; zeros once it is gone."""
    found = {"VmRSS": 0, "VmHWM": 0}
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in found:
                found[name] = int(value.split()[0])
    except (OSError, ValueError):
        pass
    return found["VmRSS"], found["VmHWM"]


def run(command: Sequence[str | Path], environment: Mapping[str, str], log: Path, limit_seconds: float,
        heed: Callable[[str], None] | None = None) -> Finished:
    """Run `command` with `environment` over this process's own; its output goes to `log`. A process over the limit is
    ended, with its children. `heed` gets the log's last line now and then, when it has changed."""
    with log.open("w", encoding="utf-8") as out:
        started = time.monotonic()
        process = subprocess.Popen([str(part) for part in command], env={**os.environ, **environment}, stdout=out,
                                   stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
        memory, late = _Memory(process.pid), False
        heard, told = started, ""
        while True:
            memory.look()
            if heed is not None and time.monotonic() - heard > HEED_SECONDS:
                heard = time.monotonic()
                if told != (told := last_words(log)):
                    heed(f"  {told}")
            try:
                process.wait(SAMPLE_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() - started > limit_seconds:
                    late = True
                    memory.end()
        seconds = time.monotonic() - started
    error = None
    if late:
        error = f"not done after {limit_seconds:.0f} s"
    elif process.returncode != 0:
        error = f"exit status {process.returncode}: {last_words(log)}"
    return Finished(started, seconds, memory.peak_kib / 1024, error)


def last_words(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"
