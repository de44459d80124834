"""`generate --ray`: real Ray where it is installed, and one message where it is not."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cli.console import Console
from tests.cli.test_crash import BEGINNINGS, PROGRAM, journal_rows, rows
from tests.generate.fake_engine import lines

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (extra: ray)")
NULL = ["--model", "null"]


def ray_processes() -> set[int]:
    """Processes of Ray clusters on this machine."""
    names = ("raylet", "gcs_server", "ray::")
    return {each.pid for each in psutil.process_iter(["cmdline", "name"])
            if any(name in " ".join([each.info["name"] or "", *(each.info["cmdline"] or [])[:1]]) for name in names)}


def whole(folder: Path, count: int) -> bytes:
    """What one engine makes of rows of which many begin alike, so that their `cached_tokens` are above 0."""
    (folder / "in.jsonl").write_bytes(rows(count, BEGINNINGS))
    subprocess.run([*PROGRAM, "generate", "in.jsonl", *NULL, "-o", "whole", "-q"], cwd=folder, check=False)
    return (folder / "whole").read_bytes()


def ray_run(folder: Path, *more: str) -> subprocess.Popen[str]:
    arguments = ["generate", "in.jsonl", *NULL, "-o", "out", "--ray", "--replicas", "2", *more]
    return subprocess.Popen([*PROGRAM, *arguments], cwd=folder, stderr=subprocess.PIPE, text=True)


def replicas_of(run: subprocess.Popen[str]) -> list[psutil.Process]:
    return [each for each in psutil.Process(run.pid).children(recursive=True) if "ray::Replica" in each.name()
            or any("ray::Replica" in word for word in each.cmdline())]


@needs_ray
def test_two_replicas_make_the_bytes_of_one_engine(tmp_path: Path) -> None:
    expected, before = whole(tmp_path, 300), ray_processes()
    run = ray_run(tmp_path)
    _, said = run.communicate(timeout=120)
    assert run.returncode == 1, said  # the bad rows
    assert (tmp_path / "out").read_bytes() == expected
    assert "replica 0 (" in said and "replica 1 (" in said
    assert ray_processes() <= before, "something of Ray is still running"


@needs_ray
def test_a_killed_replica_loses_and_repeats_nothing(tmp_path: Path) -> None:
    expected = whole(tmp_path, 8_000)
    run = ray_run(tmp_path, "--max-num-seqs", "8")
    while run.poll() is None and len(journal_rows(tmp_path / "out.partial")) < 300:
        time.sleep(0.05)
    replicas_of(run)[0].kill()
    _, said = run.communicate(timeout=250)
    assert run.returncode == 1, said
    assert "was lost" in said and "of its rows, unfinished, go to the others" in said
    assert (tmp_path / "out").read_bytes() == expected


@needs_ray
def test_ctrl_c_leaves_the_journal_and_nothing_running(tmp_path: Path) -> None:
    expected, before = whole(tmp_path, 8_000), ray_processes()
    run = ray_run(tmp_path, "--max-num-seqs", "8")
    while run.poll() is None and len(journal_rows(tmp_path / "out.partial")) < 300:
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130 and "done and kept in" in said and "Traceback" not in said
    end = time.monotonic() + 10
    while not ray_processes() <= before and time.monotonic() < end:
        time.sleep(0.2)
    assert ray_processes() <= before
    one = [*PROGRAM, "generate", "in.jsonl", *NULL, "-o", "out", "-q"]  # one engine may go on with it
    assert subprocess.run(one, cwd=tmp_path, check=False).returncode == 1
    assert (tmp_path / "out").read_bytes() == expected


def test_without_ray_one_message(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result, _ = console.generate(lines({"prompt": "a"}), "--ray", "--replicas", "2")
    assert result.exit_code == 3
    assert "--ray needs Ray, which is not installed here: pip install 'pagedcli[ray]'" in result.stderr
    assert "Traceback" not in result.stderr and not console.journal().exists()


def test_replicas_need_ray(console: Console) -> None:
    result, _ = console.generate(lines({"prompt": "a"}), "--replicas", "2")
    assert result.exit_code == 2 and "add --ray" in result.stderr


@pytest.mark.parametrize("words", [["--ray"], ["--ray", "-q"], ["--ray=local"], ["--ray", "local"]])
def test_ray_stands_with_and_without_an_address(console: Console, words: list[str],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = console("generate", *words, console.write("in.jsonl", lines({"prompt": "a"})))
    assert result.exit_code == 3 and "needs Ray" in result.stderr


def test_files_by_url(console: Console) -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    store.pipe("/job/in.jsonl", lines({"prompt": "a"}, {"prompt": "b", "id": "x"}))
    local, expected = console.generate(lines({"prompt": "a"}, {"prompt": "b", "id": "x"}))
    result = console("generate", "memory://job/in.jsonl", "-o", "memory://job/out.jsonl", "--restart")
    assert result.exit_code == local.exit_code == 0, result.stderr
    assert [json.loads(line) for line in store.cat("/job/out.jsonl").splitlines()] == expected
    again = console("generate", "memory://job/in.jsonl", "-o", "memory://job/out.jsonl")
    assert again.exit_code == 2 and "exists: use --overwrite" in again.stderr
    missing = console("generate", "memory://job/none.jsonl", "-o", "memory://job/more.jsonl")
    assert missing.exit_code == 2 and "cannot read memory://job/none.jsonl: FileNotFoundError" in missing.stderr
    nowhere = console("generate", "memory://job/in.jsonl")
    assert nowhere.exit_code == 2 and "--output must say where" in nowhere.stderr
    unknown = console("generate", "nosuch://job/in.jsonl", "-o", "x.jsonl")
    assert unknown.exit_code == 2 and "nosuch" in unknown.stderr
