"""The paper's experiments: names, short runs, searches on known curves, files that are written."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pagedcli.bench.experiments import Setting, choose, near, points, registry, run_experiment, run_experiments
from pagedcli.bench.experiments_memory import beams_of
from pagedcli.bench.experiments_rates import in_order
from pagedcli.bench.paper_alpaca import TILT, alpaca_pairs, features, fitted_pairs, solve_tilt, tilted
from pagedcli.bench.paper_fit import (
    Knee,
    Recorded,
    fit_round,
    latency_of,
    record,
    record_batch,
    recost,
    split,
    trial,
)
from pagedcli.bench.paper_lengths import CHAT_FACTORS, LengthSource, chat_lengths
from pagedcli.bench.paper_report import write_outcome, write_summary
from pagedcli.bench.paper_setup import PLACES, Run, config_for, crossing, paper_figures, papers_requests
from pagedcli.bench.paper_targets import PANELS, find_rate, target_of
from pagedcli.bench.signature import Signature
from pagedcli.bench.simulate import step_table
from pagedcli.core.errors import UsageError
from pagedcli.engine.beam_script import RecordedBeams
from pagedcli.execution.hardware import find_hardware
from pagedcli.workloads import find_spec
from pagedcli.workloads.chat_model import ChatModel, simulate_turns
from pagedcli.workloads.lengths import load_sample

SIGNED = Signature({"command": "paper"}, {"commit": "abc1234"})
SHAREGPT = Path(__file__).resolve().parents[3] / "shared" / "paper" / "sharegpt_lengths.csv"


def test_names_are_chosen_by_their_beginning() -> None:
    assert choose(["fig12"]) == list(PANELS)
    assert choose([]) == choose(["all"]) == list(registry())
    assert choose(["fig2", "table1", "fig2"]) == ["fig2", "table1"]
    with pytest.raises(UsageError, match="'fig99' is no experiment"):
        choose(["fig99"])


def test_a_known_curve_is_crossed_where_it_should() -> None:
    calls: list[float] = []

    def latency(rate: float) -> float:
        calls.append(rate)
        return 0.03 if rate < 2.0 else 0.03 * math.exp(10 * (rate - 2.0))

    expected = 2.0 + math.log(0.5 / 0.03) / 10
    for guess in (0.3, 2.0, 2.3, 9.0):
        assert find_rate(latency, 0.5, guess, 0.02) == pytest.approx(expected, rel=0.02)
    known = {1.0: latency(1.0), 3.0: latency(3.0)}
    calls.clear()
    assert find_rate(latency, 0.5, 2.2, 0.02, known) == pytest.approx(expected, rel=0.02)
    assert all(1.0 < rate < 3.0 for rate in calls)


def test_printed_curves_are_read_as_described() -> None:
    assert crossing([(1.0, 0.1), (2.0, 1.0)], 0.5) == pytest.approx(1 + math.log(5) / math.log(10))
    short = target_of("fig12a", "orca-max")  # ends at 0.0823 s/token
    assert (short.level, short.rate, short.low_rate) == (0.0823, 0.5, 0.2)
    assert target_of("fig12a", "paged").rate == pytest.approx(1.948, abs=0.01)


def test_verdicts() -> None:
    assert near("x", 1.1, 1.0, 0.15).good and not near("x", 1.2, 1.0, 0.15).good
    assert points("x", 10, 12.5, 3).good and not points("x", 10, 13.5, 3).good


def test_lengths_have_the_papers_means() -> None:
    for workload, printed in (("sharegpt", (161.31, 337.99)), ("alpaca-paper", (19.31, 58.45))):
        rows = LengthSource().draw(workload)
        for side in (0, 1):
            assert sum(row[side] for row in rows) / len(rows) == pytest.approx(printed[side], rel=0.01)
        assert all(prompt + output < 2048 for prompt, output in rows)
    if SHAREGPT.is_file():
        real = LengthSource(SHAREGPT).draw("sharegpt")
        assert len(real) == 79_725
        assert "real" in LengthSource(SHAREGPT).describe("sharegpt")
    assert "synthetic" in LengthSource().describe("sharegpt")


def test_requests_are_the_artefacts(tmp_path: Path) -> None:
    """Counts of 10 ms, the first rows as many as arrive, shuffled: with global generators, as the artefact has them."""
    rows = [(number + 1, 2 * number + 1) for number in range(50)]
    np.random.seed(0)
    counts = np.random.poisson(0.02, 3000)
    random.seed(0)
    taken = (rows * 10)[:counts.sum()]
    random.shuffle(taken)
    made = papers_requests(rows, 2.0, 30.0)
    assert [(len(request.prompt), request.output_len) for request in made] == taken
    assert [request.arrival for request in made] == pytest.approx([
        quantum / 100 for quantum, count in enumerate(counts) for _ in range(count)])

    path = tmp_path / "lengths.csv"
    path.write_text("input,output\n9,5\n2047,1\n3,4\n", "utf-8")
    source = LengthSource(path)
    assert source.draw("sharegpt") == [(9, 5), (3, 4)]  # in its order, without what is too long
    assert source.exact("sharegpt") and not source.exact("alpaca-paper") and not LengthSource().exact("sharegpt")
    run = Run("fastertransformer", "opt-175b", "sharegpt", 0.5, source)
    assert (run.span, Run("paged", "opt-175b", "sharegpt", 0.5, source).span) == (3600.0, 900.0)


def test_chat_serves_every_turn_once() -> None:
    """Prompts of later turns hold the earlier ones, so the same turns have the same lengths however they are mixed."""
    few, many = (chat_lengths(400, 1, share) for share in (0.1, 0.5))
    assert len(few) == len(many) == 400
    assert sum((Counter(few) & Counter(many)).values()) > 380  # all but the last conversation's
    assert max(prompt for prompt, _ in few) == 1024 and max(output for _, output in few) <= 1016


def test_shipped_beams_are_real_searches() -> None:
    for width in (2, 4, 6):
        script = beams_of(width, Setting())
        assert isinstance(script, RecordedBeams) and script.width == width


def test_table_1_holds_and_is_written(tmp_path: Path) -> None:
    outcome = run_experiment("table1", Setting())
    assert outcome.judged and outcome.held == len(outcome.judged)
    write_outcome(outcome, tmp_path, SIGNED)
    assert json.loads((tmp_path / "table1.json").read_text("utf-8"))["cells"][0]["verdict"] == "holds"
    page = write_summary(tmp_path).read_text("utf-8")
    assert "60.1 K" in page and f"All from one state of the code: `{SIGNED.text}`" in page
    assert "| table1 | 6 of 6 |  |" in page


def test_a_page_of_mixed_results_says_so(tmp_path: Path) -> None:
    other = Signature({"command": "paper"}, {"commit": "def5678"})
    write_outcome(run_experiment("table1", Setting()), tmp_path, SIGNED)
    write_outcome(run_experiment("fig19a", Setting()), tmp_path, other)
    page = write_summary(tmp_path).read_text("utf-8")
    assert "All from one" not in page
    assert f"- table1: `{SIGNED.text}`" in page and f"- fig19a: `{other.text}`" in page


def test_files_of_others_are_named_and_left_out(tmp_path: Path) -> None:
    """Older, damaged and foreign files in the folder: each is named with what is wrong, none ends the command."""
    write_outcome(run_experiment("table1", Setting()), tmp_path, SIGNED)
    good = json.loads((tmp_path / "table1.json").read_text("utf-8"))
    cell = good["cells"][0]
    others = {
        "fig2": ({name: value for name, value in good.items() if name != "signature"}, "without a usable signature"),
        "fig13": ([1, 2], "of another version"),
        "fig14": ({**good, "key": "fig14", "cells": [{**cell, "ours": "many"}, 5]}, "without a usable name, ours"),
        "fig15": ({**good, "key": "fig15", "seconds": None}, "without a usable seconds"),
        "fig16": (good, "holds the results of table1"),
        "capacity": (good, "no experiment has this name"),
    }
    for name, (content, _) in others.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content), "utf-8")
    broken = {"fig12a": b'{"key": "fig12a", "cel', "fig12b": b"\xff\xfe\x00", "fig12c": b"", "fig12d": b"[" * 200_000}
    for name, content in broken.items():
        (tmp_path / f"{name}.json").write_bytes(content)
    (tmp_path / "fig17.json").mkdir()
    page = write_summary(tmp_path).read_text("utf-8")
    named = dict(line[2:].split(": ", 1) for line in page.splitlines() if line.startswith("- `"))
    assert sorted(named) == sorted(f"`{name}.json`" for name in (*others, *broken, "fig17"))
    assert all(wrong in named[f"`{name}.json`"] for name, (_, wrong) in others.items())
    assert all(named[f"`{name}.json`"] == "damaged: not JSON" for name in broken)
    assert "6 of 6 judged cells hold." in page and "All from one state of the code" in page
    assert "| fig2 |" not in page

    (tmp_path / "table1.json").unlink()
    assert "0 of 0 judged cells hold." in write_summary(tmp_path).read_text("utf-8")


def test_experiments_at_once_are_those_one_by_one() -> None:
    names = ["fig19a", "table1", "fig2"]
    together = {outcome.key: outcome for outcome in run_experiments(names, Setting(scale=0.02, workers=2))}
    assert sorted(together) == sorted(names)
    for name in names:
        assert together[name].cells == run_experiment(name, Setting(scale=0.02)).cells
    assert together["fig2"].cpu_seconds > 0


def test_translation_has_builds_of_its_own() -> None:
    """Other coefficients and 256 sequences at most; nothing else differs from the A100 of Figure 12."""
    for policy in ("paged", "orca-oracle"):
        assert config_for(policy, "llama-13b", "wmt16").scheduler.max_num_seqs == 256
        used = PLACES["llama-13b"].deployment(policy).cost_model.coefficients
        others = PLACES["opt-13b"].deployment(policy).cost_model.coefficients
        changed = {name for name, value in used.as_dict().items() if value != others.as_dict()[name]}
        assert changed == {"layer_seconds", "sequence_seconds", "prompt_seconds"}
    assert config_for("paged").scheduler.max_num_seqs == 2048


def test_order_is_judged_where_the_figure_tells_systems_apart() -> None:
    printed = {"worst": 1.0, "middle": 1.03, "best": 3.0}
    assert in_order(printed, {"worst": 2.0, "middle": 1.5, "best": 2.1})  # the first two are level in print
    assert not in_order(printed, {"worst": 2.0, "middle": 2.2, "best": 2.1})


def test_fitted_values_go_to_their_software() -> None:
    base = find_hardware("a100-40gb").coefficients
    found = split({"layer_seconds": 3e-4, "ft_sequence_seconds": 2e-3}, base)
    assert found[""].layer_seconds == found["fastertransformer"].layer_seconds == 3e-4
    assert found[""].sequence_seconds == base.sequence_seconds
    assert (found["fastertransformer"].sequence_seconds, found["fastertransformer"].prompt_seconds) == (2e-3, 0.0)


def test_curves_that_were_read_off_give_the_printed_ratios() -> None:
    def read(figure: str) -> float:
        return target_of(figure, "paged").rate / target_of(figure, "orca-oracle").rate

    for shots, printed in paper_figures()["fig16"].items():
        assert read(f"fig16-{shots}") == pytest.approx(printed, rel=0.03)
    assert read("fig14-beam-6") == pytest.approx(paper_figures()["fig14"]["beam-6"], rel=0.07)


def test_chat_is_scaled_to_the_printed_means() -> None:
    """All turns, as served: speakers counted, answers cut at 1,016 tokens. The means are those of Figure 11."""
    drawn = simulate_turns(ChatModel.from_json(load_sample("chat")["chat"]), 40_000, np.random.default_rng(3))
    paper = find_spec("sharegpt").paper
    query, answer = (np.rint(factor * lengths) + speaker for factor, lengths, speaker in
                     zip(CHAT_FACTORS, (drawn.query, drawn.output), (2, 3), strict=True))
    assert query.mean() == pytest.approx(paper["prompt_mean"], rel=0.01)
    assert np.minimum(answer, 1016).mean() == pytest.approx(paper["output_mean"], rel=0.01)
    served = [output for _, output in chat_lengths(20_000, 0)]
    assert sum(served) / len(served) == pytest.approx(paper["output_mean"], rel=0.02)


def test_orcas_chunks_by_hand() -> None:
    """19 + 109 tokens fill 8 blocks; one token more takes 9, which buddies round to 16; Pow2 takes 109 for 128."""
    pairs = np.array([(19, 109), (20, 109), (1, 1), (1000, 1047)])
    assert features(pairs).tolist() == [[19, 109, 109 * 8, 109 * 16], [20, 109, 109 * 16, 109 * 16], [1, 1, 1, 1],
                                        [1000, 1047, 1047 * 128, 1047 * 128]]


def test_the_least_tilt_gives_the_wanted_means() -> None:
    coin = np.array([[0.0], [1.0]])
    assert solve_tilt(coin, np.array([0.75]))[0] == pytest.approx(math.log(3))
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((20_000, 2))
    tilt = solve_tilt(normal, np.array([0.3, -0.2]))
    assert tilt == pytest.approx([0.3, -0.2], abs=0.02)  # of unit normals the tilt is the shift
    assert tilted(normal @ tilt) @ normal == pytest.approx([0.3, -0.2], abs=1e-6)


def test_alpaca_has_the_papers_four_numbers() -> None:
    """Figure 11's means, and in a quarter of Figure 13's hour the batches of the two Orcas that lengths decide."""
    pairs = alpaca_pairs(52_002, 7)  # a seed that nothing was fitted to
    assert pairs.mean(axis=0) == pytest.approx((19.31, 58.45), rel=0.01)
    printed = paper_figures()["fig13"]["alpaca"]
    for policy in ("orca-oracle", "orca-pow2"):
        run = Run(policy, "opt-13b", "alpaca-paper", 30.0, LengthSource(), duration=900.0, limit=None, horizon=900.0)
        steps = step_table(run.events()[1]).between(300.0, 900.0)
        assert float(steps.column("running").mean()) == pytest.approx(printed[policy], rel=0.03)


def test_the_tilt_is_slight() -> None:
    """Most of the draws' worth is left, and up to the 95th percentile quantiles move by at most 4 % or a token."""
    plain = fitted_pairs(200_000, np.random.default_rng(1))
    weights = tilted(features(plain) @ np.array(TILT))
    assert 1 / (weights ** 2).sum() > 0.95 * len(plain)
    drawn = alpaca_pairs(52_002, 1)
    for share in (0.25, 0.5, 0.75, 0.9, 0.95):
        assert np.quantile(drawn, share, axis=0) == pytest.approx(np.quantile(plain, share, axis=0), rel=0.04, abs=1.0)


