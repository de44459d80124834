"""Conversions that no run reads any more are told apart from those in use, and none is touched."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedcli.execution import gguf_cache, packed_copy
from pagedcli.execution.gguf_cache import FORMAT, ORIGIN, converted_folder
from pagedcli.execution.linear_kernels import lacks
from pagedcli.execution.old_models import held_bytes, old_models
from tests.execution.tiny_models import load, save_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def convert(file: Path, out: Path) -> None:
        (out / "config.json").write_text("{}")
        (out / "model.safetensors").write_bytes(bytes(5000))

    monkeypatch.setattr(gguf_cache, "_convert", convert)
    monkeypatch.setenv("PAGEDCLI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def gguf(tmp_path: Path, name: str = "model") -> Path:
    file = tmp_path / f"{name}.gguf"
    file.write_bytes(b"GGUF" + name.encode() * 50)
    return file


def convert(file: Path) -> Path:
    return converted_folder(file, lambda line: None)[0]


def reasons() -> dict[str, str]:
    return {item.folder.name: item.why for item in old_models()}


def test_a_conversion_in_use_is_not_named(tmp_path: Path) -> None:
    assert old_models() == [], "no cache at all"
    folder = convert(gguf(tmp_path))
    assert json.loads((folder / ORIGIN).read_text()) == {"format": FORMAT, "source": str(tmp_path / "model.gguf")}
    assert old_models() == []


def test_each_way_of_being_useless_is_told(tmp_path: Path, cache: Path) -> None:
    unsealed, other_format, replaced, gone = (convert(gguf(tmp_path, name)) for name in ("a", "b", "c", "d"))
    (unsealed / "sums.json").unlink()
    (other_format / ORIGIN).write_text(json.dumps({"format": FORMAT - 1, "source": str(tmp_path / "b.gguf")}))
    (tmp_path / "c.gguf").write_bytes(b"GGUF other")
    (tmp_path / "d.gguf").unlink()
    place = hashlib.sha256(str(gone.resolve()).encode()).hexdigest()[:8]
    packed = cache / "packed" / f"d-{place}-fp32-0123456789abcdef"
    packed.mkdir(parents=True)
    (packed / "weights.bin").write_bytes(bytes(7))
    assert reasons() == {
        unsealed.name: "converted by an older version",
        other_format.name: f"converted in format {FORMAT - 1}, where this version has {FORMAT}",
        replaced.name: f"{tmp_path / 'c.gguf'} is gone or another file now",
        gone.name: f"{tmp_path / 'd.gguf'} is gone or another file now",
        packed.name: f"packed from {gone.name}"}
    assert {item.folder.name: item.size for item in old_models()}[packed.name] == 7
    assert all(folder.is_dir() for folder in (unsealed, other_format, replaced, gone, packed)), "nothing is deleted"


def test_a_moved_file_keeps_its_conversion(tmp_path: Path) -> None:
    folder = convert(gguf(tmp_path))
    (tmp_path / "moved").mkdir()
    moved = (tmp_path / "model.gguf").rename(tmp_path / "moved" / "model.gguf")
    assert reasons() == {folder.name: f"{tmp_path / 'model.gguf'} is gone or another file now"}, "not used since"
    assert converted_folder(moved, lambda line: None) == (folder, False)
    assert json.loads((folder / ORIGIN).read_text()) == {"format": FORMAT, "source": str(moved)}
    assert old_models() == []
    written = (folder / ORIGIN).stat().st_ino
    convert(moved)
    assert (folder / ORIGIN).stat().st_ino == written, "written again only for another file"


@pytest.mark.parametrize("mount_point_stays", [True, False])
def test_a_file_on_a_disk_that_is_not_mounted_may_come_back(mount_point_stays: bool, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    convert(gguf(disk))
    disk.rename(tmp_path / "unmounted")
    if mount_point_stays:
        disk.mkdir()
    assert old_models() == []


def test_what_a_running_or_an_older_version_may_read_is_passed_over(tmp_path: Path, cache: Path) -> None:
    folder = convert(gguf(tmp_path))
    (folder / ORIGIN).unlink()  # as made before conversions said where they came from
    assert old_models() == []
    assert converted_folder(tmp_path / "model.gguf", lambda line: None) == (folder, False)
    assert (folder / ORIGIN).is_file(), "it is named at the next use"
    scratch = cache / "models" / f".{folder.name}.abc123.tmp"
    scratch.mkdir()
    with (cache / "models" / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert old_models() == [], "a conversion is at work in it"
    assert reasons() == {scratch.name: "left by a conversion that was killed"}


def test_what_a_newer_version_made_is_passed_over(tmp_path: Path) -> None:
    folder = convert(gguf(tmp_path))
    (folder / ORIGIN).write_text(json.dumps({"format": FORMAT + 1, "source": str(tmp_path / "gone.gguf")}))
    (folder / "sums.json").unlink()  # it may seal in another way
    assert old_models() == []


def test_what_this_user_may_not_read_is_passed_over(tmp_path: Path, cache: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    shut, seen = (convert(gguf(tmp_path, name)) for name in ("a", "b"))
    for folder in (shut, seen):
        (folder / "sums.json").unlink()
    closed, stat, iterdir = [shut], Path.stat, Path.iterdir

    def look(path: Path, **more: bool) -> os.stat_result:
        if any(folder in path.parents for folder in closed):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **more)

    def names(path: Path) -> Iterator[Path]:
        if path in closed:
            raise PermissionError(13, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "stat", look)
    monkeypatch.setattr(Path, "iterdir", names)
    with pytest.raises(PermissionError):
        (shut / "config.json").is_file()
    assert reasons() == {seen.name: "converted by an older version"}
    closed.append(cache / "models")
    assert old_models() == []
    closed.append(tmp_path)
    assert old_models() == []


def test_what_is_not_ours_is_passed_over(tmp_path: Path, cache: Path) -> None:
    models = cache / "models"
    (models / "my-own-model").mkdir(parents=True)
    (models / "notes-0123456789abcdef").mkdir()  # named as ours are, but no model
    (models / "a.txt").write_text("x")
    elsewhere = tmp_path / "elsewhere-0123456789abcdef"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text("{}")
    (models / elsewhere.name).symlink_to(elsewhere)
    assert old_models() == []


def test_a_cache_that_cannot_be_written_serves_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = convert(gguf(tmp_path))
    (folder / ORIGIN).unlink()

    def refuse(*words: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(gguf_cache.os, "replace", refuse)
    assert converted_folder(tmp_path / "model.gguf", lambda line: None) == (folder, False)
    assert sorted(item.name for item in folder.iterdir()) == ["config.json", "model.safetensors", "sums.json"]


@pytest.mark.skipif(lacks("fp32") is not None, reason="no native products on this processor")
def test_what_was_packed_from_a_conversion_is_found_by_its_own_name(tmp_path: Path, cache: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_copy, "LEAST_BYTES", 0)
    monkeypatch.setattr(gguf_cache, "_convert", lambda file, out: save_model("llama", out))
    folder = convert(gguf(tmp_path, "my model"))
    load(folder, attention_backend="cpu")
    load(save_model("llama", tmp_path / "other"), attention_backend="cpu")
    (tmp_path / "my model.gguf").unlink()
    (copy,) = (cache / "packed").glob("my-model-*")
    assert reasons() == {folder.name: f"{tmp_path / 'my model.gguf'} is gone or another file now",
                         copy.name: f"packed from {folder.name}"}


def test_bytes_are_of_all_files_and_follow_no_link(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_bytes(bytes(1000))
    (tmp_path / "b").write_bytes(bytes(20))
    link = tmp_path / "link"
    link.symlink_to("/nowhere/at/all")
    assert held_bytes(tmp_path) == 1020 + link.lstat().st_size
