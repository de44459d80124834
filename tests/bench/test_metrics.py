"""Exact figures on scripted times, worked out by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from pagedcli.bench.metrics import Goodput, Window, samples, summarize
from pagedcli.bench.records import RequestRecord, RunResult, StepRecord, StepTable
from pagedcli.bench.serve import replay
from pagedcli.core.errors import UsageError
from tests.bench.scripted_engine import ScriptedEngine, requests


def record(index: int, arrival: float, times: list[float], **changes: object) -> RequestRecord:
    values = {"index": index, "key": f"r{index}", "arrival": arrival, "dispatched": arrival, "prompt_tokens": 10,
              "output_len": len(times), "output_tokens": len(times), "scheduled": arrival,
              "finish": times[-1] if times else None, "token_times": np.array(times), **changes}
    return RequestRecord(**values)


def run_of(records: list[RequestRecord], steps: StepTable | None = None, duration: float = 10.0) -> RunResult:
    return RunResult(policy="paged", rate=2.0, requests=tuple(records), steps=steps or StepTable(), duration=duration)


THREE = [record(0, 1.0, [1.5]), record(1, 2.0, [2.25, 2.75]), record(2, 3.0, [4.0, 4.25, 5.0])]


def test_first_token_time_is_not_an_inter_token_latency():
    """Outputs of 1, 2 and 3 tokens with times chosen in binary fractions: every figure is exact."""
    assert samples(THREE, "ttft").tolist() == [0.5, 0.25, 1.0]
    assert samples(THREE, "tpot").tolist() == [0.5, 0.5]
    assert samples(THREE, "itl").tolist() == [0.5, 0.25, 0.75]
    assert samples(THREE, "e2el").tolist() == [0.5, 0.75, 2.0]
    figures = summarize(run_of(THREE))
    assert figures["mean_ttft_ms"] == pytest.approx(1750 / 3)
    assert figures["median_ttft_ms"] == 500.0
    assert (figures["mean_tpot_ms"], figures["std_tpot_ms"]) == (500.0, 0.0)
    assert (figures["mean_itl_ms"], figures["median_itl_ms"]) == (500.0, 500.0)
    assert figures["std_itl_ms"] == pytest.approx(math.sqrt((250**2 + 250**2) / 3))
    assert figures["normalized_latency_s"] == pytest.approx((0.5 + 0.375 + 2 / 3) / 3)


def test_percentiles_interpolate_linearly():
    records = [record(i, 0.0, [float(i + 1)]) for i in range(5)]
    figures = summarize(run_of(records), percentiles=(50, 90, 99, 99.9))
    assert figures["p50_e2el_ms"] == 3000.0
    assert figures["p90_e2el_ms"] == pytest.approx(4600.0)
    assert figures["p99_e2el_ms"] == pytest.approx(4960.0)
    assert figures["p99.9_e2el_ms"] == pytest.approx(4996.0)


def test_a_scripted_engine_gives_the_same_figures():
    """Steps of 0.5, 0.25, 0.125 ... are known; three requests share them."""
    script = [0.5, 0.25, 0.125]
    engine = ScriptedEngine(lambda step, running: script[step], slots=3)
    run = replay(engine, requests([(4, 1), (4, 2), (4, 3)]), [0.0, 0.0, 0.0])
    assert samples(run.requests, "ttft").tolist() == [0.5, 0.5, 0.5]
    assert samples(run.requests, "itl").tolist() == [0.25, 0.25, 0.125]
    assert samples(run.requests, "tpot").tolist() == [0.25, 0.1875]
    assert samples(run.requests, "e2el").tolist() == [0.5, 0.75, 0.875]


def test_throughput_and_goodput():
    figures = summarize(run_of(THREE), goodput=Goodput.parse(["ttft:600", "e2el:1000"]))
    assert figures["request_throughput"] == 0.3
    assert figures["request_goodput"] == 0.2
    assert figures["output_throughput"] == 0.6
    assert figures["total_token_throughput"] == 3.6
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 6)
    assert summarize(run_of(THREE))["request_goodput"] is None
    assert summarize(run_of(THREE), goodput=Goodput(tpot=499.0))["request_goodput"] == pytest.approx(0.1)


@pytest.mark.parametrize("text", ["itl:5", "ttft", "ttft:", "ttft:-1", "ttft:nan"])
def test_bad_goodput_flags_name_the_flag(text: str):
    with pytest.raises(UsageError, match="ttft:MS"):
        Goodput.parse([text])


def test_failures_and_windows_are_left_out_of_latency():
    bad = record(3, 4.0, [], error="too_long", error_message="no")
    assert summarize(run_of([*THREE, bad]))["mean_e2el_ms"] == summarize(run_of(THREE))["mean_e2el_ms"]
    assert summarize(run_of([*THREE, bad]))["failed"] == 1
    late = summarize(run_of([*THREE, bad]), window=Window(arrivals_from=2.0))
    assert (late["completed"], late["failed"], late["duration"]) == (2, 1, 8.0)
    assert late["mean_e2el_ms"] == 1375.0


def step(time: float, running: int, used: tuple[int, int, int, int, int], logical: int, physical: int) -> StepRecord:
    return StepRecord(time, 0.1, running, 0, 0, running, 8, *used, logical, physical)


def test_memory_figures_are_means_over_iterations():
    steps = StepTable(1)
    steps.append(step(0.0, 1, (10, 20, 30, 20, 20), 4, 2))
    steps.append(step(1.0, 3, (30, 20, 10, 20, 20), 9, 3))
    steps.append(step(2.0, 5, (50, 0, 0, 0, 50), 5, 5))
    figures = summarize(run_of([], steps))
    assert figures["waste"] == pytest.approx({"token": 0.3, "reserved": 0.4 / 3, "internal": 0.4 / 3,
                                              "external": 0.4 / 3, "free": 0.3})
    assert sum(figures["waste"].values()) == pytest.approx(1.0)
    assert figures["batch_size"] == 3.0
    assert figures["sharing_saving"] == pytest.approx(1 - 1 / 2)
    window = summarize(run_of([], steps), window=Window(steps_from=1.0, steps_to=2.0))
    assert (window["batch_size"], window["steps"]) == (3.0, 1)
    assert window["sharing_saving"] == pytest.approx(1 - 1 / 3)


def test_nothing_served_gives_valid_json():
    figures = summarize(run_of([record(0, 0.0, [], error="too_long")]))
    text = json.dumps(figures, allow_nan=False)
    assert json.loads(text)["normalized_latency_s"] is None
    infinite = RunResult(policy="paged", rate=math.inf, requests=(), steps=StepTable(), duration=0.0)
    assert json.loads(json.dumps(summarize(infinite), allow_nan=False))["request_rate"] == "inf"


def test_tokens_of_samples_count_in_throughput_but_length_in_latency():
    four = record(0, 0.0, [1.0, 2.0], output_tokens=8, sequences=4)
    figures = summarize(run_of([four]))
    assert figures["normalized_latency_s"] == 1.0
    assert figures["total_output_tokens"] == 8


def test_step_table_grows_and_round_trips():
    table = StepTable(1)
    rows = [step(float(i), i, (i, 0, 0, 0, 100 - i), 1, 1) for i in range(1000)]
    for row in rows:
        table.append(row)
    assert len(table) == 1000 and table[999] == rows[999] and table[-1] == rows[-1]
    again = StepTable.from_columns({name: table.column(name) for name in StepRecord._fields})
    assert list(again) == rows
    assert (table.pool == 100).all()
    with pytest.raises(IndexError):
        table[1000]
