"""`pagedcli workloads` and `pagedcli workloads show`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagedcli.cli.workloads import app, histogram
from pagedcli.core.errors import UsageError
from pagedcli.workloads import specs


def run(*args: str) -> str:
    result = CliRunner().invoke(app, list(args), env={"COLUMNS": "120"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_list_names_every_set_with_its_figures() -> None:
    output = run()
    for name in specs():
        assert name in output
    assert "161.1" in output and "synthetic" in output and "mooncake" in output


def test_the_list_as_json() -> None:
    rows = {row["name"]: row for row in json.loads(run("--json"))}
    assert set(rows) == set(specs())
    assert rows["sharegpt"]["shipped"]["prompt"]["mean"] == pytest.approx(161.31, rel=0.01)
    assert rows["alpaca-paper"]["shipped"]["output"]["mean"] == pytest.approx(58.45, rel=0.01)
    assert rows["wmt16-5shot"]["shipped"]["prompt"]["mean"] == pytest.approx(30.475 + 341, rel=0.01)


def test_show_draws_both_histograms_and_names_the_source() -> None:
    output = run("show", "sharegpt")
    assert "sharegpt (synthetic): 1,000 requests" in output
    assert "source: sharegpt: synthetic (fitted to" in output
    assert "prompt tokens" in output and "output tokens" in output and "█" in output


def test_show_a_file_with_counts(tmp_path: Path) -> None:
    path = tmp_path / "mine[bold].csv"
    path.write_text("input,output\n" + "5,10\n" * 7 + "5,0\n")
    output = run("show", "--trace", str(path))
    assert "mine[bold]: 7 requests" in output  # names from files are shown as they are, not as markup
    assert "rows kept: 7; dropped: 1 no output tokens" in output
    account = json.loads(run("show", "--trace", str(path), "--json"))
    assert (account["kept"], account["dropped"], account["rank_correlation"]) == (7, {"no output tokens": 1}, None)
    assert account["prompt"]["mean"] == 5 and account["synthetic"] is False


def test_filter_and_shots_reach_the_set() -> None:
    shots = json.loads(run("show", "wmt16", "--shots", "5", "--json"))
    assert shots["prompt"]["mean"] == pytest.approx(371.5, rel=0.01)
    assert json.loads(run("show", "sharegpt", "--filter", "vllm", "--json"))["prompt"]["largest"] <= 1024
    with pytest.raises(UsageError, match="--filter = 'x'"):
        run("show", "sharegpt", "--filter", "x")


def test_bars_add_up_to_all_requests() -> None:
    for values in ([1] * 10, [3], list(range(1, 200)), [1, 1, 5000], [16] * 5 + [17]):
        table = histogram(values)
        shares = [float(str(cell).split()[0]) for cell in table.columns[2].cells]
        assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares) + 1e-9)


def test_importing_the_command_loads_nothing_heavy() -> None:
    code = ("import sys, pagedcli.cli.workloads; "
            "print([m for m in ('torch', 'transformers', 'numba', 'pandas', 'datasets', 'numpy') if m in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_loading_a_synthetic_set_needs_no_data_libraries() -> None:
    code = ("import sys; from pagedcli.workloads import load_workload, WorkloadOptions; "
            "load_workload('sharegpt', num_requests=5, options=WorkloadOptions(offline=True)); "
            "print([m for m in ('torch', 'pandas', 'datasets', 'pyarrow', 'huggingface_hub') if m in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
