"""Sessions on the real engine without a model: cold caches, equal conditions, shares that add up, capacity."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from pagedcli.bench.metrics import summarize
from pagedcli.bench.serve import replay, warm_up
from pagedcli.bench.session import EngineRunner, Experiment, Session, make_requests
from pagedcli.bench.signature import Signature
from pagedcli.core.clock import VirtualClock, WallClock
from pagedcli.core.config import CacheConfig, ModelConfig, RunConfig
from pagedcli.core.errors import UsageError
from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.core.request import SamplingParams
from pagedcli.engine.build import build_engine, load
from pagedcli.engine.engine import Engine
from pagedcli.workloads.arrivals import Constant
from pagedcli.workloads.spec import TraceRequest, Workload

CONFIG = RunConfig(model=ModelConfig(model="null", max_model_len=256), cache=CacheConfig(num_blocks=64, block_size=16))
VOCAB = load(CONFIG)[0].limits.vocab_size
SYSTEMS = ("paged", "orca-oracle", "orca-pow2", "orca-max", "fastertransformer", "tgi")


def make(policy: str, seconds: float = 0.01) -> Engine:
    """An engine on a simulated clock whose steps take 10 ms each."""
    config = replace(CONFIG, policy=policy)
    executor, tokenizer = load(config)

    def execute(plan: StepPlan) -> StepResult:
        del plan
        return StepResult(None, seconds)

    executor.execute = execute  # type: ignore[method-assign]  # the null executor with a price
    return build_engine(config, clock=VirtualClock(), executor=executor, tokenizer=tokenizer, record_times=True)


def workload(count: int = 60, prefix: int = 0) -> Workload:
    rng = np.random.default_rng(4)
    rows = tuple(TraceRequest(i, int(rng.integers(4, 80)) + prefix, int(rng.integers(1, 60)),
                              prefix_id="p" if prefix else None, prefix_len=prefix) for i in range(count))
    return Workload("test", "made up", True, rows, count, {}, "ids")


def session(experiment: Experiment, work: Workload | None = None, **changes: object) -> Session:
    work = work or workload()
    params = SamplingParams(**({"temperature": 0.0} | changes))
    requests = make_requests(work, VOCAB, params=params)
    runner = EngineRunner(make, VOCAB, simulated=True)
    return Session(experiment, work, requests, lambda policy: runner)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("policy", SYSTEMS)
def test_waste_shares_add_to_one_at_every_step_of_every_policy(policy: str, n: int):
    ran = session(Experiment(policy=policy, rates=(20.0,)), temperature=1.0 if n > 1 else 0.0, n=n).run(policy, 20.0)
    assert ran.figures["completed"] == 60 and ran.figures["failed"] == 0
    assert (ran.steps.pool == 64 * 16).all()
    assert sum(ran.figures["waste"].values()) == pytest.approx(1.0)
    assert ran.figures["total_output_tokens"] == n * sum(row.output_len for row in workload().requests)


def test_every_policy_gets_the_same_requests_at_the_same_times():
    bench = session(Experiment(baselines=("orca-max", "tgi"), rates=(5.0, 20.0), repeats=2))
    assert len(bench.schedule()) == 12
    for policy, rate, repeat in bench.schedule():
        bench.run(policy, rate, repeat)
    for rate in (5.0, 20.0):
        runs = [run for run in bench.runs if run.rate == rate]
        assert len({tuple(run.requests["arrival"]) for run in runs}) == 1
        assert len({tuple(run.requests["prompt_tokens"]) for run in runs}) == 1
    np.testing.assert_allclose(np.array(bench.runs[0].requests["arrival"]) * 5.0,
                               np.array(bench.runs[-1].requests["arrival"]) * 20.0)
    results = bench.results("x", Signature({"a": "b"}, {}), {})
    assert {run.figures["role"] for run in results.runs if run.policy == "tgi"} == {"baseline"}
    assert all(run.figures["signature"] == results.signature.text for run in results.runs)


def test_a_second_run_in_one_process_starts_with_a_cold_prefix_cache():
    """32 shared tokens are two blocks: all requests but the first hit them, in the second run as in the first."""
    bench = session(Experiment(rates=(20.0,)), workload(prefix=32))
    first, second = (bench.run("paged", 20.0, repeat) for repeat in range(2))
    assert first.requests["cached_tokens"][0] == second.requests["cached_tokens"][0] == 0
    assert sum(first.requests["cached_tokens"]) == sum(second.requests["cached_tokens"]) > 0
    assert list(first.series("e2el")) == list(second.series("e2el"))


def test_warming_up_leaves_the_cache_cold_for_the_workload():
    work = workload(prefix=32)
    requests = make_requests(work, VOCAB)
    warm, cold = make("paged"), make("paged")
    warm_up(warm, VOCAB)
    hits = [[record.cached_tokens for record in replay(engine, requests, Constant(10.0).deadlines(60, 0)).requests]
            for engine in (warm, cold)]
    assert hits[0] == hits[1]


def test_duration_limits_arrivals():
    bench = session(Experiment(rates=(5.0,), duration=4.0))
    run = bench.run("paged", 5.0)
    assert 0 < len(run.requests["arrival"]) < 60
    assert max(run.requests["arrival"]) < 4.0
    with pytest.raises(UsageError, match="raise --num-requests"):
        session(Experiment(rates=(5.0,), duration=400.0)).run("paged", 5.0)


def test_capacity_orders_the_systems():
    bench = session(Experiment(baselines=("orca-max",), limits=(0.02, 0.1)), workload(100))
    found = {policy: bench.find_capacity(policy) for policy in ("paged", "orca-max")}
    for limit in range(2):
        assert found["paged"][limit].rate > found["orca-max"][limit].rate > 0
    assert len(bench.capacity) == 4
    assert len(bench.runs) == sum(len(found[policy][1].probes) for policy in found)


def test_trace_times_are_replayed_as_they_are():
    work = workload(5)
    timed = replace(work, requests=tuple(replace(row, arrival=row.index * 1.5) for row in work.requests))
    run = session(Experiment(rates=(None,)), timed).run("paged", None)
    assert list(run.requests["arrival"]) == [0.0, 1.5, 3.0, 4.5, 6.0]


def test_arrivals_later_than_a_clock_can_tell_are_refused():
    with pytest.raises(UsageError, match=r"--rate = 1e-08.*the last of 60 requests"):
        session(Experiment(rates=(1e-8,))).run("paged", 1e-8)


def test_bad_experiments_are_named():
    with pytest.raises(UsageError, match="once"):
        Experiment(baselines=("paged",))
    with pytest.raises(UsageError, match="repeat = 0"):
        Experiment(repeats=0)


@pytest.mark.slow
def test_ten_thousand_arrivals_on_the_null_engine():
    """Report 25: 10,000 arrivals at 200/s through the whole engine in real time."""
    config = replace(CONFIG, cache=CacheConfig(num_blocks=4096))
    rows = tuple(TraceRequest(i, 16, 4) for i in range(10_000))
    requests = make_requests(Workload("x", "x", True, rows, 10_000, {}, "ids"), VOCAB)
    engine = build_engine(config, clock=WallClock(), record_times=True)
    figures = summarize(replay(engine, requests, Constant(200.0).deadlines(10_000, 0), rate=200.0))
    print(f"\nachieved {figures['request_rate_achieved']:.2f}/s, p99 lag {figures['p99_dispatch_lag_ms']:.2f} ms")
    assert figures["request_rate_achieved"] == pytest.approx(200.0, rel=0.01)
    assert figures["completed"] == 10_000 and math.isfinite(figures["normalized_latency_s"])
