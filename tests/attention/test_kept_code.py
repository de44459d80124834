"""Kept machine code: each key leads to its own code, whatever other processes write and whenever one ends."""

from __future__ import annotations

import errno
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import types
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import IndexDataCacheFile

import pagedcli
from pagedcli.attention.kept_code import KeptCode, OneFilePerKey, kept_cfunc, kept_njit, source_sum


@pytest.mark.parametrize(("kind", "found"), [(IndexDataCacheFile, "code of a"), (OneFilePerKey, "code of b")])
def test_keys_of_two_processes_lead_to_their_own_code(kind: type[IndexDataCacheFile], found: str,
                                                      tmp_path: Path) -> None:
    """Both see an empty folder; one saves all of its own while the other is between two writes.

    Numba's own files then give the code of `a` for `b`: once they do not, `kept_code` has one reason less.
    """
    one, two = (kind(str(tmp_path), "module.function", "stamp") for _ in range(2))
    empty = two._load_index()
    two._load_index = lambda: dict(empty)
    opened = one._open_for_write

    def interrupted(path: str) -> Any:
        if path.endswith(".nbc"):
            two.save("b", "code of b")
        return opened(path)

    one._open_for_write = interrupted
    one.save("a", "code of a")
    assert kind(str(tmp_path), "module.function", "stamp").load("b") == found


def test_a_file_of_another_key_or_a_damaged_one_counts_as_absent(tmp_path: Path) -> None:
    kept = OneFilePerKey(str(tmp_path), "module.function", "stamp")
    kept.save("a", [1, 2])
    assert kept.load("a") == [1, 2]
    kept.path("b").write_bytes(kept.path("a").read_bytes())
    assert kept.load("b") is None
    whole = kept.path("a").read_bytes()
    for damaged in (b"", whole[:-1], whole[:40], whole[:-1] + bytes([whole[-1] ^ 1])):
        kept.path("a").write_bytes(damaged)
        assert kept.load("a") is None
    kept.save("a", [3])
    assert kept.load("a") == [3]


def test_code_of_other_sources_is_not_loaded(tmp_path: Path) -> None:
    OneFilePerKey(str(tmp_path), "module.function", "old").save("a", 1)
    assert OneFilePerKey(str(tmp_path), "module.function", "new").load("a") is None


def test_a_full_disk_costs_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: KeptCode, signature: Any, data: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(KeptCode, "_save_overload", full)
    monkeypatch.setattr(OneFilePerKey, "load", lambda self, key: None)
    assert make_adder(3).ctypes(10) == 13


def test_code_outlives_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptCode, "__init__", _in_folder(tmp_path, KeptCode.__init__))
    assert [make_adder(4).cache_hits for _ in range(2)] == [0, 1]
    assert make_adder(5).cache_hits == 0


def _in_folder(folder: Path, made: Any) -> Any:
    def init(self: Any, function: Any) -> None:
        made(self, function)
        self._cache_file._cache_path = str(folder)
    return init


def test_the_sum_follows_what_files_say(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("import numba\n")
    first = source_sum(tmp_path)
    (tmp_path / "one.py").write_text("import numba  # changed\n")
    assert source_sum(tmp_path) == first, "read once a process"
    source_sum.cache_clear()
    assert source_sum(tmp_path) != first


def make_adder(amount: int) -> Any:
    @kept_cfunc(types.int64(types.int64))
    def add(x: int) -> int:
        return x + amount

    return add


def test_closures_have_symbols_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where two processes have each compiled one of them as their n-th function, and a third loads both."""
    made = []
    for amount in (1, 2):
        monkeypatch.setattr(FunctionIdentity, "_unique_ids", itertools.count(900_000_001))
        made.append(make_adder(amount))
    assert [add.ctypes(10) for add in made] == [11, 12]
    assert made[0].native_name != made[1].native_name


def test_what_has_no_lasting_text_is_refused() -> None:
    array = np.zeros(1)

    def first(x: float) -> float:
        return x + array[0]

    with pytest.raises(TypeError, match="kept code holds numbers, text and types only"):
        kept_njit()(first)


def test_all_compiled_code_is_kept_this_way() -> None:
    package = Path(pagedcli.__file__).parent
    others = [file.name for file in package.rglob("*.py")
              if re.search(r"cache=True.*\n?.*def |njit\(cache|cfunc\(.*cache", file.read_text())]
    assert others == []
