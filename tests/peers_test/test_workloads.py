"""Rows of the comparison: the asked shapes, the same from one making to the next, and what `pagedcli` can read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedcli.generate.formats import parse_row
from pagedcli.generate.source import RawRow
from tests.peers.workloads import FIELDS, NAMES, Source, Workload, make, read

TEXTS = tuple(f"prompt {number} about {'words ' * (number % 7)}" for number in range(300))


def encode(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def made(name: str, shared: Path = Path("absent")) -> Workload:
    return make(name, Source(TEXTS, "texts of a test", shared), encode)


def test_mixed_lengths_have_the_asked_means() -> None:
    rows = made("W1").rows
    prompts, outputs = [len(row["prompt_token_ids"]) for row in rows], [row["max_tokens"] for row in rows]
    assert len(rows) == 128
    assert 140 < sum(prompts) / 128 < 200 and min(prompts) >= 38 and max(prompts) <= 575
    assert 70 < sum(outputs) / 128 < 115 and min(outputs) >= 17 and max(outputs) <= 512


def test_measured_rows_are_taken_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "peers").mkdir()
    given = {"id": "a", "prompt_token_ids": [5, 6], "max_tokens": 3, "note": "not ours to pass on"}
    (tmp_path / "peers" / "W1.jsonl").write_text(json.dumps(given) + "\n")
    workload = made("W1", tmp_path)
    assert workload.rows == ({"id": "a", "prompt_token_ids": [5, 6], "max_tokens": 3, "n": 1, "temperature": 0.0,
                              "ignore_eos": True},)
    assert (workload.prompt_tokens, workload.output_tokens) == (2, 3)


def test_shared_prefix_is_341_tokens_of_every_row_and_no_more() -> None:
    rows = [row["prompt_token_ids"] for row in made("W2").rows]
    assert len(rows) == 64
    assert len({tuple(row[:341]) for row in rows}) == 1
    assert len({tuple(row[:349]) for row in rows}) > 32
    assert all(22 <= len(row) - 341 <= 38 for row in rows)


@pytest.mark.parametrize(("name", "rows", "prompt", "tokens", "n"), [("W4", 16, 2000, 32, 1), ("W5", 1, 100, 128, 1)])
def test_fixed_shapes(name: str, rows: int, prompt: int, tokens: int, n: int) -> None:
    workload = made(name)
    assert [(len(row["prompt_token_ids"]), row["max_tokens"], row["n"]) for row in workload.rows] == (
        [(prompt, tokens, n)] * rows)


def test_parallel_sampling_is_32_rows_of_four_samples() -> None:
    workload, base = made("W3"), made("W1")
    assert workload.output_tokens == 32 * 4 * 64
    assert all(row["temperature"] == 1 for row in workload.rows)
    assert [row["prompt_token_ids"] for row in workload.rows] == [row["prompt_token_ids"] for row in base.rows[:32]]


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_the_same_each_time_and_read_back(name: str, tmp_path: Path) -> None:
    workload = made(name)
    assert workload.digest == made(name).digest
    file = tmp_path / "rows.jsonl"
    file.write_text(workload.text)
    assert tuple(read(file)) == workload.rows
    assert all(tuple(row) == FIELDS and row["ignore_eos"] for row in workload.rows)
    assert len({row["id"] for row in workload.rows}) == len(workload.rows)


def test_a_cut_is_smaller_and_has_another_digest() -> None:
    whole = made("W1")
    cut = whole.cut(3, 5)
    assert len(cut.rows) == 3 and cut.output_tokens == 15
    assert cut.rows[0]["prompt_token_ids"] == whole.rows[0]["prompt_token_ids"]
    assert cut.digest != whole.digest and cut.origin.endswith("cut")


def test_generate_reads_such_rows() -> None:
    row = made("W3").rows[0]
    parsed = parse_row(RawRow(0, 1, json.dumps(row).encode()))
    assert parsed.error is None
    assert (parsed.id, parsed.ids) == (row["id"], row["prompt_token_ids"])
    assert parsed.settings == {"max_tokens": 64, "n": 4, "temperature": 1.0, "ignore_eos": True}


def test_an_unknown_workload_is_named() -> None:
    with pytest.raises(ValueError, match=r"W9.*W1, W2"):
        made("W9")
