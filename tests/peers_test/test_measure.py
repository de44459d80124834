"""Processes are measured, and none outlives its limit."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil

from tests.peers.measure import run


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_memory_of_a_process_and_its_child(tmp_path: Path) -> None:
    hold = "held = bytearray(b'x') * (80 << 20); import time; time.sleep(1.0)"
    alone = run(python(hold), {}, tmp_path / "log", 60)
    code = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {hold!r}]); {hold}; child.wait()"
    both = run(python(code), {}, tmp_path / "log", 60)
    assert alone.error is None and both.error is None
    assert 80 < alone.peak_mib < 140
    assert both.peak_mib > alone.peak_mib + 70


def test_a_failure_carries_the_last_words(tmp_path: Path) -> None:
    ended = run(python("print('first'); raise SystemExit('no such model')"), {}, tmp_path / "log", 60)
    assert ended.error == "exit status 1: no such model"


def test_over_the_limit_it_ends_with_its_children(tmp_path: Path) -> None:
    told = tmp_path / "child"
    code = ("import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; "
            f"time.sleep(600)'], start_new_session=True); open({str(told)!r}, 'w').write(str(child.pid)); "
            "time.sleep(600)")
    began = time.monotonic()
    ended = run(python(code), {}, tmp_path / "log", 3)
    assert ended.error == "not done after 3 s" and time.monotonic() - began < 120
    child = int(told.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_environment_is_added_to_our_own(tmp_path: Path) -> None:
    ended = run(python("import os; assert os.environ['PEER'] == '1' and os.environ['PATH']"), {"PEER": "1"},
                tmp_path / "log", 60)
    assert ended.error is None
