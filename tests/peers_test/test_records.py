"""Medians, the worst of each round, and ratios that say who is better."""

from __future__ import annotations

from typing import Any

import pytest

from tests.peers.check import Agreement
from tests.peers.records import Run, median, standing, summarise


def runs(engine: str, walls: list[float], **more: Any) -> list[Run]:
    return [Run(engine, "W1", number, wall=wall, load=1.0, whole=wall + 2, cpu=wall, peak_mib=100.0 * number, **more)
            for number, wall in enumerate(walls, 1)]


def test_median_of_those_there_are() -> None:
    assert median([3.0, None, 1.0, 10.0]) == 3.0
    assert median([None]) is None


def test_a_line_has_medians_and_the_range() -> None:
    [line] = summarise(runs("openvino", [5.0, 4.0, 9.0]), threads=2)
    assert (line.wall, line.low, line.high, line.whole, line.peak_mib) == (5.0, 4.0, 9.0, 7.0, 200.0)
    assert line.busy == pytest.approx(0.5)
    assert line.good and line.rounds == 3


def test_the_least_agreement_of_the_rounds_counts() -> None:
    found = [*runs("vllm", [1.0], equal=9, compared=10), *runs("vllm", [1.0], equal=7, compared=10)]
    assert summarise(found, 2)[0].agreement == Agreement(7, 10)


def test_a_failed_run_gives_no_figures_and_its_reason() -> None:
    failed = Run("vllm", "W1", 2, error="exit status 1: no memory")
    [line] = summarise([*runs("vllm", [4.0]), failed], 2)
    assert line.wall == 4.0 and line.rounds == 1 and line.problem == "exit status 1: no memory"
    [alone] = summarise([failed], 2)
    assert alone.wall is None and not alone.good


def test_wrong_lengths_take_an_engine_out_of_the_ranking() -> None:
    lines = summarise([*runs("ours", [4.0]), *runs("vllm", [1.0], faults=("a: 1 token",)), *runs("openvino", [6.0])], 2)
    found = standing(lines, "W1")
    assert found.best == "openvino" and found.speed == 1.5


def test_the_whole_job_is_told_on_our_line_and_the_larger_peak_counts() -> None:
    job = Run("ours-job", "W1", 1, whole=11.0, peak_mib=500.0)
    [line] = summarise([*runs("ours", [4.0]), job], 2)
    assert line.engine == "ours" and line.whole == 11.0 and line.peak_mib == 500.0 and line.wall == 4.0


def test_above_one_is_better_for_us_in_each_figure() -> None:
    ours = Run("ours", "W1", 1, wall=10.0, whole=12.0, peak_mib=300.0)
    fast = Run("vllm", "W1", 1, wall=15.0, whole=90.0, peak_mib=900.0)
    small = Run("openvino", "W1", 1, wall=20.0, whole=24.0, peak_mib=150.0)
    found = standing(summarise([ours, fast, small], 2), "W1")
    assert (found.best, found.speed, found.whole, found.memory) == ("vllm", 1.5, 2.0, 0.5)


def test_no_standing_without_an_other_engine() -> None:
    found = standing(summarise(runs("ours", [4.0]), 2), "W1")
    assert (found.best, found.speed) == (None, None)


def test_a_record_is_plain_and_rounded() -> None:
    record = Run("ours", "W1", 1, wall=1.23456).record()
    assert record["wall"] == 1.235 and record["error"] is None and record["workload"] == "W1"
