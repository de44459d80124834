"""Calibration: coefficients come back from a trace that was made with them; real traces within the stated error."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pagedcli.bench.calibrate import (
    FIXED,
    check_split,
    fit_trace,
    mean_error,
    replay_trace,
    run_latencies,
    statistics,
    vllm_config,
)
from pagedcli.bench.calibrate_trace import Trace, read_trace
from pagedcli.bench.least_squares import fit_positive
from pagedcli.core.errors import UsageError
from pagedcli.execution.hardware import find_hardware
from pagedcli.execution.shapes import SHAPES
from pagedcli.execution.simulated import Deployment
from pagedcli.workloads import Poisson

REAL = Path(__file__).resolve().parents[3] / "shared" / "vllm_trace" / "rtx4090_llama31_8b_requests.jsonl"


def _deployment() -> Deployment:
    return Deployment(find_hardware("rtx4090"), SHAPES["llama3-8b"], num_blocks=1500)


def _made_trace(values: dict[str, float], count: int = 80, rate: float = 6.0) -> Trace:
    rng = np.random.default_rng(1)
    prompt, output = rng.integers(20, 900, count).astype(float), rng.integers(20, 300, count).astype(float)
    arrival = Poisson(rate).deadlines(count, 0)
    blank = np.zeros(count)
    deployment = _deployment()
    deployment = replace(deployment, hardware=replace(deployment.hardware, engines={},
                                                      coefficients=replace(FIXED, **values)))
    run = replay_trace(Trace("made", prompt, output, arrival, blank, blank), vllm_config(), deployment)
    first = np.array([record.first_token for record in run.requests], dtype=float)
    last = np.array([record.finish for record in run.requests], dtype=float)
    return Trace("made", prompt, output, arrival, first, last)


def test_a_simulated_trace_is_fitted_closely() -> None:
    trace = _made_trace({"weight_efficiency": 0.7, "flop_efficiency": 0.4, "kv_efficiency": 0.5,
                         "step_seconds": 0.004, "sequence_seconds": 5e-5})
    found = fit_trace(trace, _deployment(), vllm_config(), train=40)
    assert found.error < 0.02
    assert found.held_out_error is not None and found.held_out_error < 0.03
    mean, most = found.pool_use()
    assert 0 < mean < most <= 1


def test_a_pool_whose_size_is_not_told_is_found() -> None:
    trace = _made_trace({"weight_efficiency": 0.7, "flop_efficiency": 0.4, "kv_efficiency": 0.5,
                         "step_seconds": 0.004, "sequence_seconds": 5e-5}, rate=40.0)
    true = _deployment().blocks
    wrong = replace(_deployment(), num_blocks=round(1.25 * true))
    known = fit_trace(trace, wrong, vllm_config())
    found = fit_trace(trace, wrong, vllm_config(), seek_pool=True)
    assert known.blocks == wrong.blocks and found.blocks == pytest.approx(true, rel=0.08)
    assert found.error < known.error and found.error < 0.02
    assert found.preemptions > 0


def test_least_squares_finds_a_curve() -> None:
    xs = np.linspace(1, 5, 20)
    ys = 3.0 * np.exp(-0.5 * xs)
    found = fit_positive(lambda p: np.log(p["a"] * np.exp(-p["b"] * xs) / ys), {"a": 1.0, "b": 1.0},
                         {"a": (0.1, 10), "b": (0.1, 10)})
    assert found["a"] == pytest.approx(3.0, rel=1e-4) and found["b"] == pytest.approx(0.5, rel=1e-4)


def test_two_clocks_are_tied_by_the_fastest_queueing(tmp_path: Path) -> None:
    rows = [{"input_toks": 4, "output_toks": 2, "arrival_time": 1000.0, "queued_ts": 7.5, "first_token_ts": 8.0,
             "last_token_ts": 9.0},
            {"input_toks": 4, "output_toks": 2, "arrival_time": 1001.0, "queued_ts": 8.0, "first_token_ts": 8.5,
             "last_token_ts": 9.5}]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    trace = read_trace(path)
    assert trace.latencies()["ttft"].tolist() == [1.0, 0.5]  # the first request waited half a second to be queued


def _row(**fields: object) -> str:
    usual = {"input_toks": 4, "output_toks": 2, "arrival_time": 1.0, "first_token_time": 2.0, "last_token_time": 3.0}
    return json.dumps({**usual, **fields})


@pytest.mark.parametrize(("text", "message"), [
    ('{"input_toks": 4}', "line 1: no number in output_toks"), ("nonsense", "line 1: not JSON"), ("", "no requests"),
    (_row() + "\n\n" + _row(input_toks=0), "t.jsonl, line 3: input_toks = 0: must be a whole number of tokens, from 1"),
    (_row(output_toks=2.5), "line 1: output_toks = 2.5: must be a whole number"),
    (_row(input_toks=10**12), "line 1: input_toks = 1000000000000: must be a whole number of tokens, from 1 to 10,000"),
    (_row(first_token_time=-5), "line 1: first_token_time = -5: must not be before arrival_time = 1"),
    (_row(last_token_time=1.5), "line 1: last_token_time = 1.5: must not be before first_token_time = 2"),
    (_row(arrival_time=float("nan")), "line 1: arrival_time = NaN: must be a finite number"),
    (_row(last_token_time=float("inf")), "line 1: last_token_time = Infinity: must be a finite number"),
    (_row(queued_ts="soon"), "line 1: queued_ts = soon: must be a finite number"),
    (_row(arrival_time=True), "line 1: arrival_time = true: must be a finite number"),
    (_row(last_token_time=5e9), "line 1: last_token_time = 5000000000: is 5e+09 s after the first arrival, and at most "
                                "1e+09 can be simulated; times must be in seconds"),
    (_row(queued_ts=9.0), "first_token_time = 2: must not be before arrival_time = 1 (9 on the clock of queued_ts)")])
def test_faulty_traces_are_explained(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=re.escape(message)):
        read_trace(path)


def test_a_faulty_line_of_a_csv_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("input_toks,output_toks,arrival,first_token,finish\n4,2,0,1,2\n4,2,nan,1,2\n", "utf-8")
    with pytest.raises(UsageError, match=r"t\.csv, line 3: arrival = nan: must be a finite number"):
        read_trace(path)


def _plain(count: int, output: float = 2.0, first: float = 0.5) -> Trace:
    arrival = np.arange(count, dtype=float)
    return Trace("t1", np.full(count, 4.0), np.full(count, output), arrival, arrival + first, arrival + 1.0)


def test_what_a_trace_is_split_into() -> None:
    assert [check_split(_plain(count)) for count in (6, 24, 40)] == [5, 6, 10]
    assert [check_split(_plain(40), train) for train in (5, 39)] == [5, 39]


@pytest.mark.parametrize(("trace", "train", "message"), [
    (_plain(1), None, "t1 holds 1 request: at least 6 are needed, 5 to fit to and one to judge by"),
    (_plain(5), None, "t1 holds 5 requests: at least 6"),
    (_plain(40), 0, "--train = 0: must be from 5 to 39, one fewer than the 40 requests of t1"),
    (_plain(40), 4000, "--train = 4000: must be from 5 to 39"), (_plain(40), 40, "--train = 40: must be from 5 to 39"),
    (_plain(40, output=1.0), None, "of the first 10 of 40 requests, none has two output tokens or more"),
    (_plain(40, first=0.0), None, "of the first 10 of 40 requests, mean_ttft is 0 s")])
def test_what_cannot_be_fitted_and_judged_is_refused(trace: Trace, train: int | None, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        check_split(trace, train)


@pytest.mark.slow
def test_the_rtx_4090_trace() -> None:
    if not REAL.is_file():
        pytest.skip("the measured trace is not here")
    trace = read_trace(REAL)
    deployment = replace(_deployment(), num_blocks=2588)
    assert fit_trace(trace, deployment, vllm_config()).error <= 0.015
    part = fit_trace(trace, deployment, vllm_config(), train=75)
    assert part.held_out_error is not None and part.held_out_error <= 0.035
    rest = slice(75, None)
    assert mean_error(statistics(trace.latencies(rest)), statistics(run_latencies(part.run, rest))) <= 0.035
