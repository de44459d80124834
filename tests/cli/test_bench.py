"""`pagedcli bench` and `pagedcli compare` in process, on the engine without a model and on simulated hardware."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from pagedcli.cli import bench
from pagedcli.cli.app import app
from pagedcli.cli.bench_setup import DEFAULT_REQUESTS, read_rates, read_setup
from pagedcli.cli.bench_view import state_table
from pagedcli.core.errors import UsageError

NULL = ("--model", "null", "--synthetic", "--offline", "--num-requests", "12", "--quiet", "--no-plots")
SIMULATED = ("--simulate", "a100-40gb", "--model", "opt-13b", "--synthetic", "--offline", "--no-plots",
             "--num-requests", "40", "--no-chunked-prefill")


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two identical simulated sessions, `a` and `b`."""
    folder = tmp_path_factory.mktemp("results")
    for name in ("a", "b"):
        done = invoke("bench", *SIMULATED, "--baseline", "orca-max", "--rate", "1,2", "--results", str(folder),
                      "--name", name)
        assert done.exit_code == 0, done.output
    return folder


def test_a_run_in_which_no_request_was_done_is_no_success(tmp_path: Path):
    done = invoke("bench", *SIMULATED, "--rate", "1", "--time-limit", "0.001", "--results", str(tmp_path))
    assert done.exit_code == 1 and "measured nothing" in done.output, done.output


@pytest.mark.parametrize(("words", "said"), [
    (("--num-kv-blocks", "1", "--num-requests", "5"), "and the pool has 1; raise --kv-cache-memory or --num-kv-blocks"),
    (("--n", "300"), "the first failed: the request needs 300 sequences at once, above the 256"),
    (("--time-limit", "0.001"), "raise --time-limit, or lower --rate"),
    (("--rate", "1e-7", "--duration", "10"), "none arrived; raise --duration"),
    (("--drop-before", "1e6"), "arrived before --drop-before")])
def test_why_a_run_measured_nothing(words: tuple[str, ...], said: str, tmp_path: Path):
    done = invoke("bench", *SIMULATED, "--rate", "1", "--results", str(tmp_path), *words)
    assert done.exit_code == 1, done.output
    assert said in done.stderr.partition("paged measured nothing: no request was done; ")[2]
    assert ("--time-limit" in done.stderr) == ("--time-limit" in words)


@pytest.mark.parametrize(("words", "said"), [
    (("--rate", "trace"), "--rate trace: sharegpt (synthetic) has no arrival times of its own; give requests"),
    (("--temperature", "5"), "temperature = 5.0: must be between 0 and 2")])
def test_what_only_the_workload_or_the_sampling_refuses_is_a_usage_error(
        words: tuple[str, ...], said: str, tmp_path: Path):
    done = invoke("bench", *SIMULATED, "--results", str(tmp_path), *words)
    assert done.exit_code == 2 and said in done.stderr, done.output
    assert not list(tmp_path.iterdir())


def test_simulated_swap_space_is_the_one_asked_for(tmp_path: Path):
    counts = {}
    for size in ("0", "25MiB", "20GiB", None):
        words = () if size is None else ("--swap-space", size)
        done = invoke("bench", *SIMULATED, "--num-requests", "100", "--n", "4", "--preemption", "swap", "--rate", "inf",
                      "--results", str(tmp_path), "--name", str(size), *words)
        assert done.exit_code == 0, done.output
        steps = pd.read_parquet(tmp_path / str(size) / "steps.parquet")
        counts[size] = int(steps["preempt_swap"].sum()), int(steps["preempt_recompute"].sum()), steps["swapped"].max()
        assert (f"swap_space={0 if size == '0' else ''}" in summary(tmp_path / str(size))["signature"]) == bool(size)
    assert counts["0"][0] == 0 and counts["0"][1] > 0
    # A block of 16 tokens of OPT-13B is 16 x 2 x 40 layers x 5,120 x 2 bytes = 12.5 MiB, so 25 MiB hold two.
    assert counts["25MiB"][2] <= 2 and counts["25MiB"][0] < counts["20GiB"][0]
    assert counts[None] == counts["20GiB"] and counts[None][0] > counts[None][1]


