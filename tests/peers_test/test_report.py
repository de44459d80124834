"""The table, the page and the record of a comparison."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests.peers.engines import ENGINES
from tests.peers.records import Run, standing, summarise
from tests.peers.report import HEADS, Report, cells, markdown, show, verdict
from tests.peers.run import Settings
from tests.peers.workloads import Workload

ROW = {"id": "a", "prompt_token_ids": [1, 2, 3], "max_tokens": 10, "n": 2, "temperature": 0.0, "ignore_eos": True}
ONE = Workload("W5", (ROW,), "a test")
TWO = Workload("W1", (ROW, {**ROW, "id": "b"}), "a test")
OURS = Run("ours", "W1", 1, wall=10.0, load=2.0, whole=13.0, cpu=19.0, peak_mib=500.0, equal=2, compared=2,
           version="v1")
THEIRS = Run("openvino", "W1", 1, wall=15.0, load=1.0, whole=16.5, cpu=29.0, peak_mib=900.0, equal=1, compared=2,
             version="v2")


def report(runs: list[Run]) -> Report:
    engines = (ENGINES["ours"], ENGINES["openvino"])
    settings = Settings(1, ("W1",), engines, "bf16", 2, ("W1",), None, None, 60, 0)
    made = Report.start(settings, "try", {"vllm": "pip failed"})
    made.workloads, made.machine, made.runs = [TWO], [{"copy GB/s": 20.0}], runs
    return made


def test_cells_hold_rate_ratio_and_agreement() -> None:
    lines = summarise([OURS, THEIRS], 2)
    ours, theirs = (dict(zip(HEADS, cells(line, lines, TWO), strict=True)) for line in lines)
    assert ours["out tok/s"] == "4" and ours["ours faster"] == "" and ours["cores busy"] == "95%"
    assert theirs["ours faster"] == "1.50x" and theirs["wall s (range)"] == "15.00 (15.00-15.00)"
    assert theirs["greedy 20"] == "1/2" and theirs["lengths"] == "as asked" and theirs["whole job s"] == "16.5"


def test_a_row_alone_is_told_in_milliseconds_a_token() -> None:
    [line] = summarise([replace(OURS, workload="W5")], 2)
    assert "500.00 ms/token" in cells(line, [line], ONE)[1]


def test_a_failed_engine_keeps_its_line_with_the_reason() -> None:
    lines = summarise([OURS, Run("vllm", "W1", 1, error="exit status 1: no memory")], 2)
    found = dict(zip(HEADS, cells(lines[1], lines, TWO), strict=True))
    assert found["wall s (range)"] == "-" and found["lengths"] == "exit status 1: no memory"
    assert found["greedy 20"] == "-"


def test_the_verdict_is_against_the_best_other() -> None:
    assert verdict(standing(summarise([OURS, THEIRS], 2), "W1")).startswith(
        "1.50x the speed of the best other (openvino), whole job 1.27x, memory 1.80x")
    assert "no other engine" in verdict(standing(summarise([OURS], 2), "W1"))


def test_the_page_tells_command_versions_failures_and_lines() -> None:
    page = markdown(report([OURS, THEIRS]))
    assert "python -m tests.peers.run --rounds 1 --workloads W1 --peers ours,openvino" in page
    assert "Not set up: vllm: pip failed." in page and "Versions: v1; v2." in page
    assert "| OpenVINO GenAI | 15.00 (15.00-15.00) |" in page and "copy GB/s 20" in page


def test_a_cut_is_named_so() -> None:
    made = Report.start(replace(report([]).settings, rows=4, tokens=4), None, {})
    assert made.name.endswith("-cut") and made.command.endswith("--rows 4 --tokens 4")


def test_both_files_are_written_whole(tmp_path: Path) -> None:
    report([OURS, THEIRS]).write(tmp_path)
    data = json.loads((tmp_path / "try.json").read_text())
    assert [run["wall"] for run in data["runs"]] == [10.0, 15.0] and data["failed"] == {"vllm": "pip failed"}
    assert data["workloads"][0]["output_tokens"] == 40
    assert sorted(file.name for file in tmp_path.iterdir()) == ["try.json", "try.md"]


def test_the_terminal_gets_a_table_for_each_workload() -> None:
    shown: list[object] = []
    show(report([OURS, THEIRS]), lambda item, **_: shown.append(item))
    assert getattr(shown[0], "row_count", 0) == 2
    assert "not set up: vllm: pip failed" in shown