@pytest.mark.slow
def test_runs_are_recorded_at_their_knees() -> None:
    """What a recorded run says under its own coefficients is what it measured, and knees are near the paper's."""
    own = split({}, find_hardware("a100-40gb").coefficients)
    batch = record_batch(LengthSource(), own, duration=90.0)
    assert batch.low is None and batch.knee.wanted == 30.0
    assert batch.knee.rate == pytest.approx(30.0, rel=0.1)  # a short run's queue has not settled
    curve = record(target_of("fig12b", "orca-max"), LengthSource(), own)
    assert curve.low is not None and curve.low_latency == 0.0613
    seconds = recost(curve.low, own)
    assert latency_of(curve.low, seconds) == pytest.approx(curve.low.latency, rel=0.02)
    assert curve.knee.rate == pytest.approx(curve.knee.wanted, rel=0.15)  # Figure 12's own tolerance


@pytest.mark.slow
def test_the_coefficients_hold_figures_13_and_18b() -> None:
    """vLLM's batch of Alpaca requests over Figure 13's hour, and Figure 18b's shape: 16 or 32 best, 128 far off."""
    run = Run("paged", "opt-13b", "alpaca-paper", 30.0, LengthSource(), duration=3600.0, limit=None, horizon=3600.0)
    steps = step_table(run.events()[1]).between(600.0, 3600.0)
    printed = paper_figures()["fig13"]["alpaca"]["paged"]
    assert float(steps.column("running").mean()) == pytest.approx(printed, rel=0.10)
    latency = {size: replace(run, rate=30.1, duration=600.0, horizon=math.inf, limit=40.0, block_size=size)
               .point().latency for size in (8, 16, 32, 64, 128)}
    assert min(latency, key=lambda size: latency[size]) in (16, 32)
    assert latency[128] > 1.5 * latency[16]