def test_a_simulated_static_batch_is_the_one_asked_for(tmp_path: Path):
    done = invoke("bench", *SIMULATED, "--policy", "fastertransformer", "--static-batch", "2", "--rate", "inf",
                  "--results", str(tmp_path), "--name", "two")
    assert done.exit_code == 0, done.output
    assert pd.read_parquet(tmp_path / "two" / "steps.parquet")["sequences"].max() == 2


def test_every_system_in_one_session(tmp_path: Path):
    baselines = ("orca-oracle", "orca-pow2", "orca-max", "fastertransformer", "tgi")
    words = [word for name in baselines for word in ("--baseline", name)]
    done = invoke("bench", *NULL, *words, "--rate", "inf", "--results", str(tmp_path), "--name", "all")
    assert done.exit_code == 0, done.output
    runs = summary(tmp_path / "all")["runs"]
    assert [run["policy"] for run in runs] == ["paged", *baselines]
    assert all(run["completed"] == 12 and run["rate"] == "inf" for run in runs)
    assert len({run["total_output_tokens"] for run in runs}) == 1
    assert "synthetic" in done.output and "paged against tgi" in done.output
    # 4 sequences of the longest length fit: what orca-max reserves, it cannot exceed.
    assert next(run for run in runs if run["policy"] == "orca-max")["batch_size"] <= 4


def test_results_hold_tables_page_and_signature(simulated: Path):
    folder = simulated / "a"
    assert {"summary.json", "requests.parquet", "requests.csv", "steps.parquet", "report.md", "report.html"} <= {
        path.name for path in folder.iterdir()}
    found = summary(folder)
    assert "simulate=a100-40gb" in found["signature"] and "kv_blocks=983" in found["signature"]
    assert all(run["simulated"] and run["synthetic"] for run in found["runs"])
    assert "simulated time" in (folder / "report.html").read_text()
    steps = pd.read_parquet(folder / "steps.parquet")
    assert steps.groupby("run").size().tolist() == [run["steps"] for run in found["runs"]]


def test_simulated_sessions_repeat_exactly(simulated: Path):
    done = invoke("compare", str(simulated / "a"), str(simulated / "b"), "--max-regress", "normalized_latency=0%",
                  "--max-regress", "waste.token=0%", "--max-regress", "steps=0")
    assert done.exit_code == 0, done.output
    assert "no regression" in done.output


def test_equal_results_are_said_to_be_equal(simulated: Path):
    done = invoke("compare", str(simulated / "a"), str(simulated / "b"))
    assert done.exit_code == 0 and "A is simulated, B is simulated" in done.output
    assert "nothing changed: all " in done.output and "verdict" not in done.output


def test_a_slower_result_fails_the_gate(simulated: Path, tmp_path: Path):
    slow = tmp_path / "slow"
    slow.mkdir()
    for path in (simulated / "a").iterdir():
        (slow / path.name).write_bytes(path.read_bytes())
    found = summary(slow)
    for run in found["runs"]:
        if run["policy"] == "paged":
            run["normalized_latency_s"] *= 1.08
    (slow / "summary.json").write_text(json.dumps(found))
    gate = ("compare", str(simulated / "a"), str(slow), "--max-regress")
    worse = invoke(*gate, "normalized_latency=5%")
    assert worse.exit_code == 1 and "nothing changed" not in worse.output
    assert invoke(*gate, "normalized_latency=10%").exit_code == 0
    assert invoke("compare", str(slow), str(simulated / "a"), "--max-regress", "normalized_latency=5%").exit_code == 0


def test_compare_says_what_is_wrong_with_its_input(simulated: Path, tmp_path: Path):
    assert invoke("compare", str(simulated / "a"), str(tmp_path)).exit_code == 2
    assert invoke("compare", str(simulated / "a"), str(simulated / "b"), "--max-regress", "speed=1%").exit_code == 2


