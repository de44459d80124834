"""Runs one process to its end and tells how long it took and how much memory it and its children held."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

SAMPLE_SECONDS = 0.1
"""Between two looks at the memory: seldom enough to cost the measured process nothing that shows."""


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
    """High-water mark of a process and its children, from samples."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self.peak_kib = 0

    def look(self) -> None:
        try:
            tree = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
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


def run(command: Sequence[str | Path], environment: Mapping[str, str], log: Path, limit_seconds: float) -> Finished:
    """Run `command` with `environment` over this process's own; its output goes to `log`. A process over the limit is
    ended, with its children."""
    with log.open("w", encoding="utf-8") as out:
        started = time.monotonic()
        process = subprocess.Popen([str(part) for part in command], env={**os.environ, **environment}, stdout=out,
                                   stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
        memory, late = _Memory(process.pid), False
        while True:
            memory.look()
            try:
                process.wait(SAMPLE_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() - started > limit_seconds:
                    late = True
                    os.killpg(process.pid, signal.SIGKILL)
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
