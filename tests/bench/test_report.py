"""Results folders: the summary's keys, tables that read back, a page that is safe, small and offline."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from pagedcli.bench import plots, report
from pagedcli.bench.charts import log_ticks, nice_ticks, svg
from pagedcli.bench.figures import all_charts
from pagedcli.bench.metrics import summarize
from pagedcli.bench.serve import replay
from pagedcli.bench.signature import Signature, make_signature
from pagedcli.bench.storage import Results, read_results, read_side, run_data
from pagedcli.bench.tables import ratios, significant
from pagedcli.core.errors import UsageError
from pagedcli.workloads.arrivals import Poisson
from tests.bench.scripted_engine import ScriptedEngine, requests

EVIL = '<script>alert("x")</script>|[a](b)'


@pytest.fixture(scope="module")
def results() -> Results:
    rng = np.random.default_rng(0)
    work = requests([(int(p), int(o)) for p, o in zip(rng.integers(4, 40, 120), rng.integers(2, 30, 120), strict=True)])
    work[7] = replace(work[7], key=EVIL)
    work[9] = replace(work[9], key=EVIL, prompt=tuple([9] * 99))
    runs = []
    for rate in (1.0, 2.0, 4.0):
        for policy, slots in (("paged", 8), ("orca-max", 3)):
            engine = ScriptedEngine(0.05, slots=slots, max_prompt=50)
            run = replay(engine, work, Poisson(rate).deadlines(120, 0), policy=policy, rate=rate, simulated=True,
                         synthetic=True, notes=(f"note {EVIL}",))
            runs.append(run_data(run, summarize(run) | {"role": "policy" if slots == 8 else "baseline"}))
    signature = make_signature({"workload": f"test {EVIL}", "model": Path("/somewhere/else/model.gguf"), "seed": 0})
    return Results("a run", signature, runs, {"requests": 120},
                   [{"policy": "paged", "limit": 0.5, "rate": 3.25, "above": 3.4}])


@pytest.fixture(scope="module")
def folder(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results") / "run"
    report.write_report(results, path)
    return path


def test_the_summary_has_the_agreed_keys(folder: Path):
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["signature"].startswith("pagedcli|")
    keys = {"policy", "rate", "request_rate", "burstiness", "duration", "completed", "failed", "total_input_tokens",
            "total_output_tokens", "request_throughput", "request_goodput", "output_throughput",
            "total_token_throughput", "normalized_latency_s", "waste", "batch_size", "sharing_saving", "preemptions"}
    keys |= {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99")
             for name in ("ttft", "tpot", "itl", "e2el")}
    for run in summary["runs"]:
        assert keys <= run.keys()
        assert sum(run["waste"].values()) == pytest.approx(1.0)
    assert [run["failed"] for run in summary["runs"]] == [1] * 6


def test_tables_read_back_as_they_were(results: Results, folder: Path):
    again = read_results(folder)
    assert len(again.runs) == len(results.runs)
    for old, new in zip(results.runs, again.runs, strict=True):
        assert new.group == old.group
        assert list(new.steps) == list(old.steps)
        for name in ("normalized_latency", "ttft", "tpot", "e2el"):
            np.testing.assert_array_equal(new.series(name), old.series(name))
    assert again.signature.text == results.signature.text
    lines = (folder / "requests.csv").read_text().splitlines()
    assert len(lines) == 1 + 6 * 120


def test_waste_shares_of_every_step_add_to_one(folder: Path):
    import pandas as pd

    steps = pd.read_parquet(folder / "steps.parquet")
    shares = steps[[f"waste_{name}" for name in ("token", "reserved", "internal", "external", "free")]]
    np.testing.assert_allclose(shares.sum(axis=1), 1.0)


def test_one_side_may_be_a_folder_of_folders(folder: Path):
    assert len(read_side(folder.parent)) == 1
    with pytest.raises(UsageError, match="missing"):
        read_results(folder.parent)
    with pytest.raises(UsageError, match="no summary"):
        read_side(folder.parent / "absent")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]


def test_the_page_stands_alone_and_escapes_what_traces_say(folder: Path):
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    assert len(text.encode()) < 1_000_000
    assert page.links == [] and "http" not in text and "url(" not in text and "@import" not in text
    assert "script" not in page.tags and "&lt;script&gt;" in text
    assert page.tags.count("figure") == len(list(folder.glob("*.png"))) >= 8
    assert "simulated time" in text and "synthetic lengths" in text
    assert "too_long" in text


def test_markdown_escapes_too(folder: Path):
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "<script>" not in text.split("## Signature")[0]
    table = [line for line in text.splitlines() if line.startswith("| paged") and "req/s" in line]
    assert len(table) == 3
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 13 for line in table)


def test_without_matplotlib_the_rest_is_written(results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plots, "available", lambda: False)
    _, remarks = report.write_report(results, tmp_path)
    assert remarks == [plots.MISSING] and "pagedcli[plots]" in plots.MISSING
    assert not list(tmp_path.glob("*.png"))
    assert (tmp_path / "report.html").read_text().count("<svg") >= 8


def test_ratios_speak_for_the_policy_when_above_one(results: Results):
    found = [ratio for ratio in ratios(results) if ratio.rate == 4.0]
    assert len(found) == 1
    own, base = (next(run.figures for run in results.runs if run.group == (name, 4.0))
                 for name in ("paged", "orca-max"))
    assert found[0].latency == pytest.approx(base["normalized_latency_s"] / own["normalized_latency_s"])
    assert found[0].latency > 1 and "lower normalized latency" in found[0].sentence


def test_charts_of_every_kind_hold_what_was_measured(results: Results):
    charts = {chart.key: chart for chart in all_charts(results)}
    line = next(series for series in charts["latency_vs_rate"].series if series.label == "paged")
    assert line.x == (1.0, 2.0, 4.0)
    assert line.y[2] == pytest.approx(results.runs[4].figures["normalized_latency_s"])
    for key in ("waste_by_system", "waste_over_time_paged"):
        totals = np.sum([series.y for series in charts[key].series], axis=0)
        np.testing.assert_allclose(totals, 1.0)
    assert charts["ttft_distribution"].series[0].y[-1] == 1.0


def test_values_beyond_the_plot_leave_it_and_are_told(results: Results):
    slow = [replace(run, figures={**run.figures, "normalized_latency_s": 3.0}) if run.policy == "orca-max" else run
            for run in results.runs]
    chart = all_charts(replace(results, runs=slow))[0]
    assert chart.y_max == 1.0 and "Above it at every rate: orca-max" in chart.note
    drawing = svg(chart)
    assert drawing.count("<circle") == 3  # the markers of paged; orca-max has none inside
    assert 'viewBox="61 14' in drawing  # what leaves the plot is cut, not bent to its edge


def test_runs_cut_short_are_named_and_not_compared(results: Results):
    cut = [replace(run, figures={**run.figures, "stopped": "after 9 s 1 of 4"}) if run.policy == "orca-max" else run
           for run in results.runs]
    changed = replace(results, runs=cut)
    found = ratios(changed)
    assert found and all(ratio.latency is ratio.filled is ratio.batch is None for ratio in found)
    assert {ratio.sentence.partition(": ")[2] for ratio in found} == {"orca-max was cut short"}
    chart = all_charts(changed)[0]
    assert [line.label for line in chart.series] == ["paged"] and "Cut short, so not drawn: orca-max at " in chart.note
    page = report.html(changed, all_charts(changed))
    assert page.count("orca-max was cut short") == len(found) and page.count("<small>cut short</small>") == len(found)


def test_one_rate_gives_bars(results: Results):
    single = replace(results, runs=[run for run in results.runs if run.rate == 4.0])
    assert all_charts(single)[0].kind == "bars"
    assert "<svg" in report.html(single, all_charts(single))
    unlimited = replace(results, runs=[replace(run, figures={**run.figures, "rate": "inf"}) for run in single.runs])
    assert "all at once" in report.html(unlimited, all_charts(unlimited))


def test_signatures_name_no_path_and_tell_settings_apart():
    one = make_signature({"model": "/data/models/m.gguf", "seed": 0, "rates": [1.0, 2.5], "left out": None})
    assert one.settings == {"model": "m.gguf", "seed": "0", "rates": "1,2.5"}
    other = Signature({**one.settings, "seed": "1"}, {})
    assert one.digest != other.digest and one.digest == Signature(dict(one.settings), {"cpu": "x"}).digest
    assert one.differences(other) == ["seed: 0 / 1"]
    assert Signature.from_dict(one.as_dict()) == one


def test_ticks_and_numbers():
    assert nice_ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert nice_ticks(0.0, 0.37) == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert log_ticks(0.9, 110.0) == pytest.approx([1, 3, 10, 30, 100])
    assert [significant(v) for v in (0.012345, 1.0, 123.4, 12345.6, 0, None, math.inf)] == [
        "0.0123", "1.00", "123", "12,346", "0", "-", "inf"]