def test_capacity_is_found_and_written(tmp_path: Path):
    done = invoke("bench", *SIMULATED, "--find-capacity", "--latency-limit", "0.1", "--baseline", "orca-max",
                  "--results", str(tmp_path), "--name", "cap")
    assert done.exit_code == 0, done.output
    paged, orca = summary(tmp_path / "cap")["capacity"]
    assert paged["policy"] == "paged" and paged["rate"] > orca["rate"] > 0
    assert "capacity" in done.output


def test_too_few_requests_show_no_capacity(tmp_path: Path):
    done = invoke("bench", *SIMULATED, "--num-requests", "8", "--find-capacity", "--results", str(tmp_path), "--name",
                  "few")
    assert done.exit_code == 0 and "8 requests" in done.output and "raise --num-requests" in done.output
    found = summary(tmp_path / "few")
    assert all(item["too_few_requests"] for item in found["capacity"]) and len(found["runs"]) < 10
    assert "unknown: too few requests" in (tmp_path / "few" / "report.md").read_text()


@pytest.mark.parametrize("words, says", [
    (("--rate", "0"), "--rate"), (("--rate", "fast"), "--rate"),
    (("--policy", "magic"), "pagedcli: --policy = 'magic': must be one of"),
    (("--baseline", "nonsense"), "pagedcli: --baseline = 'nonsense': must be one of"),
    (("--baseline", "paged"), "once"), (("--goodput", "speed:1"), "ttft:MS"), (("--steps-between", "9:3"), "9:3"),
    (("--rate", "inf", "--find-capacity"), "--find-capacity"), (("--name", "a/b"), "--name"),
    (("--workload", "nonsense"), "nonsense")])
def test_bad_options_end_in_one_message(words: tuple[str, ...], says: str, tmp_path: Path):
    done = invoke("bench", *NULL, "--rate", "inf", "--results", str(tmp_path), *words)
    assert done.exit_code == 2
    assert says in done.stderr and "Traceback" not in done.output


@pytest.mark.parametrize(("words", "said"), [
    (("--name", "a/b"), "--name 'a/b': must be a plain folder name"), (("--name", "../../x"), "--name '../../x'"),
    (("--name", ""), "--name ''"), (("--results", "/proc/x"), "--results /proc/x: cannot be written to"),
    (("--results", "/dev/null"), "--results /dev/null is not a folder"),
    (("--name", "n" * 300), "... (300 characters)': must be at most 255 bytes")])
def test_results_that_cannot_be_written_are_refused_before_serving(
        words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "load_backend", lambda *_: pytest.fail("served"))
    done = invoke("bench", *SIMULATED, "--results", str(tmp_path / "new" / "deep"), *words)
    assert done.exit_code == 2 and said in done.stderr, done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("words", "said"), [
    (("--duration", "nan"), "--duration = nan: must be a finite number, above 0, at most 1e+09"),
    (("--duration", "inf"), "--duration = inf: must be a finite number"),
    (("--drop-before", "nan"), "--drop-before = nan: must be a finite number, at least 0"),
    (("--stop-latency", "nan"), "--stop-latency = nan: must be a finite number, above 0"),
    (("--goodput", "ttft:inf"), "--goodput 'ttft:inf': must be ttft:MS, tpot:MS or e2el:MS with MS finite"),
    (("--time-limit", "inf"), "--time-limit = inf: must be a finite number"),
    (("--burstiness", "1e-310"), "--burstiness = 1e-310: must be a finite number, at least 0.001, at most 1e+06"),
    (("--temperature", "nan"), "--temperature = nan: must be a finite number"),
    (("--static-batch", "0"), "--static-batch = 0: must be at least 1"),
    (("--seed", "-1"), "--seed = -1: must be at least 0"),
    (("--rate", "nan"), "'nan' must be a number above 0"),
    (("--rate", "4,1e-300"), "--rate = 1e-300: 40 requests would arrive until later than 1e+09 s; must be at least "
                             "4e-08/s"),
    (("--num-requests", "9" * 300), "--num-requests = 999,999,999,"),
    (("--rate", "z" * 300), "... (300 characters)")])
