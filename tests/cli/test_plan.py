"""What `pagedcli plan` refuses, before anything is simulated."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagedcli.cli.app import app


@pytest.mark.parametrize(("words", "message"), [
    (("--workers", "0"), "--workers = 0: must be at least 1"),
    (("--tensor-parallel-size", "2", "--tensor-parallel-size", "0"), "--tensor-parallel-size = 0: must be at least 1"),
    (("--prices", "nan.toml"), "--prices nan.toml: l4 = nan: must be dollars an hour"),
    (("--prices", "new.toml"), "--prices new.toml: 'h300' is no device"),
    (("--plot", "."), "--plot . is a folder"), (("--plot", "x.xyz"), "--plot x.xyz: must end in .png"),
    (("--plot", "/proc/x/y.png"), "--plot /proc/x: cannot be written to"),
    (("--plot", "/proc/y.png"), "--plot /proc/y.png: cannot be written"),
    (("--num-requests", "1"), "1 request says too little of a workload's lengths")])
def test_what_cannot_be_planned_is_refused_at_once(
        words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedcli.bench.planner.make_plan", lambda *_: pytest.fail("planned"))
    (tmp_path / "nan.toml").write_text("l4 = nan\n", "utf-8")
    (tmp_path / "new.toml").write_text("h300 = 1.0\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["plan", "--model", "opt-13b", *words])
    assert done.exit_code == 2 and message in " ".join(done.stderr.split()), done.output
