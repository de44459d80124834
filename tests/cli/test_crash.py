"""Runs that end badly, in processes of their own: kill -9, Ctrl-C, closed pipes; and one too large to hold."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.generate.fake_engine import lines

PROGRAM = [sys.executable, "-c", "from pagedcli.cli.app import main; main()"]
NULL = ["--model", "null"]
BEGINNINGS = ("", "Dear reader of this long letter, ", "Dear reader of this long letter, and of the next one to come: ")

# `--model null` with a log of every row that the engine finished, written before the journal hears of it; a row a
# step, each step slowed a little, so that a run is long enough to be killed at any of its rows.
LOGGED = """
import os, sys, time
from pagedcli.cli.app import app
from pagedcli.cli.environment import Environment
import typer

def build(config, say):
    from pagedcli.engine.build import build_engine
    engine = build_engine(config)
    step, log = engine.step, os.open(os.environ["GENERATION_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    def logged():
        time.sleep(0.0005)
        finished = step()
        for group in finished:
            os.write(log, b"%d\\n" % group.request.index)
        return finished
    engine.step = logged
    return engine

typer.main.get_command(app).main(obj=Environment(build_engine=build))
"""


def rows(count: int, beginnings: tuple[str, ...] = ("",)) -> bytes:
    """Prompts with lengths of their own and now and then a bad row; each starts with one of `beginnings`."""
    dice = random.Random(5)
    made: list[dict[str, Any]] = []
    for index in range(count):
        if index % 41 == 7:
            made.append({"prompt": "", "id": f"bad-{index}"})
        else:
            text = f"{dice.choice(beginnings)}{dice.random()} {'x' * dice.randrange(60)}"
            made.append({"prompt": text, "max_tokens": dice.randrange(1, 30)})
    return lines(*made)


def journal_rows(path: Path) -> set[int]:
    """Rows in a journal that end in a whole line."""
    if not path.exists():
        return set()
    whole = path.read_bytes().split(b"\n")[:-1]
    return {json.loads(line)["index"] for line in whole if line.startswith(b'{"index"')}


def test_twenty_kills_change_no_byte_and_repeat_no_row(tmp_path: Path) -> None:
    """With the prefix cache on and prompts that share blocks: `cached_tokens` too comes out as if nothing happened."""
    count = 240
    (tmp_path / "in.jsonl").write_bytes(rows(count, BEGINNINGS))
    arguments = ["generate", "in.jsonl", *NULL, "--max-num-seqs", "3", "-q"]
    subprocess.run([*PROGRAM, *arguments, "-o", "whole"], cwd=tmp_path, check=False)
    whole = (tmp_path / "whole").read_bytes()
    assert whole.count(b"\n") == count

    log, journal, out = tmp_path / "log", tmp_path / "out.partial", tmp_path / "out"
    dice = random.Random(11)
    kept: set[int] = set()
    kills = torn = 0
    while kills < 20:
        log.write_bytes(b"")
        run = subprocess.Popen([sys.executable, "-c", LOGGED, *arguments, "-o", "out"], cwd=tmp_path,
                               env={**os.environ, "GENERATION_LOG": str(log), "OMP_NUM_THREADS": "1"})
        target = min(len(kept) + dice.randrange(1, 12), count - 1)
        while run.poll() is None and len(journal_rows(journal)) < target:
            time.sleep(0.001)
        run.kill()
        assert run.wait() == -signal.SIGKILL, "the run ended before it was killed"
        kills += 1
        again = {int(line) for line in log.read_bytes().split(b"\n")[:-1]} & kept
        assert not again, f"finished rows were generated again: {again}"
        if kills % 4 == 0:  # a torn last line: the row goes, and nothing but that row may be done again
            with journal.open("r+b") as stream:
                stream.truncate(journal.stat().st_size - dice.randrange(1, 30))
            torn += 1
        now = journal_rows(journal)
        assert now >= kept or torn
        kept = now
        assert not out.exists(), "an output appeared before all rows were done"
    log.write_bytes(b"")
    done = subprocess.run([sys.executable, "-c", LOGGED, *arguments, "-o", "out"], cwd=tmp_path, check=False,
                          env={**os.environ, "GENERATION_LOG": str(log)})
    assert done.returncode == 1  # the bad rows
    assert not {int(line) for line in log.read_bytes().split(b"\n")[:-1]} & kept
    assert out.read_bytes() == whole and not journal.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_keep_the_journal(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "in.jsonl").write_bytes(rows(3000))
    arguments = ["generate", "in.jsonl", *NULL, "--max-num-seqs", "2"]
    run = subprocess.Popen([*PROGRAM, *arguments], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    journal = tmp_path / "in.out.jsonl.partial"
    while run.poll() is None and len(journal_rows(journal)) < 5:
        time.sleep(0.01)
    run.send_signal(number)
    _, said = run.communicate(timeout=30)
    assert run.returncode == 130 and "Traceback" not in said
    assert "of 3,000 rows done and kept in" in said and "same command again" in said
    assert len(journal_rows(journal)) >= 5 and not (tmp_path / "in.out.jsonl").exists()


def test_a_closed_pipe_gives_one_message(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(rows(2000))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    run = subprocess.Popen([*PROGRAM, "generate", "in.jsonl", *NULL, "-o", "-", "-q"], cwd=tmp_path, env=environment,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None and run.stderr is not None
    run.stdout.close()
    said = run.stderr.read().decode()
    assert run.wait(timeout=60) == 3
    assert said.count("\n") == 1 and "the output was closed" in said and "none is generated twice" in said
    done = subprocess.run([*PROGRAM, "generate", "in.jsonl", *NULL, "-o", "-"], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, check=False)
    assert done.stdout.count("\n") == 2000 and "nothing was generated" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl"]


def summary_of(tmp_path: Path, count: int) -> dict[str, Any]:
    with (tmp_path / "in.jsonl").open("w") as stream:
        for index in range(count):
            stream.write(f'{{"prompt": "What is {index} and {index * 7 % 1000}?", "id": "row-{index}"}}\n')
    arguments = ["generate", "in.jsonl", *NULL, "--max-tokens", "2", "-q", "--json-summary", "s.json", "--overwrite"]
    done = subprocess.run([*PROGRAM, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "in.out.jsonl").open() as stream:
        for index, line in enumerate(stream):
            assert line.startswith(f'{{"id": "row-{index}", "index": {index}, ')
    assert index == count - 1
    return json.loads((tmp_path / "s.json").read_text())


def test_memory_does_not_grow_with_rows(tmp_path: Path) -> None:
    """A cut of the million-row test: buffers and caches fill in the first run, rows are what the second adds."""
    small, large = summary_of(tmp_path, 10_000), summary_of(tmp_path, 30_000)
    assert large["peak_memory_bytes"] - small["peak_memory_bytes"] < 24 << 20


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_million_rows(tmp_path: Path) -> None:
    small, large = summary_of(tmp_path, 2000), summary_of(tmp_path, 1_000_000)
    grown, seconds = large["peak_memory_bytes"] - small["peak_memory_bytes"], large["seconds"]["total"]
    print(f"1,000,000 rows: {1e6 / seconds:,.0f} rows/s, {grown / 2**20:.1f} MiB more than 2,000 rows")
    assert grown < 100e6
    assert 1e6 / seconds >= 5000