def test_numbers_that_no_run_can_heed_are_refused_in_short(words: tuple[str, ...], said: str, tmp_path: Path):
    done = invoke("bench", *SIMULATED, "--results", str(tmp_path), *words)
    assert done.exit_code == 2 and said in done.stderr, done.output
    assert len(done.stderr) < 300 and not list(tmp_path.iterdir())


def test_a_rate_times_a_duration_beyond_every_number_is_refused_in_short(tmp_path: Path):
    done = invoke("bench", *SIMULATED[:-3], "--rate", "1e305", "--duration", "1e8", "--results", str(tmp_path))
    assert done.exit_code == 2 and "requests of --rate x --duration" in done.stderr and len(done.stderr) < 200


def test_rates_are_read():
    assert read_rates("0.5,1,inf") == (0.5, 1.0, float("inf"))
    assert read_rates("trace") == (None,)
    with pytest.raises(UsageError):
        read_rates("1,trace")


def test_default_pool_makes_memory_scarce_and_a_given_one_is_kept():
    assert read_setup({}).config.cache.num_blocks == 4 * 1024 // 16
    assert read_setup({"max_model_len": 512, "block_size": 32}).config.cache.num_blocks == 4 * 512 // 32
    assert read_setup({"num_kv_blocks": 7}).config.cache.num_blocks == 7
    given = read_setup({"kv_cache_memory": "1GiB"}).config.cache
    assert (given.num_blocks, given.memory) == (None, 1 << 30)


def test_several_samples_are_sampled_and_beams_are_beams():
    assert read_setup({}).params.greedy
    assert read_setup({"n": 3}).params.temperature == 1.0
    beams = read_setup({"beam_width": 4}).params
    assert beams.use_beam_search and beams.width == 4


def test_the_live_display_shows_rates_queues_and_memory():
    from rich.console import Console

    from pagedcli.bench.records import StepRecord
    from pagedcli.bench.serve import Progress

    step = StepRecord(1.0, 0.1, 5, 7, 2, 5, 5, 50, 20, 10, 5, 15, 4, 4)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(state_table("paged", Progress(2.0, 4, 3, 1, 40, 1.5, step, 6)))
    text = console.export_text()
    for part in ("paged", "rate asked 1.5, achieved 2.00", "4/40", "5 running", "7 waiting, 2 swapped", "50% filled",
                 "35% wasted", "6 preempted"):
        assert part in text


def test_hf_needs_a_model(tmp_path: Path):
    done = invoke("bench", *NULL, "--baseline", "hf", "--rate", "inf", "--results", str(tmp_path))
    assert done.exit_code == 3 and "--model null" in done.stderr


def test_all_at_once_within_a_duration_is_the_usual_number() -> None:
    assert read_setup({"rate": "inf", "duration": 10.0}).count == DEFAULT_REQUESTS
    assert read_setup({"rate": "2,inf", "duration": 10.0}).count == 26 + DEFAULT_REQUESTS
    assert read_setup({"rate": "trace"}).count is None


@pytest.mark.parametrize(("words", "said"), [
    (("bench", *SIMULATED, "--num-requests", "1000001"), "--num-requests = 1,000,001: must be at most 1,000,000"),
    (("bench", *SIMULATED[:-3], "--no-chunked-prefill", "--rate", "1000000", "--duration", "10"),
     "requests of --rate x --duration = 13,000,032: must be at most 1,000,000"),
    (("workloads", "show", "sharegpt", "--num-requests", "100000000000"), "must be at most 1,000,000"),
    (("plan", "--model", "opt-13b", "--num-requests", "2000000"), "must be at most 1,000,000")])
def test_more_requests_than_memory_holds_are_refused(words: tuple[str, ...], said: str) -> None:
    done = invoke(*words)
    assert done.exit_code == 2 and said in done.output, done.output
