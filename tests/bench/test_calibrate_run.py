"""Calibration to one's own runs: a simulated machine's steps give its own times back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedcli.bench.calibrate_run import fit_run, replay_runs
from pagedcli.bench.metrics import summarize
from pagedcli.bench.paper_setup import requests_at
from pagedcli.bench.signature import Signature
from pagedcli.bench.simulate import simulate
from pagedcli.bench.storage import Results, run_data
from pagedcli.core.config import CacheConfig, RunConfig
from pagedcli.core.errors import UsageError
from pagedcli.execution.hardware import Coefficients, find_hardware
from pagedcli.execution.shapes import SHAPES
from pagedcli.execution.simulated import Deployment

LENGTHS = [(20 + 3 * (k % 40), 10 + k % 30) for k in range(60)]


def _results(simulated_by: str = "") -> Results:
    made = Coefficients(weight_efficiency=0.1, flop_efficiency=0.01, kv_efficiency=0.02, step_seconds=0.01)
    hardware = replace(find_hardware("l4"), coefficients=made, engines={})
    deployment = Deployment(hardware, SHAPES["smollm2-135m"], num_blocks=400, dtype="fp32", max_positions=2048)
    config = RunConfig(cache=CacheConfig(prefix_cache=False))
    runs = []
    for rate in (1.0, 5.0, 20.0):
        run = simulate(config, deployment, requests_at(LENGTHS, rate, 20.0), rate=rate)
        runs.append(run_data(run, {**summarize(run), "policy": "paged", "rate": rate}))
    settings = {"model": "smollm2-135m", "kv_blocks": "400", "block_size": "16", "max_model_len": "2048",
                "chunked_prefill": "True"}
    return Results("made", Signature({**settings, **({"simulate": simulated_by} if simulated_by else {})}, {}), runs)


def test_a_known_machine_is_found_again() -> None:
    results = _results()
    fit = fit_run(results, SHAPES["smollm2-135m"])
    assert fit.total_error == pytest.approx(0, abs=1e-9) and fit.median_error < 0.03
    assert fit.hardware.num_blocks == 400
    again = replay_runs(results, fit.hardware)
    assert [run.rate for run in again] == [1.0, 5.0, 20.0]
    assert all(abs(run.error) < 0.05 for run in again)


def test_simulated_runs_are_refused() -> None:
    with pytest.raises(UsageError, match="was simulated"):
        replay_runs(_results("l4"), find_hardware("l4"))
