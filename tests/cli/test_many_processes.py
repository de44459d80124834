"""Runs of several processes: a killed rank, torchrun, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cli.test_crash import PROGRAM, journal_rows
from tests.execution.tiny_models import VOCAB, save_model
from tests.generate.fake_engine import lines

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def model_and_rows(folder: Path, rows: int) -> list[str]:
    """A tiny model, an input of token ids, and the command that runs two ranks on them."""
    save_model("llama", folder / "model")
    made = [{"prompt_token_ids": [3 + (index * 7 + k) % (VOCAB - 3) for k in range(5)]} for index in range(rows)]
    (folder / "in.jsonl").write_bytes(lines(*made))
    return ["generate", "in.jsonl", "--model", "model", "--dtype", "fp32", "--device", "cpu", "--threads", "1",
            "--num-kv-blocks", "64", "--max-num-seqs", "2", "--max-tokens", "16", "--ignore-eos", "--temperature", "0"]


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return [child for child in psutil.Process(process.pid).children(recursive=True)
                if any("rank_main" in word for word in child.cmdline())]
    except psutil.NoSuchProcess:
        return []


def test_a_killed_rank_ends_the_run_and_a_resume_finishes_it(tmp_path: Path) -> None:
    command = [*PROGRAM, *model_and_rows(tmp_path, 30)]
    two = [*command, "--tensor-parallel-size", "2", "-o", "out"]
    run = subprocess.Popen(two, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    journal = tmp_path / "out.partial"
    while run.poll() is None and len(journal_rows(journal)) < 4:
        time.sleep(0.02)
    (rank,) = ranks_of(run)
    rank.kill()
    killed = time.monotonic()
    _, said = run.communicate(timeout=60)
    assert time.monotonic() - killed < 10
    assert run.returncode == 3 and "Traceback" not in said
    assert f"rank 1 of 2 (process {rank.pid}) was killed by SIGKILL" in said and "run the same command again" in said
    assert not psutil.pid_exists(rank.pid)
    kept = journal_rows(journal)
    assert 4 <= len(kept) < 30
    done = subprocess.run(two, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(kept)} of 30 rows done" in done.stderr
    assert [json.loads(line)["index"] for line in (tmp_path / "out").read_text().split("\n")[:-1]] == [*range(30)]


@pytest.mark.slow
def test_ranks_end_with_a_killed_rank_zero(tmp_path: Path) -> None:
    command = [*PROGRAM, *model_and_rows(tmp_path, 2000), "--tensor-parallel-size", "2", "-o", "out"]
    run = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    while run.poll() is None and len(journal_rows(tmp_path / "out.partial")) < 4:
        time.sleep(0.02)
    ranks = ranks_of(run)
    run.send_signal(signal.SIGKILL)
    run.wait()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert len(ranks) == 1 and not alive


@pytest.mark.slow
def test_torchrun_gives_the_same_bytes_as_spawning(tmp_path: Path) -> None:
    arguments = [*model_and_rows(tmp_path, 12), "--tensor-parallel-size", "2"]
    spawned = subprocess.run([*PROGRAM, *arguments, "-o", "spawned"], cwd=tmp_path, env=ENVIRONMENT,
                             capture_output=True, text=True, check=False)
    assert spawned.returncode == 0, spawned.stderr
    (tmp_path / "main.py").write_text("from pagedcli.cli.app import main\nmain()\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "main.py", *arguments]
    run = subprocess.run([*torchrun, "-o", "launched"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True,
                         check=False, timeout=200)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("rows ") == 1, "only rank 0 tells of the job"
    assert (tmp_path / "launched").read_bytes() == (tmp_path / "spawned").read_bytes()
    again = subprocess.run([*torchrun, "-o", "launched"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True,
                           text=True, check=False, timeout=200)
    assert again.returncode != 0 and "exists: use --overwrite" in again.stderr