def test_a_fit_finds_the_coefficients_that_made_the_runs() -> None:
    """Runs of one system and what it measured; begun elsewhere, the fit comes back to the terms that they had."""
    base = find_hardware("a100-40gb").coefficients
    true = {"layer_seconds": base.layer_seconds, "sequence_seconds": base.sequence_seconds}
    begun = {name: 1.5 * value for name, value in true.items()}
    recorded = []
    for policy, rate in (("paged", 1.5), ("orca-max", 0.4)):
        run = Run(policy, "opt-13b", "sharegpt", rate, LengthSource(), duration=120.0, limit=None,
                  coefficients=split(begun, base))
        low = trial(replace(run, rate=0.1))
        knee = trial(run)
        spent = [float(recost(knee, split(values, base)).sum()) for values in (begun, true)]
        recorded.append(Recorded(Knee(knee, rate, rate * spent[0] / spent[1]), low,
                                 latency_of(low, recost(low, split(true, base)))))
    found = fit_round(recorded, begun, base)
    for name, value in true.items():
        assert found[name] == pytest.approx(value, rel=0.05)


def test_waste_of_figure_2_in_a_short_run() -> None:
    """A tenth of the paper's run already shows each system's kind of waste."""
    cells = {cell.name: cell.ours for cell in run_experiment("fig2", Setting(scale=0.1)).cells}
    printed = paper_figures()["fig2"]
    assert cells["vLLM: token states"] == pytest.approx(printed["paged"]["token"], abs=4)
    assert cells["Orca (Max): internal fragmentation"] == pytest.approx(printed["orca-max"]["internal"], abs=8)


def test_latency_rises_with_the_rate_and_paging_wins() -> None:
    def latency(policy: str, rate: float) -> float:
        return Run(policy, "opt-13b", "sharegpt", rate, LengthSource(), duration=300.0).point().latency

    assert latency("paged", 1.0) < latency("paged", 3.0)
    assert latency("paged", 1.2) < latency("orca-oracle", 1.2) <= latency("orca-max", 1.2)


def test_every_quick_experiment_runs(tmp_path: Path) -> None:
    for name in ("fig13", "fig15", "fig19a"):
        outcome = run_experiment(name, Setting(scale=0.02))
        assert outcome.cells
        assert all(path.stat().st_size > 0 for path in write_outcome(outcome, tmp_path, SIGNED))
