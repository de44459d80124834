"""The checks of `make growth` and of the attention table: what counts as a cliff, and which limit binds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagedcli.bench.micro import Row
from tests.acceptance.attention_table import CASES, shares
from tests.acceptance.growth import PROMPTS, ROWS, Point, Setting, charts, dearer, falling, swelling, table
from tests.acceptance.limits import Limits, instruction_rate, product_rate, read_rate

MIB = 1 << 20


def point(rows: int = 8, prompt: int = 64, *, prompt_rate: float = 1000.0, output_rate: float = 300.0,
          step: float = 0.02, peak: int = 1000, kv: int = 100) -> Point:
    return Point(Setting(rows, prompt, 32), 1.0, prompt_rate, output_rate, step, peak * MIB, kv * MIB)


def test_settings_are_those_that_were_asked_for() -> None:
    assert [setting.rows for setting in ROWS] == [8, 32, 128, 512]
    assert [setting.prompt for setting in PROMPTS] == [128, 512, 2048, 8176]
    assert max(setting.prompt + setting.out for setting in PROMPTS) == 8192
    assert Setting(3, 60, 5).blocks == 15


def test_fewer_tokens_a_second_with_more_rows_is_a_cliff() -> None:
    rates = [200.0, 400.0, 361.0, 359.0]
    points = [point(rows, output_rate=rate) for rows, rate in zip((8, 32, 128, 512), rates, strict=True)]
    assert falling(points[:3]) == []
    assert falling(points) == ["512 rows: 359 output tokens/s, under 0.9 of the 400 with fewer rows"]


def test_prompts_may_cost_three_times_as_much_a_token_when_four_times_as_long() -> None:
    first = point(prompt=2048, prompt_rate=1200.0, step=0.010)
    assert dearer([first, point(prompt=8176, prompt_rate=401.0, step=0.029)]) == []
    found = dearer([first, point(prompt=8176, prompt_rate=399.0, step=0.031)])
    assert found == [
        "prompts of 8,176: a prompt token takes 2.51 ms, over 3 times the 0.83 of prompts of 2,048",
        "prompts of 8,176: a decode step takes 31.00 ms, over 3 times the 10.00 of prompts of 2,048"]


def test_memory_may_grow_by_twice_the_keys_and_values() -> None:
    first = point(peak=1000, kv=100)
    assert swelling([first, point(32, peak=1000 + 128 + 2 * 50, kv=150)]) == []
    assert swelling([first, point(32, peak=1000 + 128 + 2 * 50 + 1, kv=150)]) == [
        "32 rows of 64: 229 MiB more, where keys and values allow 228"]
    assert swelling([first, point(1, peak=1129, kv=50)]) == [
        "1 rows of 64: 129 MiB more, where keys and values allow 128"], "fewer keys never allow less than the slack"


def test_table_and_charts_hold_what_was_measured() -> None:
    points = [point(8), point(32, output_rate=700.0, peak=1200)]
    last = [cell.strip() for cell in table(points).splitlines()[-1].split("|")[1:-1]]
    assert last == ["32", "64", "32", "1.00", "1,000", "700", "20.0", "0.62", "1,200", "100"]
    made = {chart.key: chart for chart in charts(points, [point(prompt=128), point(prompt=512)])}
    assert set(made) == {"rows_speed", "rows_memory", "prompts_speed", "prompts_memory"}
    assert made["rows_speed"].series[1].y == (300.0, 700.0) and made["rows_memory"].series[0].y == (1000.0, 1200.0)
    assert made["prompts_speed"].series[0].x == (128.0, 512.0)


ROW = Row("decode", "m", 9, 3, 64, 64, 400, 16, 1.0, 1.0, None, 1.0, 1.0, 1.0, kv_gigabytes_per_second=15.0,
          share_of_copy_bandwidth=0.0, gigaflops=45.0, relative_error=0.0, good=True, rounds=3)
LIMITS = Limits({"bf16": 400e9, "fp32": 200e9}, {"bf16": 450e9, "fp32": 225e9}, copy=40e9, read=30e9)


def test_the_limit_that_allows_less_binds() -> None:
    slow = shares(ROW, "bf16", LIMITS)
    assert (slow.copy, slow.read, slow.float32, slow.instructions) == pytest.approx((0.375, 0.5, 0.2, 0.1))
    assert (slow.binds, slow.of_binding) == ("memory", 0.5)
    busy = shares(replace(ROW, gigaflops=180.0), "fp32", LIMITS)
    assert (busy.binds, busy.of_binding) == ("instructions", pytest.approx(0.8))
    plain = replace(LIMITS, instructions={"fp32": 225e9})
    assert shares(ROW, "bf16", plain).instructions == pytest.approx(0.2), "without pair products it is float32 work"


def test_contexts_of_the_table() -> None:
    assert {case.context for case in CASES} >= {128, 256, 400, 512, 1024, 2048, 4096, 8192}


def test_the_better_of_two_measurements_counts() -> None:
    other = Limits({"bf16": 300e9, "fp32": 210e9}, {"bf16": 460e9, "fp32": 220e9}, copy=41e9, read=29e9)
    assert LIMITS.best(other) == Limits({"bf16": 400e9, "fp32": 210e9}, {"bf16": 460e9, "fp32": 225e9}, 41e9, 30e9)


def test_rates_are_plausible() -> None:
    lone, both = instruction_rate("fp32", 1, rounds=2), product_rate(torch.float32, size=128, rounds=2)
    assert 1e9 < lone < 1e12 and 1e8 < both < 1e14
    assert 1e8 < read_rate(1, pieces=40, rounds=2) < 1e13
