"""`pagedcli doctor` says what is there, and its exit code whether `generate` can run."""

from __future__ import annotations

from pathlib import Path

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


def test_conversions_of_no_use_are_named_with_their_size_and_the_way_to_delete_them(
        console: Console, with_model: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDCLI_CACHE", str(tmp_path))
    folder = tmp_path / "models" / "my model-0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(3 << 20))
    said = console("doctor").stdout
    assert f"{folder} (3 MiB): converted by an older version" in said
    assert "3 MiB in 1 folder. When no other version of pagedcli uses this cache, delete them with: rm -r -- " \
           f"'{folder}'" in said
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()
    assert "old model" not in console("doctor").stdout


def test_a_cache_that_is_shut_does_not_stop_the_rest(console: Console, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **more: object) -> None:
        raise PermissionError(13, "Permission denied", "/a/cache")

    monkeypatch.setattr("pagedcli.execution.old_models.old_models", refuse)
    monkeypatch.setattr("pagedcli.execution.model_hub.resolve_model", refuse)
    monkeypatch.setattr("pagedcli.execution.gguf_cache.cache_dir", refuse)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    result = console("doctor")
    said = "cannot tell: PermissionError: [Errno 13] Permission denied: '/a/cache'"
    told = {line.removesuffix(said)[8:].strip() for line in result.stdout.splitlines() if line.endswith(said)}
    assert told == {"model cache", "old models"}
    assert f"{tmp_path} (" in result.stdout, "the other cache is looked at all the same"
    assert result.exit_code == 3 and "cannot look for it: PermissionError" in result.stdout
