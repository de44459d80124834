"""`pagedcli paper`, `calibrate` and `plan` in process: what they print, write and refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pagedcli.cli.app import app
from pagedcli.execution.hardware import find_hardware


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_table_1_is_printed_and_written(tmp_path: Path) -> None:
    done = invoke("paper", "table1", "--results", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "15.7 K" in done.output and "6 of 6 judged cells hold" in done.output
    assert json.loads((tmp_path / "table1.json").read_text("utf-8"))["key"] == "table1"
    assert (tmp_path / "README.md").read_text("utf-8").startswith("# The PagedAttention paper, simulated")


def test_experiments_are_listed_and_unknown_ones_refused(tmp_path: Path) -> None:
    assert invoke("paper", "--list").output.split()[:3] == ["table1", "fig2", "fig12a"]
    done = invoke("paper", "fig99", "--results", str(tmp_path))
    assert done.exit_code == 2 and "no experiment" in done.output
    assert invoke("paper", "table1", "--scale", "0").exit_code == 2


def test_nothing_runs_unasked(tmp_path: Path) -> None:
    done = invoke("paper", "--results", str(tmp_path))
    assert done.exit_code == 2 and "name the experiments" in done.output and "table1, fig2, fig12a" in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("words", "said"), [
    (("--results", "/proc/x"), "--results /proc/x: cannot be written to"),
    (("--lengths", "nope"), "--lengths nope: there is no such file"),
    (("--beams", "nope"), "--beams nope: there is no such file")])
def test_files_that_are_not_there_are_refused_before_the_experiments(
        words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedcli.bench.experiments.run_experiments", lambda *_: pytest.fail("ran"))
    done = invoke("paper", "table1", "--results", str(tmp_path / "new"), *words)
    assert done.exit_code == 2 and said in done.stderr, done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("workers", ["1", "2"])
def test_several_experiments_say_when_they_begin(tmp_path: Path, workers: str) -> None:
    done = invoke("paper", "table1", "fig2", "--scale", "0.02", "--workers", workers, "--results", str(tmp_path))
    assert done.exit_code == 0 and sorted(done.stderr.splitlines()) == ["fig2 has begun", "table1 has begun"]
    assert invoke("paper", "table1", "--results", str(tmp_path)).stderr == ""


def test_calibrate_writes_what_simulate_takes(tmp_path: Path) -> None:
    rows = [{"input_toks": 40 + 9 * k, "output_toks": 10 + k % 7, "arrival_time": 0.3 * k,
             "first_token_ts": 0.3 * k + 0.05, "last_token_ts": 0.3 * k + 0.05 + 0.02 * (9 + k % 7)} for k in range(24)]
    trace, out = tmp_path / "t.jsonl", tmp_path / "mine.toml"
    trace.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    done = invoke("calibrate", str(trace), "--num-kv-blocks", "900", "-o", str(out))
    assert done.exit_code == 0, done.output
    assert "fitted on the first 6, judged on the other 18" in done.output and "preemptions: 0" in done.output
    assert find_hardware(str(out)).num_blocks == 900
    assert invoke("calibrate").exit_code == 2


def test_plan_compares_devices_and_says_what_does_not_fit() -> None:
    done = invoke("plan", "--model", "opt-13b", "--workload", "alpaca", "--hardware", "a100-40gb", "--hardware", "l4",
                  "--tensor-parallel-size", "1", "--policy", "orca-max", "--workers", "1",
                  "--slo", "normalized_latency<0.3")
    assert done.exit_code == 0, done.output
    assert "a100-40gb" in done.output and "not served: 1 x l4" in done.output
    assert invoke("plan", "--slo", "speed<1").exit_code == 2


def test_simulations_start_without_heavy_imports() -> None:
    code = ("import sys; import pagedcli.cli.paper, pagedcli.bench.experiments as e; e.registry(); "
            "print([m for m in ('torch', 'transformers', 'numba', 'pandas', 'matplotlib') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
