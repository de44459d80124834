"""`pagedcli doctor` says what is there, and its exit code whether `generate` can run."""

from __future__ import annotations

import pytest

from pagedcli.cli import doctor
from pagedcli.cli.doctor import Finding
from tests.cli.console import Console


@pytest.fixture
def with_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_model", lambda name: Finding("model", True, f"{name} found", needed=True))


def test_all_is_named(console: Console, with_model: None) -> None:
    result = console("doctor")
    assert result.exit_code == 0 and "generate can run here" in result.stdout
    for name in ("python", "torch", "devices", "cupy", "numba threads", "layer", "cpu", "bf16", "memory", "cache"):
        assert name in result.stdout


def test_a_missing_model_is_told_with_the_way_to_get_it(console: Console) -> None:
    result = console("doctor", "--model", "no-such-model")
    assert result.exit_code == 3
    assert "MISSING" in result.stdout and "no-such-model" in result.stdout and "cannot run here: model" in result.stdout


def test_a_missing_package(console: Console, with_model: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor._package
    renamed = {"numba": "no-such-package"}
    monkeypatch.setattr(doctor, "_package", lambda name, needed: real(renamed.get(name, name), needed))
    result = console("doctor")
    assert result.exit_code == 3 and "pip install no-such-package" in result.stdout


def test_a_broken_part_does_not_stop_the_rest(console: Console, with_model: None,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> tuple[bool, str]:
        raise OSError("driver asleep")

    monkeypatch.setattr(doctor, "_devices", broken)
    result = console("doctor")
    assert result.exit_code == 0 and "cannot tell: OSError: driver asleep" in result.stdout
