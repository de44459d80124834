"""The child processes of rank 0: what is said of a dead one, and what they may run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from pagedcli.core.errors import CannotRunError
from pagedcli.execution.rank_processes import RankProcesses


def test_a_killed_child_is_told_by_rank_and_signal() -> None:
    processes = RankProcesses(3, lambda rank: {"rank": rank}, 1)
    try:
        os.kill(processes.children[2].pid, signal.SIGKILL)
        fault = processes.fault(wait=10)
        assert fault is not None and fault.code == "rank_died" and fault.exit_status == 3
        assert f"rank 2 of 3 (process {processes.children[2].pid}) was killed by SIGKILL" in fault.message
        with pytest.raises(CannotRunError, match="was killed"):
            processes.check()
    finally:
        processes.close()
    assert all(child.poll() is not None for child in processes.children.values())


def test_files_of_the_working_folder_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("open('ran', 'w').close()\nraise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    processes = RankProcesses(2, lambda rank: {"rank": rank}, 1)
    time.sleep(1.0)  # by now it has imported what it needs to read its orders
    processes.close()
    assert not (tmp_path / "ran").exists() and processes.children[1].returncode != 9
