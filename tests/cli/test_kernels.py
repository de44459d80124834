"""`pagedcli kernels`: tables, JSON, exit status, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch

from pagedcli.bench import micro, micro_cases
from pagedcli.bench.micro_cases import Case, Heads
from tests.cli.console import Console

SMALL = Heads("small", 4, 2, 32)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_cases, "figure_18a", lambda heads: [Case("decode", SMALL, 2, 64)])
    monkeypatch.setattr(micro_cases, "quick_cases", lambda cuda: [
        Case("decode", SMALL, 4, 100), Case("prompt", SMALL, 1, 70), Case("decode", SMALL, 1 << 20, 16_384)])
    monkeypatch.setattr(micro, "copy_bandwidth", lambda bench: 12.5e9)


def test_tables_and_json(console: Console, short: None) -> None:
    file = console.folder / "k.json"
    result = console("kernels", "--json", str(file), "--device", "cpu", "--dtype", "fp32", "--threads", "1")
    assert result.exit_code == 0, result.output
    for words in ("copy bandwidth, read plus written: 12.5 GB/s", "Figure 18a", "us", "GB/s", "GFLOP/s", "tokens",
                  "3 rows, 0 with wrong outputs, 1 skipped", "skipped: decode, small, batch 1048576", "GiB to spare",
                  "|kernels=quick|device=cpu|attention=cpu|dtype=float32|"):
        assert words in result.stdout, words
    record = json.loads(file.read_text())
    assert record["signature"] in result.stdout and record["copy_gigabytes_per_second"] == 12.5
    assert [(row["kernel"], row["batch"], row["context_tokens"]) for row in record["rows"]] == [
        ("decode", 4, 100), ("prompt", 1, 70)]
    assert record["figure_18a"][0]["one_block_microseconds"] > 0
    assert len(record["skipped"]) == 1 and record["settings"]["kernels"] == "quick"
    for row in record["rows"]:
        assert row["good"] and row["relative_error"] < 1e-5


def test_wrong_outputs_end_with_status_1(console: Console, short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro, "TOLERANCE", {torch.float32: 0.0})
    result = console("kernels", "--device", "cpu", "--dtype", "fp32", "--attention-backend", "reference")
    assert result.exit_code == 1 and "3 with wrong outputs" in result.stdout and "WRONG" in result.stdout


def test_what_cannot_run(console: Console) -> None:
    result = console("kernels", "--json", str(console.folder / "no" / "k.json"))
    assert result.exit_code == 2 and "does not exist; make it first" in result.stderr
    result = console("kernels", "--device", "cpu", "--attention-backend", "cuda")
    assert result.exit_code == 2 and "--attention-backend cuda runs on a GPU" in result.stderr
    if not torch.cuda.is_available():
        result = console("kernels", "--device", "cuda")
        assert result.exit_code == 3 and "no CUDA device that torch can use" in result.stderr


def test_more_threads_than_are_of_use_are_refused_before_anything_is_measured(console: Console) -> None:
    result = console("kernels", "--threads", "100000")
    assert result.exit_code == 3 and result.stdout == ""
    assert "--threads = 100,000: this machine has" in result.stderr and "threads are of any use" in result.stderr
