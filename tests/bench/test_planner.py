"""The planner: targets as text, prices, and plans that follow what the devices can do."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from pagedcli.bench.planner import Option, Question, Slo, find_machines, make_plan, options, read_prices
from pagedcli.core.errors import UsageError
from pagedcli.execution.hardware import find_hardware, known_hardware
from pagedcli.execution.shapes import SHAPES

LENGTHS = tuple((60 + 5 * (k % 50), 10 + (k % 30)) for k in range(120))


def _question(model: str = "llama3-8b", slo: str = "normalized_latency<0.2") -> Question:
    return Question(SHAPES[model], LENGTHS, (Slo.parse(slo),), {"l4": 1.0, "h100-80gb": 10.0}, max_num_seqs=48)


def test_targets_are_read() -> None:
    assert Slo.parse("normalized_latency<0.2") == Slo("mean", "normalized_latency", 0.2)
    assert Slo.parse("p90_ttft <= 300ms") == Slo("p90", "ttft", 0.3)
    for bad in ("speed<1", "ttft>1", "ttft<-1", "ttft<x", "p100_ttft<1"):
        with pytest.raises(UsageError, match="--slo"):
            Slo.parse(bad)


def test_a_faster_device_serves_more_at_the_price_asked() -> None:
    question = _question()
    small, large = (Option(question, find_hardware(name), 1, "paged").solve() for name in ("l4", "h100-80gb"))
    assert 0 < small.rate * 2 < large.rate
    assert small.dollars_per_million == pytest.approx(1.0 / 3600 / small.tokens_per_s * 1e6)
    # Delivered over the run, which ends with the last answers: a little below what arrives, never above.
    arriving = small.rate * sum(o for _, o in LENGTHS) / len(LENGTHS)
    assert 0.7 * arriving < small.tokens_per_s < 1.02 * arriving
    assert large.estimate and large.pool_blocks > small.pool_blocks


def test_too_few_lengths_are_refused() -> None:
    with pytest.raises(UsageError, match=r"20 requests say too little .* at least 100"):
        Question(SHAPES["llama3-8b"], LENGTHS[:20], (Slo.parse("normalized_latency<0.2"),), {})
    with pytest.raises(UsageError, match=r"1 request says too little"):
        Question(SHAPES["llama3-8b"], LENGTHS[:1], (Slo.parse("normalized_latency<0.2"),), {})


def test_reserving_memory_serves_less() -> None:
    paged, most = (Option(_question(), find_hardware("l4"), 1, policy).solve() for policy in ("paged", "orca-max"))
    assert most.rate < paged.rate


def test_what_cannot_serve_says_why_and_comes_last() -> None:
    every = options(_question("opt-13b"), find_machines(["l4", "a100-40gb"]), [1], ["paged"])
    plans = make_plan(every, lambda function, jobs: [function(job) for job in jobs])
    assert [plan.hardware for plan in plans] == ["a100-40gb", "l4"]
    assert math.isnan(plans[0].dollars_per_million) and not plans[0].estimate
    assert "use more devices" in plans[1].why and plans[1].rate == 0
    assert "already misses" in Option(_question(slo="mean_tpot<0.1ms"), find_hardware("l4"), 1, "paged").solve().why


@pytest.mark.parametrize(("text", "message"), [
    ("l4 = -1", "l4 = -1: must be dollars an hour"), ("l4 = nan", "l4 = nan: must be dollars an hour, from 0"),
    ("l4 = inf", "l4 = inf: must be dollars an hour"), ("l4 = true", "l4 = True: must be"),
    ("h300 = 1.0", "'h300' is no device: must be one of a100-40gb"), ("l4 =", "not a TOML file"),
    ("l4 = '\xe9'", "byte 6 is not UTF-8")])
def test_prices_that_are_none_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=message) as caught:
        read_prices(path)
    assert str(path) in caught.value.message


def test_prices_can_be_edited(tmp_path: Path) -> None:
    assert read_prices(None)["a100-40gb"] > 0
    path = tmp_path / "prices.toml"
    path.write_text("l4 = 2\nmine = 0.5\n", "utf-8")
    assert read_prices(path, [replace(find_hardware("l4"), name="mine")]) == {"l4": 2.0, "mine": 0.5}


def test_what_is_given_twice_is_planned_once() -> None:
    every = options(_question(), find_machines(["l4", "h200", "L4"]), [1, 2, 1], ["paged", "paged"])
    assert [(item.hardware.name, item.devices, item.policy) for item in every] == [
        ("l4", 1, "paged"), ("l4", 2, "paged"), ("h200", 1, "paged"), ("h200", 2, "paged")]
    assert len(find_machines([])) == len(known_hardware())
