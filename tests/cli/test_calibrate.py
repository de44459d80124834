"""What `pagedcli calibrate` refuses, before any fit begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagedcli.cli.app import app


def _trace(folder: Path, count: int = 40) -> Path:
    path = folder / "t1.jsonl"
    path.write_text("\n".join(json.dumps({
        "input_toks": 40, "output_toks": 10, "arrival_time": 0.3 * k, "first_token_ts": 0.3 * k + 0.05,
        "last_token_ts": 0.3 * k + 0.3}) for k in range(count)), "utf-8")
    return path


@pytest.mark.parametrize(("count", "words", "message"), [
    (1, (), "t1.jsonl holds 1 request: at least 6 are needed"),
    (40, ("--train", "0"), "--train = 0: must be from 5 to 39"),
    (40, ("--train", "4000"), "--train = 4000: must be from 5 to 39"),
    (40, ("--num-kv-blocks", "0"), "--num-kv-blocks = 0: must be at least 1"),
    (40, ("--block-size", "0"), "--block-size = 0: must be at least 1"),
    (40, ("--tensor-parallel-size", "0"), "--tensor-parallel-size = 0: must be at least 1"),
    (40, ("--max-num-seqs", "0"), "--max-num-seqs = 0: must be at least 1"),
    (40, ("-o", "/proc/x/y.toml"), "the folder /proc/x does not exist"),
    (40, ("-o", "/proc/y.toml"), "--output /proc/y.toml: cannot be written"),
    (40, ("-o", "."), "--output . is a folder"),
    (40, ("-o", "mine.txt"), "--output mine.txt: must end in .toml"),
    (40, ("-o", "my card.toml"), "'my card' names the device in it")])
def test_what_cannot_come_out_right_is_refused_before_the_fit(
        count: int, words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedcli.bench.calibrate.fit_both", lambda *_, **__: pytest.fail("fitted"))
    trace = _trace(tmp_path, count)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["calibrate", str(trace), *words])
    assert done.exit_code == 2 and message in " ".join(done.stderr.split()), done.output
    assert list(tmp_path.iterdir()) == [trace]


def test_the_trace_itself_is_not_written_over(tmp_path: Path) -> None:
    trace = _trace(tmp_path).rename(tmp_path / "t1.toml")
    before = trace.read_bytes()
    done = CliRunner().invoke(app, ["calibrate", str(trace), "-o", str(trace)])
    assert done.exit_code == 2 and "is the trace itself" in done.stderr, done.output
    assert trace.read_bytes() == before


@pytest.mark.parametrize(("option", "value"), [("--train", "5"), ("--num-kv-blocks", "900"), ("--model", "opt-13b"),
                                               ("--hardware", "rtx4090")])
def test_what_a_results_folder_says_itself_is_not_passed_over(option: str, value: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["calibrate", "--from-run", str(tmp_path), "-o", str(tmp_path / "x.toml"), option,
                                    value])
    assert done.exit_code == 2 and f"{option} describes a trace's server" in done.stderr, done.output


def test_a_folder_without_results_is_what_is_refused_without_such_options(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["calibrate", "--from-run", str(tmp_path), "-o", str(tmp_path / "x.toml")])
    assert done.exit_code == 2 and "describes a trace's server" not in done.stderr, done.output
    assert str(tmp_path) in "".join(done.stderr.split()), done.output
